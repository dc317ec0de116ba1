"""The whole run: days and dollars from the sustained step and the effective time, against runs of months."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from planner.answer import Plan, PricedLayout, Sustained, half_width
from planner.errors import SpecError
from planner.layout.evaluate import evaluate
from planner.months.losses import WIDEST_OF_RUNS, with_sustained
from planner.specs.cluster import ClusterSpec
from planner.specs.training import OperationsSpec, Parallelism, TrainingSpec

LLAMA = Parallelism(tp=8, pp=16, vpp=8, dp=128, schedule="interleaved-1f1b")


def months(num_gpus: int = 16_384, dp: int = 128, tokens: float | None = 15e12, **operations: Any) -> Plan:
    """Llama 3.1 405B on H100, as Meta laid it out."""
    training = TrainingSpec(
        seq_length=8192, global_batch_size=16 * dp, tokens=tokens, operations=OperationsSpec(**operations)
    )
    layout = LLAMA.model_copy(update={"dp": dp})
    return evaluate("405b", ClusterSpec(hardware="h100", num_gpus=num_gpus), training, layout)


@pytest.fixture(scope="module", name="llama")
def _llama() -> Plan:
    return months()


def test_days_are_those_of_the_sustained_step_in_the_time_that_trains(llama: Plan) -> None:
    cost, goodput, sustained = llama.run_cost, llama.goodput, llama.best.sustained
    assert cost
    assert goodput
    assert sustained
    steps = 15e12 / (2048 * 8192)
    assert cost.days == pytest.approx(steps * sustained.step_s / goodput.effective_fraction / 86_400)
    assert cost.gpu_hours == pytest.approx(24 * 16_384 * cost.days)
    assert cost.usd == pytest.approx(3.2 * cost.gpu_hours)
    assert cost.mwh == pytest.approx(1.7e-3 * cost.gpu_hours)


def test_intervals_hold_the_answer_and_what_it_was_made_of(llama: Plan) -> None:
    cost, goodput = llama.run_cost, llama.goodput
    assert cost
    assert goodput
    assert cost.days_interval
    assert cost.usd_interval
    assert cost.usd
    assert cost.days_interval[0] < cost.days < cost.days_interval[1]
    assert cost.usd_interval[0] / cost.usd == pytest.approx(cost.days_interval[0] / cost.days)
    assert goodput.interval[0] < goodput.effective_fraction < goodput.interval[1] < 1
    assert goodput.simulated_fraction is not None
    assert goodput.interval[0] < goodput.simulated_fraction < goodput.interval[1]


def test_llama_3_trained_for_over_nine_tenths_of_54_days(llama: Plan) -> None:
    # arXiv:2407.21783, section 3.3.4; its hours (30.84M for 15.6T tokens) hold what came after it, too
    assert llama.goodput
    assert llama.run_cost
    assert llama.goodput.interval[0] < 0.9 < llama.goodput.effective_fraction
    assert llama.goodput.interval[1] > 0.95


def test_llama_3_took_31_million_gpu_hours() -> None:
    # its model card: 30.84M for 15.6T tokens
    cost = months(tokens=15.6e12).run_cost
    assert cost is not None
    assert cost.days_interval is not None
    low, high = (24 * 16_384 * days for days in cost.days_interval)
    assert low < 30.84e6 < high
    assert cost.gpu_hours == pytest.approx(30.84e6, rel=0.15)


def test_byterobust_trained_for_97_percent_of_three_months() -> None:
    # arXiv:2509.16293, a dense model on 9,600 GPUs
    goodput = months(9600, 75).goodput
    assert goodput
    assert goodput.interval[0] < 0.97 < goodput.interval[1]


def test_checkpoints_are_what_the_trainer_writes(llama: Plan) -> None:
    assert llama.goodput
    # two bytes of weights, twelve of masters and moments
    assert llama.goodput.checkpoint_bytes == 14 * llama.model.num_parameters
    assert llama.goodput.asynchronous


def test_a_trainer_that_waits_for_its_checkpoints() -> None:
    training = TrainingSpec(seq_length=2048, global_batch_size=64, tokens=1e12)
    cluster = ClusterSpec(hardware="a100", num_gpus=8)
    goodput = evaluate("8b", cluster, training, Parallelism(), runtime="torch-fsdp").goodput
    assert goodput
    assert not goodput.asynchronous
    assert goodput.checkpoint_bytes
    assert goodput.storage_gb_per_s
    assert goodput.checkpoint_s == pytest.approx(goodput.checkpoint_bytes / goodput.storage_gb_per_s / 1e9)


def test_what_is_given_replaces_the_defaults(llama: Plan) -> None:
    given = months(failures_per_1000_gpu_days=0.25, storage_gb_per_s=4000.0, usd_per_gpu_hour=2.0)
    assert given.goodput
    assert llama.goodput
    assert given.run_cost
    assert given.goodput.failures_per_day == pytest.approx(llama.goodput.failures_per_day / 2)
    assert given.goodput.effective_fraction > llama.goodput.effective_fraction
    assert given.run_cost.usd == pytest.approx(2 * given.run_cost.gpu_hours)
    assert given.inputs_sha256 != llama.inputs_sha256


def test_spare_nodes_are_paid(llama: Plan) -> None:
    kept = months(num_spare_nodes=6)
    assert kept.run_cost
    assert kept.goodput
    assert llama.goodput
    assert kept.run_cost.gpu_hours == pytest.approx(24 * kept.run_cost.days * (16_384 + 48))
    assert kept.goodput.num_spare_nodes == 6
    assert kept.goodput.restart_s < llama.goodput.restart_s


def test_a_run_that_never_ends_is_said_to() -> None:
    with pytest.raises(SpecError, match=r"never ends: an interruption every 0\.527 s"):
        months(failures_per_1000_gpu_days=1e4)


def test_a_run_that_hardly_trains_still_has_numbers() -> None:
    goodput = months(failures_per_1000_gpu_days=8.0).goodput
    assert goodput is not None
    assert 0 <= goodput.interval[0] <= goodput.effective_fraction < 0.4


def test_without_tokens_there_is_no_whole_run() -> None:
    plan = months(tokens=None)
    assert plan.run_cost is None
    assert plan.goodput is None
    assert plan.best.sustained is not None


@pytest.fixture(name="layout")
def _layout(make_plan: Callable[..., Plan]) -> PricedLayout:
    return make_plan().best


def sustained(layout: PricedLayout, straggler_fraction: float = 0.0) -> Sustained:
    found = with_sustained(layout, straggler_fraction).sustained
    assert found is not None
    return found


def test_it_is_longer_by_the_published_factor_and_names_its_source(layout: PricedLayout) -> None:
    found = sustained(layout)
    assert found.step_s == pytest.approx(1.12 * layout.step.step_s)
    assert "production runs" in found.source
    # one line of a report
    assert len(found.source) <= 62
    low_s, high_s = found.step_s_interval
    assert low_s < found.step_s < high_s
    assert (high_s - low_s) / 2 <= 0.12 * found.step_s


def test_it_is_less_sure_where_the_benchmark_is_less_sure_than_those_of_the_runs(layout: PricedLayout) -> None:
    def with_width(width: float) -> float:
        step_s = layout.step.step_s
        step = layout.step.model_copy(update={"step_s_interval": (step_s * math.exp(-width), step_s * math.exp(width))})
        return half_width(sustained(layout.model_copy(update={"step": step})).step_s_interval)

    known = with_width(WIDEST_OF_RUNS)
    assert with_width(0.05) == with_width(0.1) == known
    assert with_width(0.3) == pytest.approx(math.sqrt(known**2 + 0.3**2 - WIDEST_OF_RUNS**2))


def test_a_straggler_that_was_stated_is_not_counted_twice(layout: PricedLayout) -> None:
    assert sustained(layout, 0.05).step_s == pytest.approx(1.12 / 1.05 * layout.step.step_s)
    # never below the jitter of clean runs
    assert sustained(layout, 0.5).step_s == pytest.approx(1.004 * layout.step.step_s)


def test_every_layout_has_one() -> None:
    training = TrainingSpec(seq_length=8192, global_batch_size=64)
    for hardware, known in (("h100", True), ("gh200", False)):
        best = evaluate("8b", ClusterSpec(hardware=hardware, num_gpus=8), training, Parallelism(tp=8)).best
        assert best.sustained is not None
        assert best.sustained.step_s > best.step.step_s
        assert (half_width(best.sustained.step_s_interval) < 0.17) == known


def test_each_end_widens_by_itself(layout: PricedLayout) -> None:
    step_s, known = layout.step.step_s, half_width(sustained(layout).step_s_interval)
    step = layout.step.model_copy(update={"step_s_interval": (0.95 * step_s, 1.5 * step_s)})
    found = sustained(layout.model_copy(update={"step": step}))
    low_s, high_s = found.step_s_interval
    assert math.log(found.step_s / low_s) == pytest.approx(known)
    assert math.log(high_s / found.step_s) > 0.35


def test_switches_that_a_run_does_not_say_widen_it_too() -> None:
    training = TrainingSpec(seq_length=4096, global_batch_size=512)
    cluster, layout = ClusterSpec(hardware="h100", num_gpus=128), Parallelism(tp=1, pp=4, ep=8)
    unsaid, said = (
        evaluate("qwen3-30b-a3b", cluster, training, layout, says_switches=says).best for says in (False, True)
    )
    assert unsaid.sustained is not None
    assert said.sustained is not None
    assert unsaid.unsaid
    assert half_width(unsaid.sustained.step_s_interval) > half_width(said.sustained.step_s_interval)
