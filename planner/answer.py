"""The types of the answer: a plan, and the layouts in it with their stages, their time and their memory.

The JSON of these types is the interface contract: fields are added, never renamed. Times are in seconds, memory is in
bytes, and an interval is meant to hold the true value in 80% of all cases.
"""

from __future__ import annotations

import hashlib
import json
from html import escape
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from planner.files import write_text
from planner.shape import RANK_ORDERS
from planner.specs.base import Spec
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import RankOrder, TrainingSpec
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import Value

SCHEMA_VERSION: Final = 1

Interval = tuple[float, float]
Evidence = Literal["spec_sheet", "calibrated", "probed"]
"""The source of the seconds: data sheets, measurements of this kind of GPU, or those corrected by a probe."""


class Layout(Spec):
    """The shape that was chosen."""

    tp: int
    cp: int
    ep: int
    etp: int
    pp: int
    vpp: int
    dp: int
    micro_batch_size: int
    num_microbatches: int
    schedule: str
    zero_stage: int
    shard_size: int
    """Ranks over which ZeRO or FSDP shards; dp·cp unless a smaller group was asked for (HSDP)."""
    sequence_parallel: bool
    recompute: Literal["none", "selective", "full"]
    """`full` if any layer is recomputed whole; the stages say how many."""
    recompute_modules: tuple[str, ...] = ()
    rank_order: RankOrder = "tp-cp-ep-dp-pp"
    """The order in which ranks are numbered, the innermost group first."""
    num_gpus_used: int
    num_gpus_spare: int = 0
    """GPUs that no rank uses."""

    @property
    def dp_outermost(self) -> bool:
        """True where data-parallel ranks lie outside the pipelines."""
        return self.rank_order != RANK_ORDERS[0]

    @property
    def axes(self) -> tuple[str, ...]:
        """The sizes of the grid that are worth saying, such as `TP 8` and `PP 16`."""
        axes = [("TP", self.tp), ("CP", self.cp), ("PP", self.pp), ("VPP", self.vpp), ("DP", self.dp), ("EP", self.ep)]
        shown = [f"{name} {size}" for name, size in axes if size > 1 or name in ("TP", "PP", "DP")]
        # dense layers have no etp of their own; experts are whole where they are spread, and cut as the rest if not
        if self.etp != (1 if self.ep > 1 else self.tp):
            shown.append(f"ETP {self.etp}")
        return tuple(shown)

    def __str__(self) -> str:
        return f"{' × '.join(self.axes)} · micro-batch {self.micro_batch_size} × {self.num_microbatches}"


class Placement(Spec):
    """The outermost tier of the network that a group's exchanges cross."""

    group: Literal["tp", "cp", "ep", "dp", "pp"]
    size: int
    """Ranks of a group."""
    tier: str
    """Name of the tier."""
    is_inside_nvlink: bool
    """True if all ranks of a group are in one NVLink domain."""
    tier_gpus: int | None = None
    """GPUs under the tier; null for the outermost."""
    oversubscription: float = 1.0
    """Factor by which the tier's bandwidth falls short of the sum of what is below it."""
    fills_gpus: int | None = None
    """GPUs of an NVLink domain that the groups fill, if they do not fill all: one more would cross its border."""

    def __str__(self) -> str:
        shared = f" {self.oversubscription:g}x" if self.oversubscription > 1 else ""
        if not self.is_inside_nvlink:
            crosses = "crosses NVLink, " if self.group == "ep" else ""
            return f"{self.group} {self.size} {crosses}over {self.tier}{shared}"
        rack = f" (NVL{self.tier_gpus})" if self.group == "ep" and (self.tier_gpus or 0) > 8 else ""
        partly = f", if jobs fill {self.fills_gpus} of its GPUs" if self.fills_gpus else ""
        return f"{self.group} {self.size} in {self.tier}{rack}{partly}"


class StageMemory(Spec):
    """Memory that a rank of a stage needs at its peak, in bytes; the items add up to peak_allocated_bytes."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    workspace_bytes: int
    """Bytes that a backward (or a recomputed layer) needs for a moment, and bytes of fixed buffers."""
    reserved_bytes: int
    peak_allocated_bytes: int
    """The bytes that torch.cuda.max_memory_allocated would show."""
    total_bytes: int
    """peak_allocated_bytes + reserved_bytes."""
    total_bytes_interval: Interval | None = None


class StagePlan(Spec):
    """One pipeline stage: what it holds, how long a micro-batch takes through all its chunks, what it needs."""

    stage: int
    chunks: tuple[tuple[int, int], ...]
    """[first layer, last layer exclusive) of each virtual stage, in the order a micro-batch meets them."""
    num_layers: int
    holds: tuple[str, ...]
    """The parts beside layers that the stage holds: any of embedding, head and mtp."""
    recompute: dict[str, int]
    """Layers per recompute mode."""
    num_recomputed: tuple[tuple[int, ...], ...] = ()
    """Number of layers that are recomputed whole, for each chunk and each kind of layer (in model order); they are the
    first layers of the chunk. Empty if no stage recomputes any, and in files that say no more than `recompute`."""
    in_flight_microbatches: float
    forward_s: float
    """Seconds of computing in one micro-batch's forward; its exchanges are counted in forward_comm_s."""
    backward_s: float
    """Seconds of computing in one micro-batch's backward, recomputation included."""
    weight_grad_s: float
    """The seconds of backward_s that weight gradients take; schedules that split the backward move them."""
    forward_comm_s: float
    """Seconds of tensor-, context- and expert-parallel exchanges in one forward that no computing hides."""
    backward_comm_s: float
    optimizer_s: float
    num_parameters: int
    """Number of parameters that one rank holds."""
    memory: StageMemory


class StepBreakdown(Spec):
    """The parts of a step's seconds, on the rank that decides how long it is; the items add up to step_s."""

    compute_s: float
    tp_comm_s: float
    cp_comm_s: float
    ep_comm_s: float
    pp_comm_s: float
    exposed_dp_s: float
    bubble_s: float
    optimizer_s: float
    overhead_s: float


class StepTime(Spec):
    """The time of one optimizer step, and the speeds that follow from it."""

    step_s: float
    step_s_interval: Interval | None = None
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    """Tokens per second, divided by all GPUs given, spare ones included."""
    model_tflops_per_gpu: float
    """Model FLOPs (no recompute) per second and GPU used."""
    mfu: float
    """model_tflops_per_gpu over the dense bf16 peak."""
    bubble_fraction: float
    """Idle share of the pipeline's time, mean over stages."""
    breakdown: StepBreakdown


class RecipeGain(Spec):
    """The worth of one switch of a recipe: the step without it, beside the step with it."""

    switch: str
    value: Value
    """The value in the recipe."""
    without_step_s: float
    """Seconds of the step with the switch at its plainest value."""
    replanned: bool
    """True if the step without the switch is that of the best layout for it, false if it is of this layout."""
    source: str = ""
    """The evidence that the switch gains."""


class Offer(Spec):
    """A value of a switch that is chosen with consent only, and the step that it would give."""

    switch: str
    value: Value
    step_s: float
    replanned: bool
    """True if the step is that of the best layout with the value, false if it is of this layout."""
    changes: str
    """The thing that the value changes: `numerics`, `checks` or `tokens`."""
    allow: tuple[str, ...]
    """Names for --allow that give the consent."""


class RecipeRefusal(Spec):
    """A value of a switch that does not go with the layout or with the rest of the recipe."""

    switch: str
    value: Value
    rule: str
    """The rule that the value breaks, in words."""


class PricedLayout(Spec):
    """One layout priced: whether it fits, how its stages are cut, how long a step takes."""

    id: str | None = None
    evidence: Evidence
    fits: bool
    parallelism: Layout
    stages: tuple[StagePlan, ...]
    step: StepTime
    warnings: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    """Each rank's actions in order, as torch spells them, if the schedule was made to measure (`auto`)."""
    rank_factors: tuple[float, ...] = ()
    """Measured: how many times as long each pipeline rank takes as the profile says; empty: all take as long."""
    runtime_spec: RuntimeSpec | None = None
    """The runtime that priced an alternative, if it is not that of the best: only one of the two splits backwards."""
    recipe: dict[str, Value] = Field(default_factory=dict)
    """The value of each switch that has an effect on this layout; empty in files that do not say."""
    recipe_gains: tuple[RecipeGain, ...] = ()
    """The worth of the switches that are on."""
    offers: tuple[Offer, ...] = ()
    """The values that consent would buy, the fastest first."""
    recipe_refused: tuple[RecipeRefusal, ...] = ()
    """The values that rules refuse for this layout and recipe."""
    rank_order: RankOrder = "tp-cp-ep-dp-pp"
    """The order in which ranks are numbered, the innermost group first, as in `parallelism`."""
    placement: tuple[Placement, ...] = ()
    """The tier that each group of ranks spans; empty in files that do not say."""
    trade: str = ""
    """A sentence on an alternative: what it gives up against the best plan, and what it gains."""

    @property
    def worst_stage(self) -> StagePlan:
        """The stage that needs the most memory."""
        return max(self.stages, key=lambda stage: stage.memory.total_bytes)

    @property
    def slowest_stage(self) -> StagePlan:
        """The stage whose micro-batch takes longest, exchanges included."""
        return max(self.stages, key=lambda s: s.forward_s + s.backward_s + s.forward_comm_s + s.backward_comm_s)


class ModelSummary(Spec):
    """The model's totals; `spec` holds the whole model."""

    name: str
    num_parameters: int
    num_active_parameters: int
    model_flops_per_token: float
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

    num_shapes: int
    """Legal shapes."""
    num_fitting: int
    """Legal shapes that can fit in memory."""
    num_ilps: int
    seconds: float | None = None
    """Wall seconds of the search; null in saved files, which are the same for the same inputs."""
    outcome: Literal["proven", "bounded", "feasible"]
    """`proven`: the search ended within the gap that was asked for. `bounded`: it ended with a wider one. `feasible`:
    time ran out before it ended."""
    lower_bound_s: float
    """No legal shape that fits has a shorter step than this, in the stated model, among the layouts searched."""
    gap: float
    """step_s / lower_bound_s − 1."""
    asked_gap_fraction: float | None = None
    """How far above the bound the step was allowed to be, as a fraction of the step; null in files that do not say."""
    schedules: tuple[str, ...] = ()
    """Schedules that were tried for pipelines; empty in files that do not say. `searched` says more."""
    searched: Searched | None = None
    """The choices that the search tried; null in files that do not say."""
    unsearched: tuple[str, ...] = ()
    """The choices that the search left out, in the words with which the sentence about the proof ends."""


class RunCost(Spec):
    """Time, energy and money that the whole training run takes for the tokens asked for."""

    tokens: float
    days: float
    gpu_hours: float
    usd: float | None = None
    mwh: float | None = None


class BatchOffer(Spec):
    """Another batch nearby under which the same GPUs train more tokens a second."""

    global_batch_size: int
    """Sequences of a step."""
    step_s: float
    """Seconds of its step in the layout that is fastest for it."""
    tokens_per_s: float


class Plan(Spec):
    """The answer of `plan()` and `evaluate()`: the inputs, the best layout, alternatives, why others were rejected.

    `fits`, `parallelism`, `stages`, `step`, `evidence` and `warnings` are those of `best`.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    planner_version: str
    model: ModelSummary
    cluster: ClusterSpec
    training: TrainingSpec
    runtime: str
    runtime_spec: RuntimeSpec
    best: PricedLayout
    alternatives: tuple[PricedLayout, ...] = ()
    rejections: dict[str, int] = Field(default_factory=dict)
    rejection_examples: dict[str, str] = Field(default_factory=dict)
    """One rejected shape per reason, in words with its numbers."""
    search: SearchReport | None = None
    run_cost: RunCost | None = None
    planned_as: Plan | None = Field(default=None, exclude=True, repr=False)
    """The plan that was made, if this one is its price under another trainer; no file has it."""
    assumptions: tuple[str, ...] = ()
    """Defaults that move the step of the best layout, with nothing planned again, and how to set them."""
    batch_offer: BatchOffer | None = None
    """A batch within 3% of the one planned that gives over 2% more tokens a second; null if there is none."""

    @property
    def as_planned(self) -> Plan:
        """The plan as it was made, for the trainer that it was made for."""
        return self.planned_as or self

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
        return {**self.model_dump(mode="json", exclude=left_out), "inputs_sha256": self.inputs_sha256}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Read what `to_json` wrote. Raises pydantic's ValidationError if the data do not fit."""
        return cls.model_validate({key: value for key, value in data.items() if key != "inputs_sha256"})

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the plan as JSON to a file that `load` and every command read; `-` is stdout.

        The seconds that the search took are left out, so that the same inputs make the same bytes. Raises SpecError if
        the file exists and `force` is not given.
        """
        search = None if self.search is None else self.search.model_copy(update={"seconds": None})
        data = self.model_copy(update={"search": search}).to_json()
        write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n", force)

    # load and _repr_html_ are the imports that climb: users ask the plan itself
    @staticmethod
    def load(path: str | Path) -> Plan:
        """The plan in a file that `save` wrote; `-` is stdin. Raises SpecError if it holds no plan of this version."""
        from planner.plan_file import read_plan

        return read_plan(str(path))

    def _repr_html_(self) -> str:
        """The report as a notebook shows it, in a frame of its own so that its styles change nothing else."""
        from planner.report.page import report_page

        return f'<iframe srcdoc="{escape(report_page(self))}" style="width: 100%; height: 40em; border: 0"></iframe>'
