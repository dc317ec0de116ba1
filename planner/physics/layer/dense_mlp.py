"""The dense MLP: projections up, an activation, the projection down."""

from __future__ import annotations

from collections.abc import Iterator

from planner.physics.layer.blocks import bias_gradients, enter_tp, leave_tp, local_copies
from planner.physics.operators import BF16, Item, Operator, Saved
from planner.shape import Number, Shape
from planner.specs.model import ModelSpec
from planner.trainers.spec import RuntimeSpec


def dense_mlp(model: ModelSpec, intermediate: int, shape: Shape, runtime: RuntimeSpec, module: str) -> Iterator[Item]:
    """Up (and gate) projection, activation, down projection, sharded over tp."""
    tokens, hidden, width = shape.tokens, model.hidden_size, intermediate / shape.tp
    factor = 2 if model.gated_mlp else 1
    modules = (module,)
    apart = model.gated_mlp and not runtime.fused_projections
    products = []
    for name in ("gate", "up") if apart else ("up",):
        columns = width if apart else factor * width
        # recomputing every other product recomputes this one
        again = (*modules, "op") if apart and name == "up" else modules
        product = Operator(
            name=f"{module} {name}",
            kind="gemm",
            modules=again,
            m=tokens,
            n=columns,
            k=hidden,
            parameters=columns * (hidden + (1 if model.has_mlp_bias else 0)),
            takes_cast_gradient=runtime.fuses_mlp,
            saved=(Saved(name, (tokens, columns), again, dtype="uint8" if runtime.narrow_activations else "bf16"),),
        )
        products.append(product)
    yield from enter_tp(f"{module} up", products, hidden, shape, runtime, modules)
    yield activation_of(f"{module} activation", model, tokens, width, runtime, modules)
    down = Operator(
        name=f"{module} down",
        kind="gemm",
        modules=modules,
        m=tokens,
        n=hidden,
        k=width,
        takes_cast_input=runtime.fuses_mlp,
        parameters=hidden * (width + (1 if model.has_mlp_bias else 0)),
    )
    yield from leave_tp(down, BF16 * tokens * hidden, shape, modules)
    if model.has_mlp_bias:
        yield from bias_gradients(module, [factor * width, hidden], shape, runtime)
    yield from local_copies(f"{module} copies", BF16 * tokens * hidden, shape, runtime, modules)


def activation_of(
    name: str, model: ModelSpec, rows: Number, width: Number, runtime: RuntimeSpec, modules: tuple[str, ...]
) -> Operator:
    """The activation act(gate)·up or act(x), which gives `width` features of `rows`.

    It keeps its output, and act(gate) where activation and product are not fused.
    """
    modules = (*modules, "op")
    saved = [Saved("activation", (rows, width), modules, gemm_input=True)]
    num_bytes = saved[0].num_bytes
    fused = runtime.fused_activation or runtime.compiled
    if not model.gated_mlp and model.activation == "relu2" and not fused:
        # relu, then its square; backward: three kernels for the square, one for relu
        passes, backward, kernels = (4, 10, 2)
    elif not model.gated_mlp:
        passes, backward, kernels = (2, 3, 1)
    elif fused:
        passes, backward, kernels = (3, 5, 1)
    else:
        # silu (read, write) and product (two reads, write); backward: two products, silu's gradient, the concatenation;
        # gate and up are views of one buffer
        passes, backward, kernels = (5, 13, 2)
        saved.append(Saved("activated gate", (rows, width), modules))
    # x · sigmoid(1.702·x) in three kernels
    sigmoid = (Saved("sigmoid", (rows, width), modules),) * (model.activation == "quick_gelu" and runtime.is_runner)
    return Operator(
        name=name,
        kind="elementwise",
        family="strided" if len(saved) > 1 else "activation",
        modules=modules,
        forward_bytes=passes * num_bytes,
        backward_bytes=backward * num_bytes,
        forward_kernels=kernels,
        backward_kernels=2 * kernels,
        # the two learned numbers of xIELU
        parameters=2 if model.activation == "xielu" else 0,
        saved=(*saved, *sigmoid),
        # gradients of gate and up, and the buffer they are joined in, as what the product kept goes
        working_bytes=2 * num_bytes if len(saved) > 1 else None,
    )
