"""Batches near the one asked for: which one GPUs divide best, and when it is offered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import ClusterSpec, TrainingSpec, plan
from planner.shape import NEAR_FRACTION, liked_batch
from planner.specs.training import SearchLimits

LIMITS = SearchLimits(switches="default", tp=(1, 2, 4), cp=(1,), schedule=("1f1b",), top=1)


@pytest.mark.parametrize(
    ("asked", "gpus", "liked"),
    [(15_625, 2048, 15_360), (16_384, 2048, 16_384), (1000, 64, 1024), (1024, 100, 1000), (2000, 16_384, 2048)],
)
def test_the_batch_that_the_gpus_divide_best(asked: int, gpus: int, liked: int) -> None:
    assert liked_batch(asked, gpus) == liked


@given(st.integers(1, 100_000), st.integers(1, 5000))
def test_it_is_near_and_no_batch_nearer_has_as_large_a_divisor(asked: int, gpus: int) -> None:
    liked = liked_batch(asked, gpus)
    assert liked is not None
    assert abs(liked - asked) <= NEAR_FRACTION * asked
    divisor = max(d for d in range(1, gpus + 1) if gpus % d == 0 and liked % d == 0)
    reach = abs(liked - asked)
    nearer = range(max(asked - reach + 1, 1), asked + reach)
    assert not any(size % divisor == 0 for size in nearer)


def test_a_batch_between_two_whole_numbers_of_sequences_has_none_near() -> None:
    assert liked_batch(1.46, 8) is None


def test_a_batch_that_leaves_gpus_idle_gets_an_offer_that_holds() -> None:
    cluster = ClusterSpec(hardware="h100", num_gpus=32)
    odd = plan("8b", cluster, TrainingSpec(seq_length=2048, global_batch_size=131), limits=LIMITS)
    assert odd.batch_offer.global_batch_size == 128
    even = plan("8b", cluster, TrainingSpec(seq_length=2048, global_batch_size=128), limits=LIMITS)
    assert even.batch_offer is None
    assert even.step.step_s == pytest.approx(odd.batch_offer.step_s, rel=0.01)
    assert odd.batch_offer.tokens_per_s > 1.02 * odd.step.tokens_per_s
    few = ClusterSpec(hardware="h100", num_gpus=6), TrainingSpec(seq_length=2048, global_batch_size=16)
    far = plan("1b", *few, runtime="hf")
    assert (far.parallelism.num_gpus_spare, far.batch_offer.global_batch_size) == (2, 18)
