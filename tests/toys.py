"""Models and clusters small enough to look at every layout, and every split that the search may choose from."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any

import numpy as np

from planner.answer import Plan
from planner.layout.candidate import Candidate, Split
from planner.layout.evaluate import pricing_of
from planner.physics.communication import exchange_tiers_s
from planner.physics.cost import CostTable
from planner.physics.pricing import Pricing
from planner.search.case import Case
from planner.search.enumerate import enumerate_shapes, scalar, schedule_options
from planner.search.frontier import recompute_choices
from planner.search.ilp.node import RecomputeChoice
from planner.search.search import plan
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec, LinkTier, ReservedMemory
from planner.specs.model import ModelSpec
from planner.specs.training import SearchLimits, TrainingSpec
from planner.trainers.load import load_runtime
from planner.trainers.rules.recipe import Setting, takes_shapes
from planner.trainers.spec import RuntimeSpec

NO_LIMIT_S = 1e6
"""Of a search that ends by itself: a busy machine takes longer and finds the same."""
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "first_k_dense_replace": 1}


def exchange_s(*exchange: Any) -> Any:
    """Seconds of a layer's collective on all tiers together."""
    return sum(exchange_tiers_s(*exchange))


def toy_model(num_hidden_layers: int = 6, **changes: Any) -> ModelSpec:
    """A Llama of a few layers."""
    fields = {
        "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4,
        "vocab_size": 32000,
    }  # fmt: skip
    return ModelSpec(name="toy", num_hidden_layers=num_hidden_layers, **(fields | changes))


def toy_hardware(
    memory_gib: float = 80.0,
    nvlink_gb_per_s: float = 450.0,
    network_gb_per_s: float = 50.0,
    latency_us: float = 5.0,
    hbm_gb_per_s: float = 3000.0,
    tflops: float = 1000.0,
) -> HardwareSpec:
    """A GPU in nodes of four; all of its memory holds tensors."""
    return HardwareSpec(
        name="toy-gpu", source="made up", architecture="hopper", memory_gib=memory_gib, hbm_gb_per_s=hbm_gb_per_s,
        peak_tflops={"bf16": tflops, "fp8": 2 * tflops}, num_sms=132, gpus_per_node=4,
        tiers=(
            LinkTier(name="nvlink", num_gpus=4, gb_per_s=nvlink_gb_per_s, latency_us=latency_us),
            LinkTier(name="network", gb_per_s=network_gb_per_s, latency_us=latency_us),
        ),
        reserved=ReservedMemory(context_gib=0.0, communicator_gib=0.0, fragmentation_fraction=0.0),
    )  # fmt: skip


def toy_cluster(num_gpus: int = 8, **changes: Any) -> ClusterSpec:
    return ClusterSpec(hardware=toy_hardware(**changes), num_gpus=num_gpus)


def toy_training(global_batch_size: int = 8, seq_length: int = 2048, **changes: Any) -> TrainingSpec:
    return TrainingSpec(seq_length=seq_length, global_batch_size=global_batch_size, **changes)


@cache
def compositions(total: int, parts: int) -> tuple[tuple[int, ...], ...]:
    """All ways to write `total` as an ordered sum of `parts` non-negative integers."""
    cuts = combinations(range(total + parts - 1), parts - 1)
    return tuple(tuple(b - a - 1 for a, b in zip((-1, *cut), (*cut, total + parts - 1), strict=True)) for cut in cuts)


def legal_counts(num_layers: int, pp: int, vpp: int, empty_ends: bool) -> Iterator[tuple[int, ...]]:
    """Layers of each virtual stage: any, or where stages interleave equal ones but for the first and the last."""
    if pp * vpp == 1:
        yield (num_layers,)
        return
    least, inner = 0 if empty_ends else 1, pp * vpp - 2
    if vpp == 1 or not inner:
        for counts in compositions(num_layers, pp * vpp):
            if min(counts[0], counts[-1]) >= least and min(counts[1:-1], default=1) >= 1:
                yield counts
        return
    for chunk in range(1, num_layers + 1):
        for first in range(least, chunk + 1):
            last = num_layers - first - chunk * inner
            if least <= last <= chunk:
                yield (first, *[chunk] * inner, last)


def legal_splits(model: ModelSpec, shape: Shape, choice: RecomputeChoice, empty_ends: bool) -> Iterator[Split]:
    """Every split of a shape under one way to recompute, as the integer program has them."""
    for counts in legal_counts(model.num_hidden_layers, int(shape.pp), int(shape.vpp), empty_ends):
        plain = Split(counts, choice.base)
        held = [[model.layers[a:b].count(kind) for kind in model.kinds] for a, b in plain.chunks]
        if choice.whole == "none":
            yield plain
        elif choice.whole == "all":
            yield Split(counts, choice.base, tuple(map(tuple, held)))
        elif choice.whole == "one_count":
            for number in range(min(counts) + 1):
                yield Split(counts, choice.base, tuple((number,) for _ in counts))
        else:
            for numbers in product(*(product(*(range(n + 1) for n in stage)) for stage in held)):
                yield Split(counts, choice.base, numbers)


@dataclass(frozen=True)
class Problem:
    """A planning problem, and all layouts of it one by one."""

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    runtime: RuntimeSpec
    limits: SearchLimits

    @property
    def pricing(self) -> Pricing:
        return pricing_of(self.model, self.cluster, self.training, self.runtime, self.limits)

    @property
    def choices(self) -> tuple[RecomputeChoice, ...]:
        return recompute_choices(self.model, self.runtime, self.limits)

    def shapes(self) -> list[Shape]:
        shapes, _ = enumerate_shapes(case_of(self))
        return [scalar(shapes, i) for i in range(len(np.atleast_1d(shapes.tp)))]

    def nodes(self) -> Iterator[tuple[CostTable, str, RecomputeChoice]]:
        """Every shape with every schedule, vpp and way to recompute."""
        for shape in self.shapes():
            for one, schedule in schedule_options(shape, self.model, self.limits, self.runtime):
                setting = Setting(self.model, self.cluster, self.training, self.runtime, one)
                if not takes_shapes(setting):
                    continue
                table = self.pricing.table(one)
                for choice in self.choices:
                    yield table, schedule, choice

    def fitting_steps_s(self, table: CostTable, schedule: str, choice: RecomputeChoice) -> Iterator[float]:
        """Replayed seconds of every split of one node that fits."""
        pricing = self.pricing
        for split in legal_splits(self.model, table.shape, choice, self.runtime.head_only_stage):
            if Candidate(pricing, table, split, schedule).fits:
                yield Candidate(pricing, table, split, schedule).step_s

    def best_step_s(self) -> float:
        """The fastest of all layouts, by replaying every one of them."""
        return min((s for node in self.nodes() for s in self.fitting_steps_s(*node)), default=math.inf)


def toy_problem(
    model: ModelSpec | None = None,
    cluster: ClusterSpec | None = None,
    training: TrainingSpec | None = None,
    runtime: str | RuntimeSpec = "megatron",
    **limits: Any,
) -> Problem:
    return Problem(
        model or toy_model(), cluster or toy_cluster(), training or toy_training(),
        load_runtime(runtime) if isinstance(runtime, str) else runtime,
        SearchLimits(**({"time_limit_s": NO_LIMIT_S, "switches": "default"} | limits)),
    )  # fmt: skip


def case_of(problem: Problem) -> Case:
    return Case(problem.model, problem.cluster, problem.training, problem.runtime, problem.limits)


def solved(problem: Problem) -> Plan:
    return plan(problem.model, problem.cluster, problem.training, limits=problem.limits, runtime=problem.runtime)
