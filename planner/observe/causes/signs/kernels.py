"""Signs in computing: all kernels slower alike, one family slower than the others, families that fusing replaces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median

from planner.layout.compute_terms import compute_terms
from planner.observe.causes.signs.ranks import family_s
from planner.observe.causes.signs.seen import Rank, Seen
from planner.observe.causes.signs.sign import Sign, sure
from planner.observe.ideal.passes import passes_of
from planner.observe.traces.families import COMMUNICATION, NAMES, OPTIMIZER
from planner.report.format import seconds

PRODUCTS = ("gemm", "convolution")
ATTENTION = ("attention", "softmax")
_MEMORY_BOUND = tuple(name for name in NAMES if name not in (*PRODUCTS, *ATTENTION, OPTIMIZER, NAMES[COMMUNICATION]))
_LEAST_FRACTION = 0.02
"""A family with less of the computing is not compared."""


@dataclass(frozen=True, slots=True)
class Families:
    """Seconds of a step in products, attention and kernels that memory bounds."""

    products_s: float
    attention_s: float
    memory_bound_s: float

    def over(self, other: Families) -> Families | None:
        """The ratios to what is expected; None where a family is too small to be compared."""
        mine, theirs = _seconds(self), _seconds(other)
        if min(mine) < _LEAST_FRACTION * sum(mine) or min(theirs) < _LEAST_FRACTION * sum(theirs):
            return None
        return Families(*(a / b for a, b in zip(mine, theirs, strict=True)))


def _seconds(families: Families) -> tuple[float, float, float]:
    return families.products_s, families.attention_s, families.memory_bound_s


def _found(rank: Rank) -> Families:
    return Families(*(rank.middle(partial(family_s, wanted=f)) for f in (PRODUCTS, ATTENTION, _MEMORY_BOUND)))


def ratios(seen: Seen) -> tuple[Families, float] | None:
    """How many times as long each family takes as expected, the median over the ranks, and the error of that."""
    found = []
    for rank in seen.on_gpus:
        expected = _expected(seen, rank)
        over = None if expected is None else _found(rank).over(expected)
        if over is not None:
            found.append(_seconds(over))
    if not found:
        return None
    return Families(*map(median, zip(*found, strict=True))), 0.015 if seen.earlier_ranks else 0.05


def _expected(seen: Seen, rank: Rank) -> Families | None:
    """The families of the same rank in the earlier run, or of its stage in the plan, what is recomputed among them."""
    if seen.earlier_ranks:
        same = next((one for one in seen.earlier_ranks if one.report.rank == rank.report.rank), seen.earlier_ranks[0])
        return None if same.on_host else _found(same)
    candidate, stage = seen.case.candidate, rank.stage
    if candidate is None or stage is None or seen.case.earlier is not None:
        return None
    terms = compute_terms(candidate, stage)
    known = (terms["products_s"], terms["attention_s"], terms["memory_bound_s"])
    again = terms["recompute_s"] / (sum(known) or 1.0)
    return Families(known[0] * (1 + again) + terms["ends_s"], *(part * (1 + again) for part in known[1:]))


def all_slower(seen: Seen) -> Sign | None:
    """Products and attention slower by one factor: nothing but the clock makes both so."""
    known = ratios(seen)
    if known is None:
        return None
    over, error = known
    least = min(over.products_s, over.attention_s)
    says = f"products take {over.products_s:.2f} and attention {over.attention_s:.2f} times what is expected"
    extra_s = (1 - 1 / least) * median(rank.middle(lambda step: step.compute_s) for rank in seen.on_gpus)
    return Sign(sure(least, 1 + 1.2 * error, 0.8 * error), says, max(0.0, extra_s))


def attention_slower(seen: Seen) -> Sign | None:
    """Attention slower than expected beside the other families."""
    known = ratios(seen)
    if known is None:
        return None
    over, error = known
    ratio = over.attention_s / min(over.products_s, over.memory_bound_s)
    extra_s = (1 - 1 / ratio) * median(rank.middle(lambda step: family_s(step, ATTENTION)) for rank in seen.on_gpus)
    says = f"attention takes {over.attention_s:.2f} times what is expected, products {over.products_s:.2f} times"
    return Sign(sure(ratio, 1 + 4 * error, 2 * error), says, max(0.0, extra_s))


def softmax_apart(seen: Seen) -> Sign | None:
    """Kernels of a softmax of their own, which attention in one kernel does not need."""
    if not seen.on_gpus:
        return None
    softmax_s, fused_s, compute_s = (
        median(rank.middle(of) for rank in seen.on_gpus)
        for of in (
            lambda step: family_s(step, ("softmax",)),
            lambda step: family_s(step, ("attention",)),
            lambda step: step.compute_s,
        )
    )
    says = f"kernels of softmax take {seconds(softmax_s)} of a step, those of fused attention {seconds(fused_s)}"
    return Sign(sure((softmax_s - fused_s) / (compute_s or 1.0), 0.02, 0.005), says, softmax_s)


def small_slower(seen: Seen) -> Sign | None:
    """Kernels that memory bounds slower than expected beside the others: fused ones make one of several."""
    known = ratios(seen)
    if known is None:
        return None
    over, error = known
    ratio = over.memory_bound_s / min(over.products_s, over.attention_s)
    found_s = median(rank.middle(lambda step: family_s(step, _MEMORY_BOUND)) for rank in seen.on_gpus)
    says = f"norms, activations and copies take {over.memory_bound_s:.2f} times what is expected"
    return Sign(sure(ratio, 1 + 5 * error, 2 * error), says, max(0.0, (1 - 1 / ratio) * found_s))


def many_small(seen: Seen) -> Sign | None:
    """Kernels that memory bounds take a share of the computing that fused ones do not."""
    shares = []
    for rank in seen.on_gpus:
        found = _seconds(_found(rank))
        if found[0] > 0.1 * sum(found):  # a step of a model, and no kernels for a test
            shares.append(found[2] / sum(found))
    if not shares:
        return None
    share = median(shares)
    return Sign(sure(share, 0.4, 0.05), f"norms, activations and copies take {share:.0%} of computing")


def passes_longer(seen: Seen) -> Sign | None:
    """Forward and backward longer than planned on every stage."""
    plan, prediction = seen.case.plan, seen.case.prediction
    if plan is None or prediction is None or prediction.kind == "run":
        return None
    found = []
    for one in passes_of(seen.case):
        if one.forward_s and one.backward_s:
            stages = plan.best.stages if one.stage is None else [plan.best.stages[one.stage]]
            planned = [
                stage.forward_s + stage.backward_s
                + (stage.forward_comm_s + stage.backward_comm_s) * one.holds_exchanges for stage in stages
            ]  # fmt: skip
            found.append((one.forward_s + one.backward_s) / max(planned))
    if not found:
        return None
    ratio = min(found)
    extra_s = (1 - 1 / ratio) * prediction.breakdown.get("compute_s", 0.0)
    return Sign(sure(ratio, 1.08, 0.04), f"passes take {ratio:.2f} times what is planned", max(0.0, extra_s))
