"""Probabilities of causes by the signs that were seen: several may be at work at once, each leaves signs by itself.

P(sign | set) = 1 − (1 − P(sign | none)) · Π over the set of (1 − leaves) ÷ (1 − P(sign | none)): what none of them
leaves is not there (a noisy or). A sign of strength w counts w · P + (1 − w) · (1 − P). Sets of up to three are
compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain, combinations
from math import prod

from planner.observe.causes.hypotheses import HYPOTHESES, Hypothesis
from planner.observe.causes.kinds import KINDS
from planner.observe.causes.signs.sign import Sign

MOST_AT_ONCE = 3
Causes = frozenset[str]


def chance(sign: str, causes: Collection[str]) -> float:
    """Probability that a run with these causes, and no other, shows a sign."""
    none = 1 - KINDS[sign].without
    left = (1 - leaves(HYPOTHESES[cause], sign) for cause in causes)
    return 1 - none * prod(min(1.0, one / none) for one in left)


def leaves(hypothesis: Hypothesis, sign: str) -> float:
    """Probability of a sign where one cause is at work; as without it where the cause does not speak of the sign."""
    return max(hypothesis.leaves.get(sign, 0.0), KINDS[sign].without)


def posterior(signs: Mapping[str, Sign], possible: Collection[str] = tuple(HYPOTHESES)) -> dict[Causes, float]:
    """Probability of each set of causes, the empty one among them; they add up to 1."""
    sets = [frozenset(chosen) for chosen in chain(*(combinations(possible, n) for n in range(MOST_AT_ONCE + 1)))]
    weights = [_prior(chosen, possible) * _likelihood(chosen, signs) for chosen in sets]
    total = sum(weights)
    return {chosen: weight / total for chosen, weight in zip(sets, weights, strict=True)}


def _prior(chosen: Causes, possible: Collection[str]) -> float:
    return prod(HYPOTHESES[name].prior if name in chosen else 1 - HYPOTHESES[name].prior for name in possible)


def _likelihood(chosen: Causes, signs: Mapping[str, Sign]) -> float:
    found = ((sign.strength, chance(name, chosen)) for name, sign in signs.items())
    return prod(strength * seen + (1 - strength) * (1 - seen) for strength, seen in found)


def marginals(of_sets: Mapping[Causes, float], possible: Collection[str]) -> dict[str, float]:
    """Probability that each cause is at work, alone or with others."""
    return {name: sum(weight for chosen, weight in of_sets.items() if name in chosen) for name in possible}
