"""Networks, hosts and rented instances by name."""

from __future__ import annotations

import pytest

from planner.errors import SpecError
from planner.layout.runs import parse_run
from planner.specs.machines import find_host, machines, with_host, with_network
from planner.specs.registry import load_hardware


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
    with pytest.raises(SpecError, match="unknown") as error:
        option(load_hardware("h100"), word, "--it")
    assert {"ef": "efa", "p55": "p5"}[word] in error.value.hint


def test_a_profile_may_name_its_network_and_host(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Numbers that it states itself stay."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "source: mine\narchitecture: hopper\nmemory_gib: 80\nhbm_gb_per_s: 3352\n"
        "peak_tflops: {bf16: 989}\nnum_sms: 132\n"
        "network: efa\nhost: p5\ntiers:\n- {name: nvlink, num_gpus: 8, gb_per_s: 450, latency_us: 3}\n"
        "- {name: network, gb_per_s: 50, latency_us: 8}\n"
    )
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
