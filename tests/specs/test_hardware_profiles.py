"""Every hardware file: sourced, dense and not sparse, rates per direction, memory as the driver reports it.

Cards and boxes that people own or rent: their names, the limits of physics, and what users timed on them.
Networks, hosts and rented instances by name.
A network on one line of the command line: what it means, and what is wrong with one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from refusals import refused
from tables import beside

from planner.cli import main
from planner.errors import SpecError
from planner.layout.runs import parse_run
from planner.physics.kernels import product_s, stream_s
from planner.specs.cluster import ClusterSpec, parse_tiers, tiers_text
from planner.specs.hardware import HardwareSpec
from planner.specs.machines import find_host, machines, with_host, with_network
from planner.specs.registry import hardware_names, load_hardware
from planner.specs.units import TERA

CASES = beside(__file__)

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


NAMES = CASES["names"]
TIMED = CASES["timed"]


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


@pytest.mark.parametrize(("name", "domain"), CASES["links_are_called_what_they_are"])
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


@pytest.mark.parametrize(("name", "row"), machines().instances.items())
def test_an_instance_is_its_gpu_on_its_network_beside_its_host(name: str, row) -> None:  # type: ignore[no-untyped-def]
    made, base = load_hardware(name), load_hardware(row.hardware)
    assert (made.network, made.host.kind) == (row.network, find_host(row.host)[0])  # type: ignore[index]
    assert made.tiers[-1].gb_per_s == row.gb_per_s
    assert made.peak_tflops == base.peak_tflops
    assert made.tiers[0] == base.tiers[0]
    assert all(load_hardware(alias) == made for alias in row.aliases)


def test_a_named_network_moves_the_tiers_outside_a_node_alone() -> None:
    base = load_hardware("h100")
    efa = with_network(base, "efa")
    assert efa.tiers[0] == base.tiers[0]
    assert efa.tiers[1].is_host_driven
    assert efa.tiers[1].all_to_all_gb_per_s is not None
    assert with_network(base, "ib").tiers[1].efficiency_fraction == base.tiers[1].efficiency_fraction


@pytest.mark.parametrize(("option", "word"), [(with_network, "ef"), (with_host, "p55")])
def test_an_unknown_name_is_refused_with_the_nearest(option, word: str) -> None:  # type: ignore[no-untyped-def]
    with refused("unknown", {"ef": "efa", "p55": "p5"}[word]):
        option(load_hardware("h100"), word, "--it")


def test_a_profile_may_name_its_network_and_host(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Numbers that it states itself stay."""
    path = tmp_path / "mine.yaml"
    path.write_text(CASES["a_profile_may_name_its_network_and_host"])
    mine = load_hardware(path)
    row = machines().networks["efa"].tier
    assert mine.efficiency.host_us == machines().hosts["epyc-7r13"].host_us
    assert mine.tiers[1].latency_us == 8
    assert mine.tiers[1].all_to_all_gb_per_s == row["all_to_all_gb_per_s"]


def test_what_a_run_says_of_its_machines_is_no_switch() -> None:
    """It changes the prices; its switches are as unsaid as before."""
    run = {
        "model": "qwen3-30b-a3b", "hardware": "h100", "num_gpus": 64, "seq_length": 4096, "global_batch_size": 256,
        "parallelism": {"tp": 8, "pp": 2, "ep": 32}, "features": {"network": "efa", "host": "P5.48xlarge"},
    }  # fmt: skip
    said, plain = parse_run({"run": run}), parse_run({"run": {**run, "features": {}}})
    assert not said.says_switches
    assert said.runtime == plain.runtime
    assert said.cluster.hardware.network == "efa"
    assert said.cluster.hardware.host.kind == "epyc-7r13"
    odd = parse_run({"run": {**run, "features": {"host": "abacus", "dispatcher_transport": "uccl"}}})
    assert odd.unknown_features == ("host: 'abacus'",)
    assert odd.runtime.dispatcher_transport == "uccl"


H100 = load_hardware("h100")
JOB = ["--model", "405b", "--gpus", "16384"]


@pytest.mark.parametrize("text", ["pod:3072:50,spine:*:50:7x", "spine:*:25", "rack:32:100,pod:512:50,all:*:12.5:2.5x"])
def test_a_network_is_written_as_it_was_read(text: str) -> None:
    tiers = parse_tiers(text, H100)
    assert tiers_text(tiers) == text
    cluster = ClusterSpec(hardware=H100, num_gpus=16384, network_tiers=tiers)
    assert cluster.tiers == (H100.tiers[0], *tiers)
    assert ClusterSpec.model_validate_json(cluster.model_dump_json()).tiers == cluster.tiers
    assert {tier.latency_us for tier in tiers} == {H100.tiers[-1].latency_us}


@pytest.mark.parametrize(("text", "message", "hint"), TABLES["what_is_wrong_with_a_network_is_said"])
def test_what_is_wrong_with_a_network_is_said(text: str, message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_tiers(text, H100)
    assert message in caught.value.message
    assert hint in caught.value.hint
    if "write --tier" in caught.value.hint:
        parse_tiers(caught.value.hint.split("--tier ")[1], H100)


def test_a_tier_inside_nvlink_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--tier", "pod:8:50,spine:*:50"]) == 2
    assert "pod:8: NVLink joins 8 GPUs of h100-sxm-80gb" in capsys.readouterr().err
    assert main([*JOB, "--tier", "spine:*:50", "--assume", "network_gb_per_s=9"]) == 2
    with pytest.raises(ValueError, match="no more than NVLink's domain"):
        ClusterSpec(hardware=H100, num_gpus=64, network_tiers=parse_tiers("pod:8:50,spine:*:50", H100))


def test_amd_gpus_are_told_of_their_own_links(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--hardware", "mi300x", "--tier", "pod:8:50,spine:*:50"]) == 2
    assert "pod:8: xGMI joins 8 GPUs of mi300x" in capsys.readouterr().err


def test_a_saved_plan_keeps_its_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", *JOB, "--tp", "8", "--pp", "16", "--tier", "pod:3072:50,spine:*:50:7x", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [tier["name"] for tier in answer["cluster"]["network_tiers"]] == ["pod", "spine"]
    best = answer["best"]
    assert (best["rank_order"], best["parallelism"]["rank_order"]) == ("tp-cp-ep-dp-pp", "tp-cp-ep-dp-pp")
    assert {p["group"]: p["tier"] for p in best["placement"]} == {"tp": "nvlink", "dp": "pod", "pp": "spine"}
    assert any("--tier pod:3072:25,spine:*:25:7x" in line for line in answer["assumptions"])
