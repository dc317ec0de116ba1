"""The whole search: optimal on clusters small enough to look at everything, and what every plan has to obey.

Laws of the search over random jobs: more of a resource finds no slower plan, proven is what it says.
A search looks at its clock between any two pieces of work, however large the job is.
"""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws.counting import law
from tables import beside
from toys import MOE, NO_LIMIT_S, solved, toy_cluster, toy_model, toy_problem, toy_training

from planner.answer import Plan, PricedLayout
from planner.errors import Infeasible, SolverError
from planner.layout.evaluate import evaluate
from planner.physics.layers import model_totals
from planner.search import frontier
from planner.search.case import Deadline
from planner.search.frontier import blocks_of
from planner.search.search import plan
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model, model_names
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.trainers.load import RUNTIMES, load_runtime

TABLES = beside(__file__)

SMALL: dict[str, Any] = {"training": toy_training(16), "cp": (1,), "zero_stage": (1,), "micro_batch_size": (1, 2)}
EXHAUSTIVE: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": ("1f1b",), "pp": (2, 4)},
    "interleaved": {"schedule": ("interleaved-1f1b",), "pp": (2, 4), "model": toy_model(8)},
    "free": {"model": toy_model(5), "recompute": ("none", "full")},
    "tight": {"cluster": toy_cluster(8, memory_gib=1.6), "tp": (1, 2), "schedule": ("1f1b",)},
    "tight, selective": {"cluster": toy_cluster(8, memory_gib=1.3), "recompute": ("none", "selective"), "tp": (2, 4)},
    "recompute per stage": {
        "runtime": "torch-eager", "model": toy_model(4), "cluster": toy_cluster(8, memory_gib=2.4), "tp": (1, 2),
        "schedule": ("1f1b",),
    },
    "experts": {"model": toy_model(5, moe=MOE), "ep": (1, 4), "tp": (1, 2), "schedule": ("1f1b",)},
    "sliding": {"model": toy_model(6, sliding_window=256, sliding_window_pattern=3), "tp": (2,), "pp": (2, 4)},
    "tied and large vocabulary": {"model": toy_model(5, tie_word_embeddings=True, vocab_size=160_000), "tp": (1, 2)},
    "odd number of GPUs": {"cluster": toy_cluster(7), "training": toy_training(30), "micro_batch_size": (1,)},
}  # fmt: skip


@pytest.mark.thorough(2)
@pytest.mark.parametrize("name", EXHAUSTIVE)
def test_nothing_that_fits_is_faster(name: str) -> None:
    """Every shape, schedule, recompute count and split is replayed."""
    problem = toy_problem(**(SMALL | {"top": 1, "gap_fraction": 0.0} | EXHAUSTIVE[name]))
    answer, best_s = solved(problem), problem.best_step_s()
    assert answer.search.outcome != "feasible"  # it ended by itself
    assert answer.search.lower_bound_s <= best_s * (1 + 1e-6)
    # the program's bounds are a little below the replay, so that a split next to the best may be taken for it
    assert answer.step.step_s <= best_s * 1.005
    assert answer.search.gap <= 0.1
    assert answer.search.asked_gap_fraction == 0.0
    named = problem.limits.schedule or ("1f1b", "interleaved-1f1b")
    assert answer.search.schedules == named, "of which the bound is"


def layers_of(layout: PricedLayout) -> list[int]:
    """Every decoder layer in the order in which a micro-batch meets it."""
    chunks = sorted(chunk for stage in layout.stages for chunk in stage.chunks)
    return [layer for first, last in chunks for layer in range(first, last)]


def check_layout(layout: PricedLayout, model: ModelSpec, cluster: ClusterSpec, training: TrainingSpec) -> None:
    """What holds for every plan."""
    p, step = layout.parallelism, layout.step
    assert layer_count(layout) == model.num_hidden_layers
    assert layers_of(layout) == list(range(model.num_hidden_layers))
    assert [stage.stage for stage in layout.stages] == list(range(p.pp))
    assert all(stage.num_layers == sum(last - first for first, last in stage.chunks) for stage in layout.stages)
    assert sorted(name for stage in layout.stages for name in stage.holds) == sorted(
        ["embedding", "head"] + ["mtp"] * (model.num_nextn_predict_layers > 0)
    )
    assert p.tp * p.cp * p.pp * p.dp == p.num_gpus_used
    assert p.num_gpus_used + p.num_gpus_spare == cluster.num_gpus
    assert p.dp * p.micro_batch_size * p.num_microbatches == training.global_batch_size
    assert layout.fits
    for stage in layout.stages:
        memory = stage.memory
        items = [value for name, value in memory if name.endswith("_bytes")]
        assert all(value >= 0 for value in items)
        parts = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
        assert memory.peak_allocated_bytes == sum(getattr(memory, f"{part}_bytes") for part in parts)
        assert memory.total_bytes == memory.peak_allocated_bytes + memory.reserved_bytes
        assert memory.total_bytes <= cluster.hardware.memory_bytes
    parts_s = [seconds for _, seconds in step.breakdown]
    assert all(seconds >= -1e-9 * step.step_s for seconds in parts_s)
    assert sum(parts_s) == pytest.approx(step.step_s, rel=1e-9)
    assert step.tokens_per_s == pytest.approx(training.tokens_per_step / step.step_s)
    assert 0 < step.mfu < 1
    assert 0 <= step.bubble_fraction < 1


def layer_count(layout: PricedLayout) -> int:
    return sum(stage.num_layers for stage in layout.stages)


def check_plan(answer: Plan, limits: SearchLimits) -> None:
    for layout in (answer.best, *answer.alternatives):
        check_layout(layout, answer.model.spec, answer.cluster, answer.training)
    steps = [other.step.step_s for other in answer.alternatives]
    # alternatives are replayed for a few rounds, and solved to a percent
    assert all(step >= answer.step.step_s * 0.99 for step in steps)
    assert steps == sorted(steps)
    assert len(steps) <= limits.top
    grids = [str(layout.parallelism) for layout in (answer.best, *answer.alternatives)]
    assert len(set(grids)) == len(grids)
    assert answer.search.gap == pytest.approx(answer.step.step_s / answer.search.lower_bound_s - 1)
    assert answer.search.num_fitting <= answer.search.num_shapes
    assert answer.search.gap >= 0


@pytest.mark.thorough(4)
@pytest.mark.parametrize("name", model_names())
def test_every_shipped_model_gets_a_plan_with_all_its_layers(name: str) -> None:
    model = load_model(name)
    billions = model_totals(model, load_runtime("megatron"), 2048).num_parameters / 1e9
    num_gpus = 8 if billions < 10 else 64 if billions < 150 else 512
    limits = SearchLimits(
        top=1, time_limit_s=NO_LIMIT_S, gap_fraction=0.1, tp=(1, 8), cp=(1,), micro_batch_size=(1,),
        zero_stage=(1,), schedule=("1f1b",), recompute=("none", "full"),
        switches="default",  # recipes are chosen in test_recipes.py
    )  # fmt: skip
    training = TrainingSpec(seq_length=2048, global_batch_size=512)
    cluster = ClusterSpec(hardware=load_hardware("b200"), num_gpus=num_gpus)
    check_plan(plan(model, cluster, training, limits=limits), limits)


@pytest.mark.thorough(2)
@pytest.mark.parametrize("num_layers", [61, 126])
@pytest.mark.parametrize("pp", [1, 5, 8, 24])
def test_any_number_of_layers_is_split_over_any_number_of_stages(num_layers: int, pp: int) -> None:
    limits = SearchLimits(pp=(pp,), top=1, time_limit_s=NO_LIMIT_S, tp=(1,), cp=(1,), micro_batch_size=(1,))
    model, training = toy_model(num_layers), toy_training(240)
    answer = plan(model, toy_cluster(48, memory_gib=300.0), training, limits=limits)
    assert answer.parallelism.pp == pp
    check_layout(answer.best, model, answer.cluster, training)


@pytest.mark.thorough(2)
@pytest.mark.parametrize("num_gpus", [384, 1536, 2040, 16380])
def test_gpu_counts_of_no_power_of_two_and_spare_ranks(num_gpus: int) -> None:
    model, training = load_model("8b"), TrainingSpec(seq_length=8192, global_batch_size=2048)
    limits = SearchLimits(top=2, time_limit_s=NO_LIMIT_S, cp=(1,), micro_batch_size=(1,))
    answer = plan(model, ClusterSpec(hardware=load_hardware("h100"), num_gpus=num_gpus), training, limits=limits)
    check_plan(answer, limits)
    used, spare = answer.parallelism.num_gpus_used, answer.parallelism.num_gpus_spare
    assert used + spare == num_gpus
    # per GPU given, not per GPU used
    assert answer.step.tokens_per_s_per_gpu == pytest.approx(answer.step.tokens_per_s / num_gpus)


def test_ranks_that_no_batch_can_use_stay_spare() -> None:
    problem = toy_problem(cluster=toy_cluster(7), training=toy_training(16), tp=(1,), pp=(1,))
    answer = solved(problem)
    assert (answer.parallelism.dp, answer.parallelism.num_gpus_used, answer.parallelism.num_gpus_spare) == (4, 4, 3)
    check_plan(answer, problem.limits)


def test_more_gpus_are_never_slower() -> None:
    steps = [
        solved(toy_problem(cluster=toy_cluster(n), top=1, training=toy_training(64))).step.step_s for n in (4, 8, 16)
    ]
    assert steps == sorted(steps, reverse=True)


def test_ties_go_the_same_way_whatever_the_order_of_pins() -> None:
    orders = ((1, 2, 4), (4, 2, 1), (2, 4, 1))
    answers = [solved(toy_problem(training=toy_training(32), tp=tp, pp=tp)) for tp in orders]
    layouts = [[layout.model_dump() for layout in (one.best, *one.alternatives)] for one in answers]
    assert layouts[0] == layouts[1] == layouts[2]


PINS: list[dict[str, Any]] = TABLES["pins"]


@pytest.mark.thorough(3)
@pytest.mark.parametrize("pins", PINS, ids=str)
def test_pinned_axes_are_honoured(pins: dict[str, Any]) -> None:
    model = toy_model(6, moe=MOE) if "ep" in pins else toy_model(6)
    problem = toy_problem(model, toy_cluster(8), toy_training(32), **pins)
    answer = solved(problem)
    check_plan(answer, problem.limits)
    for layout in (answer.best, *answer.alternatives):
        for axis, allowed in pins.items():
            assert getattr(layout.parallelism, axis) in allowed, axis
        if pins.get("recompute") == ("full",):
            assert all(set(stage.recompute) <= {"full"} for stage in layout.stages)


def test_405b_is_planned_to_within_a_percent_of_the_bound() -> None:
    model, training = load_model("405b"), TrainingSpec(seq_length=8192, global_batch_size=2048)
    limits = SearchLimits(tp=(8,), cp=(1,), micro_batch_size=(1,), top=1, time_limit_s=NO_LIMIT_S)
    answer = plan(model, ClusterSpec(hardware=load_hardware("h100"), num_gpus=2048), training, limits=limits)
    check_plan(answer, limits)
    assert answer.search.outcome == "proven"
    assert answer.search.gap <= 0.01


def test_proven_means_within_the_gap_that_was_asked() -> None:
    outcomes = {}
    for gap_fraction in (0.0, 0.3):
        answer = solved(toy_problem(toy_model(7), toy_cluster(8), toy_training(8), gap_fraction=gap_fraction, top=1))
        assert (answer.search.outcome == "proven") == (answer.search.gap <= gap_fraction * (1 + 1e-9))
        outcomes[gap_fraction] = answer.search.outcome
    assert outcomes[0.3] == "proven"


SPLIT_OR_NOT: dict[str, Any] = {
    "model": toy_model(8), "training": toy_training(8, seq_length=4096), "runtime": "torchtitan", "pp": (2, 4),
    "schedule": ("1f1b", "zb-v"), "micro_batch_size": (1,),
}  # fmt: skip
"""torchtitan compiles no layer whose backward is split: its layouts have two runtimes."""


@pytest.mark.parametrize(
    "design",
    [{"model": toy_model(7), "cluster": toy_cluster(8, memory_gib=3.0), "training": toy_training(32)}, SPLIT_OR_NOT],
    ids=["megatron", "split or not"],
)
def test_every_layout_of_a_plan_evaluates_to_itself(design: dict[str, Any]) -> None:
    """What the search says of its layouts, `evaluate` says of each, whatever else was searched."""
    problem = toy_problem(**design, cp=(1,), recompute=("none",))
    for layout in (found := solved(problem), *found.alternatives):
        p = layout.parallelism
        virtual = sorted(chunk for stage in layout.stages for chunk in stage.chunks)
        wanted = Parallelism(
            **{axis: getattr(p, axis) for axis in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "micro_batch_size")},
            schedule=p.schedule, rank_order=p.rank_order, zero_stage=p.zero_stage,
            fsdp=p.shard_size if p.zero_stage else None,
            layers_per_stage=tuple(last - first for first, last in virtual),
        )  # fmt: skip
        again = evaluate(problem.model, problem.cluster, problem.training, wanted, runtime=problem.runtime)
        assert again.step.step_s == pytest.approx(layout.step.step_s, rel=2e-3)
        assert [s.memory for s in again.stages] == [s.memory for s in layout.stages]


def test_weights_are_sharded_over_as_many_ranks_as_pays() -> None:
    """1B on 64 H100: 8 nodes wait less for reductions in one ring of each than for gathers in one ring of all."""
    arguments = (
        load_model("llama-3.2-1b"),
        ClusterSpec(hardware=load_hardware("h100"), num_gpus=64),
        TrainingSpec(seq_length=4096, global_batch_size=512),
    )
    pins = {"tp": (1,), "cp": (1,), "pp": (1,), "micro_batch_size": (4,), "zero_stage": (3,)}
    pins["recompute"] = ("none",)
    best = plan(*arguments, limits=SearchLimits(**pins, gap_fraction=0.0), runtime="torchtitan").best
    assert best.parallelism.shard_size < best.parallelism.dp == 64
    for size in (8, 16, 32, 64):
        layout = Parallelism(micro_batch_size=4, zero_stage=3, fsdp=size)
        other = evaluate(*arguments, layout, runtime="torchtitan").best
        assert not other.fits or other.step.step_s >= best.step.step_s
        assert (other.step.step_s == best.step.step_s) == (size == best.parallelism.shard_size)


@pytest.mark.parametrize(("trainer", "group"), [("internevo", 8), ("megatron", 1024)])
def test_an_optimizer_is_sharded_over_a_node_where_that_pays(trainer: str, group: int) -> None:
    """7B on 1,024 A100 with 50 GB/s a node: InternEvo hides no weights, and measured groups of 8 to be 60% faster."""
    cluster = ClusterSpec(hardware=load_hardware("a100"), num_gpus=1024, network_gb_per_s=6.25)
    arguments = load_model("llama-2-7b"), cluster, TrainingSpec(seq_length=2048, global_batch_size=8192)
    pins = {"tp": (1,), "cp": (1,), "pp": (1,), "micro_batch_size": (2,), "zero_stage": (1,)}
    runtime = load_runtime(trainer).model_copy(update={"narrow_gradient_bytes": None})
    best = plan(*arguments, limits=SearchLimits(top=1, **pins), runtime=runtime).best
    assert best.parallelism.shard_size == group
    steps = [
        evaluate(*arguments, Parallelism(micro_batch_size=2, zero_stage=1, fsdp=size), runtime=runtime).step.step_s
        for size in (8, 1024)
    ]
    assert best.step.step_s == pytest.approx(min(steps))


def test_counts_of_rejections_name_their_reasons() -> None:
    answer = solved(toy_problem(cluster=toy_cluster(8, memory_gib=1.5), training=toy_training(32)))
    assert answer.rejections["does_not_fit"] > 0
    assert "heads_not_divisible_by_tp" not in answer.rejections, "nobody asked for such a tp"
    assert set(answer.rejections) == set(answer.rejection_examples)
    assert list(answer.rejections.values()) == sorted(answer.rejections.values(), reverse=True)


def test_alternating_layers_interleave_with_recompute_of_each_stage() -> None:
    """The program knows one mean kind there; what it recomputes are layers of the model's own kinds."""
    model = toy_model(12, sliding_window=256, sliding_window_pattern=2)
    answer = solved(
        toy_problem(
            model, toy_cluster(4, memory_gib=6.0), toy_training(32), "torch-eager", schedule=("interleaved-1f1b",),
            pp=(2,), tp=(2,), cp=(1,), micro_batch_size=(4,), zero_stage=(1,),
        )
    )  # fmt: skip
    assert layers_of(answer.best) == list(range(12))
    assert sum(stage.recompute.get("full", 0) for stage in answer.best.stages) > 0


def test_a_rank_that_the_replay_finds_too_full_is_given_less() -> None:
    """Chunks hold unequal numbers of micro-batches: the mean that the program counts is too little on first ranks."""
    limits = SearchLimits(tp=(2,), cp=(1,), pp=(16,), vpp=(5,), micro_batch_size=(1,))
    model = ModelSpec.model_validate({**load_model("megatron-145.6b").model_dump(), "max_position_embeddings": 4096})
    answer = plan(
        model, ClusterSpec(hardware=load_hardware("a100-pcie-80gb"), num_gpus=128),
        TrainingSpec(seq_length=4096, global_batch_size=256), limits=limits, runtime="torch-eager",
    )  # fmt: skip
    assert answer.fits
    assert answer.search.gap < 0.12


@pytest.mark.parametrize(("name", "gpus", "hardware", "vpp"), [("neox-20b", 8, "b200", 2), ("8b", 16, "h100", 2)])
def test_pinned_chunks_are_no_slower_than_equal_ones(name: str, gpus: int, hardware: str, vpp: int) -> None:
    """A rank's layers in one long chunk take it as long as in several short ones; the others wait for them."""
    model, cluster = load_model(name), ClusterSpec(hardware=load_hardware(hardware), num_gpus=gpus)
    training = TrainingSpec(seq_length=8192, global_batch_size=512)
    pins = {"tp": (1,), "cp": (2,), "pp": (2,), "vpp": (vpp,), "micro_batch_size": (1,), "recompute": ("none",)}
    limits = SearchLimits(top=1, allow=("bf16_gradients",), **pins)
    found = plan(model, cluster, training, limits=limits)
    even = evaluate(model, cluster, training, Parallelism(cp=2, pp=2, vpp=vpp, dp=gpus // 4))
    assert even.best.fits
    assert found.best.step.step_s <= even.best.step.step_s * (1 + 1e-9)


@pytest.mark.parametrize("pins", [{"pp": (1,)}, {"vpp": (1,)}])
def test_a_schedule_of_several_stages_is_refused_where_there_is_one(pins: dict[str, Any]) -> None:
    """Not replaced by none; 1f1b of one stage is none."""
    model, cluster = load_model("8b"), ClusterSpec(hardware=load_hardware("h100"), num_gpus=16)
    training = TrainingSpec(seq_length=8192, global_batch_size=64)
    with pytest.raises(Infeasible):
        plan(model, cluster, training, limits=SearchLimits(schedule=("interleaved-1f1b",), **pins))
    alone = plan(model, cluster, training, limits=SearchLimits(schedule=("1f1b",), pp=(1,)))
    assert alone.parallelism.schedule == "none"


WORSE = {"memory_gib": 4.0, "nvlink_gb_per_s": 100.0, "network_gb_per_s": 2.0, "hbm_gb_per_s": 1500.0, "tflops": 400.0}
"""A poor GPU: each of these is doubled, or more, by itself."""
HIDDEN_LESS = 5e-4
"""A rank that is not the busiest computes faster on a faster GPU, and hides less of its exchange of gradients."""
MODELS: list[dict[str, Any]] = [{}, {"moe": MOE}, {"tie_word_embeddings": True, "vocab_size": 96_000}]


def best(resources: dict[str, float], layers: int, design: dict[str, Any], batch: int, trainer: str) -> Plan | None:
    problem = toy_problem(
        toy_model(layers, **design), toy_cluster(8, **resources), toy_training(batch), trainer, top=1, cp=(1,)
    )
    try:
        return solved(problem)
    except Infeasible:
        return None


@law(5)
@given(
    resource=st.sampled_from(sorted(WORSE)), times=st.sampled_from([2.0, 5.0]), layers=st.integers(4, 7),
    design=st.sampled_from(MODELS), batch=st.sampled_from([8, 24]), trainer=st.sampled_from(sorted(RUNTIMES)),
)  # fmt: skip
def test_more_of_a_resource_finds_no_slower_plan(
    resource: str, times: float, layers: int, design: dict[str, Any], batch: int, trainer: str
) -> None:
    before = best(WORSE, layers, design, batch, trainer)
    after = best(WORSE | {resource: times * WORSE[resource]}, layers, design, batch, trainer)
    if before is None:
        return
    for answer in (before, after):
        assert answer.search.outcome != "feasible"
        assert (answer.search.outcome == "proven") == (answer.search.gap <= 0.005 * (1 + 1e-9))
    assert after.step.step_s <= before.step.step_s * (1 + after.search.gap + HIDDEN_LESS)


@pytest.mark.parametrize("pps", [[1] * 10, [5, 9, 1, 1, 1, 20, 3], [], [100]], ids=str)
def test_blocks_have_every_shape_once_and_few_ranks(pps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "BLOCK", 4)
    monkeypatch.setattr(frontier, "BLOCK_RANKS", 10)
    order = np.arange(len(pps))[::-1]
    blocks = [block.tolist() for block in blocks_of(order, np.array(pps, dtype=np.int64))]
    assert [index for block in blocks for index in block] == order.tolist()
    for block in blocks:
        assert 1 <= len(block) <= 4
        assert len(block) == 1 or sum(pps[index] for index in block) <= 10


def test_time_that_ends_anywhere_leaves_a_plan_that_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second later; shapes are opened two at a time."""
    monkeypatch.setattr(frontier, "BLOCK", 2)
    free = {"cp": (1,), "micro_batch_size": (1,), "recompute": ("none",), "zero_stage": (1,), "top": 1}
    problem = toy_problem(toy_model(4), toy_cluster(4), toy_training(8), gap_fraction=0.0, **free)
    ends = []
    for asks in (1, 4, 8, 1e9):
        monkeypatch.setattr("planner.search.case.time", SimpleNamespace(monotonic=count().__next__))
        limits = problem.limits.model_copy(update={"time_limit_s": asks})
        found = plan(problem.model, problem.cluster, problem.training, limits=limits, runtime=problem.runtime)
        ends.append(found.search.outcome)
    assert ends[:2] == ["feasible", "feasible"]
    assert ends[-1] in ("proven", "bounded")


def test_a_search_that_is_not_patient_gives_up_without_a_layout() -> None:
    late = Deadline(1.0, count().__next__, patient=False)
    assert Deadline(1.0, count().__next__).gives_up(has_layout=False) is False
    assert Deadline(1.0, count().__next__).gives_up(has_layout=True)
    with pytest.raises(SolverError, match="1 s"):
        late.gives_up(has_layout=False)
