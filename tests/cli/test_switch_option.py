"""--switch, --allow and --runtime NAME@VERSION: what they change, and the line that says what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main
from planner.cli.inputs import read_described, read_job, read_limits
from planner.cli.options import LayoutOptions, SearchOptions
from planner.errors import SpecError
from planner.trainers.switches import written

MIXTURE = ["--model", "qwen3-30b", "--gpus", "64", "--hardware", "gb200", "-s", "4096", "-b", "512"]
LAYOUT = ["--ep", "32"]
_SIZES = ("tp", "cp", "pp", "vpp", "dp", "ep", "micro_batch_size", "zero_stage", "schedule")


def evaluated(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["evaluate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def line(**features: Any) -> dict[str, Any]:
    layout = {"ep": 32, "dp": 64}
    job = {"model": "qwen3-30b", "hardware": "gb200", "num_gpus": 64}
    run = {**job, "seq_length": 4096, "global_batch_size": 512, "parallelism": layout, "features": features}
    return {"id": "a", "run": run}


@pytest.mark.parametrize(
    ("options", "features"),
    [
        ([], {}),
        (["--switch", "cuda_graph=none"], {"cuda_graph": "none"}),
        (["--switch", "ep_overlap=delayed,dispatcher=alltoall"], {"ep_overlap": "delayed", "dispatcher": "alltoall"}),
        (["--assume", "ep_overlap=true"], {"ep_overlap": True}),
    ],
    ids=str,
)
def test_flags_and_lines_price_a_run_alike(
    options: list[str], features: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where neither says which switches are on: both take the likely values. Features say all, an option what it
    names."""
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(line(**features)))
    assert main(["evaluate", "--runs", str(path), "--json"]) == 0
    of_line = json.loads(capsys.readouterr().out)
    of_flags = evaluated([*MIXTURE, *LAYOUT, *options], capsys)
    low_s, high_s = of_line["step"].pop("step_s_interval")
    of_one = of_flags["best"]["step"].pop("step_s_interval")
    assert of_flags["best"]["step"] == of_line["step"]
    assert of_one[0] <= low_s < high_s <= of_one[1]


def test_switches_change_the_price_and_default_takes_the_trainers_own(capsys: pytest.CaptureFixture[str]) -> None:
    likely = evaluated([*MIXTURE, *LAYOUT], capsys)
    own = evaluated([*MIXTURE, *LAYOUT, "--switch", "default"], capsys)
    overlapped = evaluated([*MIXTURE, *LAYOUT, "--switch", "ep_overlap=true,cuda_graph=none"], capsys)
    assert likely["runtime_spec"]["graphed_modules"]
    assert not own["runtime_spec"]["graphed_modules"]
    assert overlapped["runtime_spec"]["ep_overlap_fraction"] > 0
    assert len({told["best"]["step"]["step_s"] for told in (likely, own, overlapped)}) == 3


def test_pins_and_consent_reach_the_search() -> None:
    options = {"model": "8b", "gpus": 8}
    asked = SearchOptions(**options, switch="p2p_overlap=false", allow="bf16-gradients,fp8", assume="nan_checks=true")
    limits = read_limits(asked, read_job(asked))
    assert limits.switches == {"p2p_overlap": False, "nan_checks": True}
    assert limits.allow == ("bf16_gradients", "fp8")
    job = read_job(SearchOptions(**options))
    assert read_limits(SearchOptions(**options, switch="default"), job).switches == "default"
    assert read_limits(SearchOptions(**options), job).switches is None
    with pytest.raises(SpecError, match="--allow: unknown 'bf17_gradients'"):
        read_limits(SearchOptions(**options, allow="bf17_gradients"), job)


def test_a_plans_layout_with_its_recipe_has_the_plans_step(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--model", "qwen3-30b", "--gpus", "16"]
    assert main([*job, "--pp", "2", "--tp", "2", "--ep", "8", "--top", "1", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    layout, recipe = best["parallelism"], best["recipe"]
    sizes = [f"--{axis.replace('_', '-')}={layout[axis]}" for axis in _SIZES]
    ways = ["--recompute", layout["recompute"]]
    if num_layers := best["stages"][0]["recompute"].get("full"):
        ways += ["--recompute-num-layers", str(num_layers)]
    chunks = [stage["chunks"][chunk] for chunk in range(layout["vpp"]) for stage in best["stages"]]
    ways += ["--layers-per-stage", ",".join(str(last - first) for first, last in chunks)]
    if layout["recompute_modules"]:
        ways += ["--recompute-modules", ",".join(layout["recompute_modules"])]
    switches = ",".join(f"{name}={written(value)}" for name, value in recipe.items())
    again = evaluated([*job, *sizes, *ways, "--switch", switches], capsys)["best"]
    # nobody said how its data is routed
    assert again["step"].pop("step_s_interval")[1] > best["step"].pop("step_s_interval")[1]
    assert again["step"] == best["step"]
    assert again["recipe"] == recipe
    assert evaluated([*job, *sizes, *ways, "--switch", "default"], capsys)["best"]["step"] != best["step"]


def test_what_consent_would_buy_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--model", "8b", "--gpus", "8", "--pp", "1", "--tp", "1", "--top", "1"]
    assert main([*job, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    offers = [offer for offer in best["offers"] if offer["switch"] == "bf16_gradients"]
    for offer in offers:
        assert main([*job, "--allow", ",".join(offer["allow"]), "--json"]) == 0
        allowed = json.loads(capsys.readouterr().out)["best"]
        assert allowed["recipe"]["bf16_gradients"] is True
        assert allowed["step"]["step_s"] <= offer["step_s"] * 1.005
    assert offers


def test_an_assumed_field_stands_beside_switches() -> None:
    asked = LayoutOptions(model="8b", gpus=8, assume="tp_overlap_fraction=0.25,p2p_overlap=false")
    runtime = read_described(asked, read_job(asked)).runtime_spec
    assert (runtime.tp_overlap_fraction, runtime.interleaved_p2p_overlap) == (0.25, False)
