"""The split of sequences over context-parallel ranks: which rank holds which tokens.

Of 2·cp equal chunks rank r holds chunks r and 2·cp − 1 − r, so that causal attention is the same work on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from planner.probe.model.peers import TensorPeers


def shard(sequence: Tensor, cp: TensorPeers) -> Tensor:
    """This rank's two chunks, side by side, of a tensor that has a row for each token of a sequence."""
    if cp.size == 1:
        return sequence
    chunks = sequence.chunk(2 * cp.size)
    return torch.cat((chunks[cp.rank], chunks[-1 - cp.rank]))


def gather(x: Tensor, cp: TensorPeers) -> Tensor:
    """The rows of all ranks in the sequence's order: [seq/cp, …] → [seq, …]."""
    chunks = cp.all_gather(x).chunk(2 * cp.size)
    return torch.cat((*chunks[::2], *chunks[:0:-2]))


def scatter(x: Tensor, cp: TensorPeers) -> Tensor:
    """This rank's rows of the sum over all ranks: [seq, …] → [seq/cp, …]."""
    chunks = x.chunk(2 * cp.size)
    pairs = zip(chunks[: cp.size], reversed(chunks), strict=False)
    return cp.reduce_scatter(torch.cat([chunk for pair in pairs for chunk in pair]))


def chunk_ends(q: Tensor, cp: TensorPeers) -> Iterator[int]:
    """The positions in the sequence at which this rank's two chunks end."""
    chunk = q.shape[0] // 2
    yield (cp.rank + 1) * chunk
    yield (2 * cp.size - cp.rank) * chunk
