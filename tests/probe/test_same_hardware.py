"""A probe says something about the GPUs that it ran on, and about no others."""

from __future__ import annotations

import pytest
from tables import beside

from planner.probe.evidence import objection_to_device
from planner.specs.registry import hardware_names, load_hardware

TABLES = beside(__file__)

DEVICES = TABLES["devices"]


@pytest.mark.parametrize("device", DEVICES)
def test_each_gpu_is_evidence_of_its_own_profile_and_of_no_other_silicon(device: str) -> None:
    own = load_hardware(DEVICES[device])
    assert objection_to_device(device, "2.9", own) is None
    for name in hardware_names():
        other = load_hardware(name)
        if other.architecture != own.architecture:
            said, hint = objection_to_device(device, "2.9", other) or ("", "")
            assert device in said
            assert f"--hardware {own.name}" in hint


@pytest.mark.parametrize("torch_version", ["2.9.1+rocm6.4", "2.9"])
def test_amds_gpus_say_nothing_of_nvidias_and_the_other_way_around(torch_version: str) -> None:
    said, _ = objection_to_device("AMD Radeon Graphics", torch_version, load_hardware("h200")) or ("", "")
    assert said == "ran on AMD Radeon Graphics, a GPU of AMD; h200-sxm-141gb is NVIDIA's"
    said, _ = objection_to_device("NVIDIA RTX PRO 6000", "2.9", load_hardware("mi300x")) or ("", "")
    assert said.endswith("a GPU of NVIDIA; mi300x is AMD's")


def test_a_gpu_of_the_same_silicon_with_another_memory_is_another_gpu() -> None:
    said, hint = objection_to_device("NVIDIA H100 80GB HBM3", "2.9", load_hardware("h200")) or ("", "")
    assert said == "ran on NVIDIA H100 80GB HBM3, which is another GPU than h200-sxm-141gb"
    assert hint == "probe on h200-sxm-141gb, or plan with --hardware h100-sxm-80gb"


@pytest.mark.parametrize(("device", "name"), TABLES["a_card_is_another_gpu_than_the_one_on_a_board"])
def test_a_card_is_another_gpu_than_the_one_on_a_board(device: str, name: str) -> None:
    hardware = load_hardware(name)
    said, _ = objection_to_device(device, "2.9", hardware) or ("", "")
    assert said == f"ran on {device}, which is another GPU than {hardware.name}"
    assert objection_to_device("NVIDIA A100-PCIE-40GB", "2.9", load_hardware("a100-pcie")) is None


def test_a_profile_of_the_users_own_may_have_any_name_and_has_its_silicon() -> None:
    ours = load_hardware("h100").model_copy(update={"name": "our-cluster", "aliases": ()})
    assert objection_to_device("NVIDIA H100 80GB HBM3", "2.9", ours) is None
    assert objection_to_device("NVIDIA A100-SXM4-80GB", "2.9", ours) is not None
    assert objection_to_device("NVIDIA Graphics Device", "2.9", ours) is None
