"""Probabilities of causes by the signs that were seen: several may be at work at once, each leaves signs by itself.

P(sign | set) = 1 − (1 − P(sign | none)) · Π over the set of (1 − leaves) ÷ (1 − P(sign | none)): a sign is not
there where nothing leaves it (a noisy or). A sign of strength w counts w · P + (1 − w) · (1 − P). Sets of up to three forms are
compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from planner.observe.causes.hypotheses import HYPOTHESES, Form
from planner.observe.causes.kinds import KINDS
from planner.observe.causes.signs.sign import Sign

MOST_AT_ONCE = 3
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


def at_most(name: str, sign: str) -> float:
    """Probability of a sign where a cause is at work in the form that leaves it most."""
    return max(leaves(form, sign) for form in HYPOTHESES[name].forms)


@dataclass(frozen=True)
class Posterior:
    """Sets of forms with the probability of each, the empty one among them; they add up to 1."""

    sets: tuple[tuple[OfForm, ...], ...]
    weights: Floats

    @classmethod
    def of(cls, signs: Mapping[str, Sign], possible: Sequence[OfForm] = ALL) -> Posterior:
        """The posterior of the signs that the files can show."""
        sets = tuple(chain(*(combinations(possible, count) for count in range(MOST_AT_ONCE + 1))))
        holds = np.array([[key in chosen for key in possible] for chosen in sets], float)
        priors = np.array([form_of(key).prior for key in possible])
        logs = holds @ np.log(priors / (1 - priors))
        names = tuple(signs)
        none = np.array([1 - KINDS[name].without for name in names])
        left = np.array([[1 - leaves(form_of(key), name) for name in names] for key in possible]).reshape(
            -1, len(names)
        )
        shown = 1 - none * np.exp(holds @ np.log(left / none))
        strength = np.array([signs[name].strength for name in names])
        logs = logs + np.log(strength * shown + (1 - strength) * (1 - shown)).sum(axis=1)
        weights = np.exp(logs - logs.max())
        return cls(sets, weights / weights.sum())

    def likelihood(self, name: str) -> float:
        """Probability that a cause is at work in any of its forms, alone or with others."""
        of_cause = [any(key[0] == name for key in chosen) for chosen in self.sets]
        return float(self.weights[np.array(of_cause, bool)].sum())

    def form(self, name: str) -> OfForm:
        """The likeliest form of a cause."""
        keys = {key for chosen in self.sets for key in chosen if key[0] == name}
        return max(sorted(keys), key=self._weight)

    def _weight(self, key: OfForm) -> float:
        return float(self.weights[np.array([key in chosen for chosen in self.sets], bool)].sum())


def possible_forms(has_axis: Mapping[str, bool], keys: Collection[OfForm] = ALL) -> tuple[OfForm, ...]:
    """The forms that a job can have: those of an axis that it does not have are left out."""
    return tuple(key for key in keys if has_axis.get(form_of(key).axis, True))
