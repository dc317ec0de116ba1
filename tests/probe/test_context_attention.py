"""Sequences split over ranks: who holds which tokens, what is kept for backward, how torch's flash kernel is called."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from tiny import TINY  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from planner.probe.model.attention import (  # noqa: E402
    Attention,
    AttentionTables,
    Visibility,
    core_attention,
    flash_backward,
    flash_forward,
)
from planner.probe.model.peers import EmulatedPeers, Surroundings, TensorPeers, gather, scatter, shard  # noqa: E402
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
    tables = AttentionTables.of(model, seq_length * cp.size, around, torch.empty(0))
    weights |= {table.untyped_storage().data_ptr() for table in (tables.cos, tables.sin)}
    kept: dict[int, int] = {}

    def pack(x: Any) -> Any:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = layer(torch.randn(seq_length, 1, model.hidden_size, requires_grad=True), tables)
    assert out.shape == (seq_length, 1, model.hidden_size)
    return sum(size for address, size in kept.items() if address not in weights)


def test_keys_and_values_of_others_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.probe.model.attention.takes_flash", lambda x: True)
    monkeypatch.setattr("planner.probe.model.attention._kernel", kernel)
    assert kept_bytes(64, EmulatedPeers(4)) == kept_bytes(64, TensorPeers())


@pytest.mark.parametrize("window", [0, 4])
def test_the_flash_kernel_takes_a_chunk_and_its_gradient(window: int) -> None:
    def empty(rows: int, heads: int, dim: int) -> Any:
        return torch.empty(rows, 2, heads, dim, device="meta", dtype=torch.bfloat16)

    q, k, v = empty(4, 4, 24), empty(16, 2, 24), empty(16, 2, 16)
    rules = Visibility(None, window, None)
    out, *kept = flash_forward(q, k, v, rules)
    assert out.shape == (4, 2, 4, 16)
    grads = flash_backward(torch.empty_like(out), q, out.contiguous(), k, v, rules, kept)
    assert [grad.shape for grad in grads[:3]] == [q.shape, k.shape, v.shape]


def kernel(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
    """torch's flash kernel of the CPU, called as that of a GPU is."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(x.transpose(1, 2) for x in (q, k, v)), 0.0, True
    )
    return out.transpose(1, 2), lse, None, None, None


def kernel_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *_: Any, **__: Any) -> Any:
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(x.transpose(1, 2) for x in (grad, q, k, v, out)), lse, 0.0, True
    )
    return [x.transpose(1, 2) for x in grads]


def test_sinks_take_their_share_from_what_the_flash_kernel_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [torch.randn(6, 2, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    inputs.append(torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True))
    q, k, v, sinks = inputs
    grad = torch.randn(6, 2, 24, dtype=torch.float64)

    def attend() -> list[Any]:
        out = core_attention(q, k, v, Visibility(None, 0, sinks), TensorPeers())
        return [out, *torch.autograd.grad(out, inputs, grad)]

    expected = attend()
    for name, stand_in in (("_kernel", kernel), ("_kernel_backward", kernel_backward)):
        monkeypatch.setattr(f"planner.probe.model.attention.{name}", stand_in)
    monkeypatch.setattr("planner.probe.model.attention.takes_flash", lambda x: True)
    for result, wanted in zip(attend(), expected, strict=True):
        torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("seq_length", [6, 8])
def test_chunks_attend_as_sequences_of_their_own(seq_length: int) -> None:
    model = ModelSpec(num_hidden_layers=1, **TINY, attention_chunk_size=4)
    q, k, v = torch.randn(3, seq_length, 1, 2, 8).unbind()
    mask = AttentionTables.of(model, seq_length, Surroundings(), q).window_mask
    apart = [
        core_attention(*(x[part] for x in (q, k, v)), Visibility(None, 0, None), TensorPeers())
        for part in (slice(0, 4), slice(4, seq_length))
    ]
    together = core_attention(q, k, v, Visibility(mask, 0, None), TensorPeers())
    assert torch.allclose(together, torch.cat(apart), atol=1e-6)


def test_a_chunk_as_long_as_the_sequence_needs_no_mask() -> None:
    model = ModelSpec(num_hidden_layers=1, **TINY, attention_chunk_size=8)
    assert AttentionTables.of(model, 8, Surroundings(), torch.empty(0)).window_mask is None


@pytest.mark.parametrize(("window", "flash"), [(None, False), (4, True)])
def test_nothing_as_large_as_the_sequence_squared_is_made_where_no_mask_is_needed(
    window: int | None, flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.probe.model.attention.takes_flash", lambda x: flash)
    model = ModelSpec(num_hidden_layers=1, **TINY, sliding_window=window)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            largest = max(largest, made.numel() if isinstance(made, torch.Tensor) else 0)
            return made

    with Sizes():
        AttentionTables.of(model, 1024, Surroundings(), torch.empty(0))
    assert 0 < largest < 1024**2
