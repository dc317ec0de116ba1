"""Padded batches: the longest of the examples that a micro-batch draws decides its length.

Of b lengths that are drawn independently, the longest is at most x with the probability F(x)ᵇ, F being the share of
examples no longer than x.
"""

from __future__ import annotations

from itertools import pairwise

from planner.specs.training import TrainingSpec

Lengths = tuple[tuple[int, float], ...]
"""Lengths in tokens, ascending, and the probability of each."""


def example_lengths(training: TrainingSpec) -> Lengths:
    """The lengths of a training's examples, longer ones cut to a sequence; all as long as a sequence where none are
    stated."""
    shares: dict[int, float] = {}
    for entry in training.document_lengths or ():
        length = min(entry.length, training.seq_length)
        shares[length] = shares.get(length, 0.0) + entry.share
    if not shares:
        return ((training.seq_length, 1.0),)
    total = sum(shares.values())
    return tuple((length, shares[length] / total) for length in sorted(shares))


def longest_of(lengths: Lengths, count: int) -> Lengths:
    """The distribution of the longest of `count` lengths."""
    reached = [0.0]
    for _, share in lengths:
        reached.append(min(reached[-1] + share, 1.0))
    reached[-1] = 1.0
    chances = [after**count - before**count for before, after in pairwise(reached)]
    return tuple((length, chance) for (length, _), chance in zip(lengths, chances, strict=True))


def mean_length(lengths: Lengths) -> float:
    """The mean length."""
    return sum(length * share for length, share in lengths)


def padding_fraction(lengths: Lengths, count: int) -> float:
    """Share of the tokens of micro-batches of `count` examples that is padding."""
    return 1 - mean_length(lengths) / mean_length(longest_of(lengths, count))
