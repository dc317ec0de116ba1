"""Remedies against causes, priced for this job.

Most causes are answered by switches and layouts near the run's own (`remedy.against`), of which the fastest that the
trainer's rules allow and that fits is taken. Others are of a machine, and answered by the step without them and by what
to look at.
"""

from __future__ import annotations

from functools import partial

from planner.export.megatron.switch_options import SWITCH_OPTIONS
from planner.export.spelling import spelling_of
from planner.layout.candidate import Candidate
from planner.layout.recipe import under
from planner.observe.case import Case
from planner.observe.observation import Cause, Remedy
from planner.observe.remedy import machine
from planner.observe.remedy.against import CAUSE_OF, Against, against
from planner.observe.remedy.change import options_between, runtime_of, switches_between
from planner.observe.remedy.estimate import LEAST_GAIN, best_of, expected_step_s
from planner.observe.remedy.moves import Move, acts, switch
from planner.observe.remedy.running import restored, running
from planner.observe.remedy.written import settings_between
from planner.trainers.stated import switched
from planner.trainers.switches import SWITCHES, Value

_GONE = "without "
_MOST_SETTINGS = 4
"""Most lines of a trainer's files in a sentence."""


def remedy_for(case: Case, cause: Cause) -> Remedy | None:
    """The remedy with the step that it would give (`remedy.estimate`); None where nothing is known to help.

    A cause named `recipe` is about the switch that its `where` names.
    """
    row, now = against(cause), running(case)
    if now is None:
        return row.otherwise(case, cause) or _advice(case, cause, row)
    seen = row.as_seen(now, cause)
    found = None if seen is None else _priced(case, seen, row)
    if found is None:
        return row.otherwise(case, cause)
    return found.model_copy(update={"says": f"{row.also}, or {found.says}"}) if row.also else found


def _priced(case: Case, now: Candidate, row: Against) -> Remedy | None:
    """The best change without consent, else the planned value of switches, else the best change with consent."""
    names = (*row.switches, *row.helpers)
    back: Move = partial(restored, case, names)
    own = tuple(name for name in names if name in row.switches or name not in CAUSE_OF)
    return (
        _changed(case, now, (back, switch(*names), *row.layouts))
        or _lacking(case, now, own)
        or _changed(case, now, row.consented)
    )


def _advice(case: Case, cause: Cause, row: Against) -> Remedy | None:
    """The advice, with the options of Megatron-LM where the log is of it."""
    if not row.advice:
        return None
    is_megatron = (case.observation.facts.trainer or "").startswith("megatron")
    spelled = (spelling_of(SWITCH_OPTIONS, name, True, "") or {} for name in row.switches if is_megatron)
    options = [option for settings in spelled for option in settings]
    says = f"{row.advice} ({' '.join(options)})" if options else row.advice
    return machine.unpriced((), machine.without(case, cause), says)


def _changed(case: Case, now: Candidate, moves: tuple[Move, ...]) -> Remedy | None:
    """The best of some changes of the layout that runs."""
    best = best_of(now, (other for move in moves for other in move(now)))
    if best is None:
        return None
    step_s, options = expected_step_s(case, now, best), options_between(now, best)
    changes = _consents(now, best)
    words = ("--allow", ",".join(changes), *options) if changes else options
    why = f" (changes {' and '.join(dict.fromkeys(changes.values()))})" if changes else ""
    return Remedy(options=words, step_s=step_s, says=f"{_how(case, now, best)}{why}")


def _consents(now: Candidate, best: Candidate) -> dict[str, str]:
    """The changed switches that somebody has to agree to, and what each of them changes."""
    changed = switches_between(now, best).items()
    return {name: SWITCHES[name].consent[value] for name, value in changed if value in SWITCHES[name].consent}


def _lacking(case: Case, now: Candidate, names: tuple[str, ...]) -> Remedy | None:
    """The switches that the plan has on and that the run seems to lack, where the log does not name them."""
    off = under(now, switched(now.pricing.runtime, _plain(case, now, names)))
    # at most what the run is held against comes back
    step_s = max(expected_step_s(case, off, now), now.step_s, case.prediction.step_s if case.prediction else 0.0)
    if off.step_s < now.step_s * (1 + LEAST_GAIN):
        return None
    if case.observation.step_s is not None and step_s > case.observation.step_s * (1 - LEAST_GAIN):
        return None
    says = f"the plan has it so, and the log does not say it: {_how(case, off, now)}"
    return Remedy(options=options_between(off, now), step_s=step_s, says=says)


def _plain(case: Case, now: Candidate, names: tuple[str, ...]) -> dict[str, Value]:
    """The plainest values of switches that act on the layout, have another value, and are not named by the log."""
    unsaid = [name for name in names if acts(now, name) and name not in case.observation.facts.stated_switches]
    plain = {name: next(iter(SWITCHES[name].values)) for name in unsaid}
    return {name: value for name, value in plain.items() if SWITCHES[name].value_of(runtime_of(now)) != value}


def _how(case: Case, before: Candidate, after: Candidate) -> str:
    """The change in the trainer's own words, or in the planner's where no exporter has any."""
    settings = settings_between(case.plan, before, after) if case.plan is not None else ()
    gone = [line for line in settings if line.startswith(_GONE)]
    come = [line for line in settings if line not in gone][:_MOST_SETTINGS]
    words = [f"with {', '.join(come)}"] if come else []
    words += [", ".join(gone[:_MOST_SETTINGS])] if gone else []
    return " and ".join(words) or f"with {' '.join(options_between(before, after))}"
