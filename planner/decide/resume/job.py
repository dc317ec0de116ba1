"""A job that resumes: the old plan, the case of the new GPUs, and the axes that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from planner.answer import Layout, Plan
from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.layout.replan import reprice
from planner.search.case import Case
from planner.search.deadline import Deadline
from planner.search.recipes import pinned
from planner.specs.cluster import ClusterSpec
from planner.specs.problems import check_names
from planner.specs.training import SearchLimits, TrainingSpec
from planner.trainers.checkpoint import AXES, Axis, Checkpoint
from planner.trainers.load import checkpoint_of


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
        case = pinned(case).limited(switches="default")
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
