"""One layout as it is answered: its shape, its stages with their memory, its step, its recipe.

Times are in seconds and memory is in bytes.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from planner.shape import RANK_ORDERS
from planner.specs.base import Fraction, Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Spec
from planner.specs.model_parts import Scaling
from planner.specs.training import Parallelism, RankOrder
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import Value

Quantity = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""An amount or a rate: finite, and never below nothing."""
Seconds = Annotated[float, Field(ge=-1e-6, allow_inf_nan=False)]
"""A time; a difference of two may round to a little less than nothing."""
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
"""A whole number of things or bytes."""
Difference = Annotated[float, Field(allow_inf_nan=False)]
"""A difference: it may have either sign."""


def _in_order(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] > ends[1]:
        raise ValueError(f"begins at {ends[0]:g} and ends at {ends[1]:g}")
    return ends


Interval = Annotated[tuple[Seconds, Seconds], AfterValidator(_in_order)]
"""The ends of a range that is meant to hold the true value in 80% of all cases."""


SIGMAS_TO_END = 1.2815515655446004
"""Standard deviations from the middle of a normal distribution to either end of the interval that holds 80% of it."""


def half_width(interval: Interval) -> float:
    """Half the width of an interval, in natural logarithms."""
    return math.log(interval[1] / interval[0]) / 2


class Sustained(Spec):
    """The seconds of a step as months of training see them: jitter, slow nodes and clocks are in it, failures not."""

    step_s: PositiveSeconds
    step_s_interval: Interval
    source: str
    """The runs that the difference to a benchmark was read from."""


class RunCost(Spec):
    """Time, energy and money that the whole training run takes for the tokens asked for."""

    tokens: Quantity
    days: Quantity
    days_interval: Interval | None = None
    gpu_hours: Quantity
    usd: Quantity | None = None
    usd_interval: Interval | None = None
    mwh: Quantity | None = None
    examples: Count | None = None
    """Examples of an epoch; null for a run that is stated in tokens alone."""
    epochs: Quantity | None = None
    num_steps: Quantity | None = None
    """Optimizer steps of the run."""
    padding_fraction: Quantity | None = None
    """Share of the tokens in padded batches that is padding; null where batches are packed."""
    packed_days: Quantity | None = None
    """Days of the same layout if the examples were packed into whole sequences; null where they are."""


class Goodput(Spec):
    """The share of a long run's wall time in which it trains, and what takes the rest."""

    effective_fraction: Fraction
    interval: Interval
    checkpoint_s: Quantity
    """Seconds that the run stands still for a checkpoint."""
    checkpoint_interval_s: Quantity
    """Seconds between two checkpoints."""
    evaluation_fraction: Fraction
    failures_per_day: Quantity
    restart_s: Quantity
    """Seconds from a failure until the job trains again, its detection included."""
    failures_per_day_interval: Interval | None = None
    checkpoint_bytes: Quantity | None = None
    """Weights and optimizer states of the whole model, as the trainer writes them."""
    asynchronous: bool = False
    """True if checkpoints are written beside the training, which then waits for a copy in host memory only."""
    storage_gb_per_s: Quantity | None = None
    """Rate at which all ranks together write a checkpoint, 10^9 bytes a second."""
    simulated_fraction: Fraction | None = None
    """Median of effective_fraction over the simulated runs that the intervals are read from."""
    num_spare_nodes: Count | None = None
    """Nodes kept for this job, beside its own; null: its cluster's pool has one for every new job."""
    num_spare_nodes_advised: Count | None = None
    """The fewest spare nodes of which one is free in 99% of the failures that take a node."""
    sources: dict[str, str] = Field(default_factory=dict)
    """The origin of each figure, by the field that it decides."""


Evidence = Literal["spec_sheet", "calibrated", "probed"]
"""The source of the seconds: data sheets, measurements of this kind of GPU, or those that a probe or runs corrected."""


_STATED = (
    "tp", "cp", "pp", "vpp", "ep", "etp", "micro_batch_size", "zero_stage", "schedule", "sequence_parallel",
    "rank_order", "recompute",
)  # fmt: skip
"""Fields of a layout that one gives by the same name."""


class Layout(Spec):
    """The shape that was chosen."""

    tp: PositiveInt
    cp: PositiveInt
    ep: PositiveInt
    etp: PositiveInt
    pp: PositiveInt
    vpp: PositiveInt
    dp: PositiveInt
    micro_batch_size: PositiveInt
    num_microbatches: PositiveInt
    schedule: str
    zero_stage: NonNegativeInt
    shard_size: PositiveInt
    """Ranks over which ZeRO or FSDP shards; dp·cp unless a smaller group was asked for (HSDP)."""
    sequence_parallel: bool
    recompute: Literal["none", "selective", "full"]
    """`full` if any layer is recomputed whole; the stages say how many."""
    recompute_num_layers: PositiveInt | None = None
    """The most layers of a model chunk that full recompute covers; null where it covers all, or none."""
    recompute_modules: tuple[str, ...] = ()
    rank_order: RankOrder = "tp-cp-ep-dp-pp"
    """The order in which ranks are numbered, the innermost group first."""
    num_gpus_used: PositiveInt
    num_gpus_spare: int = 0
    """GPUs that no rank uses."""
    host_bytes: Count = 0
    """Offloaded states, weights and activations that a rank keeps in its host's memory, in the mean over stages."""

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

    def replace(self, **changes: Any) -> Parallelism:
        """This layout as one that is given to `evaluate`, with other values: `replace(pp=8)`.

        dp follows from the number of GPUs unless it is changed, or the layout leaves some of them spare; layers are cut
        as the trainer cuts them. Raises pydantic's ValidationError for names and values that a layout does not have.
        """
        stated = {name: getattr(self, name) for name in _STATED}
        stated |= {"recompute_modules": self.recompute_modules if self.recompute == "selective" else ()}
        if self.num_gpus_spare and not changes.keys() & {"tp", "cp", "pp"}:
            stated["dp"] = self.dp
        if not changes.keys() & {"recompute", "recompute_layers"}:
            stated["recompute_num_layers"] = self.recompute_num_layers
        stated |= {"fsdp": self.shard_size} if self.shard_size < self.dp * self.cp else {}
        if changes.keys() & {"pp", "vpp"} and "schedule" not in changes:
            del stated["schedule"]
        return Parallelism(**{**stated, **changes})

    def __str__(self) -> str:
        return f"{' × '.join(self.axes)} · micro-batch {self.micro_batch_size} × {self.num_microbatches}"


class Placement(Spec):
    """The outermost tier of the network that a group's exchanges cross."""

    group: Literal["tp", "cp", "ep", "dp", "pp"]
    size: PositiveInt
    """Ranks of a group."""
    tier: str
    """Name of the tier."""
    is_inside_nvlink: bool
    """True if all ranks of a group are in one NVLink domain."""
    tier_gpus: PositiveInt | None = None
    """GPUs under the tier; null for the outermost."""
    oversubscription: PositiveFloat = 1.0
    """Factor by which the tier's bandwidth falls short of the sum of what is below it."""
    fills_gpus: PositiveInt | None = None
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

    weights_bytes: Count
    frozen_weights_bytes: Count = 0
    """The bytes of weights_bytes that are frozen weights, where adapters are trained."""
    gradients_bytes: Count
    optimizer_bytes: Count
    activations_bytes: Count
    logits_bytes: Count
    workspace_bytes: Count
    """Bytes that a backward (or a recomputed layer) needs for a moment, and bytes of fixed buffers."""
    reserved_bytes: Count
    peak_allocated_bytes: Count
    """The bytes that torch.cuda.max_memory_allocated would show."""
    total_bytes: Count
    """peak_allocated_bytes + reserved_bytes."""
    total_bytes_interval: Interval | None = None


class StagePlan(Spec):
    """One pipeline stage: what it holds, how long a micro-batch takes through all its chunks, what it needs."""

    stage: NonNegativeInt
    chunks: tuple[tuple[NonNegativeInt, NonNegativeInt], ...]
    """[first layer, last layer exclusive) of each virtual stage, in the order a micro-batch meets them."""
    num_layers: NonNegativeInt
    holds: tuple[str, ...]
    """The parts beside layers that the stage holds: any of embedding, head and mtp."""
    recompute: dict[str, NonNegativeInt]
    """Layers per recompute mode."""
    num_recomputed: tuple[tuple[NonNegativeInt, ...], ...] = ()
    """Number of layers that are recomputed whole, for each chunk and each kind of layer (in model order); they are the
    first layers of the chunk. Empty if no stage recomputes any, and in files that say no more than `recompute`."""
    in_flight_microbatches: Quantity
    forward_s: Seconds
    """Seconds of computing in one micro-batch's forward; its exchanges are counted in forward_comm_s."""
    backward_s: Seconds
    """Seconds of computing in one micro-batch's backward, recomputation included."""
    weight_grad_s: Seconds
    """The seconds of backward_s that weight gradients take; schedules that split the backward move them."""
    forward_comm_s: Seconds
    """Seconds of tensor-, context- and expert-parallel exchanges in one forward that no computing hides."""
    backward_comm_s: Seconds
    optimizer_s: Seconds
    num_parameters: Count
    """Number of parameters that one rank holds."""
    memory: StageMemory

    @property
    def recomputed_in_chunks(self) -> tuple[int, ...]:
        """The number of layers that are recomputed whole in each chunk, its first ones.

        Where only their sum is known, all chunks recompute the same number, as far as a chunk has so many.
        """
        if self.num_recomputed:
            return tuple(map(sum, self.num_recomputed))
        count, sizes = self.recompute.get("full", 0), [last - first for first, last in self.chunks]
        each = next(n for n in range(max(sizes) + 1) if sum(min(n, size) for size in sizes) >= count)
        return tuple(min(each, size) for size in sizes)


class StepBreakdown(Spec):
    """The parts of a step's seconds, on the rank that decides how long it is; the items add up to step_s."""

    compute_s: Seconds
    tp_comm_s: Seconds
    cp_comm_s: Seconds
    ep_comm_s: Seconds
    pp_comm_s: Seconds
    exposed_dp_s: Seconds
    bubble_s: Seconds
    optimizer_s: Seconds
    overhead_s: Seconds


class StepTime(Spec):
    """The time of one optimizer step, and the speeds that follow from it."""

    step_s: PositiveSeconds
    step_s_interval: Interval | None = None
    tokens_per_s: Quantity
    tokens_per_s_per_gpu: Quantity
    """Tokens per second, divided by all GPUs given, spare ones included."""
    model_tflops_per_gpu: Quantity
    """Model FLOPs (no recompute) per second, divided by all GPUs given, spare ones included."""
    mfu: Quantity
    """model_tflops_per_gpu over the dense bf16 peak."""
    bubble_fraction: Quantity
    """Idle share of the pipeline's time, mean over stages."""
    breakdown: StepBreakdown


class RecipeGain(Spec):
    """The worth of one switch of a recipe: the step without it, beside the step with it."""

    switch: str
    value: Value
    """The value in the recipe."""
    without_step_s: PositiveSeconds
    """Seconds of the step with the switch at its plainest value."""
    replanned: bool
    """True if the step without the switch is that of the best layout for it, false if it is of this layout."""
    source: str = ""
    """The evidence that the switch gains."""


class Offer(Spec):
    """A value of a switch that is chosen with consent only, and the step that it would give."""

    switch: str
    value: Value
    step_s: PositiveSeconds
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


class UnsaidSwitch(Spec):
    """A switch that a run does not say, and the step under another value that such runs often have."""

    switch: str
    value: Value
    """The value that was priced."""
    other: Value
    """The other value."""
    other_fraction: Fraction
    """The share of such runs that have the other value."""
    other_step_s: PositiveSeconds
    """Seconds of the step with the other value."""


class DecidingFact(Spec):
    """The one fact that would narrow a step's wide interval most."""

    fact: Name
    """The fact, in words."""
    option: Name
    """The option that says it, or the command that measures it."""
    half_width: PositiveFloat
    """Half of the interval's width, in natural logarithms."""
    known_half_width: NonNegativeFloat
    """The same if the fact were known."""


AS_PLANNED = "as planned"
"""The assumption of a step under which nothing is changed."""


class RobustStep(Spec):
    """The step of a layout under an assumption that is changed by itself."""

    layout: Name
    """The layout, in the words of its grid."""
    assumption: Name
    """The change: a short name, a colon and a sentence; `as planned` where nothing is changed."""
    step_s: PositiveFloat


class NarrowScaling(Spec):
    """The scales of products in 8 or 4 bits."""

    scaling: Scaling
    """The values that share a scale, as the step is priced; a model published with blocks is exported so on Hopper."""
    published: Scaling | None = None
    """The same as the model was trained with; null where nothing says."""


class Recommendation(Spec):
    """The reason why another layout than the fastest comes first: it costs little, is simpler or loses less."""

    fastest: Name
    """The fastest layout, in the words of its grid."""
    fastest_step_s: PositiveFloat
    chunks: PositiveInt
    """Chunks of layers of the layout that comes first: pp·vpp."""
    fastest_chunks: PositiveInt
    worst_loss_fraction: NonNegativeFloat | None = None
    """The most that this layout loses to others near the fastest under any assumption of `robust`; null where it comes
    first for its fewer chunks."""
    fastest_worst_loss_fraction: PositiveFloat | None = None
    """The same of the fastest layout."""
    assumption: str = ""
    """The assumption under which the fastest layout loses most."""


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
    rank_factors: tuple[PositiveFloat, ...] = ()
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
    unsaid: tuple[UnsaidSwitch, ...] = ()
    """The switches that a run does not say and that may move its step by over 2%, the one that moves it most first; the
    step's interval covers them. Empty where all are said, as in a plan that was searched for."""
    deciding_fact: DecidingFact | None = None
    """The one fact that would narrow the step's interval most; null where it is within 40%."""
    rank_order: RankOrder = "tp-cp-ep-dp-pp"
    """The order in which ranks are numbered, the innermost group first, as in `parallelism`."""
    placement: tuple[Placement, ...] = ()
    """The tier that each group of ranks spans; empty in files that do not say."""
    oom_probability: Fraction | None = None
    """Probability that the fullest stage needs more memory than its GPU has; null where no interval is known."""
    sustained: Sustained | None = None
    """The step that months of training see, beside the benchmark's; null where nothing is known of it."""
    robust: tuple[RobustStep, ...] = ()
    """The steps of the best few layouts under each assumption that moves them, layout by layout, this one first; empty
    where none was compared."""
    narrow_scaling: NarrowScaling | None = None
    """The scales of its products in 8 or 4 bits; null where they are in 16."""
    recommendation: Recommendation | None = None
    """The reason why this layout comes before a faster one; null where it is the fastest found."""
    trade: str = ""
    """A sentence on an alternative: what it gives up against the best plan, and what it gains."""

    @property
    def stated(self) -> Parallelism:
        """The layout with its layers of each stage and those that are recomputed, as one gives it to `evaluate`."""
        chunks = sorted(chunk for stage in self.stages for chunk in stage.chunks)
        recomputed = tuple(self._recomputed_layers())
        mode = "full" if recomputed else "none" if self.parallelism.recompute == "full" else self.parallelism.recompute
        return self.parallelism.replace(
            layers_per_stage=tuple(last - first for first, last in chunks),
            recompute=mode,
            **({"recompute_layers": recomputed} if recomputed else {}),
        )

    def _recomputed_layers(self) -> list[int]:
        """Numbers of the layers that are recomputed whole: the first ones of each chunk."""
        return sorted(
            layer
            for stage in self.stages
            for (first, _), count in zip(stage.chunks, stage.recomputed_in_chunks, strict=True)
            for layer in range(first, first + count)
        )

    @property
    def worst_stage(self) -> StagePlan:
        """The stage that needs the most memory."""
        return max(self.stages, key=lambda stage: stage.memory.total_bytes)

    @property
    def slowest_stage(self) -> StagePlan:
        """The stage whose micro-batch takes longest, exchanges included."""
        return max(self.stages, key=lambda s: s.forward_s + s.backward_s + s.forward_comm_s + s.backward_comm_s)
