"""The MLP half of a decoder layer: dense, or mixture of experts with its exchanges."""

from __future__ import annotations

from collections.abc import Iterator

from planner.physics.layer.blocks import enter_half, leave_half
from planner.physics.layer.dense_mlp import dense_mlp
from planner.physics.layer.moe import mixture
from planner.physics.operators import Item
from planner.shape import Shape
from planner.specs.model import LayerKind, ModelSpec
from planner.trainers.spec import RuntimeSpec


def mlp_block(
    model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec, moe_imbalance: float = 1.0
) -> Iterator[Item]:
    """Norm, dense MLP or experts, residual; nothing for a layer that has a mixer alone."""
    if kind.mlp == "none":
        return
    # the router keeps what experts take in as it is
    is_dense = kind.mlp == "dense"
    beside = model.parallel_residual if kind.attention != "none" else None
    if beside != "one_norm":
        yield from enter_half(
            "mlp", model, shape, runtime, output_is_cast=is_dense, module="mlp" if is_dense else "layernorm"
        )
    if is_dense:
        assert model.intermediate_size is not None
        yield from dense_mlp(model, model.intermediate_size, shape, runtime, "mlp")
    else:
        assert model.moe is not None
        yield from mixture(model, model.moe, shape, runtime, moe_imbalance)
    yield from leave_half("mlp", model, shape, runtime, terms=2 if beside is None else 3)
