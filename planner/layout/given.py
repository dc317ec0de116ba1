"""Checks a layout that the user states, completes it with the trainer's defaults, and makes shape and split of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.errors import LayoutError, SpecError, Unsupported
from planner.layout.candidate import Split, even_counts, parse_layout, splits_from_counts
from planner.layout.seconds import MOST_ACTIONS, MOST_STAGES, replayed_actions
from planner.physics.pricing import Pricing
from planner.record import record
from planner.schedule.orders import SCHEDULES, placement, violation
from planner.shape import RANK_ORDERS, Shape, divisors
from planner.specs.model import ModelSpec
from planner.specs.problems import among
from planner.specs.training import Parallelism
from planner.trainers.rules.recipe import rules_for
from planner.trainers.rules.rule_rows import first_broken, rules_of

_TRAINABLE = tuple(name for name, kind in SCHEDULES.items() if kind.trains_one_copy)


@record
class GivenLayout:
    """A stated layout in the terms of the search."""

    shape: Shape
    split: Split
    schedule: str
    warnings: tuple[str, ...]


def fill_dp(layout: Parallelism, num_gpus: int, global_batch_size: int) -> Parallelism:
    """`layout` with dp = num_gpus / (tp·cp·pp) where it states none; raises SpecError where this is no whole number."""
    if "dp" in layout.model_fields_set:
        return layout
    ranks = layout.tp * layout.cp * layout.pp
    if num_gpus % ranks:
        dp = _largest_dp(layout, num_gpus, global_batch_size)
        raise LayoutError(
            f"dp is missing and tp·cp·pp ({ranks:,}) does not divide {num_gpus:,} GPUs",
            f"give dp {dp:,} to leave {num_gpus - dp * ranks:,} GPUs spare"
            if num_gpus > ranks
            else f"use at most {num_gpus:,} ranks",
        )
    return layout.model_copy(update={"dp": num_gpus // ranks})


def _largest_dp(layout: Parallelism, num_gpus: int, global_batch_size: int) -> int:
    """The largest dp that GPUs, batch and experts allow; 1 where they allow none."""
    most, steps = num_gpus // (layout.tp * layout.cp * layout.pp), global_batch_size // layout.micro_batch_size
    slots, experts = layout.tp * layout.cp, layout.ep * (layout.etp or 1)
    return max((dp for dp in divisors(steps, most) if slots * dp % experts == 0), default=1)


def given_layout(pricing: Pricing, wanted: Parallelism) -> GivenLayout:
    """Turn a stated layout into a shape and a split.

    Raises SpecError where it contradicts model, batch or cluster. A layout that only the trainer refuses has a warning.
    """
    _check_divisors(pricing, wanted)
    wanted = fill_dp(wanted, pricing.cluster.num_gpus, pricing.training.global_batch_size)
    shape = _shape(pricing, wanted)
    _check_arithmetic(pricing, shape)
    schedule = wanted.schedule or ("none" if shape.pp == 1 else "interleaved-1f1b" if shape.vpp > 1 else "1f1b")
    if shape.pp == 1 and schedule in ("1f1b", "interleaved-1f1b"):
        schedule = "none"
    if schedule not in _TRAINABLE:
        trains_none = f"{schedule} trains no single copy of the model with a flush after each step"
        raise SpecError(
            f"parallelism.schedule: {trains_none if schedule in SCHEDULES else f'unknown {schedule!r:.60}'}",
            among(_TRAINABLE, schedule),
        )
    _check_size(shape)
    error = violation(schedule, int(shape.pp), int(shape.vpp), int(shape.num_microbatches))
    if error is not None:
        raise LayoutError(error.message, _enough_sequences(shape, schedule) or error.hint)
    ranks, is_unasked = placement(schedule, int(shape.pp), int(shape.vpp)), pricing.runtime.recomputes_unasked
    split = _split(pricing.model, wanted, shape, ranks, is_unasked)
    refused = _refused_by_trainer(pricing, shape, split, schedule)
    warnings = tuple(f"{pricing.runtime.name} refuses this layout: {reason}" for reason in refused)
    return GivenLayout(shape, split, schedule, warnings)


def _refused_by_trainer(pricing: Pricing, shape: Shape, split: Split, schedule: str) -> Iterator[str]:
    """Reasons for which the trainer refuses a layout that arithmetic allows."""
    model, training, runtime = pricing.model, pricing.training, pricing.runtime
    for rule in rules_for(runtime):
        if not rule.holds(model, training, shape):
            yield rule.message(model, training, shape)
    if schedule not in runtime.schedules:
        yield f"it cannot run the schedule {schedule}, only {', '.join(runtime.schedules)}"
    if shape.sequence_parallel and not runtime.has_sequence_parallel:
        yield "it has no sequence parallelism"
    modules = pricing.selective_modules
    if split.base == "selective" and not runtime.has_sequence_parallel:
        yield "it has no selective recompute"
    elif split.base == "selective" and ("op" in modules) != ("op" in runtime.selective_default):
        yield f"it recomputes {', '.join(runtime.selective_recompute_modules)}, not {', '.join(modules)}"
    # Megatron-LM's layouts may leave any stage empty
    if runtime.family != "megatron" and (empty := _empty_stages(split)):
        yield f"stage {empty[0]} of {len(split.counts)} holds nothing to run"


def _empty_stages(split: Split) -> list[int]:
    """Virtual stages between the first and the last that hold no layer of any kind."""
    stages = range(1, len(split.counts) - 1)
    return [stage for stage in stages if split.counts[stage] == 0 and stage != split.mtp_stage]


def _shape(pricing: Pricing, wanted: Parallelism) -> Shape:
    training, cluster = pricing.training, pricing.cluster
    ranks = wanted.tp * wanted.cp * wanted.pp * wanted.dp
    if ranks > cluster.num_gpus:
        raise LayoutError(
            f"parallelism: tp {wanted.tp} · cp {wanted.cp} · pp {wanted.pp} · dp {wanted.dp} = {ranks} ranks, "
            f"the cluster has {cluster.num_gpus} GPUs",
            f"lower dp to {_largest_dp(wanted, cluster.num_gpus, training.global_batch_size)}, or give {ranks} GPUs"
            if ranks <= wanted.dp * cluster.num_gpus
            else f"lower tp, cp or pp, or give {ranks} GPUs",
        )
    per_step = wanted.dp * wanted.micro_batch_size
    if training.global_batch_size % per_step:
        raise LayoutError(
            f"global_batch_size: {training.global_batch_size} is no multiple of dp {wanted.dp} · "
            f"micro_batch_size {wanted.micro_batch_size} = {per_step}",
            f"use {max(1, training.global_batch_size // per_step) * per_step} sequences, or another dp",
        )
    zero: int | None = wanted.zero_stage
    if zero is None:
        stages = pricing.runtime.zero_stages
        zero = 3 if wanted.fsdp is not None else 1 if 1 in stages else stages[0]
    shard = wanted.dp * wanted.cp
    if wanted.fsdp_shard_size is not None:
        if shard % min(shard, wanted.fsdp_shard_size):
            raise LayoutError(
                f"parallelism.fsdp: {wanted.fsdp!r} shards over {wanted.fsdp_shard_size} ranks, which do not divide "
                f"dp {wanted.dp} · cp {wanted.cp} = {shard}",
                f"{_nearest_divisors(shard, wanted.fsdp_shard_size, shard)} would do",
            )
        shard = min(shard, wanted.fsdp_shard_size)
    etp = wanted.etp or (wanted.tp if pricing.model.moe is None else 1)
    stated = wanted.sequence_parallel
    sequence_parallel = pricing.runtime.sequence_parallel if stated is None else stated
    return Shape.of(
        **{axis: getattr(wanted, axis) for axis in ("tp", "cp", "ep", "pp", "vpp", "dp", "micro_batch_size")},
        etp=etp,
        num_microbatches=training.global_batch_size // per_step,
        seq_length=training.seq_length,
        sequence_parallel=int(sequence_parallel and wanted.tp > 1),
        zero_stage=zero,
        shard_size=shard,
        dp_outermost=RANK_ORDERS.index(wanted.rank_order),
    )


def _check_divisors(pricing: Pricing, wanted: Parallelism) -> None:
    """Raises SpecError for an axis that does not divide what it splits of the model, with the nearest sizes that do."""
    model, moe = pricing.model, pricing.model.moe
    for name, value, axis in (
        ("num_attention_heads", model.num_attention_heads, "tp"),
        ("seq_length", pricing.training.seq_length, "cp"),
        ("num_experts", 0 if moe is None else moe.num_experts, "ep"),
    ):
        size = getattr(wanted, axis)
        if value % size:
            raise LayoutError(
                f"parallelism.{axis}: {name} {value} is no multiple of {axis} {size}",
                f"{axis} {_nearest_divisors(value, size, pricing.cluster.num_gpus)} would do",
            )


def _nearest_divisors(value: int, size: int, most: int) -> str:
    """The divisors of a value, up to `most`, next to a size that is none, in words."""
    every = divisors(value, most)
    near = [max((d for d in every if d < size), default=0), min((d for d in every if d > size), default=0)]
    return " or ".join(str(divisor) for divisor in near if divisor)


def _enough_sequences(shape: Shape, schedule: str) -> str:
    """The batch that has as many micro-batches as a schedule needs; empty where their number is not what is wrong."""
    kind, pp, given = SCHEDULES[schedule], int(shape.pp), int(shape.num_microbatches)
    multiple = kind.microbatch_multiple(pp, int(shape.vpp))
    enough = max(-(-given // multiple) * multiple, kind.min_microbatches_per_rank * pp)
    if enough == given:
        return ""
    sequences = -(-enough // multiple) * multiple * int(shape.dp) * int(shape.micro_batch_size)
    return f"use {sequences} sequences, or another dp or micro-batch"


def _check_size(shape: Shape) -> None:
    """Raises Unsupported for a pipeline that would take gigabytes or minutes to replay."""
    stages, actions = int(shape.pp * shape.vpp), int(replayed_actions(shape))
    named = f"parallelism.pp: {shape.pp} · vpp {shape.vpp}"
    if stages > MOST_STAGES:
        raise Unsupported(
            f"{named} are {stages:,} stages, of which at most {MOST_STAGES:,} are priced", "lower pp or vpp"
        )
    if actions > MOST_ACTIONS:
        raise Unsupported(
            f"{named}: {actions:,} actions would have to be replayed, at most {MOST_ACTIONS:,} are", "lower pp or vpp"
        )


def _check_arithmetic(pricing: Pricing, shape: Shape) -> None:
    """Raises SpecError for a layout that no trainer could run."""
    model = pricing.model
    if model.moe is not None:
        slots, size = shape.tp * shape.cp * shape.dp, shape.ep * shape.etp
        if slots % size:
            raise LayoutError(
                f"parallelism.ep·etp: tp·cp·dp {slots} is no multiple of ep·etp {size}", "ep·etp must divide it"
            )
    elif shape.ep > 1:
        raise LayoutError(f"parallelism.ep: {shape.ep}, but {model.name} has no experts", "set ep to 1")
    elif first_broken(rules_of("etp"), model, pricing.training, shape):
        raise SpecError(f"parallelism.etp: {shape.etp}, but {model.name} has no experts", "leave etp out")
    if shape.pp * shape.vpp > model.num_hidden_layers + 2:
        raise SpecError(
            f"parallelism.pp: {shape.pp} · vpp {shape.vpp} stages for {model.num_hidden_layers} layers",
            "use fewer stages: none may be empty but those of embedding and head",
        )


def _split(model: ModelSpec, wanted: Parallelism, shape: Shape, ranks: Sequence[int], is_unasked: bool) -> Split:
    num_stages = int(shape.pp * shape.vpp)
    if wanted.layout is not None:
        split = parse_layout(wanted.layout, model, num_stages)
    elif wanted.layers_per_stage is not None:
        split = Split(splits_from_counts(wanted.layers_per_stage, model, ranks))
    else:
        split = Split(default_counts(model, num_stages))
    if wanted.recompute == "selective" or (wanted.recompute == "none" and (wanted.recompute_modules or is_unasked)):
        return replace(split, base="selective")
    if wanted.recompute == "none":
        return split
    chosen = frozenset(wanted.recompute_layers or ())
    if chosen and max(chosen) >= model.num_hidden_layers:
        raise SpecError(
            f"parallelism.recompute_layers: {max(chosen)}, but the last layer of {model.name} is number "
            f"{model.num_hidden_layers - 1}",
            "layers are counted from 0 on",
        )
    if wanted.recompute_layers is None:
        return split.recomputing(model, wanted.recompute_num_layers or None)
    layers = ([model.layers[i] for i in range(*chunk) if i in chosen] for chunk in split.chunks)
    return split.recomputing_layers(model, layers)


def default_counts(model: ModelSpec, num_stages: int) -> tuple[int, ...]:
    """Layers of each virtual stage as trainers cut them by default: evenly, or with embedding and head as layers.

    Embedding and head count as layers where only that makes the stages equal (Megatron's
    account_for_embedding/loss_in_pipeline_split). Where the layers cannot be cut into equal stages, a last stage with
    multi-token-prediction blocks gets the layers that are left when all stages before it are full. Megatron-Bridge's
    recipes cut the 61 layers of DeepSeek-V3 in this way: 15 times 4 and 1, 7 times 8 and 5, or 1, 30 times 2 and none.
    """
    layers, extra = model.num_hidden_layers, model.num_nextn_predict_layers
    if extra and layers % num_stages and 1 < num_stages <= layers + 1:
        before = num_stages - 1
        full = next(n for n in range(1, layers + 1) if n * before + max(n - 1 - extra, 0) >= layers)
        last = max(layers - full * before, 0)
        short = max(full * before - layers, 0)
        return (*[full - 1] * short, *[full] * (before - short), last)
    for first, last in ((0, 0), (1, 1), (0, 1), (1, 0)):
        per_stage, left = divmod(layers + first + last, num_stages)
        if left == 0 and per_stage >= max(first, last) and num_stages > 1:
            return (per_stage - first, *([per_stage] * (num_stages - 2)), per_stage - last)
    return even_counts(layers, num_stages)
