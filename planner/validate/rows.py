"""Training runs that others published, each with its source; the planner is judged by them.

`data/runs.jsonl` holds one run a line, in the form of `plan evaluate --runs`, together with what was measured. A model
that several runs share is written once, in `data/models.jsonl`.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Literal, TypeVar

from planner.layout.runs import Run, parse_run
from planner.specs.base import Fields, PositiveFloat, Spec, Texts
from planner.specs.registry import load_hardware

HELD_OUT = (
    "mlperf",
    "nemo-2022",
    "llm-foundry",
    "torchtitan-docs",
    "fms-fsdp",
    "nemo-gb200",
    "internevo",
    "automodel",
    "mlperf-6-0",
    "moe-recipes",
    "moe-modelzoo",
    "bridge-hybrids",
    "bridge-cards-2026",
    "pai-megatron",
    "torchtitan-issues",
    "mcore-tests",
    "primus-dsv2",
    "primus-pipeline",
    "primus-results-mi325x",
    "primus-results-mi355x",
    "mlperf-amd-partners",
    "dgxc",
    "automodel-lora",
    "ms-swift",
    "primus-lora",
    "xtuner-megatron",
    "torchao",
    "nanochat",
    "mbridge-card",
    "nous-torchtitan",
    "fast-llm",
    "torchtitan-2026",
    "bridge-cards-3",
    "mcore-releases",
    "aws-mbridge-2",
    "google-recipes",
    "bridge-cards-4",
    "torchtitan-latent",
    "fsdp-readmes",
    "xtuner-zero3",
    "flagperf",
    "trl-long",
    "verl-practice",
    "primus-hybrids",
    "modalities",
    "twist",
    "olmoe-bridge",
    "nebius-titan",
    "primus-pulls",
    "hf-pulls",
    "dgxc-finetunes",
    "nemotron-h",
    "automodel-gb200",
)
"""Families whose rows no coefficient is fitted to, neither together with other families nor alone."""
PRODUCTION = "production"
"""The family of runs that took weeks or months: their step is held against the sustained one, not the benchmark's."""
MemoryKind = Literal["allocated", "allocated on rank 0", "reserved", "device", "unverified"]
"""The kind of peak memory that a source reports: of torch's allocator (on the worst rank, unless the source names one),
or of the whole device, as nvidia-smi and rocm-smi show it."""


class PublishedFigures(Spec):
    """The numbers that the source reports of the run."""

    step_s: PositiveFloat
    """Seconds of an optimizer step; if the source reports throughput, they are worked out by its own convention."""
    peak_memory_gib: PositiveFloat | None = None
    memory_kind: MemoryKind | None = None


class PublishedRun(Spec):
    """One published run."""

    id: str
    source: str
    """The document and the table that the numbers are from."""
    family: str
    """A name for rows that come from one place and share hardware, software and habits; they are left out together."""
    trust: Literal["A", "B", "C"]
    """How far the row is trusted: A is fully specified and consistent, B has one field inferred, C needs care."""
    weight: PositiveFloat
    """The row's weight: one over how often the same configuration was published."""
    run: Fields
    """The run, in the form of `plan evaluate --runs`."""
    measured: PublishedFigures
    assumed: Texts = ()
    """Fields of the run that the source does not state."""

    @property
    def counts(self) -> bool:
        """True if errors on this row are scored: it is trusted, nothing about it is assumed, and it is a benchmark."""
        return self.trust in ("A", "B") and not self.assumed and self.family != PRODUCTION

    @property
    def held_out(self) -> bool:
        """True if coefficients are fitted without this row."""
        return self.family in HELD_OUT

    @property
    def on_amd(self) -> bool:
        """True if the run's GPUs are AMD's (MI300X and its successors)."""
        return load_hardware(self.run["hardware"]).is_amd

    @property
    def is_mixture(self) -> bool:
        """True if the run's model has experts."""
        return self.run["model"].get("moe") is not None

    @property
    def run_key(self) -> str:
        """A key that is the same for rows which publish the same run again."""
        return json.dumps(self.run, sort_keys=True)

    def parsed(self) -> Run:
        """The run with its model, cluster and runtime looked up, as `plan evaluate --runs` would read it.

        Raises Unsupported if the run did what is not modelled.
        """
        return parse_run({"id": self.id, "run": self.run}, self.id)


@cache
def load_rows() -> tuple[PublishedRun, ...]:
    """All published runs that come with the package, in the order of their file."""
    return rows_of(PublishedRun, "runs.jsonl")


Row = TypeVar("Row", bound=Spec)


def rows_of(kind: type[Row], name: str) -> tuple[Row, ...]:
    """The rows of a file of `data/`, one a line. A model that is none of `models.jsonl` is one of model_specs/."""
    models = {line["key"]: line["model"] for line in _lines("models.jsonl")}
    rows = _lines(name)
    for row in rows:
        model = row["run"]["model"]
        row["run"]["model"] = models.get(model, model) if isinstance(model, str) else model
    return tuple(kind.model_validate(row) for row in rows)


def _lines(name: str) -> list[Fields]:
    text = (resources.files(__package__) / "data" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
