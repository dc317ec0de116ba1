"""A line of JSON becomes the arguments of evaluate."""

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from refusals import refused
from tables import beside

from planner.answer import AS_PLANNED, Plan, RobustStep
from planner.cli.inputs import read_described, read_job
from planner.cli.options import JobOptions, LayoutOptions
from planner.errors import SpecError
from planner.layout import variation as robust
from planner.layout.evaluate import evaluate, pricing_of
from planner.layout.given import fill_dp
from planner.layout.price import reprice
from planner.layout.runs import evaluate_lines, network_gb_per_s, parse_run
from planner.layout.variation import NUM_LAYOUTS, assumed_steps, other_assumptions, robust_steps, told_assumptions
from planner.physics.pricing import Pricing
from planner.search.search import plan
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.trainers.generations import NATURAL_IMBALANCE, STRONG_IMBALANCE, UNBALANCED
from planner.trainers.load import load_runtime
from planner.trainers.switches import EP_OVERLAP

TABLES = beside(__file__)

RUN: dict[str, Any] = TABLES["run"]


def parsed(**changes: Any) -> Any:
    return parse_run({"id": "x", "run": {**RUN, **changes}}, "line 1")


@pytest.mark.parametrize(("description", "expected"), TABLES["network_rates"])
def test_network_rates_in_words(description: str | None, expected: float | None) -> None:
    assert network_gb_per_s(description, 8) == expected


def test_a_rate_in_inter_node_replaces_the_profiles() -> None:
    assert parsed(inter_node="8x200 Gb/s per node").cluster.network_gb_per_s == 25.0
    assert parsed(inter_node="fast").cluster.network_gb_per_s is None
    assert parsed(intra_node="NVLink", precision_recipe="fp16").cluster.network_gb_per_s is None


def test_inline_models_take_flat_fields() -> None:
    model = TABLES["inline_models_take_flat_fields"]
    assert parsed(model=model).model.moe.num_experts == 4


def test_features_change_the_runtime_and_unknown_ones_are_named() -> None:
    run = parsed(features={"cuda_graph": "full", "warp_drive": True})
    assert run.runtime.cuda_graphs
    assert run.unknown_features == ("warp_drive",)


def test_dp_fills_the_cluster_where_none_is_given() -> None:
    assert fill_dp(Parallelism(tp=8, pp=16), 2048, 2048).dp == 16
    assert fill_dp(Parallelism(tp=8, pp=16, dp=3), 2048, 2048).dp == 3
    with pytest.raises(SpecError):
        fill_dp(Parallelism(tp=8), 4, 2048)


@pytest.mark.parametrize(("layout", "batch", "dp", "spare"), TABLES["the_dp_to_give_is_the_largest_allowed"])
def test_the_dp_to_give_is_the_largest_allowed(layout: dict[str, int], batch: int, dp: int, spare: int) -> None:
    ranks = layout.get("tp", 1) * layout["pp"]
    with pytest.raises(SpecError, match=rf"tp·cp·pp \({ranks}\) does not divide 2,048") as caught:
        fill_dp(Parallelism.model_validate(layout), 2048, batch)
    assert caught.value.hint == f"give dp {dp} to leave {spare:,} GPUs spare"


@pytest.mark.parametrize(("line", "message"), TABLES["wrong_lines"])
def test_a_wrong_line_is_an_error_object(line: str, message: str) -> None:
    (answer,) = evaluate_lines([line])
    error = answer.to_json()["error"]
    json.dumps(answer.to_json(), allow_nan=False)
    assert error["type"] == "SpecError"
    assert error["message"].startswith(message)
    assert error["hint"]


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    (answer,) = evaluate_lines(['{"run": ' + "[" * 200_000])
    assert "line 1: not JSON" in answer.to_json()["error"]["message"]


def test_answers_come_before_the_next_line_is_read() -> None:
    def lines() -> Any:
        yield "{"
        raise AssertionError("read ahead")

    assert next(evaluate_lines(lines())).error is not None


def test_a_whole_iteration_in_a_graph_overlaps_expert_exchange_unless_said_otherwise() -> None:
    of_mixture = parsed(model="deepseek-v3", features={"cuda_graph": "full_iteration"})
    assert of_mixture.runtime.ep_overlap_fraction == EP_OVERLAP
    assert of_mixture.runtime.fuses_experts
    dense = parsed(features={"cuda_graph": "full_iteration"})
    assert (dense.runtime.ep_overlap_fraction, dense.runtime.fuses_experts) == (0.0, False)
    assert parsed(features={"ep_overlap": False, "cuda_graph": "full_iteration"}).runtime.ep_overlap_fraction == 0.0
    plain = parsed().runtime.ep_overlap_fraction
    assert parsed(features={"cuda_graph": True}).runtime.ep_overlap_fraction == plain


def test_fp16_in_the_recipe_is_the_dtype() -> None:
    assert parsed(precision_recipe="fp16").training.dtype == "fp16"
    assert parsed(precision_recipe="fp16", dtype="fp8").training.dtype == "fp8"
    assert parsed().training.dtype == "bf16"


@pytest.mark.parametrize(("recipe", "factor"), [("fp8-tensorwise", 1.0), ("fp8-rowwise", 1.45), (None, 1.45)])
def test_scales_by_rows_cost_torchtitan_speed_and_are_what_it_has_today(recipe: str | None, factor: float) -> None:
    run = parsed(runtime="torchtitan", dtype="fp8", hardware="b200", precision_recipe=recipe)
    assert run.runtime.narrow_factor == factor
    dated = parsed(runtime="torchtitan", dtype="fp8", hardware="h100", precision_recipe=recipe).runtime
    assert dated.narrow_factor == (factor if recipe else 1.0)
    assert parsed(dtype="fp8").runtime.narrow_factor == 1.0


def test_bf16_in_the_recipe_means_wide_gradients() -> None:
    assert parsed(runtime="megatron-2021", hardware="a100", precision_recipe="bf16").runtime.gradient_bytes == 4
    assert parsed(runtime="megatron-2021", hardware="a100").runtime.gradient_bytes == 2


OSS: dict[str, Any] = TABLES["oss"]


@pytest.mark.parametrize(("changes", "pattern", "sinks"), TABLES["a_known_design_fills_what_is_left_out"])
def test_a_known_design_fills_what_is_left_out(changes: dict[str, Any], pattern: int | None, sinks: bool) -> None:
    model = parsed(model={**OSS, **changes}, parallelism={"dp": 8}, num_gpus=8).model
    assert (model.sliding_window_pattern, model.attention_sinks) == (pattern, sinks)
    full = [layer.attention for layer in model.layers].count("full")
    assert full == (0 if pattern is None else model.num_hidden_layers // pattern)


def test_a_defect_costs_one_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise IndexError("7")

    run = '{"model": "8b", "hardware": "h100", "num_gpus": 8, "seq_length": 4096, "global_batch_size": 8}'
    monkeypatch.setattr("planner.layout.runs.price_given", broken)
    first, second = evaluate_lines([f'{{"id": "a", "run": {run}}}', '{"id": "b", "run": {}}'])
    assert first.error is not None
    assert first.error.message.startswith("internal: IndexError: 7 (test_runs.py:")
    assert second.id == "b"


def test_a_line_takes_no_model_from_where_lines_come_from() -> None:
    line = '{"run": {"model": "-", "hardware": "h100", "num_gpus": 8, "seq_length": 4096, "global_batch_size": 8}}'
    (answer,) = evaluate_lines([line])
    assert answer.error is not None
    assert "model: '-' is standard input" in answer.error.message


def test_natural_routing_fills_one_rank_more_unless_biases_balance_experts() -> None:
    """Qwen3 has an auxiliary loss alone, DeepSeek-V3 a bias for each expert."""
    asked = {"hardware": "h100", "num_gpus": 256, "seq_length": 4096, "global_batch_size": 256}
    natural = {"features": {"natural_routing": True}}
    qwen, deepseek = asked | {"model": "qwen3-235b-a22b"}, asked | {"model": "deepseek-v3"}
    assert parse_run({"run": qwen}).training.moe_imbalance == 1.0
    assert parse_run({"run": qwen | natural}).training.moe_imbalance == NATURAL_IMBALANCE > 1.0
    biased = parse_run({"run": deepseek | natural}).training
    assert biased.moe_imbalance == 1.0 < (biased.moe_peak_imbalance or 0.0)
    assert parse_run({"run": asked | natural | {"model": "mixtral-8x7b"}}).training.moe_imbalance == STRONG_IMBALANCE
    unbalanced = load_model("qwen3-30b").model_dump(mode="json", exclude_unset=True)
    unbalanced["moe"]["router_aux_loss_coef"] = 0
    assert parse_run({"run": asked | natural | {"model": unbalanced}}).training.moe_spread == UNBALANCED.spread
    forced = {"adapters": {"rank": 8}, "features": {"natural_routing": False}}
    assert parse_run({"run": qwen | forced}).training.moe_spread == 0
    said = parse_run({"run": qwen | natural | {"moe_imbalance": "1.2:0.8,2.2:0.2"}}).training
    assert (round(said.moe_imbalance, 3), said.moe_peak_imbalance) == (1.4, 2.2)


def test_fine_tuning_fills_the_fullest_of_many_ranks_with_few_experts_most() -> None:
    """As Blom's expected largest of so many normal means: 1.42 deviations of eight ranks, 1.03 of four."""
    asked = {"hardware": "h100", "num_gpus": 8, "seq_length": 4096, "global_batch_size": 256}
    run = parse_run({"run": asked | {"model": "qwen3-30b", "adapters": {"rank": 8}}})
    pricing = pricing_of(run.model, run.cluster, run.training, run.runtime)
    assert [round(float(pricing.imbalance(ep)), 2) for ep in (1, 4, 8)] == [1.0, 1.37, 1.72]
    assert parse_run({"run": asked | {"model": "moonlight", "adapters": {"rank": 8}}}).training.moe_spread == 0.01


JOB = LayoutOptions(model="qwen3-30b", gpus=32, hardware="h100", seq_length=4096, global_batch_size=512)
TUNED, PLAIN = "ep_overlap=true,dispatcher=deepep", "ep_overlap=false,dispatcher=deepep"
GRIDS = (
    Parallelism(pp=2, dp=16, ep=8, vpp=4, micro_batch_size=1, schedule="interleaved-1f1b"),
    Parallelism(tp=2, pp=1, dp=16, ep=16, micro_batch_size=1),
)


def evaluated(grid: Parallelism, **changed: Any) -> Plan:
    asked = replace(JOB, **changed)
    job = read_described(asked, read_job(asked))
    return evaluate(job.model, job.cluster, job.training, grid, runtime=job.runtime_spec)


def steps_of(plans: list[Plan]) -> tuple[RobustStep, ...]:
    trainer = evaluated(GRIDS[0], switch=PLAIN).runtime_spec
    candidates = [reprice(one, one.best) for one in plans][:NUM_LAYOUTS]
    return robust_steps([one.best for one in plans][:NUM_LAYOUTS], assumed_steps(candidates, trainer))


@cache
def compared(switch: str = TUNED) -> tuple[dict[str, float], ...]:
    """The steps of both layouts, by the short name of the assumption, however little it matters."""
    plans = [evaluated(grid, switch=switch) for grid in GRIDS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(robust, "TOLD_FRACTION", -1.0)
        steps = steps_of(plans)
    return tuple(
        {step.assumption.partition(":")[0]: step.step_s for step in steps if step.layout == str(one.parallelism)}
        for one in plans
    )


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("name", "option"), TABLES["each_step_is_that_of_the_layout_priced_with_the_change"])
def test_each_step_is_that_of_the_layout_priced_with_the_change(name: str, option: dict[str, Any]) -> None:
    switch = {"switch": TUNED}
    for grid, steps in zip(GRIDS, compared(), strict=True):
        assert steps[AS_PLANNED] == evaluated(grid, **switch).step.step_s
        assert steps[name] == pytest.approx(evaluated(grid, **switch, **option).step.step_s, rel=1e-3)


def test_without_overlap_every_collective_is_waited_for() -> None:
    fields = ("gradient", "parameter", "tp", "ep", "cp", "fsdp")
    none = ",".join(f"{field}_overlap_fraction=0" for field in fields) + ",ep_overlap_network_fraction=0"
    for grid, steps in zip(GRIDS, compared(), strict=True):
        by_hand = evaluated(grid, switch="dispatcher=deepep", assume=none).step.step_s
        assert steps["no overlap"] == pytest.approx(by_hand, rel=0.02), "but for what overlapping costs the host"


def test_layouts_keep_their_order_and_each_starts_as_planned() -> None:
    plans = [evaluated(grid) for grid in GRIDS]
    steps = steps_of(plans)
    names = list(dict.fromkeys(step.assumption for step in steps))
    assert names[0] == AS_PLANNED
    assert all(": " in name for name in names[1:]), "each is explained"
    assert [step.assumption for step in steps] == names * 2
    assert [step.layout for step in steps] == [str(one.parallelism) for one in plans for _ in names]


def test_an_assumption_is_told_if_it_moves_a_step_or_changes_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [evaluated(grid) for grid in GRIDS]
    monkeypatch.setattr(robust, "TOLD_FRACTION", 1e9)
    assert steps_of(plans[:1]) == ()
    slower, faster = sorted(plans, key=lambda one: -one.step.step_s)
    others = {step.assumption for step in steps_of([slower, faster])}
    first = {step.assumption for step in steps_of([faster, slower])}
    assert len(first) < len(others)
    monkeypatch.setattr(robust, "TOLD_FRACTION", -1.0)
    assert others == {step.assumption for step in steps_of(plans)}, "all that a slower layout may be chosen for"


def test_a_recipe_that_is_the_trainers_own_stays_as_planned() -> None:
    for steps in compared(PLAIN):
        assert steps["default switches"] == pytest.approx(steps[AS_PLANNED], rel=1e-3)
    plans = [evaluated(grid, switch=PLAIN) for grid in GRIDS]
    assert not any("switches" in step.assumption for step in steps_of(plans))


def search(**options: Any) -> Plan:
    job = read_job(JobOptions(**options))
    return plan(job.model, job.cluster, job.training, limits=SearchLimits(), runtime=job.runtime_spec)


@pytest.fixture(scope="module")
def slow() -> Plan:
    """A job on a slow network, the fastest layout of which hides more exchanges than its neighbour has."""
    return search(
        model="8b", gpus=16, hardware="h100", seq_length=8192, global_batch_size=16, assume="network_gb_per_s=8"
    )


def test_the_answer_compares_the_best_with_its_alternatives(slow: Plan) -> None:
    shown = [slow.best, *slow.alternatives][: robust.NUM_LAYOUTS]
    assert list(dict.fromkeys(step.layout for step in slow.best.robust)) == [str(one.parallelism) for one in shown]
    planned = [step.step_s for step in slow.best.robust if step.assumption == AS_PLANNED]
    assert planned == [one.step.step_s for one in shown]
    assert not any(other.robust for other in slow.alternatives)
    assert Plan.model_validate_json(slow.model_dump_json()) == slow


def test_an_answer_of_one_layout_compares_nothing() -> None:
    job = read_job(JobOptions(model="8b", gpus=8, hardware="h100", global_batch_size=64))
    one = plan(job.model, job.cluster, job.training, limits=SearchLimits(top=1, tp=(8,)), runtime=job.runtime_spec)
    assert one.best.robust == ()
    assert evaluated(GRIDS[0]).best.robust == ()


OPTIONS = LayoutOptions(model="deepseek-v3", gpus=256, hardware="h100", seq_length=4096, global_batch_size=512)


def _evaluated(**more: Any) -> Plan:
    asked = replace(OPTIONS, **more)
    job = read_described(asked, read_job(asked))
    layout = Parallelism(pp=8, dp=32, ep=32, micro_batch_size=1)
    return evaluate(job.model, job.cluster, job.training, layout, runtime=job.runtime_spec)


def test_each_line_tells_what_setting_its_option_does() -> None:
    now = _evaluated()
    assert len(now.assumptions) >= 3
    for line in now.assumptions:
        effect, option, value = re.match(r"([+-][\d.]+)% if .* \(--(\S+) (\S+)\)$", line).groups()  # type: ignore[union-attr]
        then = _evaluated(**{option.replace("-", "_"): value if option in ("assume", "switch") else float(value)})
        assert then.step.step_s / now.step.step_s - 1 == pytest.approx(float(effect) / 100, abs=6e-4), line
        assert abs(float(effect)) >= 2


def test_the_switches_of_a_run_that_is_described_are_told_and_those_of_a_plan_are_not() -> None:
    """The recipe of a plan says what its switches are worth."""
    now = _evaluated(switch="ep_overlap=false,dispatcher=alltoall")
    assert any("--switch dispatcher=deepep" in line for line in now.assumptions)
    assert not any("--switch" in line or "ep_overlap" in line for line in told_assumptions(reprice(now, now.best)))


def test_a_switch_that_needs_consent_or_breaks_a_rule_is_not_told() -> None:
    told = " ".join(_evaluated(switch="ep_overlap=true").assumptions)
    for name in ("bf16_gradients", "nan_checks", "shared_expert_overlap", "full_iteration"):
        assert name not in told


@pytest.mark.parametrize("runtime", ["torch-eager", "megatron"])
def test_what_a_trainer_has_no_switch_for_is_assumed_by_its_field(runtime: str) -> None:
    job = read_job(JobOptions(model="8b", gpus=16, hardware="h100", runtime=runtime))
    pricing = Pricing(model=job.model, training=job.training, cluster=job.cluster, runtime=job.runtime_spec)
    (words,) = (other.options for other in other_assumptions(pricing) if other.name == "host")
    assert words[0] == ("--assume" if runtime == "torch-eager" else "--switch")
    assert read_job(replace(OPTIONS, runtime=runtime, assume="cuda_graphs=true")).runtime_spec.cuda_graphs


def test_an_assumption_that_does_not_matter_is_not_told() -> None:
    alone = read_job(JobOptions(model="8b", gpus=1, hardware="h100", global_batch_size=8))
    told = evaluate(alone.model, alone.cluster, alone.training, Parallelism()).assumptions
    assert [line for line in told if "overlap" in line] == []


@pytest.mark.parametrize(("text", "message"), TABLES["assumptions_that_make_no_sense_are_named"])
def test_assumptions_that_make_no_sense_are_named(text: str, message: str) -> None:
    with refused(message):
        read_job(replace(OPTIONS, assume=text))


RUNS = TABLES["runs"]
"""GPU, number of them, dtype, sequences a step and a micro-batch, tokens a second and GPU."""


@pytest.mark.parametrize(("gpu", "count", "dtype", "batch", "micro_batch", "tokens_per_s"), RUNS)
def test_runs_lie_in_intervals(
    gpu: str, count: int, dtype: str, batch: int, micro_batch: int, tokens_per_s: float
) -> None:
    plan = evaluate(
        load_model("nemotron-3-nano-30b-a3b"),
        ClusterSpec(hardware=load_hardware(gpu), num_gpus=count),
        TrainingSpec(seq_length=8192, global_batch_size=batch, dtype=dtype),
        Parallelism(tp=1, pp=1, dp=count, ep=8, micro_batch_size=micro_batch),
        # as the summaries' recipes have it
        runtime=load_runtime("megatron").with_features({"bf16_gradients": True, "cross_entropy_fusion": True})[0],
        says_switches=False,
    )
    assert plan.fits
    low_s, high_s = plan.best.step.step_s_interval or (0.0, 0.0)
    measured_s = batch * 8192 / count / tokens_per_s
    assert low_s < measured_s < high_s
    assert measured_s == pytest.approx(plan.best.step.step_s, rel=0.15)
