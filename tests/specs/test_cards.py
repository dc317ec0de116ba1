"""Cards and boxes that people own or rent: their names, the limits of physics, and what users timed on them."""

from __future__ import annotations

import pytest

from planner.physics.kernels import product_s, stream_s
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.registry import hardware_names, load_hardware
from planner.specs.units import TERA

NAMES = {
    "4090": "rtx-4090-24gb", "rtx4090": "rtx-4090-24gb", "rtx-4090": "rtx-4090-24gb", "5090": "rtx-5090-32gb",
    "6000-ada": "rtx-6000-ada-48gb", "rtx-pro-6000": "rtx-pro-6000-96gb", "spark": "dgx-spark-128gb",
    "dgx-spark": "dgx-spark-128gb", "gb10": "dgx-spark-128gb", "3090": "rtx-3090-24gb", "a6000": "rtx-a6000-48gb",
    "3090-nvlink": "rtx-3090-nvlink-24gb", "l4": "l4-24gb", "a10": "a10-24gb", "a10g": "a10g-24gb", "t4": "t4-16gb",
    "4060-ti": "rtx-4060-ti-16gb", "5080": "rtx-5080-16gb", "RTX-4090": "rtx-4090-24gb",
    "h100": "h100-sxm-80gb", "H200": "h200-sxm-141gb", "a100": "a100-sxm-80gb", "gb300": "gb300-nvl72",
}  # fmt: skip
TIMED = {
    # square products of 4,096 and 8,192 in bf16, TFLOP/s: github.com/zzc0721/torch-performance-test-data, issues 78,
    # 124, 162, 120, 130 and 104; A40's of issue 185 for RTX A6000, which has its chip at 1.01 times the best rate
    "4090": (151.5, 160.2),
    "5090": (182.2, 234.7),
    "pro-6000": (399.9, 417.3),
    "l4": (54.9, 59.4),
    "4060-ti": (44.7, 43.6),
    "5080": (91.1, 102.9),
    "a6000": (116.3, 111.7),
}


def square_tflops(hardware: HardwareSpec, size: int) -> float:
    """The rate of a forward product of size x size by size x size, timed alone."""
    seconds = product_s(hardware, "bf16", hardware.efficiency.gemm.forward_fraction, 1, size, size, size)
    return 2 * size**3 / float(seconds) / TERA


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_found_by_the_names_people_type(name: str) -> None:
    assert load_hardware(name).name == NAMES[name]


def test_names_in_quotes_are_read_without_them() -> None:
    # YAML takes a bare 4090 for a number
    assert "4090" in hardware_names()["rtx-4090-24gb"]
    assert load_hardware("4090").aliases == hardware_names()["rtx-4090-24gb"]


@pytest.mark.parametrize("name", hardware_names())
def test_no_product_of_a_step_is_faster_than_the_data_sheet(name: str) -> None:
    hardware = load_hardware(name)
    peak, efficiency = hardware.peak_flops("bf16"), hardware.efficiency
    assert peak is not None
    for size in (512, 2048, 8192, 32768):
        # a card may boost above the clock of its data sheet for a while, and not for a training step
        assert square_tflops(hardware, size) * TERA * efficiency.sustained_fraction <= peak


@pytest.mark.parametrize("name", hardware_names())
def test_nothing_is_streamed_faster_than_memory_and_more_bandwidth_is_never_slower(name: str) -> None:
    hardware = load_hardware(name)
    faster = hardware.model_copy(update={"hbm_gb_per_s": 2 * hardware.hbm_gb_per_s})
    for num_bytes in (1e4, 1e7, 1e10):
        assert num_bytes / stream_s(hardware, num_bytes, 1) <= hardware.hbm_bytes_per_s
        assert stream_s(faster, num_bytes, 1) <= stream_s(hardware, num_bytes, 1)
    for rows in (1, 64, 4096):
        products = [product_s(gpu, "bf16", 0.5, 1, rows, 4096, 4096) for gpu in (hardware, faster)]
        assert products[1] <= products[0]


@pytest.mark.parametrize("name", TIMED)
def test_large_products_take_as_long_as_users_timed_them(name: str) -> None:
    hardware = load_hardware(name)
    for size, timed in zip((4096, 8192), TIMED[name], strict=True):
        assert square_tflops(hardware, size) == pytest.approx(timed, rel=0.15)


@pytest.mark.parametrize("name", ["3090", "4060-ti", "4090", "5080", "5090"])
def test_geforce_cards_reach_each_other_only_through_their_host(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.is_through_host
    assert hardware.a_domain == "a PCIe domain"
    assert hardware.tiers[0].bytes_per_s < 0.6 * hardware.tiers[0].gb_per_s * 1e9


@pytest.mark.parametrize(
    ("name", "domain"),
    [("a6000", "a PCIe domain"), ("3090-nvlink", "an NVLink domain"), ("h100", "an NVLink domain"),
     ("mi300x", "an xGMI domain")],
)  # fmt: skip
def test_links_are_called_what_they_are(name: str, domain: str) -> None:
    hardware = load_hardware(name)
    assert (hardware.a_domain, hardware.is_through_host) == (domain, False)


@pytest.mark.parametrize("num_gpus", [1, 2, 4])
def test_boxes_of_one_gpu_are_joined_by_their_network_alone(num_gpus: int) -> None:
    cluster = ClusterSpec(hardware="spark", num_gpus=num_gpus)
    assert (cluster.node_size, cluster.nvlink_domain_size, cluster.is_rack) == (1, 1, False)


def test_one_memory_is_no_more_than_the_box_has_and_keeps_room_for_the_system() -> None:
    spark, gh200 = load_hardware("spark"), load_hardware("gh200")
    assert spark.host.is_shared
    assert spark.host.memory_gib == spark.memory_gib
    assert spark.reserved.context_gib > 5 * gh200.reserved.context_gib
    assert not gh200.host.is_shared
    assert gh200.host.memory_gib > 4 * gh200.memory_gib
