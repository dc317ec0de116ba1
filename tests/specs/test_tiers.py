"""A network on one line of the command line: what it means, and what is wrong with one."""

from __future__ import annotations

import json

import pytest

from planner.cli import main
from planner.errors import SpecError
from planner.specs.cluster import ClusterSpec, parse_tiers, tiers_text
from planner.specs.registry import load_hardware

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


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("pod:3072", "'pod:3072' is no NAME:GPUS:GB_PER_S", "write --tier pod:3072:50,spine:*:50:7x"),
        ("pod:3072:0,spine:*:50", "'pod:3072:0' is no NAME", "pod:3072:50"),
        ("pod:3072:50", "is the last and must join all GPUs", "write --tier pod:3072:50,spine:*:50"),
        ("a:0:5", "is the last and must join all GPUs", "write --tier spine:*:5"),
        ("spine:*:50,pod:32:50", "joins all GPUs and comes last", "write --tier pod:32:50,spine:*:50"),
        ("a:64:50,b:32:50,c:*:9", "'b:32:50' joins no more GPUs", "--tier b:32:50,a:64:50,c:*:9"),
        ("a:64:50,a:*:9", "a: given twice", "a name of its own"),
        ("spine:*:50:0.5x", "0.5x is no oversubscription", "from 1x to 1000x"),
        ("spine:*:50:7", "'spine:*:50:7' is no NAME", "7x"),
    ],
)
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
