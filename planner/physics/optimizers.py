"""States of optimizers other than AdamW, tensor by tensor, and the seconds of their updates, before any sharding.

Newton and Schulz's iteration on an m × n matrix X, m ≤ n, is five steps of three products in bf16:

    A = X·Xᵀ (2·m²·n FLOPs),   B = b·A + c·A·A (2·m³),   X = a·X + B·X (2·m²·n).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from planner.physics.cost import PartCost
from planner.physics.kernels import clip_s, host_update_s, optimizer_s, product_s, stream_s
from planner.physics.memory import sharded
from planner.physics.operators import BF16, FP32, Item, Operator, operators_of
from planner.shape import Number, Shape, maximum, minimum, where
from planner.specs.hardware import HardwareSpec
from planner.trainers.optimizers import BLOCK, LEAST_NARROW, LEAST_PAGED, Optimizer
from planner.trainers.spec import RuntimeSpec


class Tensor(NamedTuple):
    """Trained tensors of one operator on this rank: `copies` of the same dimensions."""

    kind: Literal["matrix", "embedding", "head", "vector"]
    copies: Number
    rows: Number
    columns: Number

    @property
    def elements(self) -> Number:
        """Elements of all of them."""
        return self.copies * self.rows * self.columns


def tensors_of(op: Operator, hidden_size: int) -> Iterator[Tensor]:
    """The trained tensors of an operator: a product's weight and its bias, a table, or vectors."""
    if not op.trained:
        return
    if op.kind == "gemm" and op.weight:
        weight = minimum(op.count * op.n * op.k, op.parameters)
        yield Tensor("head" if op.name == "head" else "matrix", weight / maximum(op.n * op.k, 1), op.n, op.k)
        yield Tensor("vector", 1, op.parameters - weight, 1)
    elif op.family == "embedding":
        yield Tensor("embedding", 1, op.parameters / hidden_size, hidden_size)
    else:
        yield Tensor("vector", 1, op.parameters, 1)


class States(NamedTuple):
    """Bytes of states that stay on the GPU, and of those that leave it when it is full."""

    resident_bytes: Number
    paged_bytes: Number


def states_of(tensor: Tensor, runtime: RuntimeSpec) -> States:
    """Bytes of the states of a tensor."""
    row, elements = runtime.optimizer_row, tensor.elements
    if row.is_factored and tensor.kind != "vector":
        return States(FP32 * tensor.copies * (tensor.rows + tensor.columns) * (elements > 0), 0.0)
    moments = row.moments if tensor.kind == "matrix" else row.other_moments
    if row.is_factored:
        return States(FP32 * elements, 0.0)
    size = tensor.rows * tensor.columns
    # transformers.Trainer keeps the states of embeddings in 32 bits (GlobalOptimManager.register_module_override)
    is_narrow = (row.bits == 8) & (size >= LEAST_NARROW) & (tensor.kind != "embedding")
    width = where(is_narrow, 1, FP32 if row.bits else runtime.moment_bytes)
    states: Number = moments * width * elements
    scales: Number = where(is_narrow, moments * FP32 / BLOCK * elements, 0.0)
    leaves = row.is_paged & (size >= LEAST_PAGED)
    return States(where(leaves, 0.0, states) + scales, where(leaves, states, 0.0))


def state_costs(
    items: Sequence[Item], hidden_size: int, shape: Shape, hardware: HardwareSpec, runtime: RuntimeSpec
) -> dict[str, Number]:
    """Bytes and seconds of the states of an optimizer other than AdamW, by fields of a part's cost."""
    if runtime.optimizer == "adamw":
        return {}
    dense, expert = (
        [tensor for op in operators_of(items) if op.expert == routed for tensor in tensors_of(op, hidden_size)]
        for routed in (False, True)
    )
    return {
        "state_bytes": state_bytes(dense, runtime),
        "expert_state_bytes": state_bytes(expert, runtime),
        "state_update_s": state_update_s(dense, hidden_size, shape.tp, hardware, runtime),
        "expert_state_update_s": state_update_s(expert, hidden_size, shape.etp, hardware, runtime),
    }


def update_s(part: PartCost, shape: Shape, hardware: HardwareSpec, runtime: RuntimeSpec) -> Number:
    """Seconds of an optimizer step on this rank's shard of a part whose parameters are counted.

    Gradients are measured, scaled and zeroed in it too.
    """
    dense, expert = part.trained_dense_parameters, part.trained_expert_parameters
    shard = sharded(dense, expert, shape, runtime)
    offloaded = runtime.optimizer_offload_fraction * shard
    clipped_s = clip_s(hardware, shard, dense + expert, runtime)
    gpu_s = optimizer_s(hardware, shard - offloaded, runtime)
    if runtime.optimizer != "adamw":
        gpu_s = sharded(part.state_update_s, part.expert_state_update_s, shape, runtime)
    return gpu_s + host_update_s(hardware, offloaded, runtime) + clipped_s


def state_bytes(tensors: Sequence[Tensor], runtime: RuntimeSpec) -> Number:
    """Bytes of the states of a part's tensors that stay on the GPU."""
    return sum(states_of(tensor, runtime).resident_bytes for tensor in tensors)


def state_update_s(
    tensors: Sequence[Tensor], hidden_size: int, tp: Number, hardware: HardwareSpec, runtime: RuntimeSpec
) -> Number:
    """Seconds to update a part's tensors on one GPU.

    States that leave a full GPU come back and leave again in every step, over the host's link: the seconds are those
    of a GPU that has no room for any.
    """
    row = runtime.optimizer_row
    total: Number = 0.0
    for tensor in tensors:
        num_bytes = update_bytes(row, runtime, tensor.kind == "matrix") * tensor.elements
        total = total + stream_s(hardware, num_bytes, 0, "optimizer")
        total = total + 2 * states_of(tensor, runtime).paged_bytes / hardware.host.bytes_per_s
        if row.newton_schulz_steps and tensor.kind == "matrix":
            total = total + row.newton_schulz_steps * _orthogonal_s(tensor, hidden_size, tp, hardware, row)
    return total


def update_bytes(row: Optimizer, runtime: RuntimeSpec, is_matrix: bool = True) -> float:
    """Bytes that an update moves per parameter: of masters and their 16-bit copy where there are such, else of the
    weights themselves."""
    if runtime.master_bytes:
        return row.moved_bytes(FP32, is_matrix) + FP32 + BF16
    return row.moved_bytes(runtime.weight_bytes, is_matrix)


def workspace_bytes(items: Sequence[Item], hidden_size: int, runtime: RuntimeSpec) -> Number:
    """Bytes that the update of a part's largest tensor needs for a moment."""
    each = runtime.optimizer_row.workspace_bytes(FP32 if runtime.master_bytes else runtime.weight_bytes)
    largest: Number = 0.0
    for op in operators_of(items) if each else ():
        for tensor in tensors_of(op, hidden_size):
            largest = maximum(largest, tensor.elements)
    return each * largest


def _orthogonal_s(tensor: Tensor, hidden_size: int, tp: Number, hardware: HardwareSpec, row: Optimizer) -> Number:
    """Seconds of a step on a matrix, of which tensor-parallel ranks compute the whole, their slice, or share products.

    Of a split product, the dimension that is not the hidden state's is split. Ranks that share sum the first product,
    a square of the hidden state's width in fp32, over the fastest links.
    """
    tp = 1 if row.splits_matrix else tp
    rows = where(tensor.rows == hidden_size, tensor.rows, tensor.rows * tp)
    columns = where(tensor.rows == hidden_size, tensor.columns * tp, tensor.columns)
    short, long = minimum(rows, columns), maximum(rows, columns)
    summed: Number = 0.0
    if row.splits_products:
        short, long = where(tp > 1, hidden_size, short), where(tp > 1, rows * columns / hidden_size / tp, long)
        summed = 2 * (1 - 1 / tp) * FP32 * short**2 / hardware.tiers[0].bytes_per_s
    fraction = hardware.efficiency.gemm.forward_fraction

    def seconds(m: Number, n: Number, k: Number) -> Number:
        return product_s(hardware, "bf16", fraction, 1, m, n, k)

    each = seconds(short, short, long) + seconds(short, short, short) + seconds(short, long, short) + summed
    return tensor.copies * each
