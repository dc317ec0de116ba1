"""Seconds of a part of the model by pass: what the GPU computes, what the host issues, what of the exchanges shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.physics import compute
from planner.physics.communication import exchange_s, group_of
from planner.physics.cost import PartCost
from planner.physics.operators import Collective, Item, collectives_of, operators_of
from planner.shape import Number, Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.specs.units import MICRO
from planner.trainers.spec import RuntimeSpec

COMM_GROUPS = ("tp", "cp", "ep")
"""Groups whose exchanges run inside a layer; expert tensor parallelism counts with ep."""
REPLAYED = 0.5
"""Share that stays of the wait for an exchange's last rank where a CUDA graph replays it: the hosts' half is gone."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of parts of one model, in one training, on one cluster, under one trainer."""

    model: ModelSpec
    training: TrainingSpec
    cluster: ClusterSpec
    runtime: RuntimeSpec

    def seconds(self, items: Sequence[Item], shape: Shape) -> dict[str, Number]:
        """Seconds of a part by pass and kind; an exchange counts only as far as nothing hides it."""
        seconds: dict[str, Number] = {f"{g}_{way}_s": 0.0 for g in COMM_GROUPS for way in ("forward", "backward")}
        slow, operators = 1 + self.training.straggler_fraction, operators_of(items)
        hardware, dtype, runtime = self.cluster.hardware, self.training.dtype, self.runtime
        gpu = compute.gpu_seconds(operators, hardware, dtype, runtime)
        passes = compute.with_host(gpu, compute.issue_seconds(operators, hardware, runtime), runtime)
        for key, value in zip(("forward_s", "input_grad_s", "weight_grad_s"), passes, strict=True):
            seconds[key] = slow * value
        # while the GPU waits for the host, exchanges go on
        idle = 0.0 if runtime.blocking_launches else 1.0
        idle_s = {"forward": idle * (passes[0] - gpu[0]), "backward": idle * (sum(passes[1:]) - sum(gpu[1:]))}
        shown_of_hideable: dict[str, Number] = dict.fromkeys(seconds, 0.0)
        behind = dict.fromkeys(("ep_forward_s", "ep_backward_s"), np.zeros(()))
        for exchange in collectives_of(items):
            group = "ep" if exchange.group == "etp" else exchange.group
            key = f"{group}_{'backward' if exchange.backward else 'forward'}_s"
            size, _ = group_of(exchange.group, shape)
            hidden = self._hidden_fraction(exchange, size)
            sync_us = 0.0 if exchange.choices else self.runtime.collective_sync_us
            waits = (REPLAYED if self.runtime.cuda_graphs else 1.0) * (exchange.num_bytes > 0)
            sync_s = waits * sync_us * MICRO * np.log2(size)
            sent = self.training.dtype if self.runtime.narrow_exchanges else "bf16"
            exchanged_s = exchange_s(exchange, shape, self.cluster, sent) + sync_s
            hideable_s = hidden_s = hidden * exchanged_s
            if exchange.overlap == "cp":
                hidden_s = np.minimum(hidden_s, self._other_blocks_s(items, exchange, size))
            if exchange.beside and np.any(hidden_s):
                hidden_s = np.minimum(hidden_s, self._products_s(exchange))
            if exchange.overlap == "ep":
                behind[key] = behind[key] + hidden_s
            seconds[key] = seconds[key] + exchanged_s - hidden_s
            shown_of_hideable[key] = shown_of_hideable[key] + hideable_s - hidden_s
        for way in ("forward", "backward"):
            # what waits for no product waits for the host beside it
            keys = [f"{g}_{way}_s" for g in COMM_GROUPS]
            all_s = sum(shown_of_hideable[key] for key in keys)
            hidden_fraction = np.minimum(all_s, idle_s[way]) / np.where(all_s > 0, all_s, 1.0)
            for key in keys:
                seconds[key] = seconds[key] - hidden_fraction * shown_of_hideable[key]
        # the same pass of another micro-batch hides no more than it takes
        for way, pass_s in (("forward", passes[0]), ("backward", passes[1] + passes[2])):
            beside_s = pass_s + seconds[f"tp_{way}_s"] + seconds[f"cp_{way}_s"]
            key = f"ep_{way}_s"
            seconds[key] = seconds[key] + np.maximum(behind[key] - beside_s, 0.0)
        return self._with_late_ranks(self._with_launches(seconds, items, shape), items, shape)

    def _hidden_fraction(self, exchange: Collective, size: Number) -> Number:
        """Share of an exchange among `size` ranks that the runtime hides behind compute.

        A product that takes its input, or gives its output, in one piece per rank hides the exchange of all pieces but
        one.
        """
        if exchange.overlap == "none":
            return 0.0
        where = "mla_" if exchange.overlap == "tp" and self.model.mla is not None else ""
        fraction = float(getattr(self.runtime, f"{where}{exchange.overlap}_overlap_fraction"))
        return fraction * (1 - 1 / size) if exchange.overlap == "tp" else fraction

    def _other_blocks_s(self, items: Sequence[Item], exchange: Collective, size: Number) -> Number:
        """Seconds of attention to all blocks of keys in a ring but one, which hide the exchange of these blocks."""
        attention = [op for op in operators_of(items) if op.kind == "attention"]
        passes = compute.gpu_seconds(attention, self.cluster.hardware, self.training.dtype, self.runtime)
        seconds = sum(passes[1:]) if exchange.backward else passes[0]
        return seconds * (1 - 1 / size)

    def _products_s(self, exchange: Collective) -> Number:
        """Seconds of the products beside an exchange of tensor parallelism, which can hide no more of it than this."""
        hardware, dtype = self.cluster.hardware, self.training.dtype
        passes = [compute.operator_seconds(op, hardware, dtype, self.runtime) for op in exchange.beside]
        seconds: Number = sum(getattr(product_seconds, exchange.beside_pass) for product_seconds in passes)
        return seconds

    def _with_late_ranks(self, seconds: dict[str, Number], items: Sequence[Item], shape: Shape) -> dict[str, Number]:
        """`seconds` and the time that tensor-parallel ranks wait for the slowest one, in proportion to its compute."""
        if not any(exchange.group == "tp" for exchange in collectives_of(items)):
            return seconds
        late = self.runtime.tp_jitter_fraction * np.log2(shape.tp)
        backward_s = seconds["input_grad_s"] + seconds["weight_grad_s"]
        return seconds | {
            "tp_forward_s": seconds["tp_forward_s"] + late * seconds["forward_s"],
            "tp_backward_s": seconds["tp_backward_s"] + late * backward_s,
        }

    def _with_launches(self, seconds: dict[str, Number], items: Sequence[Item], shape: Shape) -> dict[str, Number]:
        """`seconds` and the time that the GPU waits for the host in a mixture of experts: max(GPU and exchanges, host).

        A host that needs the count of each expert's tokens cannot run ahead by more than a layer's pass, so the maximum
        is taken pass by pass. A host that does not need it (experts of a fixed capacity) is late only where both passes
        together take it longer.
        """
        if not self._is_mixture(items):
            return seconds
        host_s = self._mixture_host_s(shape)
        part = PartCost(**seconds)
        forward_s, backward_s = part.forward_total_s, part.backward_total_s
        if self.runtime.awaits_token_counts:
            late_s = np.maximum(host_s - forward_s, 0.0), np.maximum(host_s - backward_s, 0.0)
        else:
            paced = compute.at_host_pace((forward_s, backward_s), (host_s, host_s))
            late_s = paced[0] - forward_s, paced[1] - backward_s
        return seconds | {
            "forward_s": seconds["forward_s"] + late_s[0],
            "input_grad_s": seconds["input_grad_s"] + late_s[1],
        }

    def _is_mixture(self, items: Sequence[Item]) -> bool:
        return self.model.moe is not None and any(op.expert for op in operators_of(items))

    def _mixture_host_s(self, shape: Shape) -> Number:
        """Host seconds of a layer with experts, the same for forward and backward."""
        runtime, moe = self.runtime, self.model.moe
        assert moe is not None
        kernels = runtime.moe_host_factor * runtime.moe_kernels + runtime.expert_kernels * moe.num_experts / shape.ep
        if runtime.ep_overlap_fraction:
            kernels = kernels * runtime.ep_overlap_host_factor
        if compute.is_narrow(self.cluster.hardware, self.training.dtype):
            kernels = kernels * runtime.narrow_host_factor
        return kernels * compute.issue_s(self.cluster.hardware, runtime)

    def host_s(self, items: Sequence[Item], shape: Shape) -> Number:
        """Host seconds of a part's kernels, forward and backward together."""
        if self._is_mixture(items):
            return 2 * self._mixture_host_s(shape)
        hosts = [compute.host_seconds(op, self.cluster.hardware, self.runtime) for op in operators_of(items)]
        return sum(map(sum, hosts))
