"""Seconds of what ranks exchange beside their layers: gradients, weights, and activations between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from planner.physics import memory
from planner.physics.communication import Blocks, collective_s, data_parallel_places, p2p_s
from planner.physics.cost import PartCost
from planner.physics.operators import BF16, FP32
from planner.shape import FloatArray, Number, Shape, any_of, maximum, minimum, where
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.spec import RuntimeSpec


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Seconds of exchanges of one model, in one training, on one cluster, under one trainer."""

    model: ModelSpec
    training: TrainingSpec
    cluster: ClusterSpec
    runtime: RuntimeSpec

    def part_s(self, part: PartCost, shape: Shape) -> tuple[Number, Number]:
        """Seconds to reduce the gradients of a part whose parameters are counted, and to gather its weights.

        Frozen weights are gathered where they are sharded, in ZeRO-3, as they are kept.
        """
        trained = part.trained_dense_parameters, part.trained_expert_parameters
        gather_s = self.gather_s(*trained, shape)
        if any_of(part.frozen_parameters):
            gather_s = gather_s + self._frozen_s(part.frozen_parameters, part.frozen_expert_parameters, shape)
        if self.runtime.plain_forwards:
            once_s = self._frozen_s(part.reference_parameters, part.reference_expert_parameters, shape)
            # a step gathers twice, for its forward and its backward, and once for each forward without a gradient
            gather_s = gather_s + self.runtime.plain_forwards / 2 * once_s
        return self.reduce_s(*trained, shape), gather_s

    def _frozen_s(self, parameters: Number, expert: Number, shape: Shape) -> Number:
        """Seconds to gather frozen weights, `expert` of them of routed experts, as they are kept; 0 below ZeRO-3."""
        num_bytes = self.runtime.gathered_frozen_bytes
        return self._data_parallel_s(parameters - expert, expert, shape, num_bytes, reduces=False) * (
            shape.zero_stage == 3
        )

    def reduce_s(self, dense: Number, expert: Number, shape: Shape) -> Number:
        """Seconds to reduce-scatter gradients over the shard group and all-reduce them over its replicas.

        Under ZeRO-0, all ranks all-reduce them.
        """
        return self._data_parallel_s(dense, expert, shape, self.runtime.gradient_bytes, reduces=True)

    def gather_s(self, dense: Number, expert: Number, shape: Shape) -> Number:
        """Seconds to all-gather updated parameters over the shard group; none under ZeRO-0.

        Parameters are sent in bf16, also where blocks of values have scales: these are cast on arrival, along rows and
        along columns.
        """
        in_fp8 = self.runtime.narrow_parameters and self.training.dtype == "fp8"
        sharded = shape.zero_stage >= 1
        return self._data_parallel_s(dense, expert, shape, 1 if in_fp8 else BF16, reduces=False) * sharded

    def _data_parallel_s(self, dense: Number, expert: Number, shape: Shape, num_bytes: float, reduces: bool) -> Number:
        seconds: Number = 0.0
        tensors = self.runtime.gathers_tensors and not reduces
        # one parameter at a time, ZeRO-3's exchanges are small
        rate = where(shape.zero_stage == 3, self.runtime.fsdp_rate_fraction, 1.0)
        dense_places, expert_places = data_parallel_places(shape)
        groups = (
            (dense, shape.dp * shape.cp, shape.shard_size, dense_places),
            (expert, shape.expert_dp, memory.expert_shards(shape, self.runtime), expert_places),
        )
        for parameters, size, shards, places in groups:
            shard = minimum(shards, size)
            payload = num_bytes * parameters / rate
            bucket = self._tensor_parameters(shape) if tensors else self.runtime.bucket_among(shard)
            exchanges = 1.0 if bucket is None else parameters / bucket
            seconds_of = partial(collective_s, cluster=self.cluster, exchanges=exchanges)
            scatter = seconds_of("reduce_scatter", payload, shard, places)
            if not reduces:
                seconds = seconds + scatter
                continue
            each = places.every(shard) if isinstance(places, Blocks) else places * shard
            replicas = seconds_of("all_reduce", payload / shard, size / shard, each)
            among_all = seconds_of("all_reduce", payload, size, places)
            scatters = (shape.zero_stage >= 1) & (not self.runtime.all_reduces_gradients)
            seconds = seconds + where(scatters, scatter + replicas, among_all)
        return seconds

    def _tensor_parameters(self, shape: Shape) -> Number:
        """Parameters of a weight on this rank, as of a square one: those of an MLP are larger, norms are smaller."""
        return self.model.hidden_size**2 / shape.tp

    def p2p_s(self, shape: Shape) -> Number:
        """Least seconds to hand one micro-batch's activation to the next stage: those of the first; 0 without a
        pipeline.

        Later stages may lie across a tier's border (`hops_s`).
        """
        return self._hop_s(shape, 0, shape.stage_stride) * (shape.pp > 1)

    def hops_s(self, shape: Shape, ranks: Sequence[int]) -> FloatArray:
        """Seconds to hand an activation over each boundary of virtual stages, in the pipeline of rank 0.

        `ranks` has the pipeline rank of each virtual stage. None takes less than the first.
        """
        pairs = np.sort(np.stack([ranks[:-1], ranks[1:]]), axis=0) * shape.stage_stride
        hops_s = maximum(self._hop_s(shape, pairs[0], pairs[1] - pairs[0]), self.p2p_s(shape))
        return np.broadcast_to(hops_s, pairs[0].shape)  # a cluster of one tier has one number for all distances

    def _hop_s(self, shape: Shape, start: Number, distance: Number) -> Number:
        """Seconds to hand one micro-batch's activation from one rank to another.

        Where stages send slices of the activation, the seconds to gather them on arrival are included.
        """
        num_bytes = BF16 * shape.shard_tokens * self.model.residual_size
        if not self.runtime.scatters_p2p:
            return p2p_s(num_bytes, distance, self.cluster, start)
        slices = where(shape.sequence_parallel, 1, shape.tp)
        gather_s = collective_s("all_gather", num_bytes, slices, 1, self.cluster)
        return p2p_s(num_bytes / slices, distance, self.cluster, start) + gather_s

    def norm_s(self, shape: Shape) -> Number:
        """Seconds to sum the norm of the gradients over all ranks."""
        return collective_s("all_reduce", FP32, shape.num_ranks, 1, self.cluster)

    def tied_s(self, shape: Shape) -> Number:
        """Seconds in which first and last stage exchange the gradients of an embedding that they share."""
        if not self.model.tie_word_embeddings:
            return 0.0
        num_bytes = self.model.vocab_size / shape.tp * self.model.hidden_size * self.runtime.gradient_bytes
        distance = shape.stage_stride * maximum(shape.pp - 1, 1)
        return 2 * p2p_s(num_bytes, distance, self.cluster) * (shape.pp > 1)
