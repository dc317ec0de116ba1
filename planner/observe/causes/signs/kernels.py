"""Signs in computing: all kernels slower alike, one family slower than the others, families that fusing replaces."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from planner.observe.causes.signs.ranks import family_s
from planner.observe.causes.signs.seen import Seen
from planner.observe.causes.signs.sign import Sign, large, sure
from planner.observe.gap.account import Account
from planner.observe.gap.terms import ATTENTION, MEMORY_BOUND, PRODUCTS
from planner.observe.ideal.passes import passes_of
from planner.report.format import seconds

_LEAST_FRACTION = 0.002
"""A family with less of the computing is not compared."""
_WORTH = 0.02
"""Share of a step from which what a family takes more is worth a word."""
_ERROR_OF_PRICES, _ERROR_OF_RUNS, _ERROR_ON_HOST = 0.05, 0.015, 0.1
"""Error of one family's seconds: as priced, from run to run of one job, and on a CPU, whose cores others share."""


@dataclass(frozen=True, slots=True)
class Families:
    """Products, attention and kernels that memory bounds: seconds of a step, or how many times as long as expected."""

    products: float
    attention: float
    memory_bound: float

    @property
    def each(self) -> tuple[float, float, float]:
        """All three."""
        return self.products, self.attention, self.memory_bound


def _of(account: Account) -> Families:
    return Families(*(account.parts.get(name, 0.0) for name in (PRODUCTS, ATTENTION, MEMORY_BOUND)))


def ratios(seen: Seen) -> tuple[Families, float] | None:
    """How many times as long each family takes as expected, the median over the ranks, and the error of that."""
    found = []
    for pair in seen.pairs:
        if pair.expected is not None:
            mine, theirs = _of(pair.found).each, _of(pair.expected).each
            if min(theirs) > _LEAST_FRACTION * sum(theirs) and min(mine) > 0:
                found.append(tuple(a / b for a, b in zip(mine, theirs, strict=True)))
    if not found:
        return None
    over = Families(*(median(column) for column in zip(*found, strict=True)))
    on_host = any(rank.on_host for rank in seen.ranks)
    return over, _ERROR_ON_HOST if on_host else _ERROR_OF_RUNS if seen.earlier_ranks else _ERROR_OF_PRICES


def _found_s(seen: Seen, name: str) -> float:
    return median(pair.found.parts.get(name, 0.0) for pair in seen.pairs)


def all_slower(seen: Seen) -> Sign | None:
    """Products and attention slower by one factor: nothing but the clock makes both so."""
    known = ratios(seen)
    unfused = softmax_apart(seen)
    if known is None or (unfused is not None and unfused.is_seen):
        return None  # the products of attention count as products there
    over, error = known
    least = min(over.products, over.attention)
    says = f"products take {over.products:.2f} and attention {over.attention:.2f} times what is expected"
    extra_s = (1 - 1 / least) * sum(_found_s(seen, name) for name in (PRODUCTS, ATTENTION))
    return Sign(sure(least, 1 + 1.2 * error, 0.8 * error), says, max(0.0, extra_s))


def attention_slower(seen: Seen) -> Sign | None:
    """Attention slower than expected beside the other families."""
    known = ratios(seen)
    if known is None:
        return None
    over, error = known
    ratio = over.attention / over.products
    extra_s = (1 - 1 / ratio) * _found_s(seen, ATTENTION)
    says = f"attention takes {over.attention:.2f} times what is expected, products {over.products:.2f} times"
    return Sign(min(sure(ratio, 1 + 4 * error, 2 * error), _worth(seen, extra_s)), says, max(0.0, extra_s))


def _worth(seen: Seen, extra_s: float) -> float:
    return sure(extra_s / (seen.step_s or 1.0), _WORTH, _WORTH / 4)


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
    return large((softmax_s - fused_s) / (compute_s or 1.0), 0.02, 0.005, says, softmax_s)


def small_slower(seen: Seen) -> Sign | None:
    """Kernels that memory bounds slower than expected beside the others: fused ones make one of several."""
    known = ratios(seen)
    if known is None:
        return None
    over, error = known
    ratio = over.memory_bound / over.products
    says = f"norms, activations and copies take {over.memory_bound:.2f} times what is expected"
    extra_s = (1 - 1 / ratio) * _found_s(seen, MEMORY_BOUND)
    return Sign(min(sure(ratio, 1 + 5 * error, 2 * error), _worth(seen, extra_s)), says, max(0.0, extra_s))


def many_small(seen: Seen) -> Sign | None:
    """Kernels that memory bounds take a share of the computing that fused ones do not."""
    shares = []
    for pair in seen.pairs if seen.on_gpus else ():
        found = _of(pair.found).each
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
