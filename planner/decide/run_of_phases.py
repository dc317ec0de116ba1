"""The answer of a run of phases: what each takes in the layout chosen for it, the stops between them, the sums."""

from __future__ import annotations

from collections.abc import Sequence

from planner.answer import Interval
from planner.decide.course import Course, Key, course_of
from planner.decide.phase_answer import BatchStep, Change, PhaseAnswer, PhasesAnswer, RunTotal
from planner.decide.phases import Phase, Run, plan_in
from planner.decide.processes import Each
from planner.trainers.documents import attended_fraction, masked_documents
from planner.trainers.load import checkpoint_of

SECONDS_PER_DAY = 86_400
COSTS = ("days", "days_interval", "gpu_hours", "usd", "usd_interval", "mwh")


def run_of_phases(phases: Sequence[Phase], each: Each, reshard_hours: float = 0.0, command: str = "") -> PhasesAnswer:
    """Plan every phase, choose the course through them, and add up. Raises the error of a phase without a plan."""
    return answer_of(course_of(phases, each, reshard_hours), command)


def answer_of(course: Course, command: str = "") -> PhasesAnswer:
    """The answer of phases that are planned."""
    chosen = course.chosen()
    stops = [number for number, key in enumerate(chosen) if course.stops(number, chosen[number - 1], key)]
    answers = tuple(_phase(course, number, chosen) for number in range(len(chosen)))
    changes = tuple(_change(course, number, chosen) for number in stops)
    return PhasesAnswer(command=command, phases=answers, total=_total(course, answers, chosen), changes=changes)


def _run(course: Course, number: int, key: Key) -> Run:
    run = course.run(number, key)
    assert isinstance(run, Run), "a layout was chosen that runs"
    return run


def _phase(course: Course, number: int, chosen: Sequence[Key]) -> PhaseAnswer:
    phase, own, key = course.phases[number], course.found[number].plan, chosen[number]
    run, training, before = _run(course, number, key), phase.case.training, chosen[number - 1]
    kept = course.kept(number, before)[1] if number else ""
    plan = plan_in(phase, own, run, course.in_phase(number, key))
    steps = [batch.tokens / batch.global_batch_size / training.seq_length for batch in phase.batches]
    tokens_per_s = run.cost.tokens / sum(count * step_s for count, step_s in zip(steps, run.steps_s, strict=True))
    grown = [
        BatchStep(global_batch_size=batch.global_batch_size, tokens=batch.tokens, steps=count, step_s=step_s)
        for batch, count, step_s in zip(phase.batches, steps, run.steps_s, strict=True)
    ]
    fastest = min(course.runs_of(number).values(), key=lambda other: other.wall_s)
    documents, step = masked_documents(training, plan.runtime_spec), plan.step
    return PhaseAnswer(
        name=phase.name,
        tokens=run.cost.tokens,
        steps=sum(steps),
        seq_length=training.seq_length,
        global_batch_size=training.global_batch_size,
        batches=tuple(grown) if phase.grows else (),
        num_gpus=own.cluster.num_gpus,
        dtype=training.dtype,
        document_fraction=2 * float(attended_fraction(documents, training.seq_length, 0)) if documents else 1.0,
        layout="first" if not number else "kept" if before[0] == key[0] else "resharded",
        stop_s=course.change_s(number, before, key) if number else 0.0,
        step_s=step.step_s,
        step_s_interval=step.step_s_interval,
        tokens_per_s=tokens_per_s,
        mfu=step.mfu * tokens_per_s / step.tokens_per_s,
        **{name: getattr(run.cost, name) for name in COSTS},
        effective_fraction=run.goodput.effective_fraction,
        own_layout=str(fastest.layout.parallelism),
        own_days=fastest.cost.days,
        kept_days=kept.cost.days if isinstance(kept, Run) else None,
        kept_refused="" if isinstance(kept, Run) else kept,
        plan=plan,
    )


def _change(course: Course, number: int, chosen: Sequence[Key]) -> Change:
    """The stop before a phase: what changes, what that saves as long as it stays, and what it costs."""
    before, after, stays = chosen[number - 1], chosen[number], number + 1
    while stays < len(chosen) and chosen[stays][0] == after[0]:
        stays += 1
    saved = 0.0 if before[0] == after[0] else _saved_days(course, range(number, stays), before, chosen)
    costs_s = course.change_s(number, before, after) - course.change_s(number, before, before)
    return Change(
        before=course.phases[number - 1].name,
        after=course.phases[number].name,
        resharded=before[0] != after[0],
        why=_why(course, number),
        from_layout=str(_run(course, number - 1, before).layout.parallelism),
        to_layout=str(_run(course, number, after).layout.parallelism),
        gains_days=saved,
        kept_refused="" if isinstance(kept := course.kept(number, before)[1], Run) else kept,
        costs_days=costs_s / SECONDS_PER_DAY,
        saved_as=_saved_as(course, number, before, after),
        stop_s=course.change_s(number, before, after),
    )


def _saved_days(course: Course, numbers: range, before: Key, chosen: Sequence[Key]) -> float | None:
    """Days that phases take more in the layout before them than in those chosen; None where one cannot run in it."""
    saved = 0.0
    for number in numbers:
        before, old = course.kept(number, before)
        if not isinstance(old, Run):
            return None
        saved += old.cost.days - _run(course, number, chosen[number]).cost.days
    return saved


def _saved_as(course: Course, number: int, before: Key, after: Key) -> str:
    """The option or the tool without which the other layout cannot load the checkpoint; empty if it needs none."""
    if before[0] == after[0] or course.loads(number, before, after) == "as_is":
        return ""
    row = checkpoint_of(course.found[number - 1].plan.runtime_spec, course.layouts[before][0].parallelism.zero_stage)
    return "" if row.rewritten is None else row.rewritten.ready or row.rewritten.says


def _why(course: Course, number: int) -> str:
    """The thing that a job cannot change as it runs; `layout` where the layout alone is another."""
    now, before = course.phases[number].case, course.phases[number - 1].case
    changes = {
        "sequence": now.training.seq_length != before.training.seq_length,
        "dtype": now.training.dtype != before.training.dtype,
        "GPUs": now.cluster != before.cluster,
        "switches": (now.limits.switches, now.limits.allow) != (before.limits.switches, before.limits.allow),
    }
    return ", ".join(name for name, changed in changes.items() if changed) or "layout"


def _total(course: Course, phases: Sequence[PhaseAnswer], chosen: Sequence[Key]) -> RunTotal:
    """Sums over phases and the stops before them, in which GPUs cost as much as in the phase."""
    shares = [phase.stop_s / SECONDS_PER_DAY / phase.days for phase in phases]
    ends = [_ends(course, number, phase, chosen) for number, phase in enumerate(phases)]
    days = sum(phase.days * (1 + share) for phase, share in zip(phases, shares, strict=True))

    def total(name: str) -> float | None:
        values = [getattr(phase, name) for phase in phases]
        known = all(value is not None for value in values)
        return sum(value * (1 + share) for value, share in zip(values, shares, strict=True)) if known else None

    usd = total("usd")
    return RunTotal(
        tokens=sum(phase.tokens for phase in phases),
        days=days,
        days_interval=(sum(low for low, _ in ends), sum(high for _, high in ends)),
        gpu_hours=total("gpu_hours") or 0.0,
        usd=usd,
        usd_interval=None if usd is None else _usd_interval(phases, ends),
        mwh=total("mwh"),
        stops_s=sum(phase.stop_s for phase in phases),
        effective_fraction=sum(phase.days * phase.effective_fraction for phase in phases) / days,
    )


def _ends(course: Course, number: int, phase: PhaseAnswer, chosen: Sequence[Key]) -> Interval:
    """Days of a phase and of the stop before it, at either end of their intervals."""
    low, high = phase.days_interval or (phase.days, phase.days)
    if not course.stops(number, chosen[number - 1], chosen[number]):
        return low, high
    before, after = chosen[number - 1], chosen[number]
    stop = course.stop(number, (course.loads(number, before, after) or "as_is") if before[0] != after[0] else "as_is")
    (low_s, high_s), beside_s = stop.interval_s, phase.stop_s - stop.value_s
    return low + (low_s + beside_s) / SECONDS_PER_DAY, high + (high_s + beside_s) / SECONDS_PER_DAY


def _usd_interval(phases: Sequence[PhaseAnswer], ends: Sequence[Interval]) -> Interval:
    prices = [(phase.usd or 0.0) / phase.days for phase in phases]
    low, high = (sum(price * end[side] for price, end in zip(prices, ends, strict=True)) for side in (0, 1))
    return low, high
