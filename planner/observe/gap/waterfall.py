"""The waterfall: measured less predicted seconds of a step in named terms that add up to the difference; and beside it
the wall time per step less the steady step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath

from planner.layout.candidate import Candidate
from planner.layout.price import price_layout
from planner.observe.case import ObservedCase, grid_of
from planner.observe.gap.account import (
    BUBBLE,
    EXCHANGES,
    HOST_GAPS,
    PASSES,
    PIPELINE,
    PP_LINK_RATE,
    PROFILER,
    STEP_TERMS,
    UNATTRIBUTED,
    WALL_TERMS,
    Account,
    differences,
    in_seconds,
    netted,
    planned,
    priced,
    timed,
)
from planner.observe.gap.stated import stated_otherwise
from planner.observe.gap.traced import Traced, account_of, traced_ranks, typical, unnamed
from planner.observe.observation import Observation, Prediction, Term, Wall
from planner.observe.traces.recorded import ObservedFiles, Recorded
from planner.shape import FloatArray

_SLOW = {
    "checkpoint": "slow_after_checkpoints",
    "evaluation": "slow_after_evaluations",
    "periodic": "slow_periodic",
    "slow_spell": "slow_spells",
    "unexplained": "slow_unexplained",
}
"""The term of each kind of outlier."""
_NOISE = 0.1
"""Share of steps below which what lies between their lines and what two of them claim is the clock of the lines."""
_NEEDED = ("evaluation", "start_up")
"""Terms of which nothing tells how much is needed."""


def beside_steps(case: ObservedCase) -> tuple[Term, ...]:
    """Terms that add up to the wall time per step less the steady step; nothing where lines have no times.

    A step counts once, however often it was made.
    """
    observation = case.observation
    wall, step_s = observation.wall, observation.step_s
    made_again = sum(restart.lost_steps for restart in observation.restarts)
    num_steps = observation.num_steps - made_again
    if wall is None or step_s is None or num_steps < 1:
        return ()
    found: dict[str, tuple[float, str]] = {}
    for name, total_s, says in (*_of_steps(observation, step_s, wall), *_of_wall(observation, wall)):
        found[name] = (found.get(name, (0.0, ""))[0] + total_s, says)
    if made_again:
        says = f"{_steps(made_again)} were made twice, at {in_seconds(step_s)} each"
        found["steps_made_again"] = (made_again * step_s, says)
    order = list(WALL_TERMS)
    return tuple(
        Term(
            term=name,
            seconds=total_s / num_steps,
            evidence=f"{says}: {in_seconds(abs(total_s))} of {_steps(num_steps)}",
            recoverable_s=None if name in _NEEDED else max(0.0, total_s / num_steps),
        )
        for name, (total_s, says) in sorted(found.items(), key=lambda pair: order.index(pair[0]))
        if total_s
    )


def _of_steps(observation: Observation, step_s: float, wall: Wall) -> list[tuple[str, float, str]]:
    """Seconds of all steps beyond as many steady ones, and why."""
    found = [
        (
            _SLOW[outlier.kind],
            outlier.extra_s,
            f"{_steps(outlier.num_steps)} took longer{f' ({outlier.likely})' if outlier.likely else ''}",
        )
        for outlier in observation.outliers
    ]
    if observation.num_warmup_steps:
        says = f"{_steps(observation.num_warmup_steps)} at the begin took longer"
        found.append(("warm_up", observation.warmup_extra_s, says))
    jitter_s = wall.steps_s - observation.num_steps * step_s - sum(total_s for _, total_s, _ in found)
    low_s, high_s = observation.step_s_spread or (step_s, step_s)
    says = f"the mean of steady steps less their median; 8 of 10 took {in_seconds(low_s)} to {in_seconds(high_s)}"
    return [*found, ("jitter", jitter_s, says)]


def _of_wall(observation: Observation, wall: Wall) -> list[tuple[str, float, str]]:
    """Seconds beside steps, and what the log says of them."""
    downs = f"{len(observation.restarts)} interruption{'s' if len(observation.restarts) != 1 else ''}"
    return [
        ("checkpoints", wall.checkpoint_s, "training stood still for them"),
        ("evaluation", wall.evaluation_s, "training stood still for it"),
        ("start_up", wall.startup_s, "from the first line to the first step"),
        ("interruptions", wall.down_s, downs),
        *_of_clock(wall, _NOISE * (observation.step_s or 0.0) * observation.num_steps),
    ]


def _of_clock(wall: Wall, noise_s: float) -> list[tuple[str, float, str]]:
    """Idle time, and time that two lines claim; a line that is printed late leaves as much of both."""
    idle_s, overlap_s = wall.idle_s, wall.overlap_s
    if idle_s and overlap_s and max(idle_s, overlap_s) < noise_s:
        says = f"{in_seconds(idle_s)} between lines and {in_seconds(overlap_s)} claimed twice, as lines come late"
        return [("log_clock", idle_s - overlap_s, says)]
    return [
        ("idle", idle_s, "no line says what happened there"),
        ("counted_twice", -overlap_s, "two lines claim the same time"),
    ]


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"


RankPair = tuple[Traced, Account, Account]
"""A traced rank, its account, and the expected one."""


def paired(case: ObservedCase, candidate: Candidate | None, where: str) -> RankPair | None:
    """The typical rank beside the candidate, or the earlier run; None without traces of steps and their stage."""
    assert case.prediction is not None
    ranks = traced_of(case, case.recorded)
    if not ranks:
        return None
    if case.prediction.kind == "run":
        pair = _beside_run(case, ranks, where)
    else:
        pair = None if candidate is None else _beside_plan(candidate, where, ranks)
    if pair is None or not unnamed(pair[0]):
        return pair
    return pair[0], *_merged(*pair[1:])


def traced_of(case: ObservedCase, recorded: Recorded | None) -> list[Traced]:
    """The traced ranks of a run; the layout says the stage and the group of those whose traces do not."""
    if recorded is None or recorded.traces is None:
        return []
    grid = grid_of(case)
    return traced_ranks(recorded.traces.ranks, grid.stage if grid else None, only_group(case))


def only_group(case: ObservedCase) -> str:
    """The one group of a job's ranks where all exchanges are of one; else empty."""
    layout, grid = case.plan.parallelism if case.plan else None, grid_of(case)
    if grid is None:
        return ""
    sizes = {"tp": grid.tp, "cp": grid.cp, "dp": grid.dp, "pp": grid.pp, "ep": layout.ep if layout else 1}
    groups = [group for group, size in sizes.items() if size > 1]
    return groups[0] if len(groups) == 1 else ""


def _beside_plan(candidate: Candidate, source: str, ranks: Sequence[Traced]) -> RankPair | None:
    """The typical rank, its account, and that of the plan's rank of the same stage."""
    pp, rank = int(candidate.shape.pp), typical(ranks)
    stage = 0 if pp == 1 else rank.stage
    if stage is None or stage >= pp:
        return None
    pipeline = candidate.run()
    expected = planned(candidate, pipeline, stage, f"{source}{f' for stage {stage}' if pp > 1 else ''}")
    measured = account_of(rank, has_pipeline=pp > 1)
    if pp == 1:
        return rank, measured, expected
    factors = _observed_factors(candidate, ranks, pipeline.busy_s)
    if factors is None:
        return rank, measured, _one_pipeline(expected)
    replayed = replace(candidate, rank_factors=factors).run()
    bubble_s = replayed.makespan_s - float(replayed.busy_s[stage]) - float(replayed.transfer_s[stage])
    return rank, _split_pipeline(measured, bubble_s), expected


def _observed_factors(candidate: Candidate, ranks: Sequence[Traced], busy_s: FloatArray) -> tuple[float, ...] | None:
    """Factor on the seconds of each stage that makes it as busy as its traces show; None unless all are traced."""
    stages = range(int(candidate.shape.pp))
    own = [[rank for rank in ranks if rank.stage == stage] for stage in stages]
    if not all(own):
        return None
    given, step_overhead_s = candidate.rank_factors or (1.0,) * len(own), candidate.pricing.runtime.step_overhead_s
    took_s = [max(0.0, typical(traced).passes_s - step_overhead_s) for traced in own]
    return tuple(given[stage] * took_s[stage] / float(busy_s[stage]) for stage in stages)


def _split_pipeline(account: Account, bubble_s: float) -> Account:
    """The account with the waits of its pipeline cut into a bubble and what is left for transfers."""
    parts = dict(account.parts)
    waited_s = parts.pop(PIPELINE)
    bubble_s = min(bubble_s, waited_s)
    says = "the bubble is that of the plan's order replayed with the traced stages"
    details = {**account.details, BUBBLE: says, PP_LINK_RATE: f"{says}, transfers are the rest"}
    return replace(account, parts={**parts, BUBBLE: bubble_s, PP_LINK_RATE: waited_s - bubble_s}, details=details)


def _one_pipeline(account: Account) -> Account:
    """The account with bubble and transfers of its pipeline as one number."""
    parts = dict(account.parts)
    both_s = parts.pop(BUBBLE, 0.0) + parts.pop(PP_LINK_RATE, 0.0)
    return replace(account, parts={**parts, PIPELINE: both_s + parts.get(PIPELINE, 0.0)})


def _beside_run(case: ObservedCase, ranks: Sequence[Traced], where: str) -> RankPair | None:
    """The typical rank, its account, and that of the earlier run's same rank, or of one of its stage."""
    assert case.prediction is not None
    earlier = case.earlier
    others = traced_of(case, earlier.recorded if isinstance(earlier, ObservedFiles) else None)
    rank = typical(ranks)
    same = [one for one in others if one.report.rank == rank.report.rank] or [
        one for one in others if one.stage == rank.stage and rank.stage is not None
    ]
    if not same:
        return None
    grid = grid_of(case)
    has_pipeline = grid is None or grid.pp > 1
    measured, expected = (account_of(one, has_pipeline) for one in (rank, typical(same)))
    return rank, measured, replace(expected, where=f"{expected.where} {where}")


def _merged(measured: Account, expected: Account) -> tuple[Account, Account]:
    """Both accounts with the exchanges of groups that the trace does not name as one number."""
    missing = expected.exchanges.keys() - measured.exchanges.keys()
    waits = [] if measured.parts.get(PIPELINE) or measured.parts.get(BUBBLE) else [PIPELINE, BUBBLE, PP_LINK_RATE]

    def merged(account: Account) -> Account:
        shown_s = sum(one.busy_s - one.hidden_s for name, one in account.exchanges.items() if name in missing)
        waited_s = sum(account.parts.get(name, 0.0) for name in waits)
        parts = {name: value for name, value in account.parts.items() if name not in waits}
        parts[EXCHANGES] = parts.get(EXCHANGES, 0.0) + shown_s + waited_s
        return replace(
            account,
            parts=parts,
            exchanges={name: one for name, one in account.exchanges.items() if name not in missing},
        )

    return merged(measured), merged(expected)


_SMALL, _NOTHING = 1e-6, 1e-9
"""Shares of a step: a smaller term is the rounding of clocks and counts to the rest, a smaller rest is nothing."""


def waterfall(case: ObservedCase, known: Sequence[Term] = ()) -> tuple[Term, ...]:
    """Terms that add up to the observed step less the predicted one; nothing where one of them is not known.

    `known` are what switches cost that the log shows otherwise than the plan (`recipe_terms`): other terms are beside
    the price of the recipe that the run has. Beside an earlier run's traces nothing is known better than they show.
    """
    step_s, prediction = case.observation.step_s, case.prediction
    if step_s is None or prediction is None:
        return ()
    changed = _as_run(case) if known and prediction.kind == "plan" else None
    where = f"in {PurePath(prediction.source).name}{' with the recipe of the log' if changed else ''}"
    terms, rest = _of_traces(case, changed or case.candidate, where)
    if terms and prediction.kind == "run":
        known = ()
    if not terms:
        terms, rest = _of_timers(case, changed, where)
        terms = _without(terms, known) if prediction.kind == "run" else terms
    if not terms:
        rest = _alone(step_s, prediction)
    terms = [term for term in [*known, *terms] if abs(term.seconds) > _SMALL * step_s]
    left_s = step_s - prediction.step_s - sum(term.seconds for term in terms)
    if abs(left_s) > _NOTHING * step_s:
        terms.append(Term(term=UNATTRIBUTED, seconds=left_s, evidence=rest))
    order = list(STEP_TERMS)
    return tuple(sorted(terms, key=lambda term: order.index(term.term) if term.term in order else -1))


def _without(terms: list[Term], known: Sequence[Term]) -> list[Term]:
    """The terms less what is known of them: switches act on passes."""
    known_s = sum(term.seconds for term in known)
    return [
        term.model_copy(update={"seconds": term.seconds - known_s, "recoverable_s": max(0.0, term.seconds - known_s)})
        if term.term == PASSES
        else term
        for term in terms
    ]


def _as_run(case: ObservedCase) -> Candidate | None:
    """The plan's layout with all that the log states otherwise."""
    stated = stated_otherwise(case)
    return stated[-1].candidate if stated else case.candidate


def _alone(step_s: float, prediction: Prediction) -> str:
    """A sentence where only the steps are known."""
    steps = f"{in_seconds(step_s)} a step, {in_seconds(prediction.step_s)} predicted by {prediction.source}"
    return f"{steps}; no file tells more than the step apart"


def _of_timers(case: ObservedCase, changed: Candidate | None, where: str) -> tuple[list[Term], str]:
    """Terms by the timers of the log, and a sentence on what they leave; none where they tell nothing apart.

    `changed` is priced in the plan's place.
    """
    prediction, observation = case.prediction, case.observation
    assert prediction is not None
    found, breakdown, expected = timed(observation, "by the log's timers"), observation.breakdown, None
    whole_s = prediction.step_s if changed is None else changed.step_s
    if found is not None and prediction.kind == "plan":
        whole = prediction.breakdown if changed is None else price_layout(changed).step.breakdown.model_dump()
        layout = changed or case.candidate
        expected = priced(whole, 0.0 if layout is None else layout.outside.tail_s, breakdown, where)
    elif case.earlier is not None and breakdown.keys() == prediction.breakdown.keys():
        expected = timed(case.earlier.observation, where)
    if found is None or expected is None:
        return [], ""
    left = (observation.step_s or 0.0) - found.total_s, whole_s - expected.total_s
    here, there = (in_seconds(max(0.0, one)) for one in left)
    rest = f"{here} of the step that no such timer has, {there} {where} beside them"
    return list(differences(found, expected)), rest


def _of_traces(case: ObservedCase, candidate: Candidate | None, where: str) -> tuple[list[Term], str]:
    """Terms by the trace of a typical rank, and a sentence on what they leave; none where nothing can be compared."""
    pair, step_s = paired(case, candidate, where), case.observation.step_s
    if pair is None or step_s is None:
        return [], ""
    rank, measured, expected = pair
    terms, prediction = list(differences(measured, expected)), case.prediction
    assert prediction is not None
    rest = (
        f"{in_seconds(step_s)} a step, {in_seconds(rank.wall_s)} in the mean of the steps {measured.where}; "
        f"{in_seconds(prediction.step_s)} are predicted, terms have {in_seconds(expected.total_s)} of them"
    )
    logged = {source.path for source in case.observation.sources} - set(case.recorded.kinds if case.recorded else ())
    if not logged:
        return terms, rest
    # of an earlier run, its own profiler is in both of its numbers
    then_s = prediction.step_s - expected.total_s if prediction.kind == "run" else 0.0
    return _with_profiler(terms, step_s, rank.wall_s, then_s), rest


def _with_profiler(terms: list[Term], step_s: float, traced_s: float, then_s: float) -> list[Term]:
    """The terms with the log's step less the traced one, beyond what it was in an earlier run.

    What a profiler adds is first taken out of host gaps, and is no term where the traced steps are the shorter ones.
    """
    seconds_s = step_s - traced_s - then_s
    if seconds_s >= 0:
        return terms
    before = f", {in_seconds(-then_s)} more in the earlier run's" if then_s < 0 else ""
    log, trace = in_seconds(step_s), in_seconds(traced_s)
    says = f"{log} a step in the log, {trace} in the trace, which a profiler slows down{before}"
    more = Term(term=PROFILER, seconds=seconds_s, evidence=says, recoverable_s=0.0)
    by_name = {term.term: term for term in [*terms, more]}
    gaps = by_name.get(HOST_GAPS)
    if gaps is not None and gaps.seconds > 0:
        net = netted({HOST_GAPS: gaps.seconds, PROFILER: seconds_s}, PROFILER)
        says = f"{gaps.evidence}; {in_seconds(gaps.seconds - net[HOST_GAPS])} of them are the profiler's own"
        by_name[HOST_GAPS] = gaps.model_copy(
            update={"seconds": net[HOST_GAPS], "recoverable_s": net[HOST_GAPS], "evidence": says}
        )
        by_name[PROFILER] = more.model_copy(update={"seconds": net[PROFILER]})
    return list(by_name.values())
