"""Published fine-tuning runs of one to a thousand GPUs: their steps, peaks, and whether they ran out of memory.

`data/finetunes.jsonl` holds one run a line, in the form of `plan evaluate --runs`, with its address and date,
`data/finetunes_megatron.jsonl` those of Megatron's trainers (docs/FINETUNE.md), `data/runs_own.jsonl` runs of trainers
of their own, which `assume` describes with a `name`, and `data/finetune_models.jsonl` the models that several share.
Such reports leave much unsaid: a row's `unsaid` names other likely values of it with their share, over which its
intervals are widened. No number is fitted to a row but the widths of `hf` (`planner/trainers/data/hf.yaml`), which come
from half of the sources.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import Field
from rich.table import Table

from planner.answer import PricedLayout, half_width
from planner.cli.output import dumps, show
from planner.errors import PlannerError, SpecError, Unsupported
from planner.layout.confidence import mixture_interval
from planner.layout.runs import Run, parse_run
from planner.report.format import seconds
from planner.report.pieces import columns
from planner.specs.base import Fraction, PositiveFloat, Spec
from planner.specs.units import GIB
from planner.trainers.spec import RuntimeSpec
from planner.validate.rows import MemoryKind

READ, HELD = "sources read", "sources held out"
"""Names of the two halves of the sources."""
ALLOCATED = ("allocated", "allocated on rank 0")
"""Kinds of peaks that leave out blocks which an allocator keeps."""
SOURCES_READ = frozenset({
    "answer-ai", "automodel-ci", "hf-4bit-blog", "hf-fsdp-70b-blog", "litgpt-issues", "llama-factory", "peft-docs",
    "qwen-readme", "torchtune", "unsloth-benchmarks",
})  # fmt: skip
"""The sources from which the widths of `hf`, its host's time and AutoModel's are read: every other one by name; nothing
is fitted to the rest."""
MEGATRON, OWN = "Megatron's", "trainers of their own"
"""Names of all sources of Megatron's runs, and of trainers that are none of ours, to which nothing is fitted either."""
GROUPS = (READ, HELD, MEGATRON, OWN)
"""The sources by what was read from them."""
DATA = Path(__file__).with_name("data")
LIKELY = 0.5
"""Probability above which a run is expected to run out of memory."""


class Fact(Spec):
    """The numbers and the outcome that the source reports of a run; at least one of them."""

    step_s: PositiveFloat | None = None
    """Seconds of an optimizer step, worked out from throughput by the source's own convention."""
    peak_memory_gib: PositiveFloat | None = None
    memory_kind: MemoryKind | None = None
    ran_out: bool | None = None
    """True for a run that ran out of memory, False for one that the source says fits."""


class Other(Spec):
    """Another value of something that the source does not say."""

    what: str
    likely: str
    share: Fraction
    """Share of runs like it that have this value."""
    run: dict[str, Any] = Field(default_factory=dict)
    """Fields of the run under this value; those of a section are added to the section's."""
    assume: dict[str, Any] = Field(default_factory=dict)
    """Fields of the runtime under it."""
    seconds: PositiveFloat = 1.0
    """Runs of the changed size that make one step: two where sequences are half as long."""


class Finetune(Spec):
    """One published fine-tuning run."""

    id: str
    origin: str = Field(alias="from")
    """A name for rows of one source, which are judged and left out together."""
    source: str
    """The document and the table."""
    address: str
    date: str
    """Year and month of what the source describes."""
    trust: Literal["A", "B", "C"]
    """As in `rows.Row`: C is told and not counted."""
    run: dict[str, Any]
    """The run, in the form of `plan evaluate --runs`."""
    measured: Fact
    assume: dict[str, Any] = Field(default_factory=dict)
    """Fields of the runtime in which the run's software differs from today's Hugging Face stack."""
    unsaid: tuple[Other, ...] = ()
    lacks: str = ""
    """The thing that the run did and that is not modelled; empty where all is."""
    note: str = ""
    """The things that were inferred, and those that the source does not say."""

    @property
    def counts(self) -> bool:
        return self.trust != "C"

    @property
    def is_megatron(self) -> bool:
        """True for a run of Megatron-LM, NeMo or Megatron-Bridge."""
        return str(self.run["runtime"]) == "megatron"

    @property
    def group(self) -> str:
        """The sources that are summed up together."""
        if "name" in self.assume:
            return OWN
        return MEGATRON if self.is_megatron else READ if self.origin in SOURCES_READ else HELD

    @property
    def priced_as(self) -> str:
        """A key that rows share which are priced alike."""
        return self.model_dump_json(include={"run", "assume", "unsaid", "lacks"})

    def priced(self, other: Other | None = None) -> PricedLayout:
        """The run's layout, with another value of what it does not say. PlannerError where it is not modelled."""
        if self.lacks:
            raise Unsupported(f"{self.lacks}: not modelled", "leave the run out")
        fields = self.run if other is None else _merged(self.run, other.run)
        run = parse_run({"id": self.id, "run": fields}, self.id)
        assume = self.assume | (other.assume if other else {})
        return _with_runtime(run, assume).evaluate()


@dataclass(frozen=True, slots=True)
class Tuned:
    """A published run with its price, or the error that says why there is none."""

    row: Finetune
    layout: PricedLayout | None = None
    error: PlannerError | None = None
    step_s_interval: tuple[float, float] = (0.0, 0.0)
    memory_width: tuple[float, float] = (0.0, 0.0)
    """Ends of the interval of its peak, as natural logarithms of their ratio to the prediction."""

    @property
    def step_error(self) -> float | None:
        """Predicted over measured seconds, less one; None where no step was measured."""
        measured_s = self.row.measured.step_s
        return None if self.layout is None or measured_s is None else self.layout.step.step_s / measured_s - 1

    @property
    def in_interval(self) -> bool | None:
        """True if the measured step is inside the 80% interval."""
        measured_s = self.row.measured.step_s
        if self.layout is None or measured_s is None:
            return None
        return self.step_s_interval[0] <= measured_s <= self.step_s_interval[1]

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured peak, less one, of the kind that was measured."""
        measured = self.row.measured
        if self.layout is None or measured.peak_memory_gib is None:
            return None
        stage = self.layout.worst_stage.memory
        predicted = stage.peak_allocated_bytes if measured.memory_kind in ALLOCATED else stage.total_bytes
        return predicted / (measured.peak_memory_gib * GIB) - 1

    @property
    def peak_in_interval(self) -> bool | None:
        """True if the measured peak is inside its 80% interval."""
        error = self.memory_error
        if error is None:
            return None
        low, high = self.memory_width
        return low <= -math.log1p(error) <= high

    @property
    def risk(self) -> float | None:
        """Probability that the run is out of memory; None where the source does not say whether it was."""
        return None if self.layout is None or self.row.measured.ran_out is None else self.layout.oom_probability


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedScore:
    """The agreement of one source's rows, or of all."""

    name: str
    is_summary: bool
    """True for a half of the sources, and for all of them."""
    num_rows: int
    num_unsupported: int
    num_steps: int
    median_step_error: float | None
    """Median of |step error|, and its mean with its sign."""
    step_bias: float | None
    step_coverage: float | None
    num_peaks: int
    median_memory_error: float | None
    memory_bias: float | None
    memory_coverage: float | None
    num_ran: int
    num_ran_likely_out: int
    """Runs that fitted, and those among them that were expected to run out of memory."""
    num_out: int
    num_out_likely_out: int
    """Runs that ran out, and those among them of which that was expected."""


@cache
def load_finetunes() -> tuple[Finetune, ...]:
    """All published fine-tuning runs, in the order of their file."""
    models = {line["key"]: line["model"] for line in _lines("finetune_models.jsonl")}
    rows = []
    for name in ("finetunes.jsonl", "finetunes_megatron.jsonl", "runs_own.jsonl"):
        for line in _lines(name):
            line["run"]["model"] = models.get(line["run"]["model"], line["run"]["model"])
            rows.append(Finetune.model_validate(line))
    return tuple(rows)


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def price_finetunes(rows: Iterable[Finetune]) -> list[Tuned]:
    """Every row with its price and its intervals; a configuration that several published is priced once."""
    every = list(rows)
    priced = {key: _tuned(row) for key, row in {row.priced_as: row for row in every}.items()}
    return [replace(priced[row.priced_as], row=row) for row in every]


def score_finetunes(tuned: Sequence[Tuned]) -> list[TunedScore]:
    """The agreement of each source, by name, of both halves of them, and of all; rows of trust C are not counted."""
    counted = [one for one in tuned if one.row.counts]
    names = sorted({one.row.origin for one in counted})
    groups = [
        *((name, [one for one in counted if one.row.origin == name]) for name in names),
        *((name, [one for one in counted if one.row.group == name]) for name in GROUPS),
        ("all", counted),
    ]
    return [_score(name, members) for name, members in groups if members]


def _tuned(row: Finetune) -> Tuned:
    try:
        layout = row.priced()
        others = [(other, row.priced(other)) for other in row.unsaid]
    except PlannerError as error:
        return Tuned(row, error=error)
    interval, memory = layout.step.step_s_interval, layout.worst_stage.memory
    width_s, total_bytes = half_width(interval or (1.0, 1.0)), memory.total_bytes
    low_bytes, high_bytes = memory.total_bytes_interval or (total_bytes, total_bytes)
    seconds = {
        other.what: [(math.log(other.seconds * priced.step.step_s / layout.step.step_s), other.share, 0.0)]
        for other, priced in others
    }
    room = {
        other.what: [(math.log(priced.worst_stage.memory.total_bytes / total_bytes), other.share, 0.0)]
        for other, priced in others
    }
    low, high = mixture_interval(width_s, seconds)
    step_s = layout.step.step_s
    least, most = mixture_interval(math.log(total_bytes / low_bytes), room)
    if row.measured.memory_kind not in ALLOCATED:
        most = max(most, math.log(high_bytes / total_bytes))
    return Tuned(row, layout, None, (step_s * math.exp(low), step_s * math.exp(high)), (least, most))


def _score(name: str, tuned: Sequence[Tuned]) -> TunedScore:
    steps = [error for one in tuned if (error := one.step_error) is not None]
    peaks = [error for one in tuned if (error := one.memory_error) is not None]
    outcomes = [(one.row.measured.ran_out, risk > LIKELY) for one in tuned if (risk := one.risk) is not None]
    return TunedScore(
        name=name,
        is_summary=name in (*GROUPS, "all"),
        num_rows=len(tuned),
        num_unsupported=sum(one.error is not None for one in tuned),
        num_steps=len(steps),
        median_step_error=_median(map(abs, steps)),
        step_bias=_mean(steps),
        step_coverage=_mean(float(inside) for one in tuned if (inside := one.in_interval) is not None),
        num_peaks=len(peaks),
        median_memory_error=_median(map(abs, peaks)),
        memory_bias=_mean(peaks),
        memory_coverage=_mean(float(inside) for one in tuned if (inside := one.peak_in_interval) is not None),
        num_ran=sum(not out for out, _ in outcomes),
        num_ran_likely_out=sum(likely for out, likely in outcomes if not out),
        num_out=sum(bool(out) for out, _ in outcomes),
        num_out_likely_out=sum(likely for out, likely in outcomes if out),
    )


def _with_runtime(run: Run, assume: Mapping[str, Any]) -> Run:
    unknown = [name for name in assume if name not in RuntimeSpec.model_fields]
    if unknown:
        raise SpecError(f"{run.id}: assume: {unknown[0]!r} is no field of a runtime", "see planner/trainers/spec.py")
    return replace(run, runtime=run.runtime.model_copy(update=dict(assume)))


def _merged(run: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A run with some fields changed; sections are merged field by field."""
    changed = {
        name: {**run.get(name, {}), **value} if isinstance(value, dict) else value for name, value in other.items()
    }
    return {**run, **changed}


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return median(known) if known else None


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None


def show_runs(as_json: bool) -> None:
    """Print every run and the agreement of each source."""
    tuned = price_finetunes(load_finetunes())
    if as_json:
        sys.stdout.write(dumps(described(tuned)))
        return
    show(run_table(tuned), "", score_table(tuned), *_left_out(tuned))


def run_table(tuned: Sequence[Tuned]) -> Table:
    """One run a line: measured step and peak with the errors of their predictions, and the risk beside the outcome."""
    table = columns("wrrrrr", gap=1)
    table.add_row("run", "step", "error", "GiB", "error", "risk", style="dim")
    for one in tuned:
        measured = one.row.measured
        if one.error is not None:
            table.add_row(one.row.id, "", "", "", "", "not priced")
            continue
        step = "" if measured.step_s is None else seconds(measured.step_s)
        peak = "" if measured.peak_memory_gib is None else f"{measured.peak_memory_gib:.1f}"
        table.add_row(one.row.id, step, _signed(one.step_error), peak, _signed(one.memory_error), _outcome(one))
    return table


def score_table(tuned: Sequence[Tuned]) -> Table:
    """A line for each source: median errors, shares inside intervals, and what was expected of runs that fit or not."""
    table = columns("lrrrrrrrr", gap=1)
    table.add_row("source", "steps", "median", "inside", "peaks", "median", "inside", "fitted", "ran out", style="dim")
    for score in score_finetunes(tuned):
        table.add_row(
            score.name, str(score.num_steps or ""), _share(score.median_step_error), _share(score.step_coverage),
            str(score.num_peaks or ""), _share(score.median_memory_error), _share(score.memory_coverage),
            f"{score.num_ran - score.num_ran_likely_out}/{score.num_ran}" if score.num_ran else "",
            f"{score.num_out_likely_out}/{score.num_out}" if score.num_out else "",
            style="bold" if score.is_summary else None,
        )  # fmt: skip
    return table


def described(tuned: Sequence[Tuned]) -> dict[str, object]:
    """The runs and the agreement of their sources as plain data."""
    return {
        "finetune_scores": [asdict(score) for score in score_finetunes(tuned)],
        "finetunes": [_row(one) for one in tuned],
    }


def _row(one: Tuned) -> dict[str, object]:
    row = one.row
    told = {
        "id": row.id,
        "from": row.origin,
        "source": row.source,
        "address": row.address,
        "date": row.date,
        "trust": row.trust,
        "note": row.note,
        "measured": row.measured.model_dump(),
    }
    if one.layout is None:
        return {**told, "unsupported": str(one.error)}
    return {
        **told,
        "predicted_s": one.layout.step.step_s,
        "predicted_s_interval": list(one.step_s_interval),
        "step_error": one.step_error,
        "predicted_bytes": one.layout.worst_stage.memory.total_bytes,
        "memory_error": one.memory_error,
        "oom_probability": one.layout.oom_probability,
    }


def _left_out(tuned: Sequence[Tuned]) -> Iterator[str]:
    """Lines on two columns, and on why some runs were not priced."""
    yield "fitted, ran out: runs that did, those of which it was expected first"
    reasons = dict.fromkeys(str(one.error) for one in tuned if one.error is not None)
    for reason in reasons:
        yield f"{sum(str(one.error) == reason for one in tuned)} not priced: {reason}"


def _outcome(one: Tuned) -> str:
    if one.risk is None:
        return ""
    return f"{one.risk:.2f} {'out' if one.row.measured.ran_out else 'fits'}"


def _signed(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.0f}%"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"
