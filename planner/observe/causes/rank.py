"""The likely causes of what a run shows, the likeliest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.observe.case import Case
from planner.observe.causes.hypotheses import HYPOTHESES, Form
from planner.observe.causes.kinds import KINDS, signs_of
from planner.observe.causes.needs import Need
from planner.observe.causes.posterior import Posterior, at_most, form_of, leaves, possible_forms
from planner.observe.causes.remedies import remedy_for
from planner.observe.causes.signs.seen import Seen
from planner.observe.causes.signs.sign import Sign
from planner.observe.observation import Cause, Term, Verdict, WhatIf

LEAST_LIKELIHOOD = 0.2
"""Two of 40 healthy runs had a cause less likely than that, and none another (docs/OBSERVE_CAUSES.md)."""
_TELLING = 3.0
"""A sign speaks for a cause that makes it so many times as likely as a run without a fault does."""
_MOST_SIGNS = 3
_LEAST_CHANGE = 0.2
_RIVAL = 0.1
"""A rival has at least this share of a cause's likelihood."""
_SHOWS = {"slow": "slower", "memory": "above_plan"}
"""The sign that a verdict is."""
SURE = 0.5
"""A cause that is likelier there than not is said with the verdict."""
_AXES = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The likely causes of a run, and the measurement that would tell most where none is sure."""

    causes: tuple[Cause, ...]
    next_test: str = ""


def causes_of(case: Case, waterfall: Sequence[Term], what_ifs: Sequence[WhatIf]) -> tuple[Cause, ...]:
    """Causes with evidence for them; nothing where a run shows none."""
    return diagnosed(case, waterfall, what_ifs, None).causes


def diagnosed(case: Case, waterfall: Sequence[Term], what_ifs: Sequence[WhatIf], verdict: Verdict | None) -> Diagnosis:
    """The causes with evidence for them, and what to measure next of a run that is slow and does not show why."""
    seen = Seen(case, waterfall, what_ifs)
    signs = signs_of(seen)
    forms = possible_forms({axis: seen.has_axis(axis) for axis in _AXES})
    posterior = Posterior.of(signs, forms)
    likely = {name: posterior.likelihood(name) for name in dict.fromkeys(name for name, _ in forms)}
    best = {name: form_of(posterior.form(name)) for name in likely}
    causes = [_cause(seen, name, likely, best, signs) for name in likely if likely[name] >= LEAST_LIKELIHOOD]
    told = sorted((one for one in causes if one is not None), key=lambda one: (-one.likelihood, -(one.seconds or 0.0)))
    of_what = _SHOWS.get(verdict or "")
    is_told = any(one.likelihood >= SURE for one in told)
    return Diagnosis(
        tuple(one.model_copy(update={"remedy": remedy_for(case, one)}) for one in told),
        "" if of_what is None or is_told else _next_test(seen, likely, of_what, signs),
    )


def _next_test(seen: Seen, likely: Mapping[str, float], of_what: str, signs: Mapping[str, Sign]) -> str:
    """The measurement whose signs would change most of what is believed: Σ likelihood · (leaves − without)."""
    worth: dict[Need, float] = {}
    for sign, kind in KINDS.items():
        if sign in signs or kind.needs.has(seen) or not kind.is_own:
            continue
        names = [name for name in likely if at_most(name, of_what) > KINDS[of_what].without]
        change = sum(likely[name] * (at_most(name, sign) - kind.without) for name in names)
        worth[kind.needs] = worth.get(kind.needs, 0.0) + change
    best = max(worth, key=lambda need: worth[need], default=None)
    return best.says if best is not None and worth[best] > 0 else ""


def _cause(
    seen: Seen, name: str, likely: Mapping[str, float], best: Mapping[str, Form], signs: Mapping[str, Sign]
) -> Cause | None:
    """The cause with its evidence; None where no sign of its own speaks for it."""
    found = speaking(best[name], signs)
    if not _has_own(best[name], signs):
        return None
    told = [signs[sign] for sign in found]
    known_s = [sign.seconds for sign, kind in zip(told, found, strict=True) if KINDS[kind].is_own and sign.seconds]
    return Cause(
        name=name,
        likelihood=round(likely[name], 2),
        evidence="; ".join(sign.says for sign in told[:_MOST_SIGNS]),
        where=next((sign.where for sign in told if sign.where), ""),
        seconds=_at_most(seen, name, max(known_s)) if known_s else None,
        test=_test(seen, name, likely, best, signs),
    )


def speaking(form: Form, signs: Mapping[str, Sign]) -> list[str]:
    """The seen signs that a cause makes likelier: those of its own first, the most telling before others."""
    telling = {
        sign: leaves(form, sign) / KINDS[sign].without
        for sign, shown in signs.items()
        if shown.is_seen and leaves(form, sign) >= _TELLING * KINDS[sign].without
    }
    return sorted(telling, key=lambda sign: (not KINDS[sign].is_own, -telling[sign]))


def _has_own(form: Form, signs: Mapping[str, Sign]) -> bool:
    """True where a sign that speaks of causes by itself speaks for this one."""
    return any(KINDS[sign].is_own for sign in speaking(form, signs))


def _at_most(seen: Seen, name: str, found_s: float) -> float:
    """Seconds that a cause accounts for: no more than the step is above the lower end of what was predicted."""
    prediction = seen.case.prediction
    if prediction is None or seen.step_s is None or HYPOTHESES[name].is_choice:
        return found_s
    low_s = (prediction.step_s_interval or (prediction.step_s, 0.0))[0]
    return min(found_s, max(0.0, seen.step_s - low_s))


def _test(
    seen: Seen, name: str, likely: Mapping[str, float], best: Mapping[str, Form], signs: Mapping[str, Sign]
) -> str:
    """The measurement of a sign that the files lack and that tells a cause best from its rival.

    The rival is the next likely cause that has evidence of its own, or none at all; one that is nearly impossible needs
    no test.
    """
    nothing = 1 - likely[name]
    others = {
        other: value
        for other, value in likely.items()
        if other != name and value >= _RIVAL * likely[name] and _has_own(best[other], signs)
    }
    rival = max(others, key=lambda other: others[other], default=None)
    if rival is None and nothing < _RIVAL * likely[name]:
        return ""
    change = {
        sign: abs(leaves(best[name], sign) - (leaves(best[rival], sign) if rival else kind.without))
        for sign, kind in KINDS.items()
        if sign not in signs and not kind.needs.has(seen)
    }
    telling = max(change, key=lambda sign: change[sign], default=None)
    if telling is None or change[telling] < _LEAST_CHANGE:
        return ""
    from_what = f"from “{HYPOTHESES[rival].says}”" if rival else "from a run in which nothing is wrong"
    return f"{KINDS[telling].needs.says}; it tells this {from_what}"
