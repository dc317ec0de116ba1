"""Every hardware file: sourced, dense and not sparse, rates per direction, memory as the driver reports it."""

from __future__ import annotations

import pytest

from planner.specs.registry import hardware_names, load_hardware

DENSE_BF16 = {
    # half of the data sheet's sparse figure where it has one
    "h100-sxm-80gb": 989.4, "h100-sxm-96gb": 989.4, "h200-sxm-141gb": 989.4, "h800-sxm-80gb": 989.4,
    "gh200-96gb": 989.4, "h20-sxm-96gb": 148, "a100-sxm-40gb": 312, "a100-sxm-80gb": 312, "a100-pcie-80gb": 312,
    "a100-pcie-only-80gb": 312, "a800-sxm-80gb": 312, "b200-sxm-180gb": 2250, "b300-sxm-270gb": 2250,
    "gb200-nvl72": 2500, "gb300-nvl72": 2500, "l40s-48gb": 362, "mi300x": 1307.4, "mi325x": 1307.4,
    "mi350x": 2306.9, "mi355x": 2516.6, "v100-sxm-16gb": 125, "v100-sxm-32gb": 125,
    # with fp32 accumulation, which GeForce cards do at half of the rate with fp16 accumulation
    "rtx-3090-24gb": 71.2, "rtx-3090-nvlink-24gb": 71.2, "rtx-4090-24gb": 165.2, "rtx-5090-32gb": 209.5,
    "rtx-4060-ti-16gb": 44.1, "rtx-5080-16gb": 112.6, "rtx-a6000-48gb": 154.8, "rtx-a6000-nvlink-48gb": 154.8,
    "rtx-6000-ada-48gb": 364.2, "rtx-pro-6000-96gb": 503.8, "a10-24gb": 125, "a10g-24gb": 70, "l4-24gb": 121,
    "t4-16gb": 65, "dgx-spark-128gb": 125, "a30-24gb": 165, "vr200-nvl72": 4000, "mi455x": 5033,
}  # fmt: skip
SOLD_GB = {
    "gb200-nvl72": 186,
    "gb300-nvl72": 288,
    "l40s-48gb": 45,
    "a10-24gb": 22.5,
    "a10g-24gb": 22.5,
    "l4-24gb": 22.5,
    "t4-16gb": 15,
    "dgx-spark-128gb": 122,
    "mi300x": 192,
    "mi325x": 256,
    "mi350x": 288,
    "mi355x": 288,
    "mi455x": 432,
    "vr200-nvl72": 288,
}
"""GiB on the box where the name does not say them, or where memory that corrects errors takes a sixteenth."""


@pytest.mark.parametrize("name", hardware_names())
def test_a_profile_is_named_and_every_group_of_numbers_sourced(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    assert hardware.source
    assert all(tier.source for tier in hardware.tiers)
    assert hardware.price_source or not (hardware.usd_per_gpu_hour or hardware.watts_per_gpu)


def test_the_gpus_people_ask_for_are_there() -> None:
    assert set(hardware_names()) >= set(DENSE_BF16)


@pytest.mark.parametrize("name", DENSE_BF16)
def test_peaks_are_dense(name: str) -> None:
    peaks = load_hardware(name).peak_tflops
    assert peaks.get("bf16", peaks.get("fp16")) == DENSE_BF16[name]
    if "tf32" in peaks:
        assert peaks["tf32"] == pytest.approx(peaks["bf16"] / 2, rel=0.02)
    factor = {"vr200-nvl72": 4.375, "mi455x": 4}.get(name, 2)  # two generations whose 8 bits grew more than 16
    for eight_bits in {"fp8", "mxfp8"} & peaks.keys():
        # L40S's data sheet says 362 and 733
        assert peaks[eight_bits] == pytest.approx(factor * peaks["bf16"], rel=0.02)
    if "nvfp4" in peaks:
        assert 2 <= peaks["nvfp4"] / peaks["fp8"] <= 3


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("v100-sxm-16gb", {"fp16"}),
        ("a100-sxm-80gb", {"bf16", "tf32"}),
        ("h100-sxm-80gb", {"bf16", "tf32", "fp8"}),
        ("b200-sxm-180gb", {"bf16", "tf32", "fp8", "mxfp8", "nvfp4"}),
        ("gb300-nvl72", {"bf16", "tf32", "fp8", "mxfp8", "nvfp4"}),
        ("mi300x", {"bf16", "tf32", "fp8"}),
        ("mi355x", {"bf16", "fp8", "mxfp8"}),
        ("mi455x", {"bf16", "fp8", "mxfp8"}),
        ("vr200", {"bf16", "tf32", "fp8", "mxfp8", "nvfp4"}),
        ("a30", {"bf16", "tf32"}),
        ("t4", {"fp16"}),
        ("3090", {"bf16", "tf32"}),
        ("4090", {"bf16", "tf32", "fp8"}),
        # no MXFP8 and no NVFP4 for training on compute capability 12
        ("5090", {"bf16", "tf32", "fp8"}),
        ("spark", {"bf16", "tf32", "fp8"}),
    ],
)
def test_a_gpu_has_the_dtypes_of_its_generation(name: str, dtypes: set[str]) -> None:
    assert set(load_hardware(name).peak_tflops) - {"fp16"} == dtypes - {"fp16"}


@pytest.mark.parametrize("name", hardware_names())
def test_the_driver_reports_less_than_the_name_says(name: str) -> None:
    sold = SOLD_GB.get(name) or float(name.rsplit("-", 1)[1].removesuffix("gb"))
    assert 0.95 * sold <= load_hardware(name).memory_gib <= sold


@pytest.mark.parametrize(
    ("name", "domain", "nvlink", "network"),
    [
        ("h100-sxm-80gb", 8, 450, 50),
        ("h800-sxm-80gb", 8, 200, 50),
        ("a100-sxm-80gb", 8, 300, 25),
        ("a100-pcie-80gb", 2, 300, 12.5),
        ("b200-sxm-180gb", 8, 900, 50),
        ("gb200-nvl72", 72, 900, 50),
        ("gb300-nvl72", 72, 900, 100),
        ("v100-sxm-32gb", 8, 150, 6.25),
        ("mi300x", 8, 448, 50),
        ("mi355x", 8, 537.6, 50),
        ("a100-pcie-only-80gb", 4, 32, 3.125),
        ("3090-nvlink", 2, 56.25, 0.3906),
        ("a6000-nvlink", 2, 56.25, 1.5625),
        ("5090", 4, 64, 0.3906),
        ("a30", 2, 100, 1.5625),
        ("vr200", 72, 1800, 200),
        ("mi455x", 72, 1800, 300),
        ("l4", 4, 32, 1.5625),
        ("spark", 1, 136.5, 25),
    ],
)
def test_links_are_per_gpu_and_direction(name: str, domain: int, nvlink: float, network: float) -> None:
    hardware = load_hardware(name)
    assert hardware.nvlink_domain_size == domain
    assert (hardware.tiers[0].gb_per_s, hardware.tiers[-1].gb_per_s) == (nvlink, network)


@pytest.mark.parametrize("name", hardware_names())
def test_tiers_get_slower_outwards(name: str) -> None:
    rates = [tier.bytes_per_s for tier in load_hardware(name).tiers]
    latencies = [tier.latency_s for tier in load_hardware(name).tiers]
    assert rates == sorted(rates, reverse=True)
    assert latencies == sorted(latencies)


@pytest.mark.parametrize("name", ["gb200-nvl72", "gb300-nvl72"])
def test_a_rack_is_one_domain_of_small_nodes(name: str) -> None:
    assert (load_hardware(name).gpus_per_node, load_hardware(name).nvlink_domain_size) == (4, 72)
