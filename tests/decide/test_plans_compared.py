"""Plans, probes and runs beside each other: terms add up to what the steps differ by, and what differs is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import printed
from priced_plans import priced_plan
from probes import probe_result, probe_run

from planner.answer import Plan
from planner.decide.compare import Comparison, compare, of_plan, of_probe
from planner.errors import SpecError
from planner.layout.evaluate import evaluate
from planner.probe.result import ProbedMemory, ProbeResult
from planner.report.decisions import render_comparison, short_names
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import AdapterSpec, Parallelism, TrainingSpec
from planner.specs.units import GIB


def plan_of(global_batch_size: int = 64, hardware: str = "h100", runtime: str = "megatron", **layout: Any) -> Plan:
    sizes = {"tp": 2, "pp": 4, "dp": 2} | layout
    num_gpus = sizes["tp"] * sizes["pp"] * sizes["dp"]
    return priced_plan("8b", num_gpus, batch=global_batch_size, hardware=hardware, runtime=runtime, **sizes)


def text_of(comparison: Comparison) -> str:
    return printed(render_comparison(comparison), markup=False)


def probed(plan: Plan, **changes: Any) -> ProbeResult:
    memory = ProbedMemory(static_bytes=GIB, peak_allocated_bytes=9 * GIB, peak_reserved_bytes=0, device_used_bytes=0)
    return probe_result(plan, lambda stage: (1e-3, 2e-3), memory=memory, **changes)


@settings(max_examples=15, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]), batch=st.sampled_from([64, 128]),
    recompute=st.sampled_from(["none", "full"]), hardware=st.sampled_from(["h100", "mi300x"]),
)  # fmt: skip
def test_the_terms_add_up_to_the_difference_of_the_steps(
    tp: int, pp: int, batch: int, recompute: str, hardware: str
) -> None:
    sides = [plan_of(), plan_of(batch, hardware, tp=tp, pp=pp, recompute=recompute)]
    answer = compare([of_plan(plan, str(number)) for number, plan in enumerate(sides)]).to_json()
    moved = sides[1].step.step_s - sides[0].step.step_s
    assert sum(row["seconds"] for row in answer["waterfall"]) == pytest.approx(moved, abs=1e-9 * sides[0].step.step_s)


def test_facts_that_differ_are_named_and_others_are_not() -> None:
    comparison = compare([of_plan(plan_of(), "a.json"), of_plan(plan_of(tp=4, recompute="full"), "b.json")])
    answer = comparison.to_json()
    assert answer["files"] == ["a.json", "b.json"]
    differences = answer["differences"]
    assert differences["tp"] == [2, 4]
    assert differences["recompute"] == ["none", "full"]
    assert differences["gpus"] == [16, 32]
    assert differences["step_s"][0] > differences["step_s"][1]
    assert not {"pp", "model", "hardware", "seq_length"} & differences.keys()
    text = text_of(comparison)
    assert "b trains" in text
    assert "loses most in recomputing" in text


def test_a_plan_beside_itself_differs_in_nothing() -> None:
    side = of_plan(plan_of(), "a.json")
    comparison = compare([side, side.model_copy(update={"name": "b.json"})])
    assert comparison.differences == {}
    assert "as fast" in text_of(comparison)


def test_three_sides_are_held_against_the_first() -> None:
    plans = [plan_of(), plan_of(tp=4), plan_of(pp=2)]
    comparison = compare([of_plan(plan, f"{number}.json") for number, plan in enumerate(plans)])
    for plan, rows in zip(plans[1:], comparison.waterfalls, strict=True):
        assert sum(row.seconds for row in rows) == pytest.approx(plan.step.step_s - plans[0].step.step_s)
    assert max(map(len, text_of(comparison).splitlines())) <= 80


def test_what_a_probe_measured_stands_beside_a_plan_in_the_terms_that_it_tells_apart() -> None:
    plan = plan_of(hardware="h200", runtime="torch-eager")
    result = probed(plan, mode="ranks", step_s=plan.step.step_s * 1.5)
    comparison = compare([of_plan(plan, "plan.json"), of_probe(result, "probe.json")])
    (rows,) = comparison.waterfalls
    assert {row.term for row in rows} == {"passes_s", "waits_s", "exposed_dp_s", "optimizer_s", "overhead_s"}
    assert sum(row.seconds for row in rows) == pytest.approx(0.5 * plan.step.step_s)
    assert comparison.differences["peak_allocated_bytes"][1] == 9 * GIB
    assert "recompute" not in comparison.differences, "a probe does not say"
    assert "eager torch" in text_of(comparison)


def test_stages_probed_alone_have_a_step_and_no_terms() -> None:
    plan = plan_of(hardware="h200", runtime="torch-eager")
    (rows,) = compare([of_plan(plan, "plan"), of_probe(probed(plan, step_s=3.0), "probe")]).waterfalls
    assert [(row.term, row.other_s) for row in rows] == [("step_s", 3.0)]


def test_a_probe_without_a_step_of_its_own_is_refused() -> None:
    with pytest.raises(SpecError, match=r"probe.json: (has no whole step|ran in small)"):
        of_probe(probed(plan_of(hardware="h200", runtime="torch-eager"), step_s=None), "probe.json")
    small = plan_of(hardware="h200", runtime="torch-eager")
    with pytest.raises(SpecError, match="ran in small"):
        of_probe(probed(small, step_s=1.0, run=probe_run(small, dtype="float64")), "probe.json")


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a.json", "b.json"], ["a", "b"]),
        (["x/plan.json", "y/plan.json"], ["x/plan.json", "y/plan.json"]),
        (["runs/x/plan.json", "runs/y/plan.json"], ["x/plan.json", "y/plan.json"]),
        (["a.json", "a.json"], ["a (1)", "a (2)"]),
    ],
)
def test_columns_are_headed_by_the_part_of_a_name_that_tells_files_apart(names: list[str], short: list[str]) -> None:
    assert short_names(names) == short


def test_adapters_that_differ_are_named() -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=1)

    def tuned(adapters: AdapterSpec | None) -> Plan:
        training = TrainingSpec(seq_length=1024, global_batch_size=4, adapters=adapters)
        return evaluate(load_model("llama-3.2-1b"), cluster, training, Parallelism(), runtime="hf")

    lora, qlora = (of_plan(tuned(AdapterSpec(rank=8, base_bits=bits)), f"{bits}.json") for bits in (16, 4))
    differs = compare([lora, qlora]).to_json()["differences"]
    assert differs["base_bits"] == [16, 4]
    assert "rank" not in differs
    whole = compare([lora, of_plan(tuned(None), "whole.json")]).to_json()["differences"]
    assert whole["trained"] == ["adapters", "all weights"]
    assert whole["rank"] == [8, None]
