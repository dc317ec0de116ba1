"""Seconds of a collective: the links that join a group's ranks, and the time that the bytes take over them.

Ranks are numbered with tp innermost, then cp, dp, pp (experts: etp, ep, expert-dp, pp), as Megatron and torchtitan do,
or with dp outermost (`Shape.dp_outermost`, Megatron's --use-tp-pp-dp-mapping). A group of n ranks a `stride` apart has
min(n, D / stride) members under a tier of D GPUs. Bytes that these members exchange among themselves go over that tier,
all others over the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from planner.physics import memory
from planner.physics.cost import PartCost, content, remembered
from planner.physics.operators import BF16, FP32, NARROW_BYTES, Collective, Group
from planner.record import record
from planner.shape import FloatArray, Number, Shape, all_of, any_of, ceil, clip, floor, log2, maximum, minimum, where
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import LinkTier
from planner.specs.machines import transport_of
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.specs.units import GB, MICRO
from planner.trainers.spec import RuntimeSpec

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring"]


FEWEST_OF_CROWD = 0.4
"""Share of `all_to_all_gb_per_s` that is left among five units and more, of which nobody measured more than four."""


class Blocks(NamedTuple):
    """The places of a group's ranks where they lie in blocks: of cp ranks where pipelines lie between replicas."""

    stride: Number
    """Ranks from one member of a block to the next."""
    size: Number
    """Members of a block."""
    block_stride: Number
    """Ranks from one block to the next."""

    def every(self, count: Number) -> Blocks:
        """The places of each `count`-th member, where a block has a multiple of so many members or divides them."""
        inside = minimum(count, self.size)
        return Blocks(self.stride * inside, self.size / inside, self.block_stride * count / inside)

    def members_under(self, num_gpus: int, size: Number) -> Number:
        """Number of the group's `size` ranks that share a unit of `num_gpus`."""
        blocks = floor(num_gpus / self.block_stride)
        whole = self.size * maximum(blocks, 1)
        return minimum(where(blocks >= 1, whole, clip(floor(num_gpus / self.stride), 1, self.size)), size)


Places = Number | Blocks
"""The places of a group's ranks: the stride from each to the next, or blocks."""


def members_by_tier(size: Number, places: Places, tiers: tuple[LinkTier, ...]) -> list[Number]:
    """Number of a group's ranks that share one unit of each tier, innermost first; the last is the whole group."""
    counts: list[Number] = []
    for tier in tiers[:-1]:
        assert tier.num_gpus is not None
        if isinstance(places, Blocks):
            counts.append(places.members_under(tier.num_gpus, size))
        else:
            counts.append(clip(floor(tier.num_gpus / places), 1, size))
    return [*counts, size]


def collective_s(
    kind: Kind,
    num_bytes: Number,
    size: Number,
    places: Places,
    cluster: ClusterSpec,
    exchanges: Number = 1.0,
) -> Number:
    """Seconds of `exchanges` that move `num_bytes` in all over `size` ranks at `places`; 0 for one rank."""
    seconds: Number = sum(collective_tiers_s(kind, num_bytes, size, places, cluster, exchanges=exchanges))
    return seconds


def collective_tiers_s(
    kind: Kind,
    num_bytes: Number,
    size: Number,
    places: Places,
    cluster: ClusterSpec,
    inner_factor: float = 1.0,
    exchanges: Number = 1.0,
) -> list[Number]:
    """The seconds of `collective_s` on each tier, innermost first.

    all_gather, reduce_scatter and ring: at each tier a unit lacks (g−1)/g of the tensor, S bytes in all, with
    g = members / inner. The `inner` members that the tier below has gathered receive it together, which takes
    (g−1)/g · S / inner / bandwidth. An all_reduce takes twice that. In an all_to_all each tier carries the share of S
    that is for the peers under it. Besides, each exchange takes hops · latency (`num_hops`) and the tier's start.

    A pipelined tier carries its bytes beside the tiers inside it, and adds the seconds by which it is slower than they
    are together. The rings that do so pass through all ranks one after the other, and not unit by unit: (n−1)/n · S
    leaves a unit of inner ranks, with n = members.
    """
    if is_nothing(num_bytes, size):
        return [0.0] * len(cluster.tiers)
    seconds: list[Number] = []
    inner: Number = 1.0
    carried_s: Number = 0.0
    for level, (tier, members) in enumerate(
        zip(cluster.tiers, members_by_tier(size, places, cluster.tiers), strict=True)
    ):
        slow = inner_factor if level == 0 else 1.0
        moved = _moved_bytes(kind, num_bytes, size, inner, members, tier)
        rate: Number = all_to_all_bytes_per_s(tier, members / inner) if kind == "all_to_all" else tier.bytes_per_s
        here_s = slow * moved / (rate * joined_fraction(tier, members))
        if tier.pipelined:
            here_s = maximum(here_s - carried_s, 0.0)
        carried_s = carried_s + here_s
        waited_s = waits_s(kind, size, inner, members, tier, level == 0, exchanges)
        seconds.append((here_s + waited_s) * ((num_bytes > 0) * (size > 1)))
        inner = members
    return seconds


def is_nothing(num_bytes: Number, size: Number) -> bool:
    """True for an exchange of no bytes, or among one rank."""
    return not any_of(num_bytes) or not any_of(size > 1)


def _moved_bytes(kind: Kind, num_bytes: Number, size: Number, inner: Number, members: Number, tier: LinkTier) -> Number:
    """Bytes of a collective that each GPU's link of one tier carries, which joins units of `inner` ranks."""
    if kind == "all_to_all":
        return num_bytes * (members - inner) / size
    passes = 2 if kind == "all_reduce" else 1
    if tier.pipelined:
        return passes * num_bytes * (1 - 1 / members) / inner * (members > inner)
    return passes * num_bytes * (1 - inner / members) / inner


def waits_s(
    kind: Kind, size: Number, inner: Number, members: Number, tier: LinkTier, innermost: bool, exchanges: Number = 1.0
) -> Number:
    """Seconds of `exchanges` on a tier that no byte takes: the latency of their hops, and the tier's start for each."""
    hops = exchanges * num_hops(kind, size, inner, members, innermost)
    return hops * tier.latency_s + exchanges * tier.start_s_of(kind) * (members > inner)


def joined_fraction(tier: LinkTier, members: Number) -> Number:
    """Share of the tier's rate that `members` GPUs under it have: all of it through a switch, else n − 1 links at most.

    n is the number of members.
    """
    if tier.link_gb_per_s is None:
        return 1.0
    return minimum((maximum(members, 2) - 1) * tier.link_gb_per_s / tier.gb_per_s, 1.0)


def all_to_all_bytes_per_s(tier: LinkTier, units: Number) -> Number:
    """Bytes a second and GPU of a large all-to-all among `units` of what a tier joins: 2/n of its limit among n."""
    rate = tier.bytes_per_s * tier.all_to_all_fraction
    if tier.all_to_all_gb_per_s is None:
        return rate
    crowded = clip(2 / units, FEWEST_OF_CROWD, 1.0)
    return minimum(rate, crowded * tier.all_to_all_gb_per_s * GB / tier.oversubscription)


def bytes_per_s_among(tier: LinkTier, members: Number) -> Number:
    """Bytes that each of `members` GPUs under one tier sends to the others in a second."""
    return tier.bytes_per_s * joined_fraction(tier, members)


def num_hops(kind: Kind, size: Number, inner: Number, members: Number, innermost: bool) -> Number:
    """Hops of one exchange over `size` ranks on a tier that joins units of `inner` ranks to units of `members`.

    An all_to_all takes one hop. An all_reduce goes up and down a chain of members / inner units on the innermost tier,
    and a tree of them on the other tiers. The other collectives pass all ranks in one ring, because NCCL has no trees
    for them; their hops are the links of the ring that belong to this tier.
    """
    if kind == "all_to_all":
        return 1.0 * (members > inner)
    if kind == "all_reduce":
        units = members / inner
        return 2 * (units - 1 if innermost else ceil(log2(units)))
    return size / inner - size / members


def dispatch_tiers_s(
    num_bytes: Number,
    choices: int,
    size: Number,
    stride: Number,
    cluster: ClusterSpec,
    inner_factor: float = 1.0,
    row_fraction: float = 0.0,
    row_bytes: float = 1.0,
    transport: str = "",
) -> list[Number]:
    """Seconds on each tier, innermost first, to send tokens to experts, once to each unit of ranks that they visit.

    `num_bytes` are the bytes of all visits. A token visits a unit of u ranks out of n with probability
    p(u) = 1 − (1 − u/n)^choices. Where its experts stand in a row, whose first and last are `row_fraction` of all
    experts apart, it is p(u) = min(1, u/n + row_fraction): the row may begin anywhere. Over each outer tier it goes
    once to each unit below the tier that it visits: (members / inner − 1) · p(inner) copies. Over the innermost tier it
    is handed on to its ranks: n · p(1) copies, but for the one that is there already (DeepEP, HybridEP).

    Where threads of the host drive a network they hand on row by row, of `row_bytes` each, and `transport` says what it
    takes to begin and how much of a row's time its messages take (specs/machines.yaml).
    """
    if is_nothing(num_bytes, size):
        return [0.0] * len(cluster.tiers)
    token_bytes = num_bytes / choices
    is_any = (token_bytes > 0) * (size > 1)
    seconds: list[Number] = []
    inner: Number = 1.0
    for level, (tier, members) in enumerate(
        zip(cluster.tiers, members_by_tier(size, stride, cluster.tiers), strict=True)
    ):
        visited = minimum(inner / size + row_fraction, 1.0) if row_fraction else 1 - (1 - inner / size) ** choices
        copies = size * visited * (1 - 1 / members) if level == 0 else (members / inner - 1) * visited
        slow = inner_factor if level == 0 else 1.0
        handed_s: Number = slow * token_bytes * copies / bytes_per_s_among(tier, members)
        start_s = tier.latency_s
        if level and tier.is_host_driven:
            carrier = transport_of(transport)
            row_s = carrier.row_fraction * tier.message_us * MICRO
            handed_s = maximum(handed_s, token_bytes / row_bytes * copies * row_s)
            start_s += carrier.start_us * MICRO
        seconds.append((handed_s + (members > inner) * start_s) * is_any)
        inner = members
    return seconds


def p2p_s(num_bytes: Number, distance: Number, cluster: ClusterSpec, start: Number = 0) -> Number:
    """Seconds to hand `num_bytes` from rank `start` to the rank `distance` behind it, or back.

    They go over the innermost tier of which one unit holds both, latency included. From rank 0 that is the innermost
    tier wider than the distance.
    """
    outermost = cluster.tiers[-1]
    seconds: Number = num_bytes / bytes_per_s_among(outermost, 2) + outermost.latency_s
    for tier in reversed(cluster.tiers[:-1]):
        assert tier.num_gpus is not None
        within = start // tier.num_gpus == (start + distance) // tier.num_gpus
        seconds = where(within, num_bytes / bytes_per_s_among(tier, 2) + tier.latency_s, seconds)
    return seconds


def data_parallel_places(shape: Shape) -> tuple[Places, Places]:
    """Places of the ranks that hold the same dense weights (dp·cp of them), and of those with the same experts."""
    if not any_of(shape.dp_outermost):
        return shape.tp, shape.ep * shape.etp
    outermost = shape.dp_outermost > 0
    replica = shape.tp * shape.cp * where(outermost, shape.pp, shape.dp)
    dense = Blocks(shape.tp, where(outermost, shape.cp, shape.cp * shape.dp), replica)
    # there, the experts of a stage fill its tp·cp ranks (planner/trainers/rules/rules.yaml)
    return dense, Blocks(shape.ep * shape.etp, where(outermost, 1, shape.expert_dp), replica)


def group_of(group: Group, shape: Shape, shards: int = 1) -> tuple[Number, Number]:
    """Number of ranks in a group, and their stride; of the `shards` of its weights instead, where there are some."""
    if shards > 1:
        return shards, shape.tp
    if group == "tp":
        return shape.tp, 1
    if group == "cp":
        return shape.cp, shape.tp
    if group == "etp":
        return shape.etp, 1
    return shape.ep, shape.etp


def exchange_tiers_s(collective: Collective, shape: Shape, cluster: ClusterSpec, dtype: str = "bf16") -> list[Number]:
    """Seconds of a layer's collective, innermost tier first, where products are in `dtype`, as if nothing hid it.

    Worked out once for all recipes that exchange so.
    """
    size, stride = group_of(collective.group, shape, collective.shards)
    key = (
        content(collective.num_bytes), content(size), content(stride), dtype, collective.cast, collective.kind,
        collective.choices, collective.inner_factor, collective.row_fraction, collective.row_bytes,
        collective.transport,
    )  # fmt: skip
    return remembered(cluster, key, lambda: _exchange_tiers_s(collective, size, stride, cluster, dtype))


def _exchange_tiers_s(
    collective: Collective, size: Number, stride: Number, cluster: ClusterSpec, dtype: str
) -> list[Number]:
    narrow = NARROW_BYTES[dtype] / BF16 if collective.cast and dtype in NARROW_BYTES else 1.0
    num_bytes, choices, slow = collective.num_bytes, collective.choices, collective.inner_factor
    if choices:
        rows = collective.row_fraction, collective.row_bytes, collective.transport
        return dispatch_tiers_s(num_bytes, choices, size, stride, cluster, slow, *rows)
    return collective_tiers_s(collective.kind, narrow * num_bytes, size, stride, cluster, slow)


@record
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
            gather_s = gather_s + self._frozen_s(part, part.frozen_parameters, part.frozen_expert_parameters, shape)
        if self.runtime.plain_forwards:
            once_s = self._frozen_s(part, part.reference_parameters, part.reference_expert_parameters, shape)
            # a step gathers twice, for its forward and its backward, and once for each forward without a gradient
            gather_s = gather_s + self.runtime.plain_forwards / 2 * once_s
        return self.reduce_s(*trained, shape), gather_s

    def _frozen_s(self, part: PartCost, parameters: Number, expert: Number, shape: Shape) -> Number:
        """Seconds to gather weights as wide as a part's frozen ones, `expert` of them of routed experts; 0 below
        ZeRO-3."""
        num_bytes = memory.gathered_frozen_bytes(part, self.runtime)
        exchanged_s = self._data_parallel_s(parameters - expert, expert, shape, num_bytes, reduces=False)
        return (exchanged_s + self._copied_s(parameters - expert, expert, shape, num_bytes)) * (shape.zero_stage == 3)

    def _copied_s(self, dense: Number, expert: Number, shape: Shape, num_bytes: Number) -> Number:
        """Seconds to copy this rank's shards of weights from the host, where they wait, before they are gathered."""
        if not self.runtime.parameter_offload:
            return 0.0
        shards = dense / shape.shard_size + expert / memory.expert_shards(shape)
        return num_bytes * shards / self.cluster.hardware.host.bytes_per_s * (shape.zero_stage == 3)

    def reduce_s(self, dense: Number, expert: Number, shape: Shape) -> Number:
        """Seconds to reduce-scatter gradients over the shard group and all-reduce them over its replicas.

        Under ZeRO-0, all ranks all-reduce them.
        """
        return self._data_parallel_s(dense, expert, shape, self.runtime.summed_gradient_bytes, reduces=True)

    def gather_s(self, dense: Number, expert: Number, shape: Shape) -> Number:
        """Seconds to all-gather updated parameters over the shard group; none under ZeRO-0.

        Parameters are sent in bf16, also where blocks of values have scales: these are cast on arrival, along rows and
        along columns.
        """
        in_fp8 = self.runtime.narrow_parameters and self.training.dtype == "fp8"
        sharded = shape.zero_stage >= 1
        exchanged_s = self._data_parallel_s(dense, expert, shape, 1 if in_fp8 else BF16, reduces=False)
        return exchanged_s * sharded + self._copied_s(dense, expert, shape, BF16)

    def _data_parallel_s(self, dense: Number, expert: Number, shape: Shape, num_bytes: Number, reduces: bool) -> Number:
        seconds: Number = 0.0
        tensors = self.runtime.gathers_tensors and not reduces
        # one parameter at a time, ZeRO-3's exchanges are small
        rate = where(shape.zero_stage == 3, self.runtime.fsdp_rate_fraction, 1.0)
        dense_places, expert_places = data_parallel_places(shape)
        cut, scatters = self.runtime.weight_shards, (shape.zero_stage >= 1) & (not self.runtime.all_reduces_gradients)
        if cut > 1:
            dense, dense_places = dense / cut, shape.tp * cut
        groups = (
            (dense, shape.dp * shape.cp / cut, shape.shard_size, dense_places),
            (expert, shape.expert_dp, memory.expert_shards(shape), expert_places),
        )
        for parameters, size, shards, places in groups:
            shard = minimum(shards, size)
            payload = num_bytes * parameters / rate
            bucket = self._tensor_parameters(shape) if tensors else self.runtime.bucket_among(shard)
            # buckets cross layers, which ZeRO-3 exchanges one by one
            exchanges = 1.0 if bucket is None else where(shape.zero_stage == 3, 1.0, parameters / bucket)
            seconds_of = partial(collective_s, cluster=self.cluster, exchanges=exchanges)
            scatter = seconds_of("reduce_scatter", payload, shard, places)
            if not reduces:
                seconds = seconds + scatter
                continue
            each = places.every(shard) if isinstance(places, Blocks) else places * shard
            replicas = seconds_of("all_reduce", payload / shard, size / shard, each)
            if self.runtime.shards_states_over_groups:
                # the second half of the all-reduce is a gather of updated weights, once a step
                replicas = replicas * where(shape.zero_stage == 3, (num_bytes + BF16) / (2 * num_bytes), 1)
            among_all = 0.0 if all_of(scatters) else seconds_of("all_reduce", payload, size, places)
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
