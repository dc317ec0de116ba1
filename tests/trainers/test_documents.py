"""Packed documents against masks that are counted, and against many sequences drawn and cut by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.layout.evaluate import evaluate
from planner.physics import compute
from planner.physics.operators import Operator, operators_of
from planner.physics.passes import lateness
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import DocumentLength, Parallelism, TrainingSpec
from planner.trainers.documents import attended_fraction, excess_fraction, excess_microbatches, rank_imbalance
from planner.trainers.load import load_runtime


def counted_fraction(lengths: list[int], seq_length: int, window: int) -> float:
    """Mean share of the causal mask that is set, over all places at which a stream of documents may be cut."""
    stream = np.repeat(np.arange(len(lengths)), lengths)
    total = len(stream)
    rows = np.arange(seq_length)
    causal = (rows[:, None] >= rows[None, :]) & (rows[:, None] - rows[None, :] < (window or seq_length))
    attended = 0.0
    for first in range(total):
        document = stream[(first + rows) % total] + len(lengths) * ((first + rows) // total)
        attended += (causal & (document[:, None] == document[None, :])).sum() - seq_length / 2
    return attended / total / seq_length**2


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(2, 48), st.integers(0, 30))
def test_share_is_that_of_the_mask(lengths: list[int], seq_length: int, window: int) -> None:
    documents = tuple((length, 1.0) for length in lengths)
    expected = counted_fraction(lengths, seq_length, window)
    # an integral counts half of the diagonal, which is less than a key a query, and 1/6 of one where documents end
    assert float(attended_fraction(documents, seq_length, window)) == pytest.approx(expected, abs=0.51 / seq_length)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(40, 400), min_size=1, max_size=4), st.integers(100, 300))
def test_share_without_a_window_is_exact_but_for_the_ends_of_documents(lengths: list[int], seq_length: int) -> None:
    documents = tuple((length, 1.0) for length in lengths)
    expected = counted_fraction(lengths, seq_length, 0)
    assert float(attended_fraction(documents, seq_length, 0)) == pytest.approx(expected, abs=1 / 6 / 40 / seq_length)


def test_endless_documents_attend_as_a_whole_sequence_does() -> None:
    for window in (0, 100, 5000):
        whole = Operator(name="a", kind="attention", q_len=4096, kv_len=4096, window=window)
        endless = Operator(
            name="a", kind="attention", q_len=4096, kv_len=4096, window=window, documents=((10**9, 1.0),)
        )
        assert float(endless.attended_fraction) == pytest.approx(float(whole.attended_fraction), rel=1e-5)


def test_short_documents_attend_to_their_own_length() -> None:
    documents = ((100, 3.0), (900, 1.0))
    mean_met = (3 * 100**2 + 900**2) / (3 * 100 + 900) / 2
    assert float(attended_fraction(documents, 10**6, 0)) == pytest.approx(mean_met / 10**6, rel=1e-3)


def sequences(documents: tuple[tuple[int, float], ...], seq_length: int, count: int, cp: int) -> np.ndarray:
    """Attention of each rank (columns) in each of `count` sequences, one token after the other."""
    lengths, shares = np.array(documents).T
    random = np.random.default_rng(5)
    drawn = random.choice(lengths.astype(int), 4 * count * seq_length // int(lengths.mean()), p=shares / shares.sum())
    position = np.concatenate([np.arange(length) for length in drawn])[: count * seq_length].reshape(count, seq_length)
    start = np.arange(seq_length) - position
    keys = np.where(start < 0, np.arange(seq_length), position) + 0.5
    parts = keys.reshape(count, 2 * cp, -1).sum(axis=2)
    return parts[:, :cp] + parts[:, ::-1][:, :cp]


@pytest.mark.parametrize("cp", [1, 4])
def test_ranks_are_as_uneven_as_in_sequences_cut_by_hand(cp: int) -> None:
    documents = ((100, 0.6), (500, 0.3), (3000, 0.1))
    by_rank = sequences(documents, 2048, 2000, cp)
    fullest = (by_rank.max(axis=1) * cp).mean() / by_rank.sum(axis=1).mean()
    assert float(rank_imbalance(documents, 2048, cp)) == pytest.approx(fullest, rel=0.05)


@pytest.mark.parametrize(("num_ranks", "each"), [(8, 16), (64, 64)])
def test_fullest_rank_has_as_much_as_among_ranks_drawn(num_ranks: int, each: int) -> None:
    documents = ((100, 0.6), (500, 0.3), (3000, 0.1))
    totals = sequences(documents, 2048, 2000, 1).sum(axis=1)
    drawn = np.random.default_rng(1).choice(totals, (400, num_ranks, each)).sum(axis=2)
    expected = (drawn.max(axis=1) / drawn.mean(axis=1)).mean() - 1
    assert float(excess_fraction(documents, 2048, each, num_ranks)) == pytest.approx(expected, rel=0.1)


def test_no_rank_has_more_than_whole_sequences() -> None:
    documents = ((10, 0.999), (10**6, 0.001))
    whole = 0.5 / float(attended_fraction(documents, 4096, 0)) - 1
    assert float(excess_fraction(documents, 4096, 1, 10**6)) == pytest.approx(whole)


def test_ranks_that_meet_in_every_micro_batch_wait_longer() -> None:
    documents = ((400, 0.9), (800, 0.1))
    alone = Shape.of(dp=8, num_microbatches=16, zero_stage=1)
    sharded = Shape.of(dp=8, num_microbatches=16, zero_stage=3)
    ends, each = (float(excess_microbatches(documents, 2048, 1, shape)) for shape in (alone, sharded))
    assert each == pytest.approx(4 * ends)  # √16: a rank's luck does not even out


def price(runtime: str, documents: tuple[DocumentLength, ...] | None, seq_length: int = 32768) -> tuple[float, float]:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=16)
    training = TrainingSpec(seq_length=seq_length, global_batch_size=16, document_lengths=documents)
    step = evaluate("8b", cluster, training, Parallelism(tp=2, cp=2, dp=4), runtime=runtime).step
    return step.step_s, step.mfu


def test_a_trainer_that_masks_documents_is_faster_and_counts_their_flops_alone() -> None:
    short = (DocumentLength(length=1000, share=1.0),)
    step_s, mfu = price("torchtitan", None)
    masked_s, masked_mfu = price("torchtitan", short)
    assert masked_s < 0.85 * step_s
    assert masked_mfu * masked_s < 0.85 * mfu * step_s


def test_a_trainer_that_attends_across_documents_costs_the_same() -> None:
    assert price("megatron", (DocumentLength(length=1000, share=1.0),)) == price("megatron", None)


def test_a_step_waits_for_ranks_with_longer_documents() -> None:
    alike = ((2000, 1.0),)
    # as much attention on average, by few long documents among short ones
    unlike = ((200, 1.0), (4000, 0.0462))
    fractions = [float(attended_fraction(documents, 32768, 0)) for documents in (alike, unlike)]
    assert fractions[1] == pytest.approx(fractions[0], rel=0.01)
    model, runtime = load_model("8b"), load_runtime("torchtitan")
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=16)
    waits_s = []
    for documents in (alike, unlike):
        lengths = tuple(DocumentLength(length=length, share=share) for length, share in documents)
        training = TrainingSpec(seq_length=32768, global_batch_size=64, document_lengths=lengths)
        pricing = Pricing(model=model, training=training, cluster=cluster, runtime=runtime)
        shape = Shape.of(dp=8, tp=2, num_microbatches=8, seq_length=32768, sequence_parallel=1, zero_stage=3)
        op = next(op for op in operators_of(pricing.layer(model.kinds[0], shape)) if op.kind == "attention")
        each_s = sum(compute.operator_seconds(op, cluster.hardware, "bf16", pricing.runtime)) * model.num_hidden_layers
        excess = excess_microbatches(documents, 32768, 1, shape)
        late = lateness(training, cluster)
        waits_s.append(float(pricing.uneven_s(shape)))
        assert waits_s[-1] == pytest.approx(float(late * each_s * excess))
        whole = training.model_copy(update={"document_lengths": None})
        plain = Pricing(model=model, training=whole, cluster=cluster, runtime=runtime)
        assert float(pricing.tail_s(shape) - plain.tail_s(shape)) == pytest.approx(waits_s[-1])
    assert waits_s[1] > 1.1 * waits_s[0] > 0
