"""Seconds of a part of the model by pass: what the GPU computes, what the host issues, what of the exchanges shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple, TypeVar

from planner.physics import compute
from planner.physics.adapters import OF_ADAPTERS, without_adapters
from planner.physics.communication import exchange_tiers_s, group_of
from planner.physics.cost import PartCost
from planner.physics.kernels import PassSeconds, is_narrow
from planner.physics.operators import Collective, Item, Operator, collectives_of, operators_of
from planner.record import record
from planner.shape import Number, Shape, any_of, log2, maximum, minimum, where
from planner.specs.cluster import ClusterSpec
from planner.specs.machines import transport_of
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.specs.units import MICRO
from planner.trainers.spec import RuntimeSpec

T = TypeVar("T")

COMM_GROUPS = ("tp", "cp", "ep")
"""Groups whose exchanges run inside a layer; expert tensor parallelism counts with ep."""
TEXT_TOKENS = 393
"""Mean tokens of a text where fine-tuning packs texts of lengths that nobody says: 83.3 of Tulu 3 fill 32,768."""
REPLAYED = 0.5
"""Share that stays of the wait for an exchange's last rank where a CUDA graph replays it: the hosts' half is gone."""

LATE_NODE_FRACTION = 0.007
"""Mean share of its compute by which a node is late, if delays are exponential. Steps of the same layout grow so with
the number of nodes, whatever their length: series of NVIDIA's DGX Cloud recipes in bf16 (8B to 405B on 1 to 288 nodes)
ask for 0.006 to 0.010, of LLM Foundry (2 to 64 nodes) for 0.010, of torchtitan (1 to 16) for 0.007."""


def late_nodes_fraction(cluster: ClusterSpec) -> float:
    """Share of their compute that all nodes of a job wait for the latest of them; 0 for one node.

    The largest of n exponential delays is ln n times their mean beyond that of one of them. Nodes that a layout leaves
    idle count too, so that the layers of all layouts of a job are priced once.
    """
    return LATE_NODE_FRACTION * math.log(math.ceil(cluster.num_gpus / cluster.node_size))


def lateness(training: TrainingSpec, cluster: ClusterSpec) -> float:
    """Factor on all computing of a job, whose ranks wait for stragglers and for the latest node."""
    return (1 + training.straggler_fraction) * (1 + late_nodes_fraction(cluster))


class ExchangeSeconds(NamedTuple):
    """The seconds of one exchange of a micro-batch; what the host or other experts' work hides of it comes on top."""

    exchange: Collective
    exchanged_s: Number
    hideable_s: Number
    """The part that may run beside the layer's own work."""
    hidden_s: Number
    """The part that does."""

    @property
    def group(self) -> str:
        """The one of COMM_GROUPS to which its seconds count."""
        return "ep" if self.exchange.group == "etp" else self.exchange.group

    @property
    def way(self) -> str:
        """`forward` or `backward`."""
        return _way(self.exchange)


@record
class Passes:
    """Seconds of parts of one model, in one training, on one cluster, under one trainer."""

    model: ModelSpec
    training: TrainingSpec
    cluster: ClusterSpec
    runtime: RuntimeSpec
    known: dict[int, tuple[Item, Any]] = field(default_factory=dict, compare=False)
    """Seconds of the items of one shape by their identities, with the items, whose identities stay theirs so."""

    def _once(self, item: Item, work_out: Callable[[], T]) -> T:
        """The seconds of this very item, worked out once: a layer's run again where it is recomputed."""
        if id(item) not in self.known:
            self.known[id(item)] = item, work_out()
        found: T = self.known[id(item)][1]
        return found

    def _operator_s(self, op: Operator) -> PassSeconds:
        hardware, dtype, runtime = self.cluster.hardware, self.training.dtype, self.runtime
        return self._once(op, lambda: compute.operator_seconds(op, hardware, dtype, runtime))

    def seconds(self, items: Sequence[Item], shape: Shape, replayed: bool = False) -> dict[str, Number]:
        """Seconds of a part by pass and kind; an exchange counts only as far as nothing hides it.

        Parts that are `replayed` have no other micro-batch beside them: their expert exchanges show.
        """
        slow = lateness(self.training, self.cluster)
        operators = operators_of(items)
        hardware, runtime = self.cluster.hardware, self.runtime
        gpu = compute.summed(map(self._operator_s, operators))
        issued = compute.issue_seconds(operators, hardware, runtime)
        sent_s = self._sending_s(items, shape)
        issued = PassSeconds(issued[0] + sent_s["forward"], issued[1] + sent_s["backward"], issued[2])
        passes = compute.with_host(gpu, issued, runtime)
        # while the GPU waits for the host, exchanges go on
        idle = 0.0 if runtime.blocking_launches else 1.0
        idle_s = {"forward": idle * (passes[0] - gpu[0]), "backward": idle * (sum(passes[1:]) - sum(gpu[1:]))}
        seconds, behind = self._exchanges(items, shape, idle_s, replayed)
        for key, value in zip(("forward_s", "input_grad_s", "weight_grad_s"), passes, strict=True):
            seconds[key] = slow * value
        if behind:
            self._add_shown(seconds, behind, (passes[0], passes[1] + passes[2]), operators)
        elif runtime.overlaps_shared_experts:
            self._hide_behind_shared_experts(seconds, operators)
        return self._with_late_ranks(self._with_launches(seconds, items, shape), items, shape)

    def with_plain_forwards(self, seconds: dict[str, Number], items: Sequence[Item], shape: Shape) -> dict[str, Number]:
        """Seconds of a part's passes, with those of forwards without a gradient in the forward.

        They come after the forward that keeps its tensors and before the backward, free their own tensors one after the
        other, and need less for a moment than the loss's backward does, which has the gradients of the logits too.
        """
        times = self.runtime.plain_forwards
        if not times:
            return seconds
        plain = self.seconds(without_adapters(items), shape)
        names = ("forward_s", *(f"{group}_forward_s" for group in COMM_GROUPS))
        return seconds | {name: seconds[name] + times * plain[name] for name in names}

    def _add_shown(
        self,
        seconds: dict[str, Number],
        behind: dict[str, Number],
        passes_s: tuple[Number, Number],
        operators: Sequence[Operator],
    ) -> None:
        """Add to `seconds` what shows of the expert exchanges that hide `behind` another micro-batch's passes.

        The forward of one micro-batch runs beside the backward of another, so that both together hide no more than
        both take. The second exchange of the backward starts after the weight gradients of experts, unless these wait.
        What hides takes a part of the GPU from the products beside it.
        """
        exchanged = [seconds[f"{group}_{way}_s"] for group in ("tp", "cp") for way in behind]
        beside_s: Number = sum(passes_s) + sum(exchanged)
        behind_s: Number = sum(behind.values())
        waits_s = 0.0 if self.runtime.delays_weight_gradients else self._expert_weight_gradients_s(operators)
        late_s = behind.get("backward", 0.0) / 2 - (beside_s - waits_s)
        shown_s = maximum(maximum(behind_s - beside_s, late_s), 0.0)
        added_s = shown_s + self._taken_fraction() * (behind_s - shown_s)
        for way, hidden_s in behind.items():
            share = hidden_s / where(behind_s > 0, behind_s, 1.0)
            seconds[f"ep_{way}_s"] = seconds[f"ep_{way}_s"] + share * added_s

    def _exchanges(
        self,
        items: Sequence[Item],
        shape: Shape,
        idle_s: Mapping[str, Number],
        replayed: bool,
    ) -> tuple[dict[str, Number], dict[str, Number]]:
        """Seconds of exchanges that show, by group and pass, and by pass those that hide behind another micro-batch."""
        seconds: dict[str, Number] = {f"{g}_{way}_s": 0.0 for g in COMM_GROUPS for way in ("forward", "backward")}
        shown_of_hideable: dict[str, Number] = dict.fromkeys(seconds, 0.0)
        behind: dict[str, Number] = {}
        overlapped = self.runtime.overlaps_experts and not replayed
        for each in self.each_exchange(items, shape, replayed):
            key = f"{each.group}_{each.way}_s"
            if each.exchange.overlap == "ep" and overlapped:
                behind[each.way] = behind.get(each.way, 0.0) + each.hidden_s
            seconds[key] = seconds[key] + each.exchanged_s - each.hidden_s
            shown_of_hideable[key] = shown_of_hideable[key] + each.hideable_s - each.hidden_s
        for way, waited_s in idle_s.items():
            # what waits for no product waits for the host beside it
            keys = [f"{g}_{way}_s" for g in COMM_GROUPS]
            all_s = sum(shown_of_hideable[key] for key in keys)
            hidden_fraction = minimum(all_s, waited_s) / where(all_s > 0, all_s, 1.0)
            for key in keys:
                seconds[key] = seconds[key] - hidden_fraction * shown_of_hideable[key]
        return seconds, behind

    def each_exchange(self, items: Sequence[Item], shape: Shape, replayed: bool = False) -> Iterator[ExchangeSeconds]:
        """The seconds of each exchange of a part, in their order in the list."""
        for exchange in collectives_of(items):
            size, _ = group_of(exchange.group, shape, exchange.shards)
            tiers_s = self._tiers_s(exchange, shape)
            exchanged_s: Number = sum(tiers_s)
            if exchange.overlap == "ep":
                hidden_s = hideable_s = 0.0 if replayed else self._hidden_of_experts_s(exchange, tiers_s)
            else:
                hideable_s = hidden_s = self._hidden_fraction(exchange, size) * exchanged_s
            if exchange.overlap == "cp":
                hidden_s = minimum(hidden_s, self._other_blocks_s(items, exchange, size))
            if exchange.beside and any_of(hidden_s):
                hidden_s = minimum(hidden_s, self._products_s(exchange))
            yield ExchangeSeconds(exchange, exchanged_s, hideable_s, hidden_s)

    def _tiers_s(self, exchange: Collective, shape: Shape) -> list[Number]:
        """Seconds of an exchange on each tier; on the first, also those that ranks wait for the last of them."""
        runtime, dtype = self.runtime, self.training.dtype

        def tiers_s() -> list[Number]:
            sync_us = runtime.collective_sync_us if exchange.waits and not exchange.choices else 0.0
            waits = (REPLAYED if runtime.cuda_graphs else 1.0) * (exchange.num_bytes > 0)
            sent = dtype if runtime.narrow_exchanges else "bf16"
            inner_s, *outer_s = exchange_tiers_s(exchange, shape, self.cluster, sent)
            size, _ = group_of(exchange.group, shape, exchange.shards)
            return [inner_s + waits * sync_us * MICRO * log2(size), *outer_s]

        return self._once(exchange, tiers_s)

    def _hidden_of_experts_s(self, exchange: Collective, tiers_s: Sequence[Number]) -> Number:
        """Seconds of an expert exchange that can hide behind another micro-batch: a share of those on each tier."""
        runtime = self.runtime
        if not runtime.overlaps_experts:
            return 0.0
        inner_s, outer_s = tiers_s[0], sum(tiers_s[1:]) - self._begun_s(exchange, tiers_s)
        return runtime.ep_overlap_fraction * inner_s + runtime.ep_overlap_network_fraction * outer_s

    def _begun_s(self, exchange: Collective, tiers_s: Sequence[Number]) -> Number:
        """Seconds that a dispatcher of rows takes to begin where the host drives the network, whatever runs beside: the
        host stands still until it has the counts of tokens (DeepEP's dispatch)."""
        if not exchange.choices or not any(tier.is_host_driven for tier in self.cluster.tiers[1:]):
            return 0.0
        return transport_of(exchange.transport).start_us * MICRO * (sum(tiers_s[1:]) > 0)

    def hidden_exchanges_s(self, items: Sequence[Item], shape: Shape) -> Number:
        """Seconds of a part's expert exchanges, forward and backward, that another micro-batch can hide."""
        of_experts = (exchange for exchange in collectives_of(items) if exchange.overlap == "ep")
        return sum(self._hidden_of_experts_s(exchange, self._tiers_s(exchange, shape)) for exchange in of_experts)

    def _taken_fraction(self) -> float:
        """Share of the GPU that the kernels of a hidden expert exchange take from the products beside it."""
        hardware, runtime = self.cluster.hardware, self.runtime
        sms = {"deepep": runtime.deepep_sms, "hybridep": runtime.hybridep_sms}
        return sms.get(runtime.dispatcher_on(hardware), 0) / hardware.num_sms

    def _expert_weight_gradients_s(self, operators: Sequence[Operator]) -> Number:
        """Seconds of the weight gradients of experts, which run before the exchange that they could hide."""
        experts = [op for op in operators if op.expert]
        return compute.summed(map(self._operator_s, experts)).wgrad_s

    def _hide_behind_shared_experts(self, seconds: dict[str, Number], operators: Sequence[Operator]) -> None:
        """Take the exchanges off `seconds` that run beside the products of shared experts."""
        shared = [op for op in operators if "shared_experts" in op.modules]
        passes = compute.summed(map(self._operator_s, shared))
        for way, pass_s in (("forward", passes[0]), ("backward", passes[1] + passes[2])):
            key = f"ep_{way}_s"
            seconds[key] = seconds[key] - minimum(seconds[key], pass_s)

    def _hidden_fraction(self, exchange: Collective, size: Number) -> Number:
        """Share of an exchange among `size` ranks that the runtime hides behind compute.

        A product that takes its input, or gives its output, in one piece per rank hides the exchange of all pieces but
        one.
        """
        runtime = self.runtime
        if exchange.overlap == "tp":
            fraction = runtime.tp_overlap_fraction if self.model.mla is None else runtime.mla_tp_overlap_fraction
            return fraction * (1 - 1 / size)
        fractions = {"tp_async": runtime.tp_async_overlap_fraction, "cp": runtime.cp_overlap_fraction}
        fractions["weights"] = runtime.fsdp_overlap_fraction
        return fractions.get(exchange.overlap, 0.0)

    def _other_blocks_s(self, items: Sequence[Item], exchange: Collective, size: Number) -> Number:
        """Seconds of attention to all blocks of keys in a ring but one, which hide the exchange of these blocks."""
        attention = [op for op in operators_of(items) if op.kind == "attention"]
        passes = compute.summed(map(self._operator_s, attention))
        seconds = sum(passes[1:]) if exchange.backward else passes[0]
        return seconds * (1 - 1 / size)

    def _products_s(self, exchange: Collective) -> Number:
        """Seconds of the products beside an exchange of tensor parallelism, which can hide no more of it than this."""
        seconds: Number = sum(getattr(self._operator_s(op), exchange.beside_pass) for op in exchange.beside)
        return seconds

    def _with_late_ranks(self, seconds: dict[str, Number], items: Sequence[Item], shape: Shape) -> dict[str, Number]:
        """`seconds` and the time that tensor-parallel ranks wait for the slowest one, in proportion to its compute."""
        if not any(exchange.group == "tp" for exchange in collectives_of(items)):
            return seconds
        late = self.runtime.tp_jitter_fraction * log2(shape.tp)
        backward_s = seconds["input_grad_s"] + seconds["weight_grad_s"]
        return seconds | {
            "tp_forward_s": seconds["tp_forward_s"] + late * seconds["forward_s"],
            "tp_backward_s": seconds["tp_backward_s"] + late * backward_s,
        }

    def _with_launches(self, seconds: dict[str, Number], items: Sequence[Item], shape: Shape) -> dict[str, Number]:
        """`seconds` and the time that the GPU waits for the host in a mixture of experts: max(GPU and exchanges, host).

        A host that needs the count of each expert's tokens waits for it in the middle of the forward, so the maximum is
        taken of what precedes the exchange, of the rest, and of the backward. A host that does not need it (experts of
        a fixed capacity) is late only where both passes together take it longer.
        """
        if not self._is_mixture(items):
            return seconds
        sent_s, driven_s = self._sending_s(items, shape), self._driven_s(items, shape)
        layer_s, beside = self._mixture_host_s(shape), self._adapters_s(items)
        beside_s = {"forward": beside[0], "backward": beside[1] + beside[2]}
        host_s = tuple(layer_s + beside_s[way] + sent_s[way] + driven_s[way] for way in ("forward", "backward"))
        part = PartCost(**seconds)
        forward_s, backward_s = part.forward_total_s, part.backward_total_s
        if self.runtime.awaits_token_counts:
            host_first_s, gpu_first_s = self._before_counts_s(items, part)
            first_s = maximum(host_first_s - gpu_first_s, 0.0)
            rest_s = maximum(host_s[0] - host_first_s - (forward_s - gpu_first_s), 0.0)
            late_s = first_s + rest_s, maximum(host_s[1] - backward_s, 0.0)
        else:
            paced = compute.at_host_pace((forward_s, backward_s), host_s)
            late_s = paced[0] - forward_s, paced[1] - backward_s
        return seconds | {
            "forward_s": seconds["forward_s"] + late_s[0],
            "input_grad_s": seconds["input_grad_s"] + late_s[1],
        }

    def _sending_s(self, items: Sequence[Item], shape: Shape) -> dict[str, Number]:
        """Host seconds, by pass, to start the exchanges of a part's tensor- and context-parallel ranks, to rotate texts
        that are packed, and to fetch weights that ZeRO-3 shards.

        The exchanges of experts count among a mixture's kernels.
        """
        kernel_s = compute.issue_s(self.cluster.hardware, self.runtime)
        weights = sum(op.parameters > 0 for op in operators_of(items)) * (shape.zero_stage == 3)
        kernels = self._texts(items, shape) + self.runtime.fetch_kernels * weights
        each_s, both_s = self.runtime.exchange_kernels * kernel_s, kernels * kernel_s
        seconds: dict[str, Number] = {"forward": both_s, "backward": both_s}
        for exchange in collectives_of(items) if each_s else ():
            if exchange.group in ("tp", "cp"):
                is_sent = 1.0 * (group_of(exchange.group, shape, exchange.shards)[0] > 1) * (exchange.num_bytes > 0)
                seconds[_way(exchange)] = seconds[_way(exchange)] + each_s * is_sent
        return seconds

    def _texts(self, items: Sequence[Item], shape: Shape) -> Number:
        """Kernels of a pass for the texts packed into a micro-batch; none in a part without attention.

        Every rank of a shared sequence holds a part of every text. Where ranks exchange heads for tokens, the order of
        each text's 2·cp slices is worked out one by one, for three tensors one way and one the other.
        """
        runtime, lengths = self.runtime, self.training.document_lengths
        packs = runtime.packs_documents or (lengths is not None and self.training.batching == "packed")
        if not packs or not any("core_attn" in op.modules for op in operators_of(items)):
            return 0.0
        mean: float = TEXT_TOKENS
        if lengths is not None:
            mean = sum(each.length * each.share for each in lengths) / sum(each.share for each in lengths)
        slices = 4 * 2 * shape.cp * (shape.cp > 1) * (runtime.cp_comm_type == "a2a")
        kernels = runtime.document_kernels * (self.model.position_embedding == "rope") + runtime.slice_kernels * slices
        return kernels * maximum(shape.tokens * shape.cp / mean, 1.0)

    def _driven_s(self, items: Sequence[Item], shape: Shape) -> dict[str, Number]:
        """Seconds, by pass, of expert exchanges that the host's threads drive: a host that launches one layer after the
        other gains nothing meanwhile. Beside another micro-batch it goes on when they have begun."""
        seconds: dict[str, Number] = {"forward": 0.0, "backward": 0.0}
        driven = [tier.is_host_driven for tier in self.cluster.tiers]
        if self.runtime.cuda_graphs or not any(driven):
            return seconds
        for exchange in collectives_of(items):
            if exchange.group == "ep":
                tiers_s = self._tiers_s(exchange, shape)
                way, begun_s = _way(exchange), self._begun_s(exchange, tiers_s)
                all_s = sum(s for s, here in zip(tiers_s, driven, strict=True) if here)
                seconds[way] = seconds[way] + (begun_s if self.runtime.overlaps_experts else all_s)
        return seconds

    def _is_mixture(self, items: Sequence[Item]) -> bool:
        return self.model.moe is not None and any(op.expert for op in operators_of(items))

    def _mixture_host_s(self, shape: Shape) -> Number:
        """Host seconds of a layer with experts, the same for forward and backward."""
        runtime, moe = self.runtime, self.model.moe
        assert moe is not None
        # what prepares counts of tokens is gone once, whether they are known before or a graph replays it
        layer = min(runtime.moe_host_factor, runtime.launched_fraction) * runtime.moe_kernels
        chosen = runtime.index_kernels * (self.model.indexer is not None and runtime.fuses_sparse_attention)
        trains_biases = self.model.has_mlp_bias and not runtime.fuses_experts and self.training.adapters is None
        each = runtime.expert_kernels + runtime.bias_kernels * trains_biases
        return self._host_kernels_s(layer + chosen + each * moe.num_experts / shape.ep)

    def _host_kernels_s(self, kernels: Number) -> Number:
        """Host seconds of so many kernels of a layer with experts, whose casts and pieces count too."""
        runtime = self.runtime
        if runtime.overlaps_experts and not runtime.graphed_modules:
            kernels = kernels * runtime.ep_overlap_host_factor
        if is_narrow(self.cluster.hardware, self.training.dtype):
            kernels = kernels * runtime.narrow_host_factor
        return kernels * compute.issue_s(self.cluster.hardware, runtime)

    def _before_counts_s(self, items: Sequence[Item], part: PartCost) -> tuple[Number, Number]:
        """Seconds of the host and of the GPU for what precedes the exchange of a mixture's forward: attention, routing.

        The host's are the shares of a layer that CUDA graphs of attention and routing would take, less those that do.
        Beside another micro-batch the GPU has work while the host waits.
        """
        runtime = self.runtime
        whole = runtime.graphed_attention_fraction + runtime.graphed_routing_fraction
        share = whole + runtime.launched_fraction - 1
        first = next((place for place, item in enumerate(items) if item.name == "dispatch"), None)
        if share <= 0 or first is None or runtime.overlaps_experts:
            return 0.0, 0.0
        before_s: Number = sum(self._operator_s(op).forward_s for op in operators_of(items[:first]))
        gpu_s = lateness(self.training, self.cluster) * before_s + part.tp_forward_s + part.cp_forward_s
        return self._host_kernels_s(share * runtime.moe_kernels), gpu_s

    def _adapters_s(self, items: Sequence[Item]) -> PassSeconds:
        """Host seconds of the kernels of adapters, which do not count among a mixture's."""
        beside = [op for op in operators_of(items) if op.name.endswith(OF_ADAPTERS)]
        return compute.issue_seconds(beside, self.cluster.hardware, self.runtime)

    def host_s(self, items: Sequence[Item], shape: Shape) -> Number:
        """Host seconds of a part's kernels, forward and backward together."""
        sent_s: Number = sum(self._sending_s(items, shape).values())
        if self._is_mixture(items):
            return 2 * self._mixture_host_s(shape) + sum(self._adapters_s(items)) + sent_s
        hosts = [compute.host_seconds(op, self.cluster.hardware, self.runtime) for op in operators_of(items)]
        return sum(map(sum, hosts)) + sent_s


def _way(exchange: Collective) -> str:
    return "backward" if exchange.backward else "forward"
