"""The first layout of a search: the fastest of those that tuned recipes would try, found whatever the time limit is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.answer import Plan
from planner.errors import Infeasible
from planner.layout.candidate import Candidate
from planner.layout.evaluate import pricing_of
from planner.search.case import Case
from planner.search.deadline import PATIENCE_S, Deadline
from planner.search.layouts import Found, find_layouts
from planner.search.recipes import Recipes
from planner.search.why.misses import NothingFits
from planner.shape import Shape, divisors
from planner.trainers.spec import RuntimeSpec

BATCHES = (1, 2, 4)
"""Micro-batch sizes that are tried, where they divide the batch."""
LEAST_CP_TOKENS = 4096
"""Least tokens of a sequence on a context-parallel rank."""
FEW_STAGES = (1, 2, 4, 8, 16)
"""Numbers of stages that are tried beside those that divide the number of GPUs."""
BUNDLES_TRIED = 2
"""Bundles of switches that are tried, those that promise most."""
FIRST_GAP = 0.05
"""Gap at which the first layout is good enough."""


def first_layouts(
    case: Case, recipes: Recipes, deadline: Deadline | None = None, known: Candidate | None = None
) -> Found | None:
    """A search for a layout within `FIRST_GAP`: among few shapes under the quickest bundles, else with small batches.

    Without a deadline it has `PATIENCE_S`; others must beat a `known` candidate, with its recipe, by the gap that was
    asked for.
    None if it does not say whether anything fits. Raises NothingFits if nothing does: what does not fit in the smallest
    micro-batch fits in none. Raises SolverError if the solver fails.
    """
    deadline = deadline or Deadline(PATIENCE_S)
    gap_fraction = max(FIRST_GAP, case.limits.gap_fraction) if known is None else case.limits.gap_fraction
    narrow, light = (
        case.limited(top=1, gap_fraction=gap_fraction, **limits) for limits in (_narrow(case), _light(case))
    )
    starts = [known.pricing.runtime] if known is not None else _quickest(narrow, recipes.starts())
    try:
        return find_layouts(narrow, starts, deadline, known, is_first=True)
    except Infeasible:
        pass
    try:
        return find_layouts(light, recipes.starts(), deadline, is_first=True)
    except NothingFits:
        if case.runtime.counts_moments:  # a step's only micro-batch may free its activations for gradients
            return None
        raise
    except Infeasible:
        return None


def some_layout(case: Case) -> Plan:
    """The plan of the first layout of a case that is found to fit, within its time limit.

    Raises Infeasible if there is none, SolverError if time is up before that is known.
    """
    deadline, recipes = Deadline(case.limits.time_limit_s, patient=False), Recipes.of(case)
    found = first_layouts(case, recipes, deadline) or find_layouts(case, recipes.starts(), deadline)
    return found.standing(found.best).plan()


def _quickest(case: Case, runtimes: Sequence[RuntimeSpec]) -> list[RuntimeSpec]:
    """The `BUNDLES_TRIED` runtimes under which the least work of any kernel is the least, over a few kernels."""
    if len(runtimes) <= BUNDLES_TRIED:
        return list(runtimes)
    moe, limits = case.model.moe, case.limits
    eps = limits.ep or ([1] if moe is None else divisors(moe.num_experts, case.cluster.num_gpus))
    tps = limits.tp or [tp for tp in (1, 2, 4, 8) if tp <= case.cluster.nvlink_domain_size]
    tp, cp, ep, size = np.ix_(tps, limits.cp or [1], eps, limits.micro_batch_size or [1])
    kernels = Shape(
        tp=tp, cp=cp, ep=ep, dp=ep, micro_batch_size=size, seq_length=case.training.seq_length,
        sequence_parallel=(tp > 1) * int(case.runtime.has_sequence_parallel),
    )  # fmt: skip
    least_s = []
    for runtime in runtimes:
        pricing = pricing_of(case.model, case.cluster, case.training, runtime, case.limits)
        least_s.append(float(np.min(pricing.least_work_s(kernels) * tp * cp / size)))
    return [runtimes[index] for index in sorted(np.argsort(least_s, kind="stable")[:BUNDLES_TRIED].tolist())]


def _light(case: Case) -> dict[str, Any]:
    """The smallest micro-batch that the user allows and the batch divides into."""
    batch = case.training.global_batch_size
    sizes = [size for size in case.limits.micro_batch_size or (1,) if batch % size == 0]
    return {"micro_batch_size": (min(sizes),)} if sizes else {}


def _narrow(case: Case) -> dict[str, Any]:
    """The values of each axis that the user left free."""
    training, cluster, layers = case.training, case.cluster, case.model.num_hidden_layers
    gpus = cluster.num_gpus
    stages = {*divisors(gpus, layers), *(pp for pp in FEW_STAGES if pp <= min(layers, gpus))}
    few: dict[str, list[int]] = {
        "micro_batch_size": [size for size in BATCHES if training.global_batch_size % size == 0],
        "cp": [
            cp for cp in divisors(training.seq_length, gpus) if cp == 1 or training.seq_length >= cp * LEAST_CP_TOKENS
        ],
        "etp": [1],
        "pp": sorted(stages),
    }
    return {axis: tuple(values) for axis, values in few.items() if values and getattr(case.limits, axis) is None}
