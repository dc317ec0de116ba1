"""Sequences split over ranks: who holds which tokens, what is kept for backward, how torch's flash kernel is called."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from conftest import TINY  # noqa: E402

from planner.probe.attention import Attention, Tables  # noqa: E402
from planner.probe.context import Rules, _flash, _flash_backward, gather, scatter, shard  # noqa: E402
from planner.probe.peers import EmulatedPeers, Surroundings, TensorPeers  # noqa: E402
from planner.specs.model import ModelSpec  # noqa: E402


class Together(TensorPeers):
    """A rank whose peers' shards are at hand."""

    def __init__(self, size: int, rank: int, whole: Any) -> None:
        super().__init__(size, rank)
        self.whole = whole

    def all_gather(self, x: Any) -> Any:
        return torch.cat([shard(self.whole, TensorPeers(self.size, rank)) for rank in range(self.size)])

    def reduce_scatter(self, x: Any) -> Any:
        return x.chunk(self.size)[self.rank] * self.size


@pytest.mark.parametrize(("size", "rank", "held"), [(2, 0, [0, 3]), (2, 1, [1, 2]), (3, 1, [1, 4]), (1, 0, [0, 1])])
def test_each_rank_holds_an_early_and_a_late_chunk(size: int, rank: int, held: list[int]) -> None:
    whole = torch.arange(2 * size)
    cp = Together(size, rank, whole)
    assert shard(whole, cp).tolist() == held
    if size > 1:
        assert gather(shard(whole, cp), cp).tolist() == whole.tolist()
        assert scatter(whole, cp).tolist() == [size * token for token in held]


def kept_bytes(seq_length: int, cp: TensorPeers) -> int:
    """What an attention layer keeps for backward, its weights aside."""
    around = Surroundings(cp=cp)
    layer = Attention(model := ModelSpec(num_hidden_layers=1, **TINY), model.layers[0], around)
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    tables = Tables.of(model, seq_length * cp.size, around, torch.empty(0))
    weights |= {table.untyped_storage().data_ptr() for table in (tables.cos, tables.sin)}
    kept: dict[int, int] = {}

    def pack(x: Any) -> Any:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = layer(torch.randn(seq_length, 1, model.hidden_size, requires_grad=True), tables)
    assert out.shape == (seq_length, 1, model.hidden_size)
    return sum(size for address, size in kept.items() if address not in weights)


def test_keys_and_values_of_others_are_not_kept() -> None:
    assert kept_bytes(64, EmulatedPeers(4)) == kept_bytes(64, TensorPeers())


@pytest.mark.parametrize("window", [0, 4])
def test_the_flash_kernel_takes_a_chunk_and_its_gradient(window: int) -> None:
    def empty(rows: int, heads: int, dim: int) -> Any:
        return torch.empty(rows, 2, heads, dim, device="meta", dtype=torch.bfloat16)

    q, k, v = empty(4, 4, 24), empty(16, 2, 24), empty(16, 2, 16)
    rules = Rules(None, window, None)
    out, *kept = _flash(q, k, v, rules)
    assert out.shape == (4, 2, 4, 16)
    grads = _flash_backward(torch.empty_like(out), q, out.contiguous(), k, v, rules, kept)
    assert [grad.shape for grad in grads[:3]] == [q.shape, k.shape, v.shape]
