"""The lines of a small job's screen: what is trained, does it fit, how long it takes, what room there is, changes."""

from __future__ import annotations

import shlex

from planner.answer import Change, LargestModel, Layout, Plan, Room, StagePlan
from planner.answer import is_small as is_small_job
from planner.record import record
from planner.report.format import digits, fits_with, gibibytes, sentence, sentences, signed_seconds, spared, told
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
_WAYS = {"qlora": "--qlora", "lora": "--lora", "full": "all weights trained"}


def is_small(plan: Plan) -> bool:
    """True for the plan of a small job that splits no layer and has no stages."""
    sizes = plan.parallelism
    return is_small_job(plan.cluster.num_gpus, plan.training, plan.runtime_spec) and sizes.pp * sizes.tp == 1


def trained(plan: Plan) -> Texts:
    """The parameters that are trained, and what the frozen ones are kept in."""
    return tuple(
        sentences(
            "small_trained", plan=plan, adapters=plan.training.adapters, vision=plan.model.spec.vision,
            total=plan.model.num_parameters, trained=plan.model.num_trained_parameters or 0,
        )
    )  # fmt: skip


def fit(plan: Plan) -> str:
    """A sentence that says whether it fits."""
    needed, capacity = plan.best.worst_stage.memory.total_bytes, plan.cluster.hardware.memory_bytes
    of = f"{gibibytes(needed)} of {gibibytes(capacity)} GiB"
    risk = fits_with(plan.best.oom_probability)
    return sentence("small_fit", plan=plan, of=of, needed=needed, capacity=capacity, risk=risk)


def manner(layout: Layout, stage: StagePlan, sharding: str = "") -> Texts:
    """How it is run: batch, checkpointing, sharding, idle GPUs, host."""
    ways = sentences(
        "small_manner", layout=layout, stage=stage, whole=stage.recompute.get("full", 0), sharded=_SHARDED,
        checkpointing=_CHECKPOINTING, by=_MEANS.get(sharding, ""),
    )  # fmt: skip
    return (*ways, *spared(layout))


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
    step, sequences = plan.step, plan.training.global_batch_size
    return sentence(
            "small_hour", price=price, gpus=plan.cluster.num_gpus, tokens_per_s=step.tokens_per_s,
            sequences_per_s=sequences / step.step_s,
        )  # fmt: skip


def run_line(plan: Plan) -> str:
    """The time and money of the whole run."""
    cost = plan.run_cost
    assert cost is not None, "a run was asked for"
    beside = [figure.text for figure in cost_figures(plan) if figure.name in ("examples", "steps", "padding")]
    says = sentences("small_run", cost=cost, beside=beside, seq_length=plan.training.seq_length, at=price_of(plan)[1])
    return "; ".join([*says, *beside])


def price_of(plan: Plan) -> tuple[float | None, str]:
    """Dollars of a GPU-hour, and a remark on them."""
    asked, hardware = plan.training.operations.usd_per_gpu_hour, plan.cluster.hardware
    price = hardware.usd_per_gpu_hour if asked is None else asked
    return price, "" if price is None else f" at ${price:g} a GPU-hour"


def memory_items(plan: Plan) -> dict[str, int]:
    """Bytes of the items of the fullest GPU's memory, and of what is left of it."""
    memory, capacity = plan.best.worst_stage.memory, plan.cluster.hardware.memory_bytes
    adapters = plan.training.adapters
    base = "base weights" if adapters else ""
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
    return {name: size for name, size in items if name and size > 0}


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
    longest = room.sequence
    rows = told(
        "small_room", room=room, longest=longest, one=_count, model=_model,
        fits=room.checkpointed_micro_batch_size or longest.checkpointed_seq_length,
    )  # fmt: skip
    return tuple((subject, says) for subject, says in rows)


def _model(largest: LargestModel) -> str:
    """The largest model of the catalogue in a way to train it."""
    return sentence("small_model", it=largest, ways=_WAYS)


def _count(number: int) -> str:
    return f"{number:,}" if number else "not even 1"


def assumed(plan: Plan) -> str:
    """The values that stand for what the command line does not say, and the options that change them."""
    said, training = {word.partition("=")[0] for word in shlex.split(plan.command)}, plan.training
    known = {"said": said, "plan": plan, "training": training, "adapters": training.adapters}
    return ", ".join(sentences("small_assumed", **known))


SHOWN_CHANGES = 4
"""Changes on the first screen that fit."""
WORTH_BYTES, WORTH_SHARE = 2**29, 0.02
"""Bytes, and the share of a step, below which a change waits for `plan explain`."""
_ASKED_ABOUT = ("checkpointing", "micro-batch", "trained")
"""Kinds of changes that are shown though they do not fit."""


@record
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
    shown = (*_one_of_a_kind(fitting)[:SHOWN_CHANGES], *_one_of_a_kind(misfits))
    return rows_of(shown, plan.cluster.hardware.memory_bytes, plan.step.step_s)


def _is_worth_a_look(change: Change, step_s: float) -> bool:
    return abs(change.bytes) >= WORTH_BYTES or abs(change.seconds) >= WORTH_SHARE * step_s


def _one_of_a_kind(changes: list[Change]) -> list[Change]:
    """The first change of each kind."""
    return list({change.kind: change for change in reversed(changes)}.values())[::-1]


def rows_of(changes: tuple[Change, ...], capacity_bytes: int, step_s: float) -> tuple[ChangeRow, ...]:
    """Rows of changes beside the memory that a GPU has and the step as it is."""
    rows = []
    for change in changes:
        lacking = change.total_bytes - capacity_bytes
        remark = "; ".join(sentences("small_remark", it=change, lacking=lacking))
        size = f"{gib(change.bytes):+,.1f} GiB"
        rows.append(ChangeRow(change.change, size, signed_seconds(change.seconds, step_s), remark, change.options))
    return tuple(rows)
