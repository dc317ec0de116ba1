"""The likely causes of what a run shows, the likeliest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.observe.case import Case
from planner.observe.causes.hypotheses import HYPOTHESES, Form
from planner.observe.causes.kinds import KINDS, signs_of
from planner.observe.causes.posterior import Posterior, form_of, leaves, possible_forms
from planner.observe.causes.remedies import remedy_for
from planner.observe.causes.signs.seen import Seen
from planner.observe.causes.signs.sign import Sign
from planner.observe.observation import Cause, Term, WhatIf

LEAST_LIKELIHOOD = 0.1
_TELLING = 3.0
"""A sign speaks for a cause that makes it so many times as likely as a run without a fault does."""
_MOST_SIGNS = 3
_LEAST_CHANGE = 0.2
_AXES = ("tp", "cp", "ep", "dp", "pp")


def causes_of(case: Case, waterfall: Sequence[Term], what_ifs: Sequence[WhatIf]) -> tuple[Cause, ...]:
    """Causes with evidence for them; nothing where a run shows none."""
    seen = Seen(case, waterfall, what_ifs)
    signs = signs_of(seen)
    forms = possible_forms({axis: seen.has_axis(axis) for axis in _AXES})
    posterior = Posterior.of(signs, forms)
    likely = {name: posterior.likelihood(name) for name in dict.fromkeys(name for name, _ in forms)}
    best = {name: form_of(posterior.form(name)) for name in likely}
    ranked = sorted(likely, key=lambda name: -likely[name])
    causes = [
        _cause(seen, name, likely[name], best, ranked, signs) for name in ranked if likely[name] >= LEAST_LIKELIHOOD
    ]
    told = sorted((one for one in causes if one is not None), key=lambda one: (-one.likelihood, -(one.seconds or 0.0)))
    return tuple(one.model_copy(update={"remedy": remedy_for(case, one)}) for one in told)


def _cause(
    seen: Seen, name: str, likelihood: float, best: Mapping[str, Form], ranked: Sequence[str], signs: Mapping[str, Sign]
) -> Cause | None:
    """The cause with its evidence; None where no sign of its own speaks for it."""
    found = speaking(best[name], signs)
    if not any(KINDS[sign].is_own for sign in found):
        return None
    told = [signs[sign] for sign in found]
    known_s = [sign.seconds for sign, kind in zip(told, found, strict=True) if KINDS[kind].is_own and sign.seconds]
    return Cause(
        name=name,
        likelihood=round(likelihood, 2),
        evidence="; ".join(sign.says for sign in told[:_MOST_SIGNS]),
        where=next((sign.where for sign in told if sign.where), ""),
        seconds=_at_most(seen, name, max(known_s)) if known_s else None,
        test=_test(name, best, ranked, signs),
    )


def speaking(form: Form, signs: Mapping[str, Sign]) -> list[str]:
    """The seen signs that a cause makes likelier: those of its own first, the most telling before others."""
    telling = {
        sign: leaves(form, sign) / KINDS[sign].without
        for sign, shown in signs.items()
        if shown.is_seen and leaves(form, sign) >= _TELLING * KINDS[sign].without
    }
    return sorted(telling, key=lambda sign: (not KINDS[sign].is_own, -telling[sign]))


def _at_most(seen: Seen, name: str, found_s: float) -> float:
    """Seconds that a cause accounts for: no more than the step is above the lower end of what was predicted."""
    prediction = seen.case.prediction
    if prediction is None or seen.step_s is None or HYPOTHESES[name].is_choice:
        return found_s
    low_s = (prediction.step_s_interval or (prediction.step_s, 0.0))[0]
    return min(found_s, max(0.0, seen.step_s - low_s))


def _test(name: str, best: Mapping[str, Form], ranked: Sequence[str], signs: Mapping[str, Sign]) -> str:
    """The measurement of a sign that the files do not show and that tells a cause best from the next likely one."""
    other = next((one for one in ranked if one != name), None)
    change = {
        sign: abs(leaves(best[name], sign) - (leaves(best[other], sign) if other else kind.without))
        for sign, kind in KINDS.items()
        if sign not in signs
    }
    telling = max(change, key=lambda sign: change[sign], default=None)
    if telling is None or change[telling] < _LEAST_CHANGE:
        return ""
    from_what = HYPOTHESES[other].says if other else "none of these"
    return f"{KINDS[telling].needs}; it tells “{HYPOTHESES[name].says}” from “{from_what}”"
