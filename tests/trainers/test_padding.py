"""The longest of drawn lengths: against every draw there is, and laws over counts."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.specs.training import DocumentLength, TrainingSpec
from planner.trainers.documents import Lengths, example_lengths, longest_of, mean_length, padding_fraction


def _training(lengths: Lengths, seq_length: int = 10_000) -> TrainingSpec:
    documents = tuple(DocumentLength(length=length, share=share) for length, share in lengths)
    return TrainingSpec(
        seq_length=seq_length, global_batch_size=4, document_lengths=documents or None, batching="padded"
    )


_LENGTHS = st.dictionaries(st.integers(1, 5000), st.floats(0.05, 5), min_size=1, max_size=4)


@given(shares=_LENGTHS, count=st.integers(1, 4))
def test_the_longest_is_as_likely_as_all_draws_say(shares: dict[int, float], count: int) -> None:
    lengths = example_lengths(_training(tuple(shares.items())))
    counted = dict.fromkeys((length for length, _ in lengths), 0.0)
    for draw in product(lengths, repeat=count):
        counted[max(length for length, _ in draw)] += prod(share for _, share in draw)
    found = dict(longest_of(lengths, count))
    assert found.keys() == counted.keys()
    assert all(found[length] == pytest.approx(chance, abs=1e-9) for length, chance in counted.items())


@given(shares=_LENGTHS, count=st.integers(1, 64))
def test_more_examples_are_padded_more_and_never_beyond_the_longest(shares: dict[int, float], count: int) -> None:
    lengths = example_lengths(_training(tuple(shares.items())))
    fewer, more = (padding_fraction(lengths, each) for each in (count, count + 1))
    assert -1e-12 <= fewer <= more + 1e-12
    assert mean_length(longest_of(lengths, count)) <= lengths[-1][0] * (1 + 1e-12)


def test_longer_examples_are_cut_to_a_sequence() -> None:
    cut = example_lengths(_training(((100, 1.0), (300, 2.0), (5000, 1.0)), seq_length=300))
    assert cut == ((100, 0.25), (300, 0.75))


def test_without_lengths_every_example_is_a_sequence() -> None:
    assert example_lengths(_training((), seq_length=77)) == ((77, 1.0),)
    assert padding_fraction(((77, 1.0),), 8) == 0
