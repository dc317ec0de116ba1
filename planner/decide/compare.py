"""Plans, probes, imported and observed runs beside each other: what differs, and which terms make one step longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Literal

from pydantic import Field

from planner.answer import Interval, Plan
from planner.errors import SpecError
from planner.layout.price import ITEMS, reprice
from planner.layout.step import compute_terms
from planner.observe.observation import Observation
from planner.probe.result import ProbeResult
from planner.specs.base import Fields, Spec
from planner.trainers.switches import Value

PASSES, WAITS, GRADIENTS, OPTIMIZER, REST = "passes_s", "waits_s", "exposed_dp_s", "optimizer_s", "overhead_s"
PIPELINE, OTHERS, UNATTRIBUTED = "pipeline_s", "others_s", "unattributed_s"
COARSE = {
    "products_s": PASSES,
    "attention_s": PASSES,
    "memory_bound_s": PASSES,
    "recompute_s": PASSES,
    "ends_s": PASSES,
    "other_compute_s": PASSES,
    "tp_comm_s": PASSES,
    "cp_comm_s": PASSES,
    "ep_comm_s": PASSES,
    "pp_comm_s": WAITS,
    "bubble_s": WAITS,
    "exposed_dp_s": GRADIENTS,
    "optimizer_s": OPTIMIZER,
    "overhead_s": REST,
    "compute_s": PASSES,
    "pp_comm_and_waits_s": WAITS,
    "other_comm_s": REST,
    "forward_s": PASSES,
    "backward_s": PASSES,
    "forward_backward_s": PIPELINE,
    "gradients_s": GRADIENTS,
    "parameters_s": GRADIENTS,
    UNATTRIBUTED: REST,
}
"""The coarser term that a rank's own clock can measure, for each term of a step that is planned or observed."""
COARSER = {PASSES: PIPELINE, WAITS: PIPELINE}
"""Coarse terms that a log's timer does not tell apart, and what they are together."""


class Compared(Spec):
    """One side of a comparison."""

    name: str
    kind: Literal["plan", "probe", "run", "observation"]
    """`run` is a configuration that was read and priced."""
    facts: dict[str, Value] = Field(default_factory=dict)
    """The job, the layout, the recipe and the split, as they are written on a command line."""
    memory: dict[str, int] = Field(default_factory=dict)
    """Bytes of the fullest stage by item; those that a probe measured are peaks alone."""
    step_s: float
    step_s_interval: Interval | None = None
    tokens_per_step: int
    terms: dict[str, float]
    """Seconds of the step by term; they add up to it."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s

    @property
    def coarse_terms(self) -> dict[str, float]:
        """The terms that both plans and probes have."""
        return _renamed(self.terms, COARSE)

    @property
    def coarser_terms(self) -> dict[str, float]:
        """The terms that a log's timers have."""
        return _renamed(self.coarse_terms, COARSER)


def _renamed(terms: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    """The terms under other names; those that come to have one name are added up."""
    renamed: dict[str, float] = {}
    for name, seconds in terms.items():
        name = names.get(name, name)
        renamed[name] = renamed.get(name, 0.0) + seconds
    return renamed


def of_plan(plan: Plan, name: str, kind: Literal["plan", "run"] = "plan") -> Compared:
    """A plan's best layout."""
    return Compared(
        name=name,
        kind=kind,
        facts=_job(plan) | _layout(plan),
        memory={item: getattr(plan.best.worst_stage.memory, item) for item in ITEMS},
        step_s=plan.step.step_s,
        step_s_interval=plan.step.step_s_interval,
        tokens_per_step=plan.training.tokens_per_step,
        terms=_terms(plan),
    )


def _job(plan: Plan) -> dict[str, Value]:
    training, adapters = plan.training, plan.training.adapters
    trained: dict[str, Value] = {"trained": "all weights"}
    if adapters is not None:
        names = ",".join(adapters.targets)
        trained = {"trained": "adapters", "rank": adapters.rank, "targets": names, "base_bits": adapters.base_bits}
    return {
        **trained,
        "model": plan.model.name,
        "hardware": plan.cluster.hardware.name,
        "gpus": plan.cluster.num_gpus,
        "gpus_per_node": plan.cluster.node_size,
        "runtime": plan.runtime,
        "seq_length": training.seq_length,
        "global_batch_size": training.global_batch_size,
        "dtype": training.dtype,
    }


def _layout(plan: Plan) -> dict[str, Value]:
    layout = plan.parallelism
    sizes = ("tp", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch_size", "num_microbatches", "schedule")
    more = ("zero_stage", "sequence_parallel", "recompute", "rank_order", "num_gpus_spare")
    full = [stage.recompute.get("full", 0) for stage in plan.stages]
    return {
        **{name: getattr(layout, name) for name in (*sizes, *more)},
        "recompute_modules": ",".join(layout.recompute_modules),
        "layers": _listed([stage.num_layers for stage in plan.stages]),
        "recomputed_layers": _listed(full) if any(full) else "none",
        **plan.best.recipe,
    }


def _listed(counts: list[int]) -> str:
    """Counts of stages, runs of equal ones as one: `7 8×14 7`."""
    runs = [(count, len(list(equal))) for count, equal in groupby(counts)]
    return " ".join(f"{count}×{times}" if times > 1 else f"{count}" for count, times in runs)


def _terms(plan: Plan) -> dict[str, float]:
    """The breakdown of the step, and its compute cut as that of all ranks is: the busiest one may hold no head."""
    breakdown = plan.step.breakdown.model_dump()
    candidate = reprice(plan, plan.best)
    ranks = [compute_terms(candidate, rank) for rank in range(plan.parallelism.pp)]
    cut = {term: sum(of_rank[term] for of_rank in ranks) for term in ranks[0]}
    scale = breakdown.pop("compute_s") / sum(cut.values())
    return {term: scale * seconds for term, seconds in cut.items()} | breakdown


def of_probe(result: ProbeResult, name: str) -> Compared:
    """The measurements of a probe. Raises SpecError where that is no step of the plan's own stages."""
    run = result.run
    if result.step_s is None or run.dtype != "bfloat16":
        why = (
            "has no whole step"
            if result.step_s is None
            else "ran in small to prove an order, which takes other seconds"
        )
        raise SpecError(f"{name}: {why}", "probe the plan's own stages: plan probe plan.json --device cuda --stage all")
    facts = {
        "model": run.model.name,
        "hardware": result.device,
        "gpus": run.world_size,
        "runtime": "torch-eager",
        "seq_length": run.whole_seq_length,
        "dtype": "bf16",
        **{name: getattr(run, name) for name in ("tp", "cp", "ep", "pp", "dp", "micro_batch_size", "num_microbatches")},
        "schedule": run.schedule,
    }
    peaks = [rank.memory.peak_allocated_bytes for rank in result.ranks if rank.memory is not None]
    return Compared(
        name=name,
        kind="probe",
        facts=facts,
        memory={"peak_allocated_bytes": max(peaks)} if peaks else {},
        step_s=result.step_s,
        tokens_per_step=run.whole_seq_length * run.micro_batch_size * run.num_microbatches * run.dp,
        terms=_measured_terms(result, result.step_s),
    )


def of_observation(observation: Observation, name: str) -> Compared:
    """An observed run. Raises SpecError where it has no step, or no tokens to count its speed by."""
    step_s, tokens_per_s = observation.step_s, observation.tokens_per_s
    if step_s is None or tokens_per_s is None:
        lacks = "a step" if step_s is None else "tokens per second"
        raise SpecError(
            f"{name}: has not {lacks}", "observe the log with --global-batch-size N --seq-length N --gpus N"
        )
    facts, peak = observation.facts, observation.peak_memory_bytes
    stated = {"model": facts.model, "gpus": facts.num_gpus, "runtime": facts.trainer, "seq_length": facts.seq_length}
    stated |= {"global_batch_size": facts.global_batch_size, **facts.run.get("parallelism", {})}
    return Compared(
        name=name,
        kind="observation",
        facts={key: value for key, value in stated.items() if isinstance(value, str | int | float)},
        memory={"peak_allocated_bytes": peak} if peak and observation.peak_memory_kind == "allocated" else {},
        step_s=step_s,
        step_s_interval=observation.step_s_spread,
        tokens_per_step=round(tokens_per_s * step_s),
        terms=_observed_terms(observation.breakdown, step_s),
    )


def _observed_terms(breakdown: Mapping[str, float], step_s: float) -> dict[str, float]:
    """The terms of an observed step with what they leave of it; the whole step where nothing is told apart."""
    told = {name: seconds for name, seconds in breakdown.items() if name in COARSE and name != UNATTRIBUTED}
    return told | {UNATTRIBUTED: step_s - sum(told.values())} if told else {"step_s": step_s}


def _measured_terms(result: ProbeResult, step_s: float) -> dict[str, float]:
    """The seconds of the rank that computed longest, as shares of the step. Stages alone have a whole step only."""
    if result.mode == "stages":
        return {"replayed_s": step_s}
    busiest = max(result.ranks, key=lambda rank: rank.busy_s)
    passes_s = busiest.busy_s
    reduced_s, optimizer_s, gathered_s = (
        median(getattr(step, name) for step in busiest.steps) for name in ("reduce_s", "optimizer_s", "gather_s")
    )
    pipeline_s = median(step.pipeline_s for step in busiest.steps)
    terms = {
        PASSES: passes_s,
        WAITS: pipeline_s - passes_s,
        GRADIENTS: reduced_s + gathered_s,
        OPTIMIZER: optimizer_s,
    }
    return terms | {REST: step_s - sum(terms.values())}


FIGURES = ("step_s", "tokens_per_s")
"""Numbers of every side that stand among the differences."""


class WaterfallTerm(Spec):
    """One term of a step, on the first side and on another."""

    term: str
    first_s: float
    other_s: float

    @property
    def seconds(self) -> float:
        """The seconds that the other side takes more."""
        return self.other_s - self.first_s


class Comparison(Spec):
    """Several sides, the first of which the others are held against."""

    sides: tuple[Compared, ...]
    differences: dict[str, tuple[Value | None, ...]]
    """The value that each side has of a fact that not all have alike; null where a side does not have it."""
    waterfalls: tuple[tuple[WaterfallTerm, ...], ...]
    """For each side but the first, the terms whose differences add up to that of the steps."""

    def to_json(self) -> Fields:
        """Plain data in the contract's form; `waterfall` is of the second side, `waterfalls` of all but the first."""
        rows = [[{"term": row.term, "seconds": row.seconds} for row in rows] for rows in self.waterfalls]
        return {
            "files": [side.name for side in self.sides],
            "differences": {name: list(values) for name, values in self.differences.items()},
            "waterfall": rows[0],
            "waterfalls": rows,
            "sides": [side.model_dump(mode="json") for side in self.sides],
        }


def compare(sides: Sequence[Compared]) -> Comparison:
    """Hold all sides but the first against the first."""
    return Comparison(
        sides=tuple(sides),
        differences=_differing(sides),
        waterfalls=tuple(waterfall(sides[0], other) for other in sides[1:]),
    )


def waterfall(first: Compared, other: Compared) -> tuple[WaterfallTerm, ...]:
    """The terms that both sides have, the one that differs most first; their differences add up to the steps'.

    Where one side is a probe or a log, whose clocks tell less apart, the terms are as coarse as its; what only one side
    has is `others_s`. A step that was replayed from stages alone has no terms but the whole.
    """
    levels = (
        (first.terms, other.terms),
        (first.coarse_terms, other.coarse_terms),
        (first.coarser_terms, other.coarser_terms),
    )
    same = next((pair for pair in levels if pair[0].keys() == pair[1].keys()), None)
    terms, others = same or (_shared(first, other), _shared(other, first))
    rows = [WaterfallTerm(term=name, first_s=terms[name], other_s=others[name]) for name in terms]
    return tuple(sorted(rows, key=lambda row: -abs(row.seconds)))


def _shared(side: Compared, beside: Compared) -> dict[str, float]:
    """The terms that both sides have at their coarsest, and all others as one; the whole step where there are none."""
    terms = side.coarser_terms
    shared = {name: terms[name] for name in terms if name in beside.coarser_terms and name != REST}
    return shared | {OTHERS: side.step_s - sum(shared.values())} if shared else {"step_s": side.step_s}


def _differing(sides: Sequence[Compared]) -> dict[str, tuple[Value | None, ...]]:
    """The facts that not all sides have alike, in the order in which the first side has them.

    A probe or a log says less of itself than a plan; what it leaves out is no difference.
    """
    facts = [
        side.facts | side.memory | dict(zip(FIGURES, (side.step_s, side.tokens_per_s), strict=True)) for side in sides
    ]
    names = dict.fromkeys(name for side in facts for name in side)
    probed = [of_side for of_side, side in zip(facts, sides, strict=True) if side.kind in ("probe", "observation")]
    rows = {name: tuple(side.get(name) for side in facts) for name in names if all(name in side for side in probed)}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}
