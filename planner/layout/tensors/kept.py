"""The tensors that one part of a stage (a layer, the embedding, the head) keeps of a micro-batch for its backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.physics.memory import GRAPH_POOL, is_decoder_layer, offloaded
from planner.physics.operators import NARROW_BYTES, Item, Saved, operators_of
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.training import Recompute


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor, or a row of bytes that no list names, which then says why in its `note`."""

    name: str
    num_bytes: float
    dims: tuple[float, ...] | None = None
    dtype: str | None = None
    note: str = ""
    modules: tuple[str, ...] = ()
    """Modules that would make it again, if they were recomputed."""


def held(tensor: Saved, dtype: str = "bf16", operator: str = "") -> Held:
    """A tensor of the physics as a row; products are computed in `dtype`."""
    num_bytes = float(tensor.bytes_in(dtype))
    name = tensor.name
    if operator:
        name = operator if operator.split()[-1] == tensor.name else f"{operator}: {tensor.name}"
    if tensor.dtype == "bytes":
        return Held(name, num_bytes, note="several tensors, counted together")
    dims = tuple(map(float, tensor.dims))
    stored = dtype if dtype in NARROW_BYTES and tensor.is_cast else tensor.dtype
    if stored == "bf16" and dtype == "fp16":
        stored = "fp16"
    dims = dims[1:] if len(dims) > 1 and dims[0] == 1 else dims
    return Held(name, num_bytes, dims, stored, modules=tensor.modules)


def kept_tensors(pricing: Pricing, shape: Shape, items: Sequence[Item], mode: Recompute = "none") -> list[Held]:
    """The rows that add up to the part's `live_bytes` under a recompute mode."""
    if mode == "full":
        rows = [held(Saved("layer input", (shape.shard_tokens, pricing.model.hidden_size)))]
    else:
        recomputed = frozenset(pricing.selective_modules if mode == "selective" else ())
        rows = [*_on_the_gpu(pricing, items, recomputed)]
    if pricing.runtime.cuda_graphs:
        more = (GRAPH_POOL - 1) * sum(row.num_bytes for row in rows)
        rows.append(Held("pool of the CUDA graph", more, note=f"a graph's pool is {GRAPH_POOL:g} times its tensors"))
    return rows


def _on_the_gpu(pricing: Pricing, items: Sequence[Item], recomputed: frozenset[str]) -> Iterator[Held]:
    """All tensors kept but those in host memory; of layers that are kept there whole, a share of each is away."""
    runtime, dtype = pricing.runtime, pricing.training.dtype
    leaving = offloaded(runtime.offload_modules)
    stays = [
        held(tensor, dtype, op.name)
        for op in operators_of(items)
        for tensor in op.kept(recomputed)
        if (op.name, tensor.name) not in leaving
    ]
    if not (runtime.offloaded_layers and is_decoder_layer(items)):
        yield from (row for row in stays if row.num_bytes)
        return
    share = min(runtime.offloaded_layers / pricing.model.num_hidden_layers, 1.0)
    note = f"{runtime.offloaded_layers} layers wait in host memory, counted as an equal share of each: {share:.0%}"
    yield Held("a layer's tensors", (1 - share) * sum(row.num_bytes for row in stays), note=note)


def without(rows: Iterable[Held], kept: Sequence[Held]) -> list[Held]:
    """The rows that are not among those kept, which a recomputed layer makes again; one if some are kept in part."""
    left, kept_in_part = list(rows), 0.0
    for row in kept:
        same = next((one for one in left if one == row or (row.name == "layer input" and _is_input(one, row))), None)
        if same is not None:
            left.remove(same)
        else:
            kept_in_part += row.num_bytes
    if not kept_in_part:
        return left
    total = sum(row.num_bytes for row in left) - kept_in_part
    return [Held("recomputed tensors", total, note="counted together, since some are kept in part")]


def _is_input(row: Held, layer_input: Held) -> bool:
    return row.name.endswith(": input") and row.num_bytes == layer_input.num_bytes
