"""The peak memory of a rank: the one formula, exact, and the named relaxation that bounds and programs read.

A rank's peak is

    static_bytes + activations_bytes + max(transient_bytes, logits_bytes) + fixed_bytes        (`stage_memory`)

with static_bytes for weights, gradients and optimizer, activations_bytes for the micro-batches in flight (counted along
the schedule's own order), transient_bytes for a layer's backward, and fixed_bytes for buffers that every rank holds.
The driver and the allocator reserve more on top; `Pricing.usable_bytes` is the largest peak that leaves them room.

Bounds and integer programs do not know the order yet. They take `relaxed_peak_bytes`, in which the micro-batches in
flight are a number, and which is never above the exact peak where that number is not above what the order holds.

What a rank keeps in the host's memory is `host_bytes`; a layout whose host has too little is refused (`host_rule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planner.physics import memory
from planner.physics.cost import CostTable, PartCost
from planner.physics.layers import padded_vocab
from planner.physics.memory import bytes_of, constant_bytes, is_decoder_layer, reserved_bytes, sharded
from planner.physics.operators import BF16, FP32, Item, Saved, num_parameters
from planner.physics.optimizers import workspace_bytes
from planner.physics.pricing import Pricing
from planner.record import record
from planner.shape import Number, Shape, minimum
from planner.specs.units import GIB
from planner.trainers.rules.rule_rows import Rule
from planner.trainers.spec import RuntimeSpec


@record
class StageBytes:
    """Bytes of a rank at its peak, item by item; `total_bytes` is what the GPU must have."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    workspace_bytes: int
    reserved_bytes: int
    """Memory of the driver, the communicators and the allocator's slack."""

    @property
    def peak_allocated_bytes(self) -> int:
        """The peak that torch's `max_memory_allocated` shows."""
        state = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return state + self.activations_bytes + self.logits_bytes + self.workspace_bytes

    @property
    def total_bytes(self) -> int:
        """The peak and the bytes reserved beside it."""
        return self.peak_allocated_bytes + self.reserved_bytes

    def with_reserve(self, more_bytes: int) -> StageBytes:
        """The same rank with so many more bytes reserved."""
        return replace(self, reserved_bytes=self.reserved_bytes + more_bytes)


def stage_memory(pricing: Pricing, table: CostTable, cost: PartCost, activations_bytes: float) -> StageBytes:
    """The exact peak of a rank whose parts together are `cost`, while micro-batches in flight hold `activations_bytes`.

    The peak is either the loss, with all activations held and the logits on top, or a layer's backward after it, when
    the logits are gone and the layer's transient bytes are needed. When all of these are gone the optimizer runs, or
    log-probabilities are computed; what these need counts where it is larger than what has gone. So do gradients that
    the backward makes while activations go, where a trainer has none before.
    """
    constant = float(constant_bytes(pricing.model, table.shape, pricing.runtime))
    logits, transient = moment_bytes(cost)
    workspace = transient + fixed_workspace_bytes(pricing, table)
    others = between_updates_bytes(pricing, table, cost)
    workspace += max(0.0, others - activations_bytes - logits - workspace)
    late = late_gradients_bytes(pricing, table, cost) - activations_bytes - logits - workspace
    allocated = StageBytes(
        weights_bytes=round(float(cost.weights_bytes + constant)),
        gradients_bytes=round(float(cost.gradients_bytes) + max(0.0, late)),
        optimizer_bytes=round(float(cost.optimizer_bytes)),
        activations_bytes=round(activations_bytes),
        logits_bytes=round(logits),
        workspace_bytes=round(workspace),
        reserved_bytes=0,
    )
    peak_bytes, hardware = allocated.peak_allocated_bytes, pricing.cluster.hardware
    reserve = float(reserved_bytes(peak_bytes, table.shape, hardware, pricing.lost_fraction))
    return replace(allocated, reserved_bytes=round(reserve + pricing.runtime.reserved_gib * GIB))


def moment_bytes(cost: PartCost) -> tuple[float, float]:
    """Bytes of the logits, or else of a layer's backward, above what is held: the larger of both, and 0 for the other.

    A loss needs its logits when all is held; a layer's backward comes when they are gone.
    """
    transient, logits = float(cost.transient_bytes), float(cost.logits_bytes)
    return (logits, 0.0) if 0 < transient <= logits else (0.0, transient)


def relaxed_peak_bytes(static_bytes: Any, activations_bytes: Any, transient_bytes: Any) -> Any:
    """The sum static + activations + transient, which is at most the exact peak less `fixed_bytes`.

    The terms are numbers, arrays over shapes and ranks, or sums of a program's variables. The transient may be any that
    the rank certainly needs (that of the loss, or of a kind of layer that it holds), and the activations those of any
    number of micro-batches that it certainly has in flight.
    """
    return static_bytes + activations_bytes + transient_bytes


def static_bytes(part: PartCost, shape: Shape, runtime: RuntimeSpec, dtype: str) -> Number:
    """Bytes of weights, gradients and optimizer of `part`, sharded as `shape` says.

    A part that was priced for one of several shapes with the same kernels has the parameters of all of them, but the
    sharding of that one.
    """
    return sum(memory.static_bytes(part, shape, runtime, dtype))


def fixed_bytes(pricing: Pricing, table: CostTable) -> Number:
    """Bytes that every rank holds beside its layers: buffers, tables, token ids."""
    return bytes_of(buffers(pricing, table)) + constant_bytes(pricing.model, table.shape, pricing.runtime)


def fixed_workspace_bytes(pricing: Pricing, table: CostTable) -> float:
    """Bytes of `buffers`."""
    return float(bytes_of(buffers(pricing, table)))


_WORKSPACE_BYTES = {
    "hopper": 32 << 20, "blackwell": 32 << 20, "cdna3": 128 << 20, "cdna4": 128 << 20, "cdna5": 128 << 20,
}  # fmt: skip
"""Bytes in which cuBLAS or hipBLASLt works in a thread, by silicon (torch, aten/src/ATen/cuda/CublasHandlePool.cpp)."""
_OLDER_WORKSPACE_BYTES = 8320 << 10


def products_workspace_bytes(architecture: str) -> int:
    """Bytes in which a rank's products work, always: the forward's thread has its own, and the backward's.

    Stages probed on an H100 took 65 to 78 MiB more than their tensors, where this is 64.
    """
    return 2 * _WORKSPACE_BYTES.get(architecture, _OLDER_WORKSPACE_BYTES)


def buffers(pricing: Pricing, table: CostTable) -> tuple[Saved, ...]:
    """Every rank's buffers: the workspace of products, the gradient from the next stage, or two layers gathered by
    unpipelined ZeRO-3; an engine.

    torch's stages have a buffer for every micro-batch, of each chunk's input and of its output's gradient (less one
    chunk's on the first rank and the last). Inputs that micro-batches in flight have received are counted twice, here
    and with the activations. This makes up for their outputs, which the buffers keep and nothing counts: both are
    equally many.
    """
    shape, runtime, hidden = table.shape, pricing.runtime, pricing.model.residual_size
    workspace_bytes = products_workspace_bytes(pricing.cluster.hardware.architecture)
    beside = (Saved("workspace of products", (workspace_bytes,), dtype="bytes"), *_overlapped(pricing, shape))
    if pricing.training.objective.rollout_stays:
        beside = (*beside, Saved("generation of answers", (generation_bytes(pricing),), dtype="bytes"))
    if int(shape.pp) > 1:
        if not runtime.has_torch_stages:
            return (Saved("gradient from the next stage", (shape.shard_tokens, hidden)), *beside)
        number = (2 * int(shape.vpp) - (int(shape.pp) == 2)) * int(shape.num_microbatches)
        return (Saved("inputs and gradients of stages", (number, shape.shard_tokens, hidden)), *beside)
    if int(shape.zero_stage) < 3:
        return beside
    # beside them, the gradients of the layer before, on their way to be scattered
    layer = max(_gathered_elements(part, runtime) for part in table.layers.values())
    trained = max(float(part.parameters - part.frozen_parameters) for part in (*table.layers.values(), table.head))
    before = Saved(
        "gradients of the layer before", (trained,),
        dtype="fp32" if runtime.gradient_bytes == FP32 else "bf16",
    )  # fmt: skip
    gathered = Saved("two gathered layers", (2, layer))
    if runtime.parameter_offload or runtime.runs_transformers:
        # embedding and head stay from the forward to the backward: FSDP's root lets go of its weights after that alone,
        # DeepSpeed keeps a billion elements; where all wait on the host, the first gathers find nothing on the GPU
        ends = _gathered_elements(table.embedding, runtime) + _gathered_elements(table.head, runtime)
        gathered = Saved("two gathered layers, embedding and head", (2 * layer + ends,))
    return (gathered, before, *beside)


def _gathered_elements(part: PartCost, runtime: RuntimeSpec) -> float:
    """Elements of 16 bits that the gathered weights of a layer take; frozen ones are gathered as they are kept."""
    return float(part.parameters - part.frozen_parameters * (1 - memory.gathered_frozen_bytes(part, runtime) / BF16))


def _overlapped(pricing: Pricing, shape: Shape) -> tuple[Saved, ...]:
    """The rows that a second micro-batch sends and receives while the first is in its backward.

    That forward fills a chunk as the backward beside it frees one, so no more activations are in flight. Megatron-LM's
    pull request 6311 measured 364 MB more with the overlap, where this is 470.
    """
    moe = pricing.model.moe
    if moe is None or not pricing.runtime.overlaps_experts:
        return ()
    rows = shape.shard_tokens * moe.num_experts_per_tok
    return (Saved("rows sent and received beside a backward", (2, rows, pricing.model.hidden_size)),)


def late_gradients_bytes(pricing: Pricing, table: CostTable, cost: PartCost) -> float:
    """Bytes at the end of a step's backward that were not there at its begin, when activations are gone.

    They are gradients of the only micro-batch with what the embedding's backward takes, or, before that, those of all
    but the first layer with what its backward takes.
    """
    runtime, shape = pricing.runtime, table.shape
    if not runtime.counts_moments:
        return 0.0

    def whole(part: PartCost) -> float:
        dense, expert = part.trained_dense_parameters, part.trained_expert_parameters
        return float(memory.whole_gradients_bytes(dense, expert, shape, runtime))

    is_late = int(shape.num_microbatches) == 1 and not memory.keeps_gradients(shape, runtime)
    made = whole(cost) if is_late else 0.0
    first = table.layers[pricing.model.layers[0], next(iter(table.layers))[1]]
    before = made - min(made, whole(table.embedding) + whole(first))
    before += float(first.transient_bytes + first.live_bytes + table.head.live_bytes)
    moment = float(memory.embedding_moment_bytes(table.embedding, shape, pricing.model, runtime))
    return max(made + moment, before)


SUB_GROUP_ELEMENTS = 1e9
"""Parameters that ZeRO-3 updates at once, on each rank (DeepSpeed's sub_group_size)."""


def copied_gradients_bytes(pricing: Pricing, table: CostTable, cost: PartCost) -> float:
    """Bytes of the copies that an optimizer makes: fp32 ones of its shard's 16-bit gradients, and of one of its moments
    where the update is not fused; or of its largest tensor."""
    runtime, model, shape = pricing.runtime, pricing.model, table.shape
    if runtime.optimizer_row.workspace[0]:
        parts = [pricing.embedding_items(shape), pricing.head_items(shape, model.tie_word_embeddings)]
        parts += (pricing.layer(kind, shape) for kind in model.kinds)
        return max(float(workspace_bytes(items, model.hidden_size, runtime)) for items in parts)
    dense, expert = cost.trained_dense_parameters, cost.trained_expert_parameters
    updated = (1 - memory.offloaded_gradients(runtime)) * float(sharded(dense, expert, shape, runtime))
    if memory.keeps_gradients(shape, runtime):
        updated = min(updated, SUB_GROUP_ELEMENTS)
    widened = FP32 * (runtime.widens_gradients and runtime.gradient_bytes < FP32)
    return (widened + runtime.moment_bytes * runtime.copies_moment) * updated


SCORED_BYTES = 10
"""Bytes of a logit of log-probabilities with their entropy, which no gradient needs: in 16 bits, its softmax and the
product of both in fp32 (verl, torch_functional.entropy_from_logits; its issue 2828 missed 13.91 GiB for one of the
latter, 24,576 tokens × 152,064)."""


def between_updates_bytes(pricing: Pricing, table: CostTable, cost: PartCost) -> float:
    """Bytes beside a rank's weights, gradients and states while no micro-batch is trained on.

    They are an optimizer's copies of gradients, the logits of log-probabilities, or what generation takes (vLLM 0.9
    counts its own share of memory beside what was there); before the latter two gradients that are none, and states
    that are on the host meanwhile, have made room.
    """
    objective, shape = pricing.training.objective, table.shape
    logits = objective.scored_tokens * float(padded_vocab(pricing.model, shape, pricing.runtime)) / float(shape.tp)
    scored = SCORED_BYTES * logits * (float(cost.logits_bytes) > 0)
    generates = generation_bytes(pricing) * (not objective.rollout_stays)
    # Megatron's gradients have a buffer that stays
    freed = float(cost.gradients_bytes) * (pricing.runtime.family != "megatron")
    freed += objective.scored_alone * float(cost.optimizer_bytes)
    others = max(copied_gradients_bytes(pricing, table, cost), max(scored, generates) - freed)
    return products_workspace_bytes(pricing.cluster.hardware.architecture) + others


def generation_bytes(pricing: Pricing) -> float:
    """Bytes that the engine takes which generates answers on the same GPU."""
    return pricing.training.objective.rollout_fraction * pricing.cluster.hardware.memory_bytes


HOST_STATE_BYTES = 16
"""Bytes on the host per parameter that it updates: an fp32 weight, its gradient and two moments (DeepSpeed's
documentation of ZeRO-Offload's memory counts as many, deepspeed.readthedocs.io/en/latest/memory.html)."""


def host_bytes(pricing: Pricing, shape: Shape) -> Number:
    """Bytes that a rank keeps in host memory, the mean over all ranks: a node's GPUs share its memory.

    These are the states of parameters that the host updates, and activations that wait there while as many
    micro-batches are in flight as a rank has in the mean: of whole layers at least their inputs, to recompute them.
    """
    runtime, model = pricing.runtime, pricing.model
    waits = runtime.offload_modules or runtime.offloaded_layers or runtime.parameter_offload
    if not (runtime.optimizer_offload_fraction or waits):
        return 0.0
    layers = [(count, pricing.layer(kind, shape)) for kind, count in pricing.kind_counts.items()]
    ends = (pricing.embedding_items(shape), pricing.head_items(shape, model.tie_word_embeddings))
    parts: list[tuple[int, Sequence[Item]]] = [*layers, *((1, items) for items in ends)]
    dense, expert = (
        sum(count * num_parameters(items, expert=routed, trained=True) for count, items in parts) / shape.pp
        for routed in (False, True)
    )
    updated = runtime.optimizer_offload_fraction * sharded(dense, expert, shape, runtime)
    share = pricing.offloaded_share
    inputs = share * BF16 * shape.shard_tokens * model.residual_size
    decoder = [(count, items) for count, items in layers if is_decoder_layer(items)]
    waiting = sum(count * (inputs if share else pricing.offloaded_bytes_of(items)) for count, items in decoder)
    in_flight = minimum((shape.pp + 1) / 2, shape.num_microbatches)
    if runtime.parameter_offload:
        frozen = sum(count * num_parameters(items, trained=False) for count, items in parts)
        weights = BF16 * (dense + expert) + runtime.frozen_weight_bytes * frozen
        waiting = waiting + weights / shape.shard_size
    return HOST_STATE_BYTES * updated + waiting / shape.pp * in_flight


def fits_host(pricing: Pricing, shape: Shape) -> Any:
    """True where the host has memory for all that its GPUs' ranks keep there."""
    return host_bytes(pricing, shape) <= pricing.cluster.hardware.host.usable_bytes


def host_shortage(pricing: Pricing, shape: Shape) -> str:
    """The sentence that says how many bytes the host lacks, for one shape that does not fit."""
    host = pricing.cluster.hardware.host
    return (
        f"the host's part, {float(host_bytes(pricing, shape)) / GIB:,.0f} GiB a GPU, is more than the "
        f"{host.usable_bytes / GIB:,.0f} GiB that a trainer may fill of {host.memory_gib:g} GiB of host memory a GPU"
    )


def host_rule(pricing: Pricing) -> Rule:
    """The rule that offloaded bytes have to fit in the host's memory."""
    return Rule(
        "host_memory",
        lambda model, training, shape: fits_host(pricing, shape),
        lambda model, training, s: f"{host_shortage(pricing, s)}: tp {s.tp}, pp {s.pp}, dp {s.dp}, ZeRO-{s.zero_stage}",
    )
