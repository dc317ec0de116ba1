"""No bound that the search prunes by is above the replay of any legal split, whatever the model, schedule or memory.

Bounds of real jobs are those of before, to nine digits (`scripts/pin`): a looser one is noticed too.
The work of a search, counted: prices, bounds, programs and replays, so that it cannot creep back.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import wraps
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pinned_numbers import bounds
from toys import MOE, NO_LIMIT_S, Problem, case_of, legal_splits, toy_cluster, toy_model, toy_problem, toy_training

from planner.errors import Infeasible
from planner.layout import candidate
from planner.layout.candidate import Candidate, Split
from planner.layout.evaluate import pricing_of
from planner.physics.cost import CostTable
from planner.physics.passes import Passes
from planner.physics.pricing import Pricing
from planner.schedule.orders import SCHEDULES
from planner.schedule.replay import makespan_s
from planner.search.bounds import all_optimizers_s, beyond_s, coarse_bound_s, showing_s, with_ends_s
from planner.search.case import Case
from planner.search.enumerate import Bar, enumerate_shapes, scalar
from planner.search.frontier import Nodes, bound_of_shapes_s, nodes_of
from planner.search.ilp import program
from planner.search.ilp.node import RecomputeChoice, node_of
from planner.search.ilp.program import solve
from planner.search.layouts import _least_work_s, _pricings
from planner.search.priced_shapes import fits, priced_shapes, room_layers
from planner.search.recipes import Recipes
from planner.search.search import plan
from planner.shape import RANK_ORDERS, Shape
from planner.specs.cluster import ClusterSpec, parse_tiers
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import AdapterSpec, SearchLimits, TrainingSpec
from planner.specs.units import GIB
from planner.trainers.load import RUNTIMES, has_dtype, load_runtime

MODELS: dict[str, dict[str, Any]] = {
    "dense": {}, "large vocabulary": {"vocab_size": 160_000},
    "tied": {"tie_word_embeddings": True, "vocab_size": 64_000}, "experts": {"moe": MOE},
    "prediction": {"num_nextn_predict_layers": 1},
    "every second slides": {"sliding_window": 256, "sliding_window_pattern": 2},
    "three of four slide": {"sliding_window": 256, "sliding_window_pattern": 4},
}  # fmt: skip
MIXED: dict[str, Any] = {
    "moe": MOE | {"first_k_dense_replace": 0, "moe_layer_freq": 2},
    "attention_chunk_size": 256,
    "sliding_window_pattern": 4,
}
"""Three kinds of layers, in a pattern of four."""
SWITCHED: dict[str, tuple[Any, ...]] = {
    "ep_overlap_fraction": (0.0, 0.0, 0.9), "ep_overlap_network_fraction": (0.0, 0.0, 0.8),
    "overlaps_shared_experts": (False, True), "cuda_graphs": (False, False, True),
    "graphed_modules": ((), (), ("attn", "moe_router", "moe_preprocess")), "fuses_experts": (False, True),
    "optimizer_offload_fraction": (0.0, 0.0, 0.5),
    "offload_modules": ((), (), ("core_attn", "attn_proj"), ("moe_act",)), "optimizer_bytes": (12, 8),
}  # fmt: skip
"""Fields of switches, and the values that problems draw."""
TORCH = ("1f1b", "interleaved-1f1b", "gpipe", "breadth-first", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min")
NODES_PER_BLOCK = 6
SPLITS_PER_NODE = 12
RELATIVE = 1e-6


def random_problem(seed: int, design: dict[str, Any] | None = None, trainer: str | None = None) -> Problem:
    """A job of `trainer` (None: one of three), with any of its schedules, dtypes and link rates."""
    rng = random.Random(seed)
    name = trainer or rng.choice(["megatron", "torchtitan", "torch-eager"])
    runtime = load_runtime(name)
    if name == "megatron":
        runtime = runtime.model_copy(update={field: rng.choice(values) for field, values in SWITCHED.items()})
    limits: dict[str, Any] = {}
    if runtime.has_sequence_parallel:
        limits["recompute"] = rng.choice([None, ("none",), ("full",), ("none", "selective")])
    model_kind = rng.choice(list(MODELS))
    schedules = [name for name in runtime.schedules if name in TORCH]
    if len(schedules) > 2 and rng.random() < 0.6:
        limits["schedule"] = tuple(rng.sample(schedules, rng.randint(1, 3)))
    if seed % 7 == 5:
        limits["zero_stage"] = runtime.zero_stages
    cluster = toy_cluster(
        rng.choice([4, 8, 12, 16]), memory_gib=rng.choice([80.0, rng.uniform(1.0, 8.0)]),
        nvlink_gb_per_s=rng.choice([60.0, 450.0]), network_gb_per_s=rng.choice([0.5, 5.0, 50.0]),
    )  # fmt: skip
    if "cdna3" in runtime.architectures:
        cluster = with_links_of_amd(cluster)
    if seed % 3 == 1:
        # either order of the ranks, where pods tell them apart and a spine may be faster than they are
        tiers = parse_tiers("pod:8:5,spine:*:0.5" if seed % 2 else "pod:6:0.5,spine:*:50", cluster.hardware)
        cluster = cluster.changed(network_tiers=tiers)
        runtime = runtime.model_copy(update={"rank_orders": RANK_ORDERS})
    model = toy_model(rng.randint(3, 9), **(MODELS[model_kind] if design is None else design))
    batch, dtype = rng.choice([8, 16, 48]), rng.choice(["bf16", "bf16", "fp8"])
    training = toy_training(batch, dtype=dtype if has_dtype(runtime, dtype) else "bf16")
    return toy_problem(model, cluster, training, runtime, **limits)


def with_links_of_amd(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with AMD's compute units, links without a switch, rings through nodes and network at once, and memory
    for peers."""
    node, network = cluster.hardware.tiers
    xgmi = {"link_gb_per_s": node.gb_per_s / 3, "start_us": 30.0, "all_to_all_fraction": 0.8}
    tiers = (node.model_copy(update=xgmi), network.model_copy(update={"pipelined": True, "start_us": 100.0}))
    reserved = cluster.hardware.reserved.model_copy(update={"expert_peer_gib": 0.2, "width": 0.1})
    update = {"architecture": "cdna3", "tiers": tiers, "reserved": reserved}
    return cluster.changed(hardware=cluster.hardware.model_copy(update=update))


@dataclass(frozen=True)
class Bounded:
    """One node of a problem: a shape, schedule and way to recompute, with the bounds the search has for it."""

    problem: Problem
    table: CostTable
    schedule: str
    choice: RecomputeChoice
    coarse_s: float
    node_s: float
    may_fit: bool
    """True if `fits` lets the shape through."""

    def splits(self, rng: random.Random, most: int = SPLITS_PER_NODE) -> list[Split]:
        """Legal splits, some of them where there are many."""
        model, shape = self.problem.model, self.table.shape
        if self.choice.whole == "per_stage" and (model.num_hidden_layers > 5 or int(shape.vpp) > 1):
            return []
        every = list(legal_splits(model, shape, self.choice, self.problem.runtime.head_only_stage))
        return every if len(every) <= most else rng.sample(every, most)

    def step_s(self, split: Split) -> float:
        """Every action of the whole step replayed, and what comes beside the pipeline; ∞ where it does not fit."""
        candidate = Candidate(self.problem.pricing, self.table, split, self.schedule)
        if not candidate.fits:
            return math.inf
        return makespan_s(candidate.order, candidate.durations) + sum(candidate.outside)


def bounded_nodes(problem: Problem, rng: random.Random, per_block: int = NODES_PER_BLOCK) -> Iterator[Bounded]:
    """Some nodes of a problem, with the bounds of both levels."""
    pricing = problem.pricing
    shapes, _ = enumerate_shapes(case_of(problem))
    priced = priced_shapes(pricing, shapes, problem.limits)
    coarse = coarse_bound_s(priced, any(SCHEDULES[name].splits_backward for name in priced.schedules))
    fitting = fits(priced)
    for shape_of_row, nodes in nodes_of(priced):
        node_s = [nodes.bound_s(choice) for choice in problem.choices]
        for row in rng.sample(range(len(shape_of_row)), min(per_block, len(shape_of_row))):
            table, index = pricing.table(scalar(nodes.shapes.shape, row)), shape_of_row[row]
            for choice, bound_s in zip(problem.choices, node_s, strict=True):
                yield Bounded(
                    problem, table, nodes.schedules[row], choice, float(coarse[index]), float(bound_s[row]),
                    bool(fitting[index]),
                )  # fmt: skip


def num_held(
    problem: Problem, rng: random.Random, per_block: int = NODES_PER_BLOCK, most: int = SPLITS_PER_NODE
) -> int:
    """Splits of some of the problem's nodes that fit, none of which is quicker than any bound of its node says."""
    replayed = 0
    for node in bounded_nodes(problem, rng, per_block):
        for split in node.splits(rng, most):
            step_s = node.step_s(split)
            if math.isinf(step_s):
                continue
            replayed += 1
            where = problem.runtime.name, node.schedule, node.choice, node.table.shape, split
            assert node.may_fit, where
            assert node.coarse_s <= step_s * (1 + RELATIVE), where
            assert node.node_s <= step_s * (1 + RELATIVE), where
    return replayed


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("design", "first"),
    [(None, 0), (None, 10), (None, 20), (MIXED, 0), (MIXED, 10)],
    ids=["any model-0", "any model-10", "any model-20", "three kinds-0", "three kinds-10"],
)
def test_no_bound_is_above_any_replay(design: dict[str, Any] | None, first: int) -> None:
    replayed = 0
    for seed in range(first, first + 10):
        rng = random.Random(10_000 + seed)
        replayed += num_held(random_problem(seed, design), rng)
    assert replayed > 50


@pytest.mark.parametrize("seed", [5728, 6507])
@pytest.mark.parametrize("design", [None, MIXED], ids=["any model", "three kinds"])
def test_no_bound_is_above_a_first_chunk_that_is_shorter(seed: int, design: dict[str, Any] | None) -> None:
    """A rank holds most of its first chunk: in these two problems a bound was once above the replay."""
    problem = random_problem(seed, design)
    filling = replace(problem, limits=problem.limits.model_copy(update={"memory_headroom_gib": 0.0}))
    assert num_held(filling, random.Random(10_000 + seed), per_block=4, most=25) > 0


@pytest.mark.thorough(3)
@pytest.mark.parametrize(
    ("design", "first"), [(None, 0), (None, 10), (MIXED, 0)], ids=["any model-0", "any model-10", "three kinds-0"]
)
def test_the_program_finds_what_fits_and_is_never_above_it(design: dict[str, Any] | None, first: int) -> None:
    compared = 0
    for seed in range(first, first + 10):
        rng = random.Random(20_000 + seed)
        for one in bounded_nodes(random_problem(seed, design), rng):
            best_s = min(map(one.step_s, one.splits(rng)), default=math.inf)
            if math.isinf(best_s):
                continue
            pricing, choice = one.problem.pricing, one.choice
            tried = [choice, RecomputeChoice(choice.base, "none")] if choice.whole == "one_count" else [choice]
            programs = [node_of(pricing, one.table, each, one.schedule) for each in tried]
            answers = [solve(program, NO_LIMIT_S) for program in programs]
            found = [answer.bound_s for answer in answers if answer is not None]
            where = seed, one.schedule, choice, one.table.shape
            assert found, where
            if not any(program.of_mean_layers for program in programs):
                assert min(found) <= best_s * (1 + RELATIVE), where
                compared += 1
    assert compared > 10


@pytest.mark.thorough(2)
@pytest.mark.parametrize("runtime", ["megatron", "torchtitan", "torch-eager"])
@pytest.mark.parametrize("network_gb_per_s", [1.0, 50.0])
def test_on_one_rank_the_program_is_the_replay(runtime: str, network_gb_per_s: float) -> None:
    """Nothing is left to choose, so that its bound is the step but for the tail that is the same on all ranks."""
    cluster = toy_cluster(8, network_gb_per_s=network_gb_per_s)
    problem = toy_problem(toy_model(4), cluster, toy_training(32), runtime, pp=(1,), cp=(1,), recompute=("none",))
    for table, schedule, choice in problem.nodes():
        answer = solve(node_of(problem.pricing, table, choice, schedule), NO_LIMIT_S)
        step_s = min(problem.fitting_steps_s(table, schedule, choice))
        assert answer.bound_s + float(table.tail_s) == pytest.approx(step_s, rel=RELATIVE)


@pytest.mark.parametrize("memory_gib", [3.0, 6.0])
def test_one_number_for_all_stages_is_what_the_fullest_needs(memory_gib: float) -> None:
    """Where each stage recomputes as it likes, the later ones, which hold less, are quicker."""
    problem = toy_problem(toy_model(8), toy_cluster(8, memory_gib=memory_gib), toy_training(48))
    shapes, _ = enumerate_shapes(case_of(problem))
    slower = []
    for _, nodes in nodes_of(priced_shapes(problem.pricing, shapes, problem.limits)):
        own, same = (nodes.bound_s(RecomputeChoice("none", whole)) for whole in ("per_stage", "one_count"))
        possible = np.isfinite(same) & (np.asarray(nodes.shapes.shape.vpp) > 1)
        assert (same >= own * (1 - RELATIVE)).all()
        slower += (same[possible] / own[possible] - 1).tolist()
    assert max(slower) > 0.1


@pytest.mark.parametrize("network_gb_per_s", [0.5, 5.0, 50.0])
def test_the_first_rank_exchanges_what_it_holds(network_gb_per_s: float) -> None:
    """As many layers as are best for the step, of any kind: against every number of each kind."""
    cluster = toy_cluster(8, network_gb_per_s=network_gb_per_s)
    model = toy_model(6, moe=MOE | {"first_k_dense_replace": 3})
    problem = toy_problem(model, cluster, toy_training(48), rank_order=RANK_ORDERS[:1])
    shapes, _ = enumerate_shapes(case_of(problem))
    shapes = shapes.take(np.flatnonzero(np.asarray(shapes.pp) > 1))
    priced = priced_shapes(problem.pricing, shapes, problem.limits)
    table, kinds, steps = priced.table, problem.model.kinds, np.asarray(priced.shape.num_microbatches)
    each = [np.array([f(priced, kind, table.layers[kind, "none"]) for kind in kinds]) for f in (beyond_s, showing_s)]
    times = priced.layer_s("none")
    work, others = priced.work_s("none") - priced.ends_s(), np.asarray(priced.shape.pp) - 1
    pipeline_s = steps * work / np.asarray(priced.shape.pp)
    least = np.full(len(work), np.inf)
    for held in product(range(4), range(4)):
        beyond, showing = (
            f(priced, "embedding", table.embedding) + np.asarray(held) @ of_kind
            for f, of_kind in zip((beyond_s, showing_s), each, strict=True)
        )
        elsewhere = steps * (work - sum(held) * times.max(axis=0)) / others
        least = np.minimum(least, np.maximum(pipeline_s, elsewhere) + np.maximum(beyond, showing))
    found = with_ends_s(priced, pipeline_s, "none", "none")
    beside = all_optimizers_s(priced) / np.asarray(priced.shape.pp) + problem.pricing.tail_s(priced.shape)
    assert (found - beside <= least * (1 + RELATIVE)).all()
    assert (found - beside >= 0.97 * least).all()


def test_what_cannot_fit_is_screened_out() -> None:
    """The other direction, where it is plain: not even the weights fit."""
    problem = toy_problem(toy_model(8), toy_cluster(8, memory_gib=0.3))
    shapes, _ = enumerate_shapes(case_of(problem))
    priced = priced_shapes(problem.pricing, shapes, problem.limits)
    kind = problem.model.kinds[0]
    weights = 8 * np.asarray(priced.static_bytes(kind, priced.table.layers[kind, "none"])) / np.asarray(shapes.pp)
    hopeless = weights > 0.3 * 2**30
    assert hopeless.any()
    assert not fits(priced)[hopeless].any()


def model_of_kinds(**changes: Any) -> ModelSpec:
    return toy_model(6, moe=MOE | {"first_k_dense_replace": 3}, **changes)


@pytest.mark.parametrize("memory_gib", [1.5, 3.0, 6.0, 80.0])
def test_room_shrinks_with_memory_and_headroom(memory_gib: float) -> None:
    rooms = []
    for gib, headroom in ((memory_gib, 0.0), (memory_gib, 0.5), (memory_gib + 1.0, 0.0)):
        problem = toy_problem(model_of_kinds(), toy_cluster(8, memory_gib=gib), memory_headroom_gib=headroom)
        shapes, _ = enumerate_shapes(case_of(problem))
        priced = priced_shapes(problem.pricing, shapes, problem.limits)
        rooms.append([room_layers(priced, kind) for kind in problem.model.kinds])
    plain, tight, larger = rooms
    for kind in range(len(plain)):
        assert (tight[kind] <= plain[kind]).all()
        assert (plain[kind] <= larger[kind]).all()
    assert any((tight[kind] < larger[kind]).any() for kind in range(len(plain)))


def test_some_of_the_priced_shapes_are_priced_as_before() -> None:
    problem = toy_problem(model_of_kinds())
    shapes, _ = enumerate_shapes(case_of(problem))
    priced = priced_shapes(problem.pricing, shapes, problem.limits)
    some = np.array([5, 0, 17])
    np.testing.assert_array_equal(coarse_bound_s(priced.take(some)), coarse_bound_s(priced)[some])
    np.testing.assert_array_equal(fits(priced.take(some)), fits(priced)[some])


def test_a_first_chunk_that_keeps_less_is_counted_by_its_own_bytes() -> None:
    """The first of DeepSeek-V2-Lite's layers is dense and recomputes its MLP; of its chunk most is in flight.

    Priced with the mean of the rank's chunks the layout did not fit, and the bound was 5% above its step.
    """
    model, runtime = load_model("deepseek-v2-lite"), load_runtime("bridge")
    cluster = ClusterSpec(hardware=load_hardware("a100"), num_gpus=8)
    training = toy_training(64, seq_length=4096)
    pricing = pricing_of(model, cluster, training, runtime, modules=("mlp",))
    shape = Shape(
        ep=2, pp=2, vpp=14, dp=4, micro_batch_size=2, num_microbatches=8, seq_length=4096, shard_size=4
    )  # fmt: skip
    table = pricing.table(shape)
    candidate = Candidate(pricing, table, Split((1,) * 27 + (0,), "selective"), "interleaved-1f1b")
    assert candidate.fits
    solution = solve(node_of(pricing, table, RecomputeChoice("selective", "none"), "interleaved-1f1b"), 20.0)
    assert solution.bound_s <= candidate.step_s
    assert solution.counts == candidate.split.counts


PINNED = json.loads((Path(__file__).parents[1] / "pinned" / "bounds.json").read_text())


def test_bounds_are_those_of_before() -> None:
    now = bounds()
    assert now.keys() == PINNED.keys()
    changed = [name for name, values in now.items() if values != pytest.approx(PINNED[name], rel=1e-9)]
    assert not changed, f"{len(changed)} bounds changed, such as {changed[0]}"


@pytest.mark.parametrize("design", ["experts", "every second slides"])
@pytest.mark.parametrize("adapters", [None, AdapterSpec()], ids=["all weights", "adapters"])
def test_a_layout_is_found_where_just_its_memory_is_there(design: str, adapters: AdapterSpec | None) -> None:
    """The layer no dearer than any had the frozen weights of adapters as trained ones."""
    steps_s, memory_gib = [], 80.0
    for _ in range(2):
        job = toy_model(**MODELS[design]), toy_cluster(4, memory_gib=memory_gib), toy_training(16, adapters=adapters)
        problem = toy_problem(*job, memory_headroom_gib=0.0, gap_fraction=0.0, recompute=("none",), top=1)
        answer = plan(*job, limits=problem.limits, runtime=problem.runtime)
        memory_gib = answer.best.worst_stage.memory.total_bytes / GIB * (1 + 1e-6)
        steps_s.append(answer.step.step_s)
    assert steps_s[1] == pytest.approx(steps_s[0], rel=1e-9)


MOST = {
    ("llama-3.1-405b", 2048, 8192, 2048): {"tables": 47, "bounds": 39, "programs": 0, "replays": 37},
    ("deepseek-v3", 2048, 4096, 15360): {"tables": 120, "bounds": 130, "programs": 0, "replays": 66},
    ("llama-3.1-8b", 8, 8192, 512): {"tables": 34, "bounds": 24, "programs": 0, "replays": 66},
}
"""Model, GPUs, tokens and batch of a job on H100, and the most of each kind of work that its search may do: about 1.3
times what it does."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kind of work is done."""
    count: Counter[str] = Counter()
    for owner, function, kind in (
        (Pricing, "table", "tables"),
        (Nodes, "bound_s", "bounds"),
        (program, "solve", "programs"),
        (candidate, "pipeline_s", "replays"),
    ):
        original = getattr(owner, function)

        def counting(*arguments: Any, _original: Any = original, _kind: str = kind, **options: Any) -> Any:
            count[_kind] += 1
            return _original(*arguments, **options)

        monkeypatch.setattr(owner, function, wraps(original)(counting))
    return count


@pytest.mark.parametrize("job", MOST, ids=lambda job: job[0])
def test_a_search_does_no_more_than_this(job: tuple[str, int, int, int], counted: Counter[str]) -> None:
    name, num_gpus, seq_length, batch = job
    training = TrainingSpec(seq_length=seq_length, global_batch_size=batch)
    limits = SearchLimits(time_limit_s=1e6)
    answer = plan(load_model(name), ClusterSpec(hardware="h100", num_gpus=num_gpus), training, limits=limits)
    assert answer.search.outcome == "proven"
    assert {kind: counted[kind] for kind, most in MOST[job].items() if counted[kind] > most} == {}


@pytest.mark.parametrize("name", sorted(RUNTIMES))
def test_the_bar_of_a_kernel_is_never_above_the_bound_of_its_shapes(name: str) -> None:
    """Nothing that could win is passed over, under any bundle of any trainer."""
    training = TrainingSpec(seq_length=4096, global_batch_size=32)
    for model in ("deepseek-v2-lite", "llama-3.2-1b"):
        cluster = ClusterSpec(hardware="mi300x" if "primus" in name else "h100", num_gpus=16)
        case = Case(load_model(model), cluster, training, load_runtime(name), SearchLimits())
        for runtime in Recipes.of(case).starts()[:3]:
            tried = _pricings(case, [runtime])
            bar = Bar(np.inf, lambda kernels, tried=tried: _least_work_s(tried, kernels))  # type: ignore[misc]
            shapes, _ = enumerate_shapes(case)
            if not tried or not np.size(shapes.tp):
                continue
            rows = np.stack([np.asarray(getattr(shapes, axis)) for axis in ("tp", "cp", "ep", "etp")], axis=1)
            sizes, which = np.unique(np.asarray(shapes.micro_batch_size), return_inverse=True)
            least_s = bar.least_step_s(rows, sizes.tolist(), training, 16, case.runtime.has_sequence_parallel)
            own_s = least_s[np.arange(len(which)), which] * 16 / np.asarray(shapes.num_ranks)
            for pricing, limits in tried:
                assert (own_s <= bound_of_shapes_s(priced_shapes(pricing, shapes, limits)) * (1 + 1e-9)).all()


def test_a_refusal_by_bytes_prices_no_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the search nor what would help: other GPUs, adapters, shorter sequences, other cards."""
    monkeypatch.setattr(Passes, "seconds", None)
    gpus = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    with pytest.raises(Infeasible) as refused:
        plan("deepseek-v3", gpus, TrainingSpec(seq_length=4096, global_batch_size=15360))
    assert "it fits on 64 GPUs" in (refused.value.hint or "")
    assert "--qlora" in (refused.value.hint or "")
