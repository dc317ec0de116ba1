"""Every hardware file: sourced, dense and not sparse, rates per direction, memory as the driver reports it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from planner.specs.registry import hardware_names, load_hardware

TABLES = yaml.safe_load((Path(__file__).parent / "hardware.yaml").read_text())

DENSE_BF16: dict[str, float] = TABLES["bf16_tflops"]
SOLD_GB: dict[str, float] = TABLES["sold_gib"]


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


@pytest.mark.parametrize(("name", "dtypes"), TABLES["dtypes"])
def test_a_gpu_has_the_dtypes_of_its_generation(name: str, dtypes: list[str]) -> None:
    assert set(load_hardware(name).peak_tflops) - {"fp16"} == set(dtypes) - {"fp16"}


@pytest.mark.parametrize("name", hardware_names())
def test_the_driver_reports_less_than_the_name_says(name: str) -> None:
    sold = SOLD_GB.get(name) or float(name.rsplit("-", 1)[1].removesuffix("gb"))
    assert 0.95 * sold <= load_hardware(name).memory_gib <= sold


@pytest.mark.parametrize(("name", "domain", "nvlink", "network"), TABLES["links"])
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
