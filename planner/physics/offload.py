"""Tensors that wait in host memory for the backward: which they are, and the seconds to send them there and back."""

from __future__ import annotations

from collections.abc import Iterable

from planner.physics.operators import Item, operators_of
from planner.shape import Number
from planner.specs.hardware import HardwareSpec

OFFLOADED: dict[str, frozenset[tuple[str, str]]] = {
    "attn_norm": frozenset({("attention norm", "input")}),
    "qkv_linear": frozenset({("attention norm", "output")}),
    "core_attn": frozenset(
        {
            ("qkv", "qkv"),
            ("q", "q"),
            ("k", "k"),
            ("v", "v"),
            ("assemble q, k", "q"),
            ("assemble q, k", "k"),
            ("assemble q, k", "v"),
        }
    ),
    "attn_proj": frozenset({("attention", "output"), ("values", "output")}),
    "mlp_norm": frozenset({("mlp norm", "input")}),
    "expert_fc1": frozenset({("experts up", "rows")}),
    "moe_act": frozenset({("experts up", "up")}),
}
"""The inputs of each module, as Megatron-LM names modules (--offload-modules): operator, and tensor that it keeps."""


def offloaded(modules: Iterable[str]) -> frozenset[tuple[str, str]]:
    """Operators and their tensors that are inputs of some modules."""
    return frozenset[tuple[str, str]]().union(*(OFFLOADED.get(module, frozenset()) for module in modules))


def offloaded_bytes(
    items: Iterable[Item], modules: Iterable[str], recomputed: frozenset[str] = frozenset(), dtype: str = "bf16"
) -> Number:
    """Bytes of a part that leave the GPU between its forward and its backward; what is recomputed is not kept."""
    leaving = offloaded(modules)
    if not leaving:
        return 0.0
    return sum(
        tensor.bytes_in(dtype)
        for op in operators_of(items)
        for tensor in op.kept(recomputed)
        if (op.name, tensor.name) in leaving
    )


def is_decoder_layer(items: Iterable[Item]) -> bool:
    """True for a layer, which the embedding and the head are not."""
    return any(op.name == "attention norm" for op in operators_of(items))


def shown_s(num_bytes: Number, hardware: HardwareSpec, beside_s: Number) -> Number:
    """Seconds by which a pass of `beside_s` gets longer where `num_bytes` go over the host's link meanwhile."""
    late_s = num_bytes / hardware.host.bytes_per_s - beside_s
    return late_s * (late_s > 0)
