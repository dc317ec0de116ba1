"""The lines of a small job's screen: what is trained, does it fit, how long it takes, what room there is, changes."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from planner.answer import Change, Layout, Plan, Room, StagePlan
from planner.answer import is_small as is_small_job
from planner.report.format import digits, duration, fits_with, gibibytes, large, percent, signed_seconds
from planner.report.rows import Figure, StepShare, cost_figures, quoted_figures
from planner.specs.base import Texts
from planner.specs.units import gib

_SHARDED = {
    0: "each GPU has all weights and states (DDP)",
    1: "optimizer states are sharded (ZeRO-1)",
    2: "gradients and optimizer states are sharded (ZeRO-2)",
    3: "weights, gradients and states are sharded (ZeRO-3)",
}
_MEANS = {"fsdp": " by FSDP", "deepspeed": " by DeepSpeed"}
_CHECKPOINTING = {
    "none": "no checkpointing",
    "selective": "checkpointing of some operators",
    "full": "activation checkpointing",
}
_ASSUMED = (
    ("runtime", ("--runtime",)),
    ("sequence", ("--seq-length", "-s")),
    ("batch", ("--global-batch-size", "-b", "--batch-tokens")),
    ("rank", ("--lora-rank",)),
    ("targets", ("--lora-targets",)),
)


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """An item of the fullest GPU's memory."""

    name: str
    num_bytes: int
    capacity_bytes: int

    @property
    def fraction(self) -> float:
        return self.num_bytes / self.capacity_bytes


def is_small(plan: Plan) -> bool:
    """True for the plan of a small job that splits no layer and has no stages."""
    sizes = plan.parallelism
    return is_small_job(plan.cluster.num_gpus, plan.training, plan.runtime_spec) and sizes.pp * sizes.tp == 1


def trained(plan: Plan) -> Texts:
    """The parameters that are trained, and what the frozen ones are kept in."""
    adapters, total = plan.training.adapters, plan.model.num_parameters
    if adapters is None and plan.model.spec.vision is not None and not plan.model.spec.vision.is_trained:
        return (f"{large(plan.model.num_trained_parameters or 0)} of {large(total)} parameters are trained",)
    if adapters is None:
        return (f"all {large(total)} parameters are trained",)
    count = plan.model.num_trained_parameters or 0
    name = "QLoRA" if adapters.base_bits == 4 else "LoRA"
    share = percent(count / (total or 1), 2)
    dropout = f", dropout {adapters.dropout:g}" if adapters.dropout else ""
    return (
        f"{name} r={adapters.rank} on {', '.join(adapters.targets)}{dropout}",
        f"{large(count)} of {large(total)} parameters are trained ({share})",
        f"frozen base in {adapters.base_bits} bits",
    )


def fit(plan: Plan) -> str:
    """A sentence that says whether it fits."""
    needed, capacity = plan.best.worst_stage.memory.total_bytes, plan.cluster.hardware.memory_bytes
    of = f"{gibibytes(needed)} of {gibibytes(capacity)} GiB"
    if not plan.fits:
        return f"It does not fit: {of}, {gibibytes(needed - capacity)} too many"
    risk = fits_with(plan.best.oom_probability)
    return f"It fits: {of}" + (f", with a probability of {risk}" if risk else "")


def manner(layout: Layout, stage: StagePlan, sharding: str = "") -> Texts:
    """How it is run: batch, checkpointing, sharding."""
    size, number = layout.micro_batch_size, layout.num_microbatches
    each = " on each GPU" if layout.num_gpus_used > 1 else ""
    steps = f"micro-batch {size} × {number} accumulation step{'s' * (number > 1)}{each}"
    parts = [steps, _checkpointing(layout, stage)]
    if layout.num_gpus_used > 1:
        parts.append(_SHARDED[layout.zero_stage] + _MEANS.get(sharding, ""))
    if layout.num_gpus_spare:
        parts.append(f"{layout.num_gpus_spare} of {layout.num_gpus_used + layout.num_gpus_spare} GPUs idle")
    return tuple(parts)


def _checkpointing(layout: Layout, stage: StagePlan) -> str:
    """The way in which activations are checkpointed, and of how many layers where not of all."""
    whole = stage.recompute.get("full", 0)
    if 0 < whole < stage.num_layers:
        return f"activation checkpointing of {whole} of {stage.num_layers} layers"
    return _CHECKPOINTING[layout.recompute]


def figures(plan: Plan) -> tuple[Figure, ...]:
    """Step, tokens and sequences a second; interval, tokens of an hour, MFU."""
    step_s = plan.step.step_s
    return (
        *quoted_figures(plan),
        Figure("sequences/s", "tokens/s", digits(plan.training.global_batch_size / step_s)),
        Figure("steps an hour", "tokens/s", f"{3600 / step_s:,.0f}"),
    )


def how_long(plan: Plan) -> str:
    """The time and money of the run that was asked for, or of an hour."""
    price, _ = price_of(plan)
    if plan.run_cost is not None and plan.training.tokens is not None:
        return run_line(plan)
    hour_s, training = 3600.0, plan.training
    sequences = hour_s / plan.step.step_s * training.global_batch_size
    million_s = 1e6 / plan.step.tokens_per_s
    money = "" if price is None else f" (${price * plan.cluster.num_gpus:,.2f})"
    return (
        f"an hour{money}: {large(plan.step.tokens_per_s * hour_s)} tokens, {sequences:,.0f} sequences; "
        f"1M tokens: {duration(million_s)}"
    )


def run_line(plan: Plan) -> str:
    """The time and money of the whole run."""
    cost = plan.run_cost
    assert cost is not None, "a run was asked for"
    time_s, ends = cost.days * 86_400, cost.days_interval
    between = "" if ends is None else f" ({duration(ends[0] * 86_400)}–{duration(ends[1] * 86_400)})"
    money = "" if cost.usd is None else f", ${cost.usd:,.2f}{price_of(plan)[1]}"
    told = [figure.text for figure in cost_figures(plan) if figure.name in ("examples", "steps", "padding")]
    sequences = "" if told else f" ({cost.tokens / plan.training.seq_length:,.0f} sequences)"
    return "; ".join([f"{large(cost.tokens)} tokens{sequences}: {duration(time_s)}{between}{money}", *told])


def price_of(plan: Plan) -> tuple[float | None, str]:
    """Dollars of a GPU-hour, and a remark on them."""
    asked, hardware = plan.training.operations.usd_per_gpu_hour, plan.cluster.hardware
    price = hardware.usd_per_gpu_hour if asked is None else asked
    return price, "" if price is None else f" at ${price:g} a GPU-hour"


def memory_items(plan: Plan) -> tuple[MemoryItem, ...]:
    """The items of the fullest GPU's memory, and what is left of it."""
    memory, capacity = plan.best.worst_stage.memory, plan.cluster.hardware.memory_bytes
    adapters = plan.training.adapters
    base = f"base weights, {adapters.base_bits} bits" if adapters else ""
    own = "adapters" if adapters else "weights"
    items = (
        (base, memory.frozen_weights_bytes),
        (own, memory.weights_bytes - memory.frozen_weights_bytes),
        ("their gradients" if adapters else "gradients", memory.gradients_bytes),
        ("their optimizer states" if adapters else "optimizer states", memory.optimizer_bytes),
        ("activations", memory.activations_bytes),
        ("logits", memory.logits_bytes),
        ("workspace", memory.workspace_bytes),
        ("driver and allocator", memory.reserved_bytes),
        ("free", capacity - memory.total_bytes),
    )
    return tuple(MemoryItem(name, size, capacity) for name, size in items if name and size > 0)


def step_items(plan: Plan) -> tuple[StepShare, ...]:
    """The items of a step: computing is forward and backward."""
    step_s, parts, layout = plan.step.step_s, plan.step.breakdown, plan.parallelism
    stage, number = plan.best.slowest_stage, layout.num_microbatches
    recomputed = ", recomputing" if layout.recompute != "none" else ""
    items = (
        ("forward", number * stage.forward_s),
        (f"backward{recomputed}", number * stage.backward_s),
        ("exchanges of GPUs", parts.exposed_dp_s),
        ("optimizer", parts.optimizer_s),
        ("host and other overhead", parts.overhead_s + parts.bubble_s),
    )
    return tuple(StepShare(name, value_s, step_s) for name, value_s in items if value_s >= 0.001 * step_s)


def room_lines(room: Room | None) -> tuple[tuple[str, str], ...]:
    """A subject and a sentence each on the largest batch, sequence and model."""
    if room is None:
        return ()
    one, many = room.micro_batch_size, room.checkpointed_micro_batch_size
    longest = room.sequence
    if not many and not longest.checkpointed_seq_length:
        return (("micro-batch", "not even one sequence of 128 tokens fits"), *_models(room))
    whole = f", of {longest.most:,} positions" if _is_all(longest.most, room) else ""
    lines = [
        ("micro-batch", f"up to {_count(one)}; {_count(many)} with checkpointing of every layer"),
        (
            "sequence",
            f"up to {longest.seq_length:,} tokens, one at a time; "
            f"{longest.checkpointed_seq_length:,} with checkpointing{whole}",
        ),
    ]
    return (*lines, *_models(room))


def _models(room: Room) -> tuple[tuple[str, str], ...]:
    """The largest model of the catalogue in each way to train it, where it was looked for."""
    ways = {"qlora": "--qlora", "lora": "--lora", "full": "all weights trained"}
    models = [
        f"{model.name} ({large(model.num_parameters)}) with {ways[model.method]}" if model.name else
        f"none with {ways[model.method]}"
        for model in room.models
    ]  # fmt: skip
    return (("model", f"up to {'; '.join(models)}"),) if models else ()


def _count(number: int) -> str:
    return f"{number:,}" if number else "not even 1"


def _is_all(most: int | None, room: Room) -> bool:
    return most is not None and room.sequence.checkpointed_seq_length + 128 > most


def assumed(plan: Plan) -> str:
    """The values that stand for what the command line does not say, and the options that change them."""
    adapters, training = plan.training.adapters, plan.training
    said = {word.partition("=")[0] for word in shlex.split(plan.command)}
    values = {
        "runtime": f"trainer {plan.runtime}",
        "sequence": f"sequences of {training.seq_length:,}",
        "batch": f"{training.global_batch_size:,} a step",
        "rank": f"rank {adapters.rank}" if adapters else "",
        "targets": f"on {', '.join(adapters.targets)}" if adapters else "",
    }
    parts = [
        f"{values[name]} ({options[0]})"
        for name, options in _ASSUMED
        if values[name] and not said.intersection(options)
    ]
    return ", ".join(parts)


SHOWN_CHANGES = 4
"""Changes on the first screen that fit."""
WORTH_BYTES, WORTH_SHARE = 2**29, 0.02
"""Bytes, and the share of a step, below which a change waits for `plan explain`."""
_ASKED_ABOUT = ("checkpointing", "micro-batch", "trained")
"""Kinds of changes that are shown though they do not fit."""


@dataclass(frozen=True, slots=True)
class ChangeRow:
    """A change, and the texts of its columns."""

    change: str
    gib: str
    seconds: str
    remark: str
    words: Texts
    """Words of the command line that make the change."""

    @property
    def options(self) -> str:
        return " ".join(self.words)

    @property
    def cells(self) -> Texts:
        return self.change, self.gib, self.seconds, self.remark


def shown_changes(plan: Plan) -> tuple[ChangeRow, ...]:
    """The first change of each kind that fits and is worth a look, and those asked about most that do not fit."""
    fitting = [change for change in plan.changes if change.fits and _is_worth_a_look(change, plan.step.step_s)]
    misfits = [change for change in plan.changes if not change.fits and change.kind in _ASKED_ABOUT]
    return change_rows(plan, (*_one_of_a_kind(fitting)[:SHOWN_CHANGES], *_one_of_a_kind(misfits)))


def _is_worth_a_look(change: Change, step_s: float) -> bool:
    return abs(change.bytes) >= WORTH_BYTES or abs(change.seconds) >= WORTH_SHARE * step_s


def _one_of_a_kind(changes: list[Change]) -> list[Change]:
    """The first change of each kind."""
    return list({change.kind: change for change in reversed(changes)}.values())[::-1]


def change_rows(plan: Plan, changes: tuple[Change, ...]) -> tuple[ChangeRow, ...]:
    """Rows of changes, beside the GPU's memory and the step of the plan."""
    capacity, step_s = plan.cluster.hardware.memory_bytes, plan.step.step_s
    return rows_of(changes, capacity, step_s)


def rows_of(changes: tuple[Change, ...], capacity_bytes: int, step_s: float) -> tuple[ChangeRow, ...]:
    """Rows of changes beside the memory that a GPU has and the step as it is."""
    rows = []
    for change in changes:
        lacking = change.total_bytes - capacity_bytes
        misfit = f"does not fit by {gibibytes(lacking)} GiB" if lacking > 0 else "fits too narrowly"
        alters = f"changes {change.changes}" if change.changes else ""
        remark = "; ".join(filter(None, ("" if change.fits else misfit, alters)))
        size = f"{gib(change.bytes):+,.1f} GiB"
        rows.append(ChangeRow(change.change, size, signed_seconds(change.seconds, step_s), remark, change.options))
    return tuple(rows)
