"""A job that resumes: the old plan, the case of the new GPUs, and the axes that it keeps; and the answer's types.

The seconds until it trains stand here too, and what it loses until its old layout runs again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from pydantic import ConfigDict, Field

from planner.answer import Interval, Layout, Plan
from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.layout.price import reprice
from planner.months.losses import Fact, Losses, Taken, losses_of, stated
from planner.months.whole_run import Spares, Standstill, break_even_s, going_on_s, return_pays_s, waiting_s
from planner.search.case import Case, Deadline
from planner.search.recipes import pinned
from planner.specs.base import Named, Spec, Texts
from planner.specs.cluster import ClusterSpec
from planner.specs.problems import check_names
from planner.specs.training import SearchLimits, TrainingSpec
from planner.trainers.load import AXES, Axis, Checkpoint, checkpoint_of

Kind = Literal["split", "reshard", "wait", "stay"]
"""`split`: the old layout with another number of data-parallel ranks. `reshard`: any layout. `wait`: the old layout on
the old GPUs, once they are back. `stay`: the old layout, where GPUs were added."""
ORDER: tuple[Kind, ...] = ("stay", "split", "reshard", "wait")
"""The order in which they are shown."""
OF_THE_JOB = (
    "model", "hardware", "gpus_per_node", "tier", "seq_length", "batch_tokens", "dtype", "runtime", "assume",
    "calibration", "no_history", "allow",
)  # fmt: skip
"""Options that the running job has answered: another answer would be another job."""
Loads = Literal["as_is", "resave", "convert", "ready"]
"""The way to the checkpoint: as its files are; written again by a job that keeps its axes; converted by a tool; only
where it was saved in the other format."""


Answer = Literal["restarts", "stands_in", "splits", "reshards", "waits"]
"""The job's answer to a failure: it restarts on its nodes, idle or spare ones stand in, it goes on with fewer
data-parallel ranks or in another layout, or it waits for the repair."""


def way_to_load(row: Checkpoint, moved: Collection[str], zero_stage: int, has_split: bool) -> Loads | None:
    """The way in which a layout under a ZeRO stage, with some axes moved, loads a checkpoint; None if it cannot.

    Where the checkpoint must be written again, a job that keeps the axes does so (`has_split`), or it was saved in the
    other format.
    """
    if zero_stage not in row.zero_stages:
        return None
    if not {*row.keeps} & {*moved}:
        return "as_is"
    if row.rewritten is None or {*row.rewritten.keeps} & {*moved}:
        return None
    return "ready" if row.rewritten.by == "resave" and not has_split else row.rewritten.by


class Closed(Spec):
    """A choice that is not possible, and why."""

    kind: Kind
    reason: str


class Choice(Spec):
    """One way to go on; fields that older versions saved are passed over."""

    model_config = ConfigDict(extra="ignore")

    kind: Kind
    layout: str
    parallelism: Layout
    num_gpus_used: int
    num_gpus_idle: int
    global_batch_size: int
    step_s: float
    tokens_per_s: float
    rate_fraction: float
    """Tokens a second, over those of the old plan."""
    oom_probability: float | None = None
    loads: Loads = "as_is"
    needs: Texts = ()
    """Things that must be done for the checkpoint to load, each the end of a sentence."""
    back_s: float = 0.0
    """Seconds from the failure until the job trains so; of a job that waits, beside the wait. Where GPUs were added,
    seconds that a planned stop takes."""
    back_s_interval: Interval | None = None
    seconds: dict[str, float] = Field(default_factory=dict)
    """The parts of back_s."""
    ready_back_s: float | None = None
    """The same, had the checkpoint been saved in the other format; null where that makes no difference."""
    break_even_wait_s: float | None = None
    """The wait, from the failure on, beyond which this loses less than waiting; where GPUs were added, the seconds that
    the job has to run on for this to pay."""
    return_pays_s: float | None = None
    """Seconds that a job must run after its return to the old layout for that to pay; null for no shorter step."""
    lost_until_repair_s: float | None = None
    """Seconds of training at the old rate that are lost until the old layout runs again, after the usual repair."""
    convergence: Texts = ()
    """Changes that may affect what is learned: batch, order of the data, numerics."""
    execution: Texts = ()
    """Changes that affect seconds and bytes alone."""
    options: Texts = ()
    """Options with which the command plans and saves this way to go on, not another."""


class Failure(Spec):
    """One kind of failure of the job that goes on, and what it costs."""

    taken: Taken
    num_nodes: int
    per_day: float
    per_day_interval: Interval
    job: Answer
    """The job's answer that loses least."""
    lost_s: float
    """Seconds of training that one failure costs: work since the last checkpoint, standstill, the slower steps."""
    tokens_per_s: float
    """Tokens a second until the nodes are back."""
    gpu_hours_per_day: float
    """The expected loss."""
    source: str


class Before(Spec):
    """The plan of the running job."""

    num_gpus: int
    layout: str
    global_batch_size: int
    step_s: float
    tokens_per_s: float


class Resume(Spec):
    """The ways to go on after nodes came or went."""

    before: Before
    num_gpus: int
    num_gpus_lost: int
    """GPUs lost; negative for GPUs that were added."""
    keep: tuple[Axis, ...]
    """The axes that the user keeps beside those of the checkpoint."""
    checkpoint: Checkpoint
    repair_s: float
    repair_s_interval: Interval
    standby_s: float
    """Seconds from the failure until the old layout trains again, were there a spare node for each lost one."""
    choices: tuple[Choice, ...]
    """The ways to go on; none where there is nothing to do."""
    closed: tuple[Closed, ...] = ()
    recommended: int
    """Index of the choice that is saved: it keeps the batch asked for."""
    failures: tuple[Failure, ...] = ()
    spares: tuple[Spares, ...] = ()
    """The daily cost of each number of spare nodes, from none to beyond the cheapest."""
    num_idle_nodes: int = 0
    """Whole nodes of the recommended plan that no rank uses."""
    num_spare_nodes_cheapest: int | None = None
    num_spare_nodes_advised: int | None = None
    """The fewest of which one is free in 99% of the failures that take a node."""
    sources: Named = Field(default_factory=dict)

    @property
    def chosen(self) -> Choice:
        """The recommended choice."""
        return self.choices[self.recommended]


@dataclass(frozen=True)
class ResumedJob:
    """A running job's plan, and the case of its GPUs as they are now, with its own recipe but for what is pinned."""

    old: Plan
    case: Case
    keep: tuple[Axis, ...]
    deadline: Deadline

    @classmethod
    def of(cls, old: Plan, num_gpus: int, keep: Sequence[str], training: TrainingSpec | None = None,
           limits: SearchLimits | None = None, cluster: ClusterSpec | None = None) -> ResumedJob:  # fmt: skip
        """The job on `num_gpus`. Raises SpecError for an axis that nobody can keep, and for pins that contradict it."""
        check_names("--keep", "axis", keep, AXES)
        cluster = (cluster or old.cluster).changed(num_gpus=num_gpus)
        limits = limits or SearchLimits()
        case = Case(old.model.spec, cluster, training or old.training, old.runtime_spec, limits)
        # a job that runs has consented to what it runs with
        case = pinned(case.limited(allow=(*limits.allow, "bf16_gradients"))).limited(switches="default")
        job = cls(old, case, tuple(axis for axis in AXES if axis in keep), Deadline(limits.time_limit_s))
        job.pins(job.keep)
        return job

    @property
    def layout(self) -> Layout:
        """The old layout."""
        return self.old.parallelism

    @cached_property
    def start(self) -> Candidate:
        """The old layout as it was priced, on the old GPUs."""
        return reprice(self.old, self.old.best)

    @property
    def checkpoint(self) -> Checkpoint:
        """The kind of checkpoint that the old job has written."""
        return checkpoint_of(self.old.runtime_spec, self.layout.zero_stage)

    @property
    def num_gpus(self) -> int:
        return self.case.cluster.num_gpus

    @property
    def grows(self) -> bool:
        """True where GPUs were added."""
        return self.num_gpus > self.old.cluster.num_gpus

    @property
    def shrinks(self) -> bool:
        """True where GPUs were lost."""
        return self.num_gpus < self.old.cluster.num_gpus

    @property
    def copy_gpus(self) -> int:
        """GPUs of one model copy of the old layout."""
        return self.layout.tp * self.layout.cp * self.layout.pp

    @property
    def moves_batch(self) -> bool:
        """True where the user asks for another batch than the running job has."""
        return self.case.training.global_batch_size != self.old.training.global_batch_size

    def on(self, num_gpus: int) -> ResumedJob:
        """The same job on another number of GPUs."""
        return replace(self, case=replace(self.case, cluster=self.case.cluster.changed(num_gpus=num_gpus)))

    def pins(self, axes: Sequence[Axis]) -> dict[str, tuple[Any, ...]]:
        """The values of the old layout that a search is held to; SpecError where the user pins another one."""
        kept = {axis: self._value(axis) for axis in axes if axis != "layers"}
        for axis, value in kept.items():
            allowed = self.case.pins.get(axis)
            if allowed is not None and value not in allowed:
                option, given = f"--{axis.replace('_', '-')}", ",".join(map(str, allowed))
                raise SpecError(
                    f"{option} {given}: the running job has {value}, which {self._keeper(axis)}",
                    f"leave {option} out" + (f", or {axis} out of --keep" if axis in self.keep else ""),
                )
        return {axis: (value,) for axis, value in kept.items()}

    def _keeper(self, axis: str) -> str:
        return "--keep keeps" if axis in self.keep else "its checkpoint is bound to"

    def _value(self, axis: str) -> Any:
        """The old layout's value of an axis; recipes name no schedule that was made to measure."""
        return self.start.schedule if axis == "schedule" else getattr(self.layout, axis)


CONVERSIONS = 2
"""How often a converting tool moves all bytes of a checkpoint at least: it reads and writes them."""


def losses_on(job: ResumedJob, num_gpus: int) -> Losses:
    """The figures of the job's failures, restarts and checkpoints on some GPUs."""
    operations, asynchronous = job.case.training.operations, job.old.runtime_spec.asynchronous_checkpoints
    return losses_of(job.case.cluster, operations, num_gpus, job.old.checkpoint_bytes, asynchronous)


def transfer(losses: Losses) -> Fact:
    """Seconds in which a checkpoint is read, or written, with their interval."""
    rate = losses.storage_gb_per_s
    seconds = [losses.transfer_s(each) for each in (rate.value, rate.high, rate.low)]
    return Fact(value=seconds[0], low=seconds[1], high=seconds[2], source=rate.source)


@dataclass(frozen=True, slots=True)
class Clock:
    """The seconds of one job that resumes."""

    job: ResumedJob
    interim: Candidate | None = None
    """The split of the old layout that loads its checkpoint, to write it again for a new one."""

    @property
    def old(self) -> Losses:
        """The figures on the old GPUs."""
        return losses_on(self.job, self.job.layout.num_gpus_used)

    @property
    def again(self) -> dict[str, Fact]:
        """The parts in which the old layout starts and reads a checkpoint."""
        return {"start": self.old.restart_s, "read": transfer(self.old)}

    @property
    def again_s(self) -> float:
        return Standstill(self.again).value_s

    @property
    def standby(self) -> Standstill:
        """From the failure until the old layout trains again where spare nodes stand in."""
        old = self.old
        return Standstill({"detection": old.detection_s, "start": old.standby_restart_s, "read": transfer(old)})

    def standstill(self, num_gpus: int, loads: Loads) -> Standstill:
        """From the failure until a layout on some GPUs trains; from the planned stop where GPUs were added."""
        losses = losses_on(self.job, num_gpus)
        parts = {"save": transfer(self.old)} if self.job.grows else {"detection": losses.detection_s}
        if loads == "convert":
            parts["convert"] = transfer(self.old).times(CONVERSIONS)
        elif loads == "resave" and self.interim is not None:
            interim = losses_on(self.job, int(self.interim.shape.num_ranks))
            parts |= {"start of the split": interim.restart_s, "read by the split": transfer(interim)}
            parts |= {"step of the split": stated(self.interim.step_s), "save by the split": transfer(interim)}
        return Standstill({**parts, "start": losses.restart_s, "read": transfer(losses)})

    def figures(self, kind: Kind, num_gpus: int, loads: Loads, fraction: float) -> dict[str, Any]:
        """The seconds of a way and its break-evens, at a fraction of the old rate.

        Where GPUs were added, the job has to run on for v·b / (v − v₀) seconds, with v₀ trained meanwhile at the old
        rate.
        """
        if kind == "stay":
            return {}
        old, repair_s = self.old, self.old.repair_s.value
        still = Standstill(self.again) if kind == "wait" else self.standstill(num_gpus, loads)
        back_s, parts = still.value_s, {name: part.value for name, part in still.parts.items()}
        told: dict[str, Any] = {"back_s": back_s, "back_s_interval": still.interval_s, "seconds": parts}
        if loads in ("resave", "convert"):
            told["ready_back_s"] = self.standstill(num_gpus, "as_is").value_s
        if kind == "wait":
            told["lost_until_repair_s"] = float(waiting_s(repair_s, old.detection_s.value, back_s))
        elif self.job.grows:
            told["break_even_wait_s"] = back_s * fraction / (fraction - 1) if fraction > 1 else None
        else:
            save_s = parts["read"]
            return_s = save_s + self.again_s
            told["break_even_wait_s"] = break_even_s(back_s, fraction, save_s)
            told["return_pays_s"] = return_pays_s(return_s, fraction)
            told["lost_until_repair_s"] = float(going_on_s(repair_s, back_s, fraction, return_s))
        return told

    @property
    def sources(self) -> Named:
        """The origin of each figure."""
        old = self.old
        names = ("detection_s", "restart_s", "standby_restart_s", "repair_s", "node_loss_fraction", "storage_gb_per_s")
        rate = {"failures_per_1000_gpu_days": old.failures_per_1000_gpu_days.source}
        return {name: getattr(old, name).source for name in names} | rate
