"""A job goes on after nodes come or go: what is kept is kept, and every way is legal, fits and costs what plans do."""

from typing import Any

import pytest
from pages import printed
from priced_plans import priced_plan
from refusals import refused
from tables import beside

from planner.answer import Plan
from planner.decide.job import Choice, Resume, ResumedJob
from planner.decide.resume import Replanned, replan
from planner.decide.ways import split_for, split_near, with_ranks
from planner.errors import Infeasible
from planner.layout.evaluate import evaluate
from planner.layout.price import reprice
from planner.months.whole_run import going_on_s, waiting_s
from planner.report.runs import render_resume
from planner.search.rebalance import rebalance
from planner.shape import NEAR_FRACTION
from planner.specs.cluster import ClusterSpec
from planner.specs.training import OperationsSpec, Parallelism, SearchLimits, TrainingSpec
from planner.trainers.load import load_runtime

TABLES = beside(__file__)

QUICK = SearchLimits(top=1, schedule=("1f1b",), recompute=("none",), micro_batch_size=(1,), cp=(1,))
LLAMA_405B = Parallelism(tp=8, cp=2, pp=16, vpp=8, dp=8, layers_per_stage=(0, *[1] * 126, 0))


def plan_of(num_gpus: int = 64, batch: int = 128, runtime: str = "megatron", model: str = "8b", **layout: Any) -> Plan:
    return priced_plan(model, num_gpus, batch=batch, runtime=runtime, **{"tp": 2, "pp": 4, "dp": 8} | layout)


def replanned(plan: Plan, num_gpus: int, *keep: str, **more: Any) -> Replanned:
    return replan(plan, num_gpus, keep, limits=QUICK, **more)


def of_kind(resume: Resume, kind: str) -> list[Choice]:
    return [choice for choice in resume.choices if choice.kind == kind]


@pytest.fixture(scope="module")
def small() -> Plan:
    return plan_of()


@pytest.fixture(scope="module")
def shrunk(small: Plan) -> Replanned:
    return replanned(small, 56)


@pytest.fixture(scope="module")
def large() -> Replanned:
    """405B on 2,048 GPUs, of which 64 are lost."""
    cluster = ClusterSpec(hardware="h100", num_gpus=2048)
    plan = evaluate("405b", cluster, TrainingSpec(seq_length=8192, global_batch_size=2048), LLAMA_405B)
    return replan(plan, 1984)


def test_405b_on_1984_gpus(large: Replanned) -> None:
    split, near = of_kind(large.resume, "split")
    assert (split.parallelism.dp, split.num_gpus_used, split.global_batch_size) == (4, 1024, 2048)
    assert (near.parallelism.dp, near.num_gpus_used, near.global_batch_size) == (7, 1792, 2016)
    reshard, other = of_kind(large.resume, "reshard")
    assert reshard.global_batch_size == 2048
    assert other.tokens_per_s > 1.02 * reshard.tokens_per_s > 1.5 * split.tokens_per_s
    assert abs(other.global_batch_size / 2048 - 1) <= NEAR_FRACTION
    assert large.resume.chosen == reshard
    assert large.plan.parallelism == reshard.parallelism
    assert large.plan.batch_offer is not None
    assert near.convergence == ("batch 2,048 → 2,016 (-1.6%)",)
    assert reshard.convergence == ()
    # its checkpoints are reshardable by dp alone, so that a split has to write one again first
    assert (split.loads, near.loads, reshard.loads) == ("as_is", "as_is", "resave")
    assert reshard.ready_back_s == pytest.approx(split.back_s, rel=0.05)
    assert reshard.back_s > 1.5 * split.back_s
    assert large.resume.num_idle_nodes == 8


def test_every_way_is_legal_fits_and_costs_what_evaluate_says(large: Replanned, shrunk: Replanned) -> None:
    for answer, plan in ((large, large.plan), (shrunk, shrunk.plan)):
        for choice in answer.resume.choices:
            if choice.kind == "wait":
                continue
            assert choice.num_gpus_used + choice.num_gpus_idle == answer.resume.num_gpus
            sizes = choice.parallelism
            assert sizes.dp * sizes.micro_batch_size * sizes.num_microbatches == choice.global_batch_size
        assert plan.fits
        assert plan.best.oom_probability is not None
        assert plan.best.oom_probability <= 0.1 + 1e-9
        assert reprice(plan, plan.best).step_s == pytest.approx(answer.resume.chosen.step_s, rel=1e-6)
    near = of_kind(large.resume, "split")[1].parallelism
    training = large.plan.training.model_copy(update={"global_batch_size": 2016})
    given = LLAMA_405B.model_copy(update={"dp": near.dp})
    again = evaluate("405b", large.plan.cluster, training, given)
    assert again.fits
    assert not [warning for warning in again.warnings if "refuses" in warning]
    assert again.step.step_s == pytest.approx(of_kind(large.resume, "split")[1].step_s, rel=1e-3)


def test_waiting_and_going_on_lose_as_much_at_the_break_even(large: Replanned) -> None:
    (wait,) = of_kind(large.resume, "wait")
    for choice in large.resume.choices:
        if choice.kind == "wait":
            continue
        assert choice.break_even_wait_s is not None
        assert choice.back_s == pytest.approx(sum(choice.seconds.values()))
        # the save before the return is of this choice's own ranks
        save_s = choice.seconds["read"]
        lost = going_on_s(choice.break_even_wait_s, choice.back_s, choice.rate_fraction, save_s + wait.back_s)
        assert float(lost) == pytest.approx(float(waiting_s(choice.break_even_wait_s, 0.0, wait.back_s)))


def test_the_recommended_way_keeps_the_batch_and_loses_least(large: Replanned, shrunk: Replanned) -> None:
    for resume in (large.resume, shrunk.resume):
        kept = [
            c for c in resume.choices if c.kind != "wait" and c.global_batch_size == resume.before.global_batch_size
        ]
        assert resume.chosen.lost_until_repair_s == min(choice.lost_until_repair_s or 0.0 for choice in kept)


def test_idle_nodes_stand_in_for_lost_ones(large: Replanned) -> None:
    failures = {failure.taken: failure for failure in large.resume.failures}
    assert {taken: failure.job for taken, failure in failures.items()} == TABLES["idle_nodes_stand_in_for_lost_ones"]
    assert failures["switch"].tokens_per_s < failures["gpu"].tokens_per_s == large.plan.step.tokens_per_s
    assert failures["gpu"].lost_s < failures["nothing"].lost_s < failures["switch"].lost_s
    assert [row.idle_gpu_hours for row in large.resume.spares][:9] == [0.0] * 9
    assert large.resume.num_spare_nodes_cheapest is not None
    assert large.resume.num_spare_nodes_cheapest <= large.resume.num_idle_nodes


def test_spare_nodes_that_are_kept_stand_in_too(small: Plan) -> None:
    training = small.training.model_copy(update={"operations": OperationsSpec(num_spare_nodes=1)})
    alone = replanned(small, 32, "tp", "pp", "vpp", "layers")
    spared = replanned(small, 32, "tp", "pp", "vpp", "layers", training=training)
    answers = [{f.taken: f.job for f in found.resume.failures} for found in (alone, spared)]
    assert answers[0]["gpu"] != "stands_in"
    assert answers[1]["gpu"] == "stands_in"


@pytest.mark.thorough(2)
@pytest.mark.parametrize("keep", [("tp",), ("tp", "pp"), ("micro_batch_size", "schedule"), ("dp",), ("layers",)])
def test_kept_axes_are_kept(small: Plan, keep: tuple[str, ...]) -> None:
    resume = replanned(small, 56, *keep).resume
    assert resume.keep == tuple(axis for axis in resume.keep if axis in keep)
    for choice in resume.choices:
        for axis in keep:
            if axis != "layers" and choice.kind != "wait":
                assert getattr(choice.parallelism, axis) == getattr(small.parallelism, axis)
    assert "layers" not in keep or not of_kind(resume, "reshard")


def test_the_recipe_stays_unless_a_switch_is_stated(small: Plan) -> None:
    kept = replanned(small, 56).plan
    assert kept.runtime_spec == small.runtime_spec
    moved = replan(small, 56, limits=QUICK.model_copy(update={"switches": {"bf16_gradients": True}}))
    assert moved.plan.runtime_spec != small.runtime_spec
    assert all("bf16_gradients false → true" in c.convergence for c in moved.resume.choices if c.kind != "wait")


def test_a_batch_that_is_asked_for_is_the_only_one(small: Plan) -> None:
    training = small.training.model_copy(update={"global_batch_size": 112})
    resume = replanned(small, 56, training=training).resume
    assert {choice.global_batch_size for choice in resume.choices if choice.kind != "wait"} == {112}
    assert of_kind(resume, "split")[0].parallelism.dp == 7
    assert resume.chosen.convergence == ("batch 128 → 112 (-12.5%)",)


def test_a_split_takes_the_most_ranks_that_divide_the_batch(small: Plan) -> None:
    split = split_for(ResumedJob.of(small, 56, ()))
    assert (split.shape.dp, split.num_microbatches) == (4, 32)
    assert isinstance(with_ranks(ResumedJob.of(small, 56, ()), 7, 1, 128 // 7 * 7), type(split))
    job = ResumedJob.of(plan_of(batch=1000), 56, ())
    near = split_near(job, 4)
    assert near is not None
    assert near.pricing.training.global_batch_size == 1001
    assert split_near(ResumedJob.of(plan_of(batch=16), 56, ()), 4) is None


def test_a_pin_that_the_running_job_does_not_have_is_for_other_layouts(small: Plan) -> None:
    found = replan(small, 56, limits=QUICK.model_copy(update={"tp": (4,)})).resume
    assert {choice.kind for choice in found.choices} == {"reshard", "wait"}
    assert found.chosen.parallelism.tp == 4
    assert [closed.reason for closed in found.closed] == ["--tp 4: the running job has 2"]


def test_a_smaller_micro_batch_divides_more() -> None:
    split = split_for(ResumedJob.of(plan_of(batch=16, micro_batch_size=2), 32, ("dp",)))
    assert isinstance(split, str)
    split = split_for(ResumedJob.of(plan_of(batch=24, dp=4, micro_batch_size=2, num_gpus=32), 24, ()))
    assert (split.shape.dp, split.shape.micro_batch_size, split.num_microbatches) == (3, 2, 4)
    split = split_for(ResumedJob.of(plan_of(batch=20, dp=5, micro_batch_size=2, num_gpus=40), 32, ()))
    assert (split.shape.dp, split.shape.micro_batch_size) == (4, 1)


def test_more_gpus_are_used_where_that_pays(small: Plan) -> None:
    resume = replanned(small, 128).resume
    kinds = [choice.kind for choice in resume.choices]
    assert kinds[:2] == ["stay", "split"]
    assert "wait" not in kinds
    stay, split = resume.choices[:2]
    assert stay.rate_fraction == pytest.approx(1.0, rel=0.01)
    assert split.parallelism.dp == 16
    assert "detection" not in split.seconds
    assert split.break_even_wait_s is not None
    # the tokens of the stop are won back by then
    assert split.rate_fraction * (split.break_even_wait_s - split.back_s) == pytest.approx(split.break_even_wait_s)
    assert resume.chosen.rate_fraction == max(choice.rate_fraction for choice in resume.choices)


def test_an_infeasible_job_names_the_fewest_gpus(small: Plan) -> None:
    with refused("no way to go on with 1 GPUs", "it fits on ", error=Infeasible):
        replanned(small, 1)
    offloaded = load_runtime("megatron").model_copy(update={"optimizer_offload_fraction": 1.0})
    # --assume host_memory_gib would be another job
    with refused("no legal layout: the host's part", "give more GPUs", error=Infeasible):
        replanned(priced_plan("70b", 16, runtime=offloaded, tp=4, pp=4), 1)


@pytest.mark.thorough(2)
@pytest.mark.parametrize(("runtime", "layout", "loads"), TABLES["the_checkpoint_decides_what_is_open"])
def test_the_checkpoint_decides_what_is_open(runtime: str, layout: dict[str, Any], loads: dict[str, str]) -> None:
    resume = replanned(plan_of(model="llama-3.2-1b" if "20" in runtime else "8b", runtime=runtime, **layout), 32).resume
    found = {choice.kind: choice.loads for choice in resume.choices if choice.kind != "wait"}
    assert found == loads
    for choice in resume.choices:
        if choice.loads == "convert" and choice.kind != "wait":
            assert choice.ready_back_s == pytest.approx(choice.back_s - choice.seconds["convert"])
            assert choice.needs == ("ds_to_universal.py converts it",)


def test_a_checkpoint_bound_to_its_ranks_leaves_waiting_alone() -> None:
    with refused("keeps tp, ep, pp, dp, layers", "wait for the lost GPUs", error=Infeasible):
        replanned(plan_of(runtime="nanotron", zero_stage=1), 56)


def test_a_data_loader_that_knows_its_ranks_changes_convergence() -> None:
    resume = replanned(plan_of(runtime="torchtitan"), 32).resume
    (split,) = of_kind(resume, "split")
    assert "order of the data" in split.convergence
    assert any("checkpoint.exclude_from_loading" in need for need in split.needs)


def test_buckets_that_would_change_are_told() -> None:
    plan = plan_of(model="llama-3.2-1b", num_gpus=1024, batch=1024, tp=1, pp=1, dp=1024)
    (split,) = of_kind(replanned(plan, 512, "layers").resume, "split")
    assert split.needs == ("gradients are reduced in buckets of 268,435,456 parameters, as before",)


def test_a_rebalanced_plan_keeps_its_slow_rank(small: Plan) -> None:
    slow = rebalance(small, (1.0, 1.2, 1.0, 1.0)).plan
    split = split_for(ResumedJob.of(slow, 32, ()))
    assert split.rank_factors == (1.0, 1.2, 1.0, 1.0)
    assert split.split.counts == reprice(slow, slow.best).split.counts


def text_of(found: Replanned) -> str:
    return printed(render_resume(found.resume, found.plan), markup=False)


def test_the_answer_fits_80_columns(large: Replanned) -> None:
    text = text_of(large)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
