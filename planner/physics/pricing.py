"""Prices of a shape: operators and exchanges are summed into the cost table.

A layer of Llama 3.1 8B on eight GPUs, tensor-parallel:

>>> from planner.specs.registry import load_hardware, load_model
>>> from planner.trainers.load import load_runtime
>>> pricing = Pricing(
...     model=load_model("8b"),
...     training=TrainingSpec(seq_length=8192, global_batch_size=8),
...     cluster=ClusterSpec(hardware=load_hardware("h100"), num_gpus=8),
...     runtime=load_runtime("megatron"),
... )
>>> table = pricing.table(Shape.of(tp=8, seq_length=8192, sequence_parallel=1))
>>> layer = table.layers[pricing.model.kinds[0], "none"]
>>> print(f"{layer.parameters:,.0f} parameters, {layer.live_bytes / GIB:.3f} GiB kept of a micro-batch")
27,271,168 parameters, 0.133 GiB kept of a micro-batch
>>> print(layer.forward_total_s < layer.backward_total_s)
True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

from planner.physics import compute, kernels, memory
from planner.physics.adapters import adapted, without_adapters
from planner.physics.communication import Exchanges
from planner.physics.cost import CostTable, PartCost
from planner.physics.layer.moe import with_fullest_kept
from planner.physics.layers import ModelTotals, decoder_layer, embedding, head, model_totals, mtp_block, vision_tower
from planner.physics.memory import is_decoder_layer, offloaded_bytes, shown_s
from planner.physics.operators import (
    BF16,
    Item,
    kept_by_torchao,
    num_parameters,
    num_tensors,
    operators_of,
    saved_bytes,
    up_to_last_saved,
    wide_parameters,
    with_gathered_weights,
    with_products_saved,
    within_documents,
)
from planner.physics.optimizers import state_costs, update_s
from planner.physics.passes import COMM_GROUPS, Passes, lateness
from planner.record import record
from planner.shape import Number, Shape, maximum, minimum, where
from planner.specs.cluster import ClusterSpec
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.training import Recompute, TrainingSpec
from planner.specs.units import GIB
from planner.trainers.documents import (
    Documents,
    excess_microbatches,
    largest_normal,
    masked_documents,
    texts_by_ranks,
)
from planner.trainers.spec import RuntimeSpec

SHARDED = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "reduce_s", "gather_s", "optimizer_s")
"""Fields of a part that its kernel alone does not decide: sharding, replicas and the optimizer do."""


@record(kw_only=True)
class Pricing:
    """Prices shapes for one model, training, cluster and trainer, and one choice of modules for `selective`."""

    model: ModelSpec
    training: TrainingSpec
    cluster: ClusterSpec
    runtime: RuntimeSpec
    selective_modules: tuple[str, ...] = ("core_attn",)
    headroom_bytes: float = 0.0
    counts_seconds: bool = True
    """False where bytes alone are asked for: all seconds are 0 then, which saves most of the work."""
    _latest: dict[str, tuple[Shape, dict[Any, Any]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The latest shape, with the layers that were worked out for it and the seconds of their items."""

    def __post_init__(self) -> None:
        # what a dtype and adapters mean for the trainer is settled once, for all that reads its fields
        runtime = self.runtime.in_dtype(self.training.dtype, self.cluster.hardware.architecture)
        runtime = runtime.for_model(self.model).for_adapters(self.training.adapters)
        runtime = runtime.for_objective(self.training.objective)
        object.__setattr__(self, "runtime", runtime)

    @property
    def kind_counts(self) -> dict[LayerKind, int]:
        """Number of layers of each kind in the model."""
        return {kind: self.model.layers.count(kind) for kind in self.model.kinds}

    @property
    def totals(self) -> ModelTotals:
        """Parameters and FLOPs of the model, a token of this training each."""
        training = self.training
        return model_totals(self.model, self.runtime, training.seq_length, self._documents, training.adapters)

    def recomputing(self, modules: tuple[str, ...]) -> Pricing:
        """The same prices, but that `selective` recomputes these modules; what is known of layers is shared."""
        other = replace(self, selective_modules=modules)
        object.__setattr__(other, "_latest", self._latest)
        return other

    def usable_bytes(self, shape: Shape) -> Number:
        """The most bytes that tensors may take on a GPU: memory less headroom, driver's and trainer's reserve."""
        reserved = self.headroom_bytes + self.runtime.reserved_gib * GIB
        return memory.usable_bytes(shape, self.cluster.hardware, reserved, self.lost_fraction)

    @property
    def lost_fraction(self) -> float:
        """The share of allocated memory that the allocator holds beside it."""
        hardware = self.cluster.hardware
        uneven = self.training.moe_spread > 0 and not hardware.is_amd and hardware.efficiency.evidence != "probed"
        return hardware.reserved.fragmentation_fraction + self.runtime.uneven_fraction * uneven

    def table(self, shape: Shape, modes: Sequence[Recompute] = ("none", "selective", "full")) -> CostTable:
        """Prices of `shape` (numbers or arrays) under each recompute mode."""
        parts = self._parts(shape, modes)
        if self.runtime.dynamic_cp:
            parts = _in_the_mean(parts, [(times, alone._parts(own, modes)) for times, alone, own in self._texts(shape)])
        return self._assembled(shape, *parts)

    def _texts(self, shape: Shape) -> list[tuple[Number, Pricing, Shape]]:
        """The micro-batches of texts of each length for one of `shape`, what prices them, and their own shape."""
        runtime = self.runtime.model_copy(update={"dynamic_cp": "", "packs_documents": False})
        training = self.training.model_copy(update={"document_lengths": None})
        alone = replace(self, runtime=runtime, training=training)
        texts = texts_by_ranks(self.training, shape, self.runtime.dynamic_cp == "packs")
        return [(times, alone, own) for times, own in texts]

    def _parts(self, shape: Shape, modes: Sequence[Recompute]) -> tuple[Any, ...]:
        """The parts of `_assembled`."""
        model = self.model
        layers: dict[tuple[LayerKind, Recompute], PartCost] = {}
        for kind in model.kinds:
            items = self.layer(kind, shape)
            plain = self._plain(items, shape)
            for mode in modes:
                layers[kind, mode] = plain if mode == "none" else self._recomputed(items, shape, plain, mode)
        own_head = self._head(shape, shares_embedding=False)
        if self.runtime.counts_moments:
            # a layer's backward comes when all that the head kept is gone
            layers = {
                key: replace(part, transient_bytes=part.transient_bytes - own_head.live_bytes)
                for key, part in layers.items()
            }
        beside = self._head(shape, True) if model.tie_word_embeddings else own_head
        copy = self._plain(self.lookup_items(shape), shape)
        first = copy if model.vision is None else self._plain(self.embedding_items(shape), shape)
        mtp = (self._plain(self.mtp_block(shape), shape), copy) if model.num_nextn_predict_layers else ()
        return layers, first, own_head, beside, mtp, self._hidden_s(shape)

    def of_shapes(self, kernels: CostTable, shape: Shape) -> CostTable:
        """`table` of shapes whose kernels are priced, row by row: sharding, replicas and the pipeline alone are new."""
        layers: dict[tuple[LayerKind, Recompute], PartCost] = {}
        for (kind, mode), part in kernels.layers.items():
            own = self.sharded(part, shape) if mode == "none" else layers[kind, "none"]
            layers[kind, mode] = replace(part, **{name: getattr(own, name) for name in SHARDED})
        head, beside = self.sharded(kernels.head, shape), kernels.head_beside_embedding
        beside = head if beside is kernels.head else self.sharded(beside, shape)
        embedding, mtp = (self.sharded(kernels.embedding, shape), [self.sharded(p, shape) for p in kernels.mtp_parts])
        return self._assembled(shape, layers, embedding, head, beside, tuple(mtp), kernels.hidden_s)

    def _assembled(
        self,
        shape: Shape,
        layers: dict[tuple[LayerKind, Recompute], PartCost],
        embedding: PartCost,
        head: PartCost,
        beside: PartCost,
        mtp_parts: tuple[PartCost, ...],
        hidden_s: Number,
    ) -> CostTable:
        """The table of a shape whose parts are priced."""
        mtp = self._mtp(shape, layers, *mtp_parts) if mtp_parts else {}
        return CostTable(
            shape=shape,
            layers=layers,
            embedding=self._with_table(embedding, shape, layers),
            head=head,
            head_beside_embedding=beside,
            mtp=mtp.get("none"),
            mtp_recomputed={mode: part for mode, part in mtp.items() if mode != "none"},
            p2p_s=self.exchanges.p2p_s(shape) if self.counts_seconds else 0.0,
            usable_bytes=self.usable_bytes(shape),
            tail_s=self.tail_s(shape, hidden_s) if self.counts_seconds else 0.0,
            hidden_s=hidden_s,
            mtp_parts=mtp_parts,
        )

    def least_work_s(self, shape: Shape) -> Number:
        """A lower bound of the seconds of a micro-batch through the whole model, forward and backward.

        It is what `table` adds up to, less what sharding, accumulation and offloading add to it. The axes of `shape`
        may be arrays that broadcast against each other, so that a grid of kernels is priced axis by axis.
        """
        if self.runtime.dynamic_cp:
            mean_s: Number = sum(times * alone.least_work_s(own) for times, alone, own in self._texts(shape))
            return mean_s
        parts = [(self.layer(kind, shape), count) for kind, count in self.kind_counts.items()]
        parts += [(self.embedding_items(shape), 1), (self.head_items(shape, shares_embedding=False), 1)]
        if self.model.num_nextn_predict_layers:
            parts.append((self.mtp_block(shape), self.model.num_nextn_predict_layers))
        total_s: Number = 0.0
        for items, count in parts:
            passes = self.passes  # which remembers seconds; those of a whole grid are large
            seconds = passes.with_plain_forwards(passes.seconds(items, shape), items, shape)
            total_s = total_s + count * PartCost(**seconds).total_s
        self._latest.clear()  # the layers of a whole grid are large
        return total_s

    def layer(self, kind: LayerKind, shape: Shape) -> tuple[Item, ...]:
        """The operators and exchanges of a decoder layer of `kind`, as this training runs it."""
        known = self._known_of(shape)
        if kind not in known:
            items = decoder_layer(self.model, kind, shape, self.runtime, self.imbalance(shape.ep))
            known[kind] = self.as_trained(self._in_fullest_step(items, shape), shape)
        layer: tuple[Item, ...] = known[kind]
        return layer

    def _known_of(self, shape: Shape) -> dict[Any, Any]:
        """The layers of a shape and their items' seconds so far: none for another shape than the latest."""
        latest, known = self._latest.get("latest", (None, {}))
        if latest is not shape:
            known = {}
            self._latest["latest"] = shape, known
        return known

    def imbalance(self, ep: Number) -> Number:
        """Tokens of the fullest of `ep` ranks of experts over the mean: as given, or the expected largest of theirs."""
        training, moe = self.training, self.model.moe
        if moe is None or not training.moe_spread:
            return training.moe_imbalance
        excess = training.moe_spread * largest_normal(ep) * (ep / moe.num_experts) ** 0.5
        return maximum(training.moe_imbalance, 1 + excess)

    def mtp_block(self, shape: Shape) -> tuple[Item, ...]:
        """The operators and exchanges of a block of multi-token prediction, as this training runs it."""
        items = mtp_block(self.model, shape, self.runtime, self.imbalance(shape.ep))
        return self.as_trained(self._in_fullest_step(items, shape), shape)

    def _in_fullest_step(self, items: Sequence[Item], shape: Shape) -> Sequence[Item]:
        """Items whose experts keep what the fullest rank keeps in the step that decides its memory."""
        mean, peak = self.training.moe_imbalance, self.training.moe_peak_imbalance
        return items if peak is None or peak <= mean else with_fullest_kept(items, peak / mean, shape)

    def lookup_items(self, shape: Shape) -> tuple[Item, ...]:
        """The operators and exchanges of the embedding of text."""
        return self.as_trained(embedding(self.model, shape, self.runtime), shape)

    def embedding_items(self, shape: Shape) -> tuple[Item, ...]:
        """Those of the embedding and, where a model sees, of the tower that makes tokens of images."""
        return (*vision_tower(self.model, shape, self.runtime), *self.lookup_items(shape))

    def head_items(self, shape: Shape, shares_embedding: bool) -> tuple[Item, ...]:
        """The operators and exchanges of final norm, head and loss."""
        return self.as_trained(head(self.model, shape, self.runtime, shares_embedding), shape)

    def as_trained(self, items: Sequence[Item], shape: Shape) -> tuple[Item, ...]:
        """Items of the model as this training runs them: within its documents, beside its adapters."""
        items = adapted(within_documents(items, shape, self._documents), self.training.adapters, self.runtime, shape)
        items = with_gathered_weights(items, self.runtime.weight_shards)
        items = with_products_saved(items) if self.runtime.saves_products else items
        return kept_by_torchao(items, self.training.dtype) if self.runtime.narrows_by_torchao else items

    @property
    def _documents(self) -> Documents:
        return masked_documents(self.training, self.runtime)

    def _recomputed(self, items: Sequence[Item], shape: Shape, plain: PartCost, mode: Recompute) -> PartCost:
        """Cost in another recompute mode of a layer that costs `plain` without recomputing.

        The backward runs the recomputed forward too, and the tensors that this forward saves are not kept until then.
        """
        inputs = self.runtime.checkpointed_parts * BF16 * shape.shard_tokens
        together = self.layers_at_once(shape)
        live: Number = inputs * self.model.residual_size * self._pool / together
        if mode != "full":
            together, live = 1, self._kept_bytes(items, frozenset(self.selective_modules))
        elif share := self.offloaded_share:
            if self.counts_seconds:
                plain = replace(plain, **self._pass_seconds(items, shape, plain, share * live))
            live = (1 - share) * live
        seconds: dict[str, Number] = {}
        if self.counts_seconds:
            repeat = self._passes_of(shape).seconds(self.replayed_items(items, mode), shape, replayed=True)
            seconds = {f"{group}_backward_s": repeat[f"{group}_forward_s"] for group in COMM_GROUPS}
            seconds["input_grad_s"] = repeat["forward_s"]
        return replace(
            plain,
            **{name: getattr(plain, name) + again_s for name, again_s in seconds.items()},
            live_bytes=live,
            transient_bytes=plain.transient_bytes + together * (plain.live_bytes - live),
        )

    def layers_at_once(self, shape: Shape) -> Number:
        """Layers that are recomputed together, of a chunk's in the mean; the first alone keeps its input."""
        chunk = self.model.num_hidden_layers / (shape.pp * shape.vpp)
        return maximum(minimum(self.runtime.layers_at_once, chunk), 1)

    def replayed_items(self, items: Sequence[Item], mode: Recompute) -> Sequence[Item]:
        """Items of a layer whose forward runs once more in the backward."""
        if mode == "full":
            return up_to_last_saved(items) if self.runtime.stops_recompute_early else items
        chosen = frozenset(self.selective_modules if mode == "selective" else ())
        return [item for item in items if not chosen.isdisjoint(item.modules)]

    @property
    def _pool(self) -> float:
        """Factor on the bytes of activations: a graph of the whole step has them in a pool of its own."""
        return memory.GRAPH_POOL if self.runtime.cuda_graphs else 1.0

    def _kept_bytes(self, items: Sequence[Item], recomputed: frozenset[str] = frozenset()) -> Number:
        """Bytes that a part keeps on the GPU from the forward to the backward."""
        left = self.offloaded_bytes_of(items, recomputed)
        return (saved_bytes(items, recomputed, self.training.dtype) - left) * self._pool

    def offloaded_bytes_of(self, items: Sequence[Item], recomputed: frozenset[str] = frozenset()) -> Number:
        """Bytes of a part that wait in host memory: inputs of some modules, and a share of all that layers keep.

        Where some layers are kept there whole, each is priced with its share of them: layers take turns on the link.
        """
        dtype, runtime = self.training.dtype, self.runtime
        left: Number = 0.0
        if runtime.offload_modules:
            left = offloaded_bytes(items, runtime.offload_modules, recomputed, dtype)
        if self.offloaded_share and is_decoder_layer(items):
            left = left + self.offloaded_share * (saved_bytes(items, recomputed, dtype) - left)
        return left

    @property
    def offloaded_share(self) -> float:
        """Share of layers whose saved activations wait in host memory; recomputed layers save their inputs alone."""
        layers = self.model.num_hidden_layers
        return min(self.runtime.offloaded_layers, layers - self.runtime.saves_products) / layers

    def selective_table(self, table: CostTable) -> CostTable:
        """`table` with its selective mode priced for the modules that this pricing recomputes; other prices stay."""
        model, shape = self.model, table.shape
        if self.runtime.dynamic_cp:
            return self.table(shape, tuple(dict.fromkeys(mode for _, mode in table.layers)))
        layers = dict(table.layers)
        for kind in model.kinds:
            items = self.layer(kind, shape)
            layers[kind, "selective"] = self._recomputed(items, shape, table.layers[kind, "none"], "selective")
        mtp_recomputed = table.mtp_recomputed
        if mtp_recomputed and table.mtp is not None:
            changed = table.mtp
            for kind in model.predicting_layers:
                plain, selective = layers[kind, "none"], layers[kind, "selective"]
                changed = changed.changed_by(plain, selective, model.num_nextn_predict_layers)
            mtp_recomputed = mtp_recomputed | {"selective": changed}
        return replace(table, layers=layers, mtp_recomputed=mtp_recomputed)

    @property
    def passes(self) -> Passes:
        """The formulas for the seconds of a part's passes."""
        return Passes(self.model, self.training, self.cluster, self.runtime)

    def _passes_of(self, shape: Shape) -> Passes:
        """`passes` that remembers what it works out for the items of a shape."""
        known = self._known_of(shape).setdefault("items", {})
        return Passes(self.model, self.training, self.cluster, self.runtime, known)

    @property
    def exchanges(self) -> Exchanges:
        """The formulas for the seconds of exchanges beside the layers."""
        return Exchanges(self.model, self.training, self.cluster, self.runtime)

    def host_fraction(self, shape: Shape) -> float:
        """Host seconds of the layers over their seconds, forward and backward: 1 where the layers wait for the host."""
        passes, host_s, layers_s = self._passes_of(shape), 0.0, 0.0
        for kind, count in self.kind_counts.items():
            items = self.layer(kind, shape)
            host_s += count * float(passes.host_s(items, shape))
            layers_s += count * float(PartCost(**passes.seconds(items, shape)).total_s)
        return min(host_s / layers_s, 1.0)

    def _plain(self, items: Sequence[Item], shape: Shape) -> PartCost:
        """Cost of a part of which nothing is recomputed."""
        counted = PartCost(
            parameters=num_parameters(items),
            expert_parameters=num_parameters(items, expert=True),
            wide_parameters=wide_parameters(items),
            frozen_parameters=num_parameters(items, trained=False),
            frozen_expert_parameters=num_parameters(items, expert=True, trained=False),
            frozen_wide_parameters=wide_parameters(items, trained=False),
            **state_costs(items, self.model.hidden_size, shape, self.cluster.hardware, self.runtime),
            **self._reference(items),
        )
        left = self.offloaded_bytes_of(items)
        seconds = self._pass_seconds(items, shape, counted, left) if self.counts_seconds else {}
        # Python copies, sums and hooks go tensor by tensor in an optimizer step
        copies_s = (
            self.runtime.tensor_kernels * num_tensors(items) * compute.issue_s(self.cluster.hardware, self.runtime)
        )
        own = memory.transient_bytes(items, self.runtime) + memory.bytes_of(
            memory.unused_gradients(items, self.runtime)
        )
        own = own + memory.gathered_bytes(items, self.runtime)
        part = replace(
            counted,
            **seconds,
            live_bytes=self._kept_bytes(items),
            # what was sent away is back while the part's backward runs
            transient_bytes=own + left,
            tensors_s=copies_s if self.counts_seconds else 0.0,
        )
        return self.sharded(part, shape)

    def _pass_seconds(self, items: Sequence[Item], shape: Shape, counted: PartCost, left: Number) -> dict[str, Number]:
        """Seconds of a part's passes, with the copies of its weights and of the `left` bytes that wait on the host."""
        hardware, runtime = self.cluster.hardware, self.runtime
        passes = self._passes_of(shape)
        seconds = passes.with_plain_forwards(passes.seconds(items, shape), items, shape)
        alone, zero = shape.pp == 1, shape.zero_stage
        trained = counted.parameters - counted.frozen_parameters
        is_gathered = (zero == 3) * alone * (shape.shard_size > 1)
        # ZeRO-3 copies weights out of the gathered buffer in both passes, and gradients into one to be scattered; a
        # pipeline stage does so once a step
        frozen_moved = 2 * memory.gathered_frozen_bytes(counted, runtime) * counted.frozen_parameters
        seconds["forward_s"] = seconds["forward_s"] + kernels.stream_s(
            hardware, (2 * BF16 * trained + frozen_moved) * is_gathered, 1
        )
        seconds["input_grad_s"] = seconds["input_grad_s"] + kernels.stream_s(
            hardware, ((3 * BF16 + runtime.gradient_bytes) * trained + frozen_moved) * is_gathered, 2
        )
        if not runtime.fused_grad_accumulation:
            # ZeRO-2 and 3 sum the shards alone, but for a pipeline's
            shards = where((zero >= 2) & alone, shape.shard_size, 1)
            accumulated = kernels.accumulate_s(hardware, trained / shards, runtime.summed_gradient_bytes)
            seconds["weight_grad_s"] = seconds["weight_grad_s"] + accumulated
        if runtime.offload_modules or runtime.offloaded_layers:
            part = PartCost(**seconds)
            seconds["forward_s"] = seconds["forward_s"] + shown_s(left, hardware, part.forward_total_s)
            seconds["input_grad_s"] = seconds["input_grad_s"] + shown_s(left, hardware, part.backward_total_s)
        return seconds

    def sharded(self, part: PartCost, shape: Shape) -> PartCost:
        """A part whose kernel is priced, with all that the sharding of `shape` decides (`SHARDED`)."""
        weights, gradients, optimizer = memory.static_bytes(part, shape, self.runtime, self.training.dtype)
        seconds: dict[str, Number] = {}
        if self.counts_seconds:
            seconds["reduce_s"], seconds["gather_s"] = self.exchanges.part_s(part, shape)
            seconds["optimizer_s"] = update_s(part, shape, self.cluster.hardware, self.runtime) + part.tensors_s
        return replace(part, weights_bytes=weights, gradients_bytes=gradients, optimizer_bytes=optimizer, **seconds)

    def _with_table(
        self, part: PartCost, shape: Shape, layers: dict[tuple[LayerKind, Recompute], PartCost]
    ) -> PartCost:
        """The embedding `part`, whose table slows down the optimizer of the first shards of its stage."""
        if not self.counts_seconds:
            return part
        trained = part.parameters - part.frozen_parameters
        plain = [(layers[kind, "none"], count) for kind, count in self.kind_counts.items()]
        stage = trained + sum((one.parameters - one.frozen_parameters) * count for one, count in plain) / shape.pp
        table = minimum(trained, memory.sharded(stage, 0.0, shape, self.runtime))
        slower_s = kernels.optimizer_s(self.cluster.hardware, 0.0, self.runtime, table)
        return replace(part, optimizer_s=part.optimizer_s + slower_s)

    def _head(self, shape: Shape, shares_embedding: bool) -> PartCost:
        """Cost of final norm, head and loss, with the memory that the logits take while the loss runs."""
        items = self.head_items(shape, shares_embedding)
        part = self._plain(items, shape)
        layer = self.layer(self.model.layers[-1], shape)
        loss_bytes = memory.bytes_of(memory.loss_tensors(items, layer, self.runtime))
        if not self.runtime.fused_cross_entropy:
            return replace(part, logits_bytes=loss_bytes)
        # logits that the gradient overwrites live from the loss to the head's backward, which comes next
        logits_bytes = memory.bytes_of(memory.overwritten_logits(items, self.runtime))
        live_bytes = part.live_bytes - logits_bytes
        return replace(part, live_bytes=live_bytes, transient_bytes=loss_bytes, logits_bytes=loss_bytes)

    def _mtp(
        self, shape: Shape, layers: dict[tuple[LayerKind, Recompute], PartCost], block: PartCost, copy: PartCost
    ) -> dict[Recompute, PartCost]:
        """Cost of all multi-token-prediction blocks, by the recompute mode of their layers.

        Where there are several stages, the stage that holds the blocks has an embedding of its own for them.
        """
        model, runtime = self.model, self.runtime
        copy = copy.times(where(shape.pp > 1, 1, 0))
        parts: dict[Recompute, PartCost] = {"none": block}
        for kind, mode in layers if runtime.recomputes_mtp else ():
            if kind in model.predicting_layers and mode != "none":
                parts[mode] = parts.get(mode, block).changed_by(layers[kind, "none"], layers[kind, mode])
        return {mode: part.times(model.num_nextn_predict_layers) + copy for mode, part in parts.items()}

    def _reference(self, items: Sequence[Item]) -> dict[str, Number]:
        """Parameters that forwards without a gradient read, by fields of a part's cost."""
        if not self.runtime.plain_forwards:
            return {}
        own = without_adapters(items)
        return {
            "reference_parameters": num_parameters(own),
            "reference_expert_parameters": num_parameters(own, expert=True),
            "reference_wide_parameters": wide_parameters(own) + wide_parameters(own, trained=False),
        }

    def tail_s(self, shape: Shape, hidden_s: Number | None = None) -> Number:
        """Seconds at the end of a step: gradient norm over all ranks, tied-embedding gradients between first and last
        stage, host overhead.

        `hidden_s` is what a cost table knows of the shape's expert exchanges (`CostTable.hidden_s`).
        """
        once_s = self.exchanges.norm_s(shape) + self.exchanges.tied_s(shape)
        return once_s + self.unpaired_s(shape, hidden_s) + self.uneven_s(shape) + self.runtime.step_overhead_s

    def unpaired_s(self, shape: Shape, hidden_s: Number | None = None) -> Number:
        """Seconds per step of expert exchanges that could hide but have no other micro-batch beside them.

        The first forwards fill the pipeline and the last backwards drain it: pp micro-batches' worth each, whatever the
        number of chunks. The last rank waits for pp − 1 ranks before it, and starts its first backward when it has run
        one micro-batch forward.
        """
        hidden_s = self._hidden_s(shape) if hidden_s is None else hidden_s
        return minimum(shape.pp, shape.num_microbatches) * (hidden_s / shape.pp)

    def _hidden_s(self, shape: Shape) -> Number:
        """Seconds of a micro-batch's expert exchanges, in all layers, that could hide behind another micro-batch."""
        hidden_s: Number = 0.0
        if self.model.moe is None or not self.runtime.overlaps_experts or not self.counts_seconds:
            return hidden_s
        for kind, count in self.kind_counts.items():
            if kind.mlp != "dense":
                hidden_s = hidden_s + count * self._passes_of(shape).hidden_exchanges_s(self.layer(kind, shape), shape)
        return hidden_s

    def uneven_s(self, shape: Shape) -> Number:
        """Seconds per step that ranks wait for the one whose documents make for most attention, without recomputing;
        none where texts are dealt out by their work.

        Layers that see a window of keys are taken to be even.
        """
        waits_s: Number = 0.0
        for kind, count in self.kind_counts.items() if self._documents and not self.runtime.dynamic_cp else ():
            for op in operators_of(self.layer(kind, shape)):
                if op.documents and not op.window:
                    passes = compute.operator_seconds(op, self.cluster.hardware, self.training.dtype, self.runtime)
                    each_s = lateness(self.training, self.cluster) * sum(passes) * count / shape.pp
                    waits_s = waits_s + each_s * excess_microbatches(op.documents, op.kv_len, op.batch, shape)
        return waits_s


_TIMED = (
    "forward_s",
    "input_grad_s",
    "weight_grad_s",
    *(f"{g}_{way}_s" for g in COMM_GROUPS for way in ("forward", "backward")),
)


def _in_the_mean(own: Any, others: Sequence[tuple[Number, Any]]) -> Any:
    """Parts with their own bytes, and seconds that are sums of those of others, each so many times."""
    if isinstance(own, dict):
        return {key: _in_the_mean(part, [(times, other[key]) for times, other in others]) for key, part in own.items()}
    if isinstance(own, tuple):
        return tuple(_in_the_mean(part, [(t, other[at]) for t, other in others]) for at, part in enumerate(own))
    if isinstance(own, PartCost):
        return replace(own, **{n: sum(times * getattr(part, n) for times, part in others) for n in _TIMED})
    return sum(times * other for times, other in others)
