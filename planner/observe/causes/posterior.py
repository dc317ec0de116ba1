"""Probabilities of causes by the signs that were seen: several may be at work at once, each leaves signs by itself.

P(sign | set) = 1 − (1 − P(sign | none)) · Π over the set of (1 − leaves) ÷ (1 − P(sign | none)): a sign is not
there where nothing leaves it (a noisy or). A sign of strength w counts w · P + (1 − w) · (1 − P). Sets of up to three
forms are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from planner.observe.causes.hypotheses import HYPOTHESES, Form
from planner.observe.causes.kinds import KINDS
from planner.observe.causes.signs.sign import Sign

MOST_AT_ONCE = 3
LONGER_STEPS = ("slower", "slower_run")
"""Signs that a step is longer than it should be, whose seconds are the whole difference."""
_LEAST_WITHOUT = 1e-3
Floats = NDArray[np.float64]
OfForm = tuple[str, int]
"""The name of a cause, and the place of one of its forms."""
ALL: tuple[OfForm, ...] = tuple((name, place) for name, row in HYPOTHESES.items() for place in range(len(row.forms)))


def form_of(key: OfForm) -> Form:
    """The form of a cause."""
    return HYPOTHESES[key[0]].forms[key[1]]


def leaves(form: Form, sign: str) -> float:
    """Probability of a sign where one form is at work; as without it where the form does not speak of the sign."""
    return max(form.leaves.get(sign, 0.0), KINDS[sign].without)


def _leaves_of(form: Form, name: str, signs: Mapping[str, Sign]) -> float:
    """Probability of a sign, as far as the form's own seconds can make a step so much longer.

    A form whose signs show less than half of what the step takes longer makes it so much less likely.
    """
    chance, gap_s = form.leaves.get(name, 0.0), signs[name].seconds
    if name not in LONGER_STEPS or not gap_s:
        return chance
    known_s = [
        sign.seconds
        for other, sign in signs.items()
        if sign.seconds is not None and sign.is_seen and KINDS[other].is_own and other in form.leaves
    ]
    return chance * min(1.0, max(known_s) / (gap_s / 2)) if known_s else chance


def seldom(name: str, sign: Sign) -> float:
    """Probability of a sign so large in a run without a fault: it falls with the square, down to one in a thousand."""
    return max(KINDS[name].without / sign.times**2, _LEAST_WITHOUT)


def at_most(name: str, sign: str) -> float:
    """Probability of a sign where a cause is at work in the form that leaves it most."""
    return max(leaves(form, sign) for form in HYPOTHESES[name].forms)


@dataclass(frozen=True)
class Posterior:
    """Sets of forms with the probability of each, the empty one first; they add up to 1."""

    possible: tuple[OfForm, ...]
    weights: Floats

    @classmethod
    def of(cls, signs: Mapping[str, Sign], possible: tuple[OfForm, ...] = ALL) -> Posterior:
        """The posterior of the signs that the files can show."""
        holds = _sets(len(possible))
        priors = np.array([form_of(key).prior for key in possible])
        without = np.array([seldom(name, sign) for name, sign in signs.items()])
        left = np.array([[1 - _leaves_of(form_of(key), name, signs) for name in signs] for key in possible])
        fewer = np.minimum(left.reshape(len(possible), len(signs)) / (1 - without), 1.0)
        shown = 1 - (1 - without) * np.exp(holds @ np.log(fewer))
        strength = np.array([sign.strength for sign in signs.values()])
        logs = holds @ np.log(priors / (1 - priors))
        logs = logs + np.log(strength * shown + (1 - strength) * (1 - shown)).sum(axis=1)
        weights = np.exp(logs - logs.max())
        return cls(possible, weights / weights.sum())

    def likelihood(self, name: str) -> float:
        """Probability that a cause is at work in any of its forms, alone or with others."""
        return self._held([index for index, key in enumerate(self.possible) if key[0] == name])

    def form(self, name: str) -> OfForm:
        """The likeliest form of a cause."""
        own = [index for index, key in enumerate(self.possible) if key[0] == name]
        return self.possible[max(own, key=lambda index: self._held([index]))]

    def _held(self, chosen: Sequence[int]) -> float:
        """Weight of the sets that hold one of some forms."""
        return float(self.weights[_sets(len(self.possible))[:, list(chosen)].any(axis=1)].sum())


@cache
def _sets(num_forms: int) -> Floats:
    """A row of zeros and ones for each set of so many forms, the smallest first."""
    sets = [chosen for count in range(MOST_AT_ONCE + 1) for chosen in combinations(range(num_forms), count)]
    holds = np.zeros((len(sets), num_forms))
    for row, chosen in enumerate(sets):
        holds[row, list(chosen)] = 1.0
    return holds


def possible_forms(has_axis: Mapping[str, bool], keys: Collection[OfForm] = ALL) -> tuple[OfForm, ...]:
    """The forms that a job can have: those of an axis that it does not have are left out."""
    return tuple(key for key in keys if has_axis.get(form_of(key).axis, True))
