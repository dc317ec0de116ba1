"""Packed documents: how much of a sequence's attention stays within them, and how unevenly it falls on ranks.

Documents follow one another without padding, the stream is cut at every sequence's end, and no token attends to
another document. Two tokens at a distance x are of one document with the probability E[max(l − x, 0)] / E[l], l being a
document's length. Of the s² pairs of a sequence's tokens, half of which are causal, there are attended

    ∫₀ʷ (s − x) · E[max(l − x, 0)] / E[l] dx = E[s·l·m − (s + l)·m²/2 + m³/3] / E[l],   m = min(l, s, w)

where w is a window's keys, or s. One endless document gives w·(s − w/2). Short documents give s · E[l²] / 2E[l].

In padded batches the longest of the examples that a micro-batch draws decides its length. Of b lengths that are drawn
independently, the longest is at most x with the probability F(x)ᵇ, F being the share of examples no longer than x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from planner.shape import FloatArray, Number, Shape, ceil, log2, maximum, minimum
from planner.specs.hardware import HardwareSpec
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.spec import RuntimeSpec

PRICED = ("cudnn", "flash")
"""Kernels that profiles have numbers of, by their names there."""
PREFERS_CUDNN = ("hopper", "blackwell")
"""Silicon on which torch tries cuDNN's kernel first, from cuDNN 9.15.1 on, which torch's wheels have since 2.11. With
older ones, and on all other silicon, FlashAttention-2 comes first (sdp_utils.cpp; pytorch/pytorch#162073, #169849)."""
CUDNN_HEAD_DIM = 128
"""The widest heads that cuDNN's kernel takes in training, beside those of MLA; from cuDNN 9.22 on also 256
(sdp_utils.cpp)."""
MLA_DIMS = (192, 128)


def calls_flash(window: int, has_sinks: bool, cp: Number) -> Any:
    """True where ranks call FlashAttention-2 themselves, if no mask forbids it.

    torch's own attention takes neither windows nor sinks, and aligns a causal mask to the first key, while a part of a
    split sequence needs it aligned to the last.
    """
    return np.logical_or(window > 0 or has_sinks, np.greater(cp, 1))


def needs_mask(model: ModelSpec, kind: LayerKind, seq_length: int) -> bool:
    """True where a layer's scores need a tensor of their own: ALiBi, and chunks shorter than the sequence."""
    if kind.attention == "full":
        return model.position_embedding == "alibi"
    return model.attention_chunk_size is not None and model.attention_chunk_size < seq_length


def torch_choice(hardware: HardwareSpec, qk_dim: int, v_dim: int) -> Literal["cudnn", "flash"]:
    """The kernel that torch is expected to take where the layer leaves it the choice.

    It is an expectation: versions of torch and cuDNN differ, so ranks report what ran.
    """
    fits = max(qk_dim, v_dim) <= CUDNN_HEAD_DIM or (qk_dim, v_dim) == MLA_DIMS
    has_cudnn = hardware.efficiency.cudnn is not None and hardware.architecture in PREFERS_CUDNN
    return "cudnn" if has_cudnn and fits else "flash"


def kernel_of(model: ModelSpec, kind: LayerKind, hardware: HardwareSpec, cp: int, seq_length: int) -> str:
    """The kernel that a layer's attention is expected to take; `mask` where nothing prices it."""
    if needs_mask(model, kind, seq_length):
        return "mask"
    if calls_flash(window_of(model, kind, seq_length), model.attention_sinks, cp):
        return "flash"
    return torch_choice(hardware, *head_dims(model.of_layer(kind)))


def window_of(model: ModelSpec, kind: LayerKind, seq_length: int) -> int:
    """Keys that a query of a sliding layer sees; 0 elsewhere, and where no sequence is longer, as kernels take it."""
    window = model.sliding_window or 0 if kind.attention == "sliding" else 0
    return window if window < seq_length else 0


def head_dims(model: ModelSpec) -> tuple[int, int]:
    """Widths of one head's keys and values in the core of attention."""
    if model.mla is None:
        return model.head_dim, model.value_head_dim or model.head_dim
    return model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim, model.mla.v_head_dim


def torch_took(kernels: Collection[str]) -> Literal["sdpa", "sdpa-cudnn", "sdpa-flash"]:
    """RuntimeSpec.attention_kernel of ranks that ran these kernels: cuDNN's runs nowhere but where torch chose it."""
    if "cudnn" in kernels:
        return "sdpa-cudnn"
    return "sdpa-flash" if "flash" in kernels else "sdpa"


Documents = tuple[tuple[int, float], ...]
"""Lengths in tokens and the share of the documents that each has; empty where a sequence is one document."""

_SEED, _SEQUENCES, _MOST_DOCUMENTS = 26, 1024, 2_000_000


def masked_documents(training: TrainingSpec, runtime: RuntimeSpec) -> Documents:
    """The documents that attention stays within: none where the trainer attends across them, or where each has a
    sequence to itself."""
    masks = runtime.masks_documents or runtime.dynamic_cp
    if training.document_lengths is None or not masks or training.batching == "padded":
        return ()
    return tuple((entry.length, entry.share) for entry in training.document_lengths)


def attended_fraction(documents: Documents, kv_len: Number, window: Number) -> Number:
    """Share of the kv_len × kv_len square that is attended within documents; ½ for one of endless length."""
    lengths, shares = _columns(documents)
    spans, index = np.unique(np.asarray(kv_len, dtype=float), return_inverse=True)
    width = np.minimum(window, spans) if np.any(np.asarray(window) > 0) else spans
    met = np.minimum(lengths, width)
    pairs = spans * lengths * met - (spans + lengths) * met**2 / 2 + met**3 / 3
    fractions = (shares * pairs).sum(axis=0) / (shares * lengths).sum() / spans**2
    return np.reshape(fractions[index], np.shape(kv_len))


def rank_imbalance(documents: Documents, kv_len: Number, cp: Number) -> Number:
    """Attention of the fullest of `cp` ranks over their mean, each of which has the i-th and the i-th last of 2·cp
    equal pieces of a sequence: pieces of unlike documents are not alike."""
    return _by_pair(lambda span, ranks: _spread(documents, int(span), int(ranks))[1], kv_len, cp)


def excess_fraction(documents: Documents, kv_len: Number, num_sequences: Number, num_ranks: Number) -> Number:
    """How far the ranks with most attention exceed the mean, if each of `num_ranks` has `num_sequences` sequences.

    The expected largest of n sums of k sequences is a normal one's, √(σ²/k) · Φ⁻¹((n − ⅜) / (n + ¼)) (Blom 1958); it is
    no more than a rank has whose sequences are a single document each.
    """
    deviation = _by_pair(lambda span, _: _spread(documents, int(span), 1)[0], kv_len, 1)
    most = 0.5 / attended_fraction(documents, kv_len, 0) - 1
    return np.minimum(deviation * largest_normal(num_ranks) / np.sqrt(num_sequences), most)


def excess_microbatches(documents: Documents, kv_len: Number, num_sequences: Number, shape: Shape) -> Number:
    """Micro-batches of attention that a step takes longer than the mean one, of `num_sequences` sequences each.

    Ranks that exchange within every micro-batch wait for each other in each: those that share experts, and all under
    ZeRO-3 without a pipeline. Others wait at the step's end, when each has had the luck of all its micro-batches. The
    stages of 1F1B go at the pace of the fullest of the micro-batches that they hold: 64 that spread by 20% take
    10, 18 and 28% more over 2, 4 and 8 stages. Those that interleave have other chunks to run meanwhile, and are filled
    and drained at the pace of the fullest micro-batch.
    """
    times, excess = shape.num_microbatches, partial(excess_fraction, documents, kv_len)
    of_experts = np.clip(shape.ep * shape.etp / (shape.tp * shape.cp), 1, shape.dp)
    synced = np.where((shape.pp == 1) & (shape.zero_stage == 3), shape.dp, of_experts)
    in_each = times * excess(num_sequences, synced)
    at_the_end = times * excess(num_sequences * times, shape.dp / synced)
    held = times * excess(num_sequences, minimum(shape.pp, times))
    ends = (shape.pp - 1) / shape.vpp * excess(num_sequences, times)
    return in_each + at_the_end + np.where(shape.vpp > 1, ends, held)


def largest_normal(count: Number) -> Number:
    """Expected largest of so many standard normal numbers."""
    return _by_pair(lambda n, _: NormalDist().inv_cdf((n - 0.375) / (n + 0.25)), count, 1)


def _columns(documents: Documents) -> tuple[FloatArray, FloatArray]:
    """Lengths and shares as columns."""
    table = np.array(documents, dtype=float)
    return table[:, :1], table[:, 1:]


def _by_pair(value_of: Callable[[float, float], float], first: Number, second: Number) -> Number:
    """The value of each pair of numbers, found once for each that differs."""
    pairs = np.stack([np.ravel(part) for part in np.broadcast_arrays(first, second)], axis=1)
    unlike, index = np.unique(pairs, axis=0, return_inverse=True)
    values = np.array([value_of(float(a), float(b)) for a, b in unlike])
    return np.reshape(values[np.ravel(index)], np.broadcast_shapes(np.shape(first), np.shape(second)))


@lru_cache(maxsize=256)
def _spread(documents: Documents, span: int, cp: int) -> tuple[float, float]:
    """Standard deviation of a sequence's attention over its mean, and that of the fullest of its ranks over the mean.

    Read from a thousand sequences of a stream of documents that are drawn at random, the same ones every time.
    """
    lengths, shares = (column[:, 0] for column in _columns(documents))
    mean = float((shares * lengths).sum() / shares.sum())
    num_sequences = int(np.clip(_MOST_DOCUMENTS * mean / span, 64, _SEQUENCES))
    random, num_documents = np.random.default_rng(_SEED), int(num_sequences * span / mean * 1.5) + 64
    drawn = random.choice(lengths, num_documents, p=shares / shares.sum())
    total = num_sequences * span
    ends = np.cumsum(drawn)
    if ends[-1] < total:  # a few long documents: the last one drawn goes on
        ends[-1] = total
    starts = np.union1d(np.concatenate([[0], ends[ends < total]]), np.arange(num_sequences) * span)
    whole = np.concatenate([[0.0], np.cumsum(np.diff(np.append(starts, total)) ** 2 / 2)])
    at = np.arange(2 * cp * num_sequences + 1) * (span / (2 * cp))
    document = np.searchsorted(starts, at, side="right") - 1
    done = whole[document] + (at - starts[document]) ** 2 / 2
    pieces = np.diff(done).reshape(num_sequences, 2 * cp)
    by_rank = pieces[:, :cp] + pieces[:, : cp - 1 : -1]
    per_sequence = by_rank.sum(axis=1)
    fullest = float((by_rank.max(axis=1) * cp).mean() / per_sequence.mean())
    return float(per_sequence.std() / per_sequence.mean()), fullest


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


OCTAVES = 12
"""Halvings of a sequence's length below which texts count as of one length."""
UNEVEN_RANKS = 0.05
"""Share by which Megatron-LM lets the fullest rank's attention exceed what it aims at (core/pipeline_parallel/
hybrid_cp_schedule.py, `delta`; core/datasets/data_schedule_utils.py)."""


def texts_by_ranks(training: TrainingSpec, shape: Shape, packs: bool) -> list[tuple[Number, Shape]]:
    """Texts of each octave of lengths over as many ranks as hold them, a power of two, and the micro-batches of them
    for each micro-batch of `shape`, as shares of its ranks.

    A rank holds as many tokens as in `shape`. The length of an octave, Σl² / Σl, has its texts' tokens and attention.
    A text is a micro-batch of its own, or, where a trainer `packs`, as many as fill the ranks of the longest share one.
    """
    octaves: dict[int, tuple[float, float]] = {}
    uneven = 0.0 if training.document_lengths is None else UNEVEN_RANKS
    for length, share in example_lengths(training):
        octave = min(int(math.log2(training.seq_length / length)), OCTAVES)
        before = octaves.get(octave, (0.0, 0.0))
        octaves[octave] = before[0] + share * length, before[1] + share * length**2
    all_tokens = sum(tokens for tokens, _ in octaves.values())
    found: list[tuple[Number, Shape]] = []
    for tokens, squares in octaves.values():
        mean, room = squares / tokens, shape.tokens
        cp = minimum(2 ** ceil(log2(maximum(mean / room, 1.0))), shape.dp * shape.cp)
        batch: Number = maximum(room * cp / mean, 1.0) if packs else 1.0
        times = (1 + uneven) * tokens / all_tokens * room * cp / (mean * batch)
        own = replace(shape, cp=cp, dp=shape.dp * shape.cp / cp, seq_length=mean, micro_batch_size=batch)
        found.append((times, own))
    return found


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
