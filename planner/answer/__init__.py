"""The types of the answer: a plan, and the layouts in it with their stages, their time and their memory.

The JSON of these types is the interface contract: fields are added, never renamed. Times are in seconds, memory is in
bytes, and an interval is meant to hold the true value in 80% of all cases.
"""

import hashlib
import json
from html import escape
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

import planner
from planner.answer.layout import (
    AS_PLANNED,
    SIGMAS_TO_END,
    Count,
    DecidingFact,
    Difference,
    Evidence,
    Goodput,
    Interval,
    Layout,
    NarrowScaling,
    Offer,
    Placement,
    PositiveSeconds,
    PricedLayout,
    Quantity,
    RecipeGain,
    RecipeRefusal,
    Recommendation,
    RobustStep,
    RunCost,
    Seconds,
    StageMemory,
    StagePlan,
    StepBreakdown,
    StepTime,
    Sustained,
    UnsaidSwitch,
    half_width,
)
from planner.files import write_text
from planner.saved import KEY, with_digest
from planner.specs.base import Fraction, PositiveInt, Spec
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import TrainingSpec
from planner.trainers.spec import RuntimeSpec

__all__ = [
    "AS_PLANNED",
    "MOST_GPUS",
    "SCHEMA_VERSION",
    "SIGMAS_TO_END",
    "BatchOffer",
    "Change",
    "Count",
    "DecidingFact",
    "Difference",
    "Evidence",
    "Goodput",
    "Interval",
    "LargestModel",
    "Layout",
    "LongestSequence",
    "Method",
    "ModelSummary",
    "NarrowScaling",
    "Offer",
    "Placement",
    "Plan",
    "PositiveSeconds",
    "PricedLayout",
    "Quantity",
    "RecipeGain",
    "RecipeRefusal",
    "Recommendation",
    "RiskOffer",
    "RobustStep",
    "Room",
    "RunCost",
    "SearchReport",
    "Searched",
    "StageMemory",
    "StagePlan",
    "StepBreakdown",
    "StepTime",
    "Sustained",
    "UnsaidSwitch",
    "half_width",
    "is_small",
]

Method = Literal["lora", "qlora", "full"]
MOST_GPUS = 8
"""The most GPUs of a small job."""


def is_small(num_gpus: int, training: TrainingSpec, runtime: RuntimeSpec) -> bool:
    """True for a job of a few GPUs that trains adapters, or whose trainer knows no model parallelism."""
    return num_gpus <= MOST_GPUS and (training.adapters is not None or not runtime.has_model_parallel)


class Change(Spec):
    """One change of the job, with the bytes and seconds that it saves or takes, all else as it is."""

    kind: str
    """The kind of change: bits, checkpointing, micro-batch, sequence, sharding, adapters, switch or trained."""
    change: str
    """The change in words."""
    options: tuple[str, ...] = ()
    """Words of the command line that make it."""
    bytes: int
    """Change of the fullest rank's peak; negative where it saves."""
    seconds: Difference
    """Change of the seconds that a step's tokens take; negative where it gains. Another length of sequences is counted
    for as many tokens."""
    step_s: PositiveSeconds
    """Seconds of a step after it."""
    total_bytes: Count
    """Peak of the fullest rank after it."""
    fits: bool
    """True if it fits with the risk that was asked for."""
    changes: str = ""
    """The thing that it changes beside bytes and seconds: numerics, the data, what is trained; empty if none."""


class LongestSequence(Spec):
    """The longest sequences that fit one at a time on each GPU."""

    seq_length: Count
    """A multiple of 128 tokens; 0 where not even 128 fit."""
    checkpointed_seq_length: Count
    """The same with all layers recomputed."""
    most: Count | None = None
    """The positions that the model has, beyond which nothing was tried; null where the model does not say."""


class LargestModel(Spec):
    """The largest model of the catalogue that fits these GPUs when it is trained in one way."""

    method: Method
    name: str | None
    """Null where none fits."""
    num_parameters: Count = 0


class Room(Spec):
    """The largest batch, sequence and model that fit with the risk that was asked for, each with all else as it is."""

    micro_batch_size: Count
    """The largest micro-batch at this length, recomputing what the plan recomputes; 0 where not even one fits."""
    checkpointed_micro_batch_size: Count
    """The same with all layers recomputed."""
    sequence: LongestSequence
    models: tuple[LargestModel, ...] = ()


SCHEMA_VERSION: Final = 1


class ModelSummary(Spec):
    """The model's totals; `spec` holds the whole model."""

    name: str
    num_parameters: Count
    num_active_parameters: Count
    model_flops_per_token: Quantity
    num_trained_parameters: Count | None = None
    """Parameters that are trained: all of them, or those of adapters alone, which `num_parameters` leaves out; null in
    files that do not say."""
    num_vision_parameters: Count = 0
    """Parameters of the tower that makes tokens of images; `num_parameters` includes them."""
    spec: ModelSpec


class Searched(Spec):
    """The choices that the search tried; its lower bound holds for the layouts made of them."""

    schedules: tuple[str, ...]
    """Schedules of the pipelines."""
    recompute_modules: tuple[tuple[str, ...], ...]
    """Sets of modules that selective recompute was tried with; an empty set is no selective recompute."""
    switches: dict[str, tuple[str, ...]]
    """Values that each performance switch was tried with, as the command line spells them."""
    chunks: Literal["equal", "any"]
    """`equal` if all inner chunks of an interleaved pipeline hold equally many layers."""


class SearchReport(Spec):
    """How the choice was made, and how sure the solver is."""

    num_shapes: Count
    """Legal shapes."""
    num_fitting: Count
    """Legal shapes that can fit in memory."""
    num_ilps: Count
    seconds: Seconds | None = None
    """Wall seconds of the search; null in saved files, which are the same for the same inputs."""
    outcome: Literal["proven", "bounded", "feasible"]
    """`proven`: the search ended within the gap that was asked for. `bounded`: it ended with a wider one. `feasible`:
    time ran out before it ended."""
    lower_bound_s: PositiveSeconds
    """No legal shape that fits has a shorter step than this, in the stated model, among the layouts searched."""
    gap: Seconds
    """step_s / lower_bound_s − 1."""
    asked_gap_fraction: Quantity | None = None
    """How far above the bound the step was allowed to be, as a fraction of the step; null in files that do not say."""
    schedules: tuple[str, ...] = ()
    """Schedules that were tried for pipelines; empty in files that do not say. `searched` says more."""
    searched: Searched | None = None
    """The choices that the search tried; null in files that do not say."""
    unsearched: tuple[str, ...] = ()
    """The choices that the search left out, in the words with which the sentence about the proof ends."""


class BatchOffer(Spec):
    """Another batch nearby under which the same GPUs train more tokens a second."""

    global_batch_size: PositiveInt
    """Sequences of a step."""
    step_s: PositiveSeconds
    """Seconds of its step in the layout that is fastest for it."""
    tokens_per_s: Quantity


class RiskOffer(Spec):
    """A faster layout that is likelier to run out of memory, and the risk that has to be accepted for it."""

    oom_risk: Fraction
    """The value of `--oom-risk` under which it is chosen."""
    oom_probability: Fraction
    """Probability that this layout runs out of memory."""
    step_s: PositiveSeconds
    """Seconds of its step; a search under that `--oom-risk` finds one at least as fast."""


class Plan(Spec):
    """The answer of `plan()` and `evaluate()`: the inputs, the best layout, alternatives, why others were rejected.

    `fits`, `parallelism`, `stages`, `step`, `evidence` and `warnings` are those of `best`.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    planner_version: str
    command: str = ""
    """The command line that made it; empty where none did."""
    model: ModelSummary
    cluster: ClusterSpec
    training: TrainingSpec
    runtime: str
    runtime_spec: RuntimeSpec
    best: PricedLayout
    alternatives: tuple[PricedLayout, ...] = ()
    rejections: dict[str, Count] = Field(default_factory=dict)
    rejection_examples: dict[str, str] = Field(default_factory=dict)
    """One rejected shape per reason, in words with its numbers."""
    search: SearchReport | None = None
    run_cost: RunCost | None = None
    goodput: Goodput | None = None
    """The share of a long run's time that trains, if the run's tokens are given."""
    planned_as: "Plan | None" = Field(default=None, exclude=True, repr=False)
    """The plan that was made, if this one is its price under another trainer; no file has it."""
    assumptions: tuple[str, ...] = ()
    """Defaults that move the step of the best layout, with nothing planned again, and how to set them."""
    batch_offer: BatchOffer | None = None
    """A batch within 3% of the one planned that gives over 2% more tokens a second; null if there is none."""
    risk_offer: RiskOffer | None = None
    """The thing that a larger risk of running out of memory would buy; null if nothing was found."""
    room: Room | None = None
    """The largest micro-batch and sequence that fit; null for a job that is not small."""
    changes: tuple[Change, ...] = ()
    """The changes of a small job with their bytes and seconds, what helps most first."""

    @property
    def as_planned(self) -> "Plan":
        """The plan as it was made, for the trainer that it was made for."""
        return self.planned_as or self

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and optimizer states of the whole model, as the trainer writes them."""
        return round(self.runtime_spec.checkpoint_bytes_per_parameter * self.model.num_parameters)

    @property
    def fits(self) -> bool:
        return self.best.fits

    @property
    def parallelism(self) -> Layout:
        return self.best.parallelism

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        return self.best.stages

    @property
    def step(self) -> StepTime:
        return self.best.step

    @property
    def evidence(self) -> Evidence:
        return self.best.evidence

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.best.warnings

    @property
    def undecided(self) -> tuple[PricedLayout, ...]:
        """Alternatives whose interval overlaps the best's: a prediction alone cannot tell them apart."""
        ours = self.best.step.step_s_interval
        intervals = [(other, other.step.step_s_interval) for other in self.alternatives]
        return tuple(other for other, theirs in intervals if ours and theirs and theirs[0] <= ours[1])

    @property
    def inputs_sha256(self) -> str:
        """Hash of everything the plan was made from: model, cluster, training and runtime."""
        inputs = {
            "model": self.model.spec.model_dump(mode="json"),
            "cluster": self.cluster.model_dump(mode="json"),
            "training": self.training.model_dump(mode="json"),
            "runtime": self.runtime_spec.model_dump(mode="json"),
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data in the contract's form; without `search` if nothing was searched."""
        left_out = {"search"} if self.search is None else None
        return with_digest({**self.model_dump(mode="json", exclude=left_out), "inputs_sha256": self.inputs_sha256})

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Plan":
        """Read what `to_json` wrote. Raises pydantic's ValidationError if the data do not fit; `load` also refuses what
        was edited."""
        return cls.model_validate({key: value for key, value in data.items() if key not in ("inputs_sha256", KEY)})

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the plan as JSON to a file that `load` and every command read; `-` is stdout.

        The seconds that the search took are left out, so that the same inputs make the same bytes. Raises SpecError if
        the file exists and `force` is not given.
        """
        write_text(path, self.saved_text(), force)

    def saved_text(self) -> str:
        """The text that `save` writes."""
        search = None if self.search is None else self.search.model_copy(update={"seconds": None})
        data = self.model_copy(update={"search": search}).to_json()
        return json.dumps(data, indent=2, allow_nan=False) + "\n"

    # users ask the plan itself for what rooms above it know: the package's own file loads these when they are named
    @staticmethod
    def load(path: str | Path) -> "Plan":
        """The plan in a file that `save` wrote; `-` is stdin. Raises SpecError if it holds no plan of this version."""
        return planner.read_plan(str(path))

    def __str__(self) -> str:
        """The panel that `plan` prints: the layout, its figures, what was proven."""
        return planner.panel_text(self)

    def __repr__(self) -> str:
        """One line."""
        job = f"{self.model.name} on {self.cluster.num_gpus:,} GPUs"
        return f"<Plan of {job}: {self.parallelism}, {self.step.step_s:.4g} s>"

    def _repr_html_(self) -> str:
        """The report as a notebook shows it, in a frame of its own so that its styles change nothing else."""
        page = escape(planner.report_page(self))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'
