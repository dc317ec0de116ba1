"""Signs in ranks beside each other: one that computes longer or comes late, a stage that needs more than planned.

Ranks of one stage hold the same layers, so that one of them is held against the median of the others. What a rank needs
by itself is its step without communication and dependencies: whoever needs most is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from planner.observe.causes.signs.seen import DATA, Rank, Seen
from planner.observe.causes.signs.sign import Sign, large, sure
from planner.observe.ideal.passes import passes_of
from planner.observe.measured import RankPasses
from planner.observe.traces.results import TraceStep
from planner.report.format import seconds

LONGER = 1.06
"""Ranks of one stage differ by 1 to 2% in their clocks; half a dozen of them lie within 5%."""
_LATE, _LATE_ON_HOST = 0.04, 0.08
_ENOUGH = 3
_NOISE, _NOISE_ON_HOST, _LONGER_ON_HOST = 0.012, 0.1, 1.2
"""Least noise of a ratio of two ranks: a GPU has its kernels alone, a CPU shares its cores."""


@dataclass(frozen=True, slots=True)
class Beside:
    """One rank beside the others of its stage."""

    name: str
    ratio: float
    noise: float
    more_s: float
    """Seconds of a step that it needs beyond the median of the others."""
    longer: float = LONGER
    than: str = "its peers"

    @property
    def strength(self) -> float:
        """Probability that it is longer."""
        return sure(self.ratio, self.longer, self.noise)

    def sign(self, won_s: float | None) -> Sign:
        """The sign that it is."""
        says = f"{self.name} computes {self.ratio - 1:.0%} longer than {self.than}"
        extra_s = won_s or max(0.0, self.more_s)
        return large(self.ratio - 1, self.longer - 1, self.noise, says, extra_s, self.name)


def computes_longer(seen: Seen) -> Sign | None:
    """One rank that computes longer than the others of its stage, by traces, timers or Megatron's straggler line."""
    rows = [*_by_traces(seen), *_by_itself(seen), *_by_passes(seen), *_by_spreads(seen)]
    if not rows:
        return None
    worst = max(rows, key=lambda row: (row.strength, row.ratio))
    return worst.sign(seen.recoverable_s("rank", worst.name))


def _by_traces(seen: Seen) -> list[Beside]:
    return [
        Beside(
            rank.name,
            *_ratio(rank, others, lambda step: step.compute_s),
            _LONGER_ON_HOST if rank.on_host else LONGER,
        )
        for rank, others in beside_stage(seen.ranks)
    ]


def _by_itself(seen: Seen) -> list[Beside]:
    """Ranks beside themselves in the earlier run, as far as the others have not become slower: for one alone in its
    stage."""
    before = {rank.report.rank: rank for rank in seen.earlier_ranks}
    pairs = [(rank, before[rank.report.rank]) for rank in seen.ranks if rank.report.rank in before]
    prediction = seen.case.prediction
    if prediction is None or seen.step_s is None or seen.step_s <= prediction.step_s:
        return []
    if len(pairs) < 2 or len(pairs) < len(seen.ranks) or min(then.middle(computing) for _, then in pairs) <= 0:
        return []
    ratios = [rank.middle(computing) / then.middle(computing) for rank, then in pairs]
    rows = []
    for place, (rank, then) in enumerate(pairs):
        others = ratios[:place] + ratios[place + 1 :]
        usual = median(others)
        apart = 1.4826 * median(abs(other - usual) for other in others) / usual
        floor = _NOISE_ON_HOST if rank.on_host else _NOISE
        noise = max(2**0.5 * floor, apart, 1.25 * (_spread(rank) + _spread(then)))
        more_s = rank.middle(computing) - usual * then.middle(computing)
        longer = _LONGER_ON_HOST if rank.on_host else LONGER
        than = "in the earlier run, beside the other ranks"
        rows.append(Beside(rank.name, ratios[place] / usual, noise, more_s, longer, than))
    return rows


def _spread(rank: Rank) -> float:
    """The error of a rank's median seconds of computing, as a share of it."""
    middle = rank.middle(computing)
    apart = rank.middle(lambda step: abs(step.compute_s - middle))
    return 1.4826 * apart / len(rank.steps) ** 0.5 / middle if middle else 1.0


def computing(step: TraceStep) -> float:
    """Seconds in which a rank computes."""
    return step.compute_s


def beside_stage(ranks: Sequence[Rank]) -> list[tuple[Rank, list[Rank]]]:
    """Each rank whose stage is known, with the others of that stage."""
    pairs = [(rank, [other for other in ranks if other is not rank and other.stage == rank.stage]) for rank in ranks]
    return [(rank, others) for rank, others in pairs if others and rank.stage is not None]


def _ratio(rank: Rank, others: Sequence[Rank], of: Callable[[TraceStep], float]) -> tuple[float, float, float]:
    """The median over steps of a rank's seconds ÷ those of the others, its noise, and the seconds beyond theirs."""
    count = min(len(one.steps) for one in (rank, *others))
    theirs = [median(of(other.steps[number]) for other in others) for number in range(count)]
    ratios = [of(step) / other for step, other in zip(rank.steps, theirs, strict=False) if other > 0]
    if not ratios:
        return 1.0, 1.0, 0.0
    middle = median(ratios)
    spread = 1.4826 * median(abs(ratio - middle) for ratio in ratios) / len(ratios) ** 0.5
    noise = max(_NOISE_ON_HOST if rank.on_host else _NOISE, 1.25 * spread)
    return middle, noise, rank.middle(of) - median(theirs)


def _by_passes(seen: Seen) -> list[Beside]:
    """Ranks by the timers of all ranks; exchanges that they hold make the peers of a slow one look slow, too."""
    if seen.ranks:
        return []
    known = [one for one in passes_of(seen.case) if one.rank is not None and one.stage is not None]
    rows = []
    for one in known:
        others = [_pass_s(other) for other in known if other.stage == one.stage and other is not one]
        middle = median(others) if others else 0.0
        if middle > 0:
            more_s = (_pass_s(one) - middle) * seen.num_microbatches
            rows.append(Beside(f"rank {one.rank}", _pass_s(one) / middle, _noise(others, middle), more_s))
    return rows


def _noise(others: Sequence[float], middle: float) -> float:
    """The spread of the other ranks, where there are enough to tell it."""
    if len(others) < _ENOUGH:
        return 2 * _NOISE
    return max(_NOISE, 1.4826 * median(abs(other - middle) for other in others) / middle)


def _pass_s(one: RankPasses) -> float:
    return (one.forward_s or 0.0) + (one.backward_s or 0.0)


def _by_spreads(seen: Seen) -> list[Beside]:
    """The least and the most over the ranks that `--log-straggler` names: one beside the other."""
    rows = []
    for spread in seen.case.observation.rank_spreads:
        if spread.name == "tflops" and spread.low > 0 and spread.high_share < 1.0 and spread.low_share > 0.5:
            rows.append(Beside(f"rank {spread.low_rank}", spread.high / spread.low, 2 * _NOISE, 0.0))
        if spread.name == "round_trip_s" and spread.low > 0 and seen.size("pp") == 1 and spread.high_share > 0.5:
            rows.append(
                Beside(f"rank {spread.high_rank}", spread.high / spread.low, 2 * _NOISE, spread.high - spread.low)
            )
    return rows


def comes_late(seen: Seen) -> Sign | None:
    """One rank that stands still by itself, neither computing nor in an exchange, while the others wait for it."""
    ranks, wall_s = seen.ranks, seen.wall_s
    if len(ranks) < 2 or wall_s is None:
        return None
    rows = []
    for rank in ranks:
        others = [other for other in ranks if other is not rank]
        more_s = rank.middle(still) - median(other.middle(still) for other in others)
        waited_s = median(other.middle(waits) for other in others) - rank.middle(waits)
        rows.append((min(more_s, waited_s), rank))
    late_s, rank = max(rows, key=lambda row: row[0])
    least = _LATE_ON_HOST if rank.on_host else _LATE
    says = f"{rank.name} does nothing for {seconds(max(0.0, late_s))} of a step in which the others wait for it"
    return large(late_s / wall_s, least, least / 3, says, max(0.0, late_s), rank.name)


def still(step: TraceStep) -> float:
    """Seconds in which a rank stands still and neither another rank, a stream nor the loader of data explains it."""
    return step.long_gaps_s + step.idle_s - sum(length for name, length in step.waits if DATA.search(name))


def waits(step: TraceStep) -> float:
    """Seconds in which a rank waits for others, or exchanges with them."""
    return step.exposed_communication_s + step.dependencies_s


def stage_longer(seen: Seen) -> Sign | None:
    """One stage that needs more than its layers say, beside the other stages, whose own error is the same."""
    candidate = seen.case.candidate
    if candidate is None or int(candidate.shape.pp) < 2:
        return None
    found: dict[int, list[float]] = {}
    for one in passes_of(seen.case):
        if one.stage is not None and one.forward_s and one.backward_s:
            found.setdefault(one.stage, []).append(_pass_s(one))
    if len(found) < 2 or seen.case.plan is None:
        return None
    planned = seen.case.plan.best.stages
    ratios = {
        stage: median(times) / (planned[stage].forward_s + planned[stage].backward_s) for stage, times in found.items()
    }
    worst = max(ratios, key=lambda stage: ratios[stage])
    ratio = ratios[worst] / median(value for stage, value in ratios.items() if stage != worst)
    says = f"stage {worst} computes {ratio - 1:.0%} longer than its layers say, beside the other stages"
    extra_s = max(0.0, 1 - 1 / ratio) * median(found[worst]) * seen.num_microbatches
    won_s = seen.recoverable_s("stage", f"stage {worst}")
    return Sign(sure(ratio, LONGER, 0.02), says, won_s or extra_s, f"stage {worst}")


def ranks_apart(seen: Seen) -> Sign | None:
    """The least and the most of a timer over the ranks further apart than the layers of their stages are."""
    passes = [one for one in passes_of(seen.case) if one.rank is None and one.forward_s]
    if len(passes) < 2 or not (seen.size("pp") == 1 or seen.case.plan):
        return None
    low_s, high_s = min(map(_pass_s, passes)), max(map(_pass_s, passes))
    planned = 1.0
    if seen.case.plan is not None:
        stages = [stage.forward_s + stage.backward_s for stage in seen.case.plan.best.stages]
        planned = max(stages) / min(stages)
    ratio = high_s / low_s / planned
    says = f"the slowest rank's passes take {high_s / low_s - 1:.0%} longer than the fastest one's"
    says += f", {planned - 1:.0%} by their layers" if planned > 1.005 else ""
    extra_s = max(0.0, high_s - low_s * planned) * seen.num_microbatches
    return Sign(sure(ratio, LONGER, 0.02), says, extra_s)


def experts_differ(seen: Seen) -> Sign | None:
    """Ranks of one stage that differ in products, which experts have, and not in attention, which all share alike."""
    pairs = beside_stage(seen.on_gpus)
    if not pairs or not seen.has_experts:
        return None
    ratios = []
    for rank, others in pairs:
        products, _, _ = _ratio(rank, others, lambda step: family_s(step, ("gemm", "MoE routing")))
        attention, noise, _ = _ratio(rank, others, lambda step: family_s(step, ("attention",)))
        ratios.append((products - attention, noise, rank.name))
    apart, noise, name = max(ratios)
    says = f"{name}'s products take {apart:.0%} more than its peers', beside its attention"
    return Sign(sure(apart, LONGER - 1, max(noise, 0.02)), says, None, name)


def family_s(step: TraceStep, wanted: Sequence[str]) -> float:
    """Seconds of a step that kernels of these families take."""
    return sum(family.seconds for family in step.families if family.family in wanted)
