"""The half of a decoder layer that mixes tokens: norm, attention or what stands in its place, residual."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from planner.physics.layer.attention import attention
from planner.physics.layer.blocks import enter_half, leave_half
from planner.physics.layer.linear_attention import gated_delta, kimi_delta, lightning
from planner.physics.layer.mamba import mamba1, mamba2
from planner.physics.layer.short_conv import short_conv
from planner.physics.layer.traced import traced
from planner.physics.operators import Item
from planner.shape import Shape
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.model_parts import AttentionKind
from planner.trainers.spec import RuntimeSpec

Mixer = Callable[[ModelSpec, LayerKind, Shape, RuntimeSpec], Iterator[Item]]

MIXERS: dict[AttentionKind, tuple[Mixer, ...]] = {
    "full": (attention,),
    "sliding": (attention,),
    "chunked": (attention,),
    "indexed": (attention,),
    "sparse": (attention,),
    "compressed_sparse": (attention,),
    "heavily_compressed": (attention,),
    "mamba": (mamba1,),
    "mamba2": (mamba2,),
    "full_mamba2": (attention, mamba2),
    "gated_delta": (gated_delta,),
    "kimi_delta": (kimi_delta,),
    "lightning": (lightning,),
    "conv": (short_conv,),
    "none": (),
}
"""The mixers of each kind of layer, which all read the same norm's output and are summed."""


def mixer_block(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Norm, the layer's mixers, residual; nothing for a layer that only has an MLP."""
    if model.traced is not None:
        yield from traced(model, kind, shape, runtime)
        return
    mixers = MIXERS[kind.attention]
    if not mixers:
        return
    module = "layernorm" if model.mla is not None or model.compressed_attention is not None else ""
    yield from enter_half("attention", model, shape, runtime, module=module)
    for mixer in mixers:
        yield from mixer(model, kind, shape, runtime)
    yield from leave_half(
        "attention", model, shape, runtime, adds=model.parallel_residual is None or kind.mlp == "none"
    )
