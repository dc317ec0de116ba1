"""The report of a GPU check (what ran, measurements beside predictions, the targets that it meets), and its page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Literal

from planner.specs.base import Spec
from planner.specs.units import gib

PartStatus = Literal["ran", "failed", "left out"]
PartKind = Literal["profile", "pipeline", "stage", "calibration"]
SECONDS, BYTES = ("forward", "backward"), ("static memory", "peak allocated")
MEDIAN_SECONDS, WORST_SECONDS, WORST_BYTES = 0.03, 0.06, 0.01
"""Targets: the largest errors of forwards and backwards (median and worst of all stages), and of bytes (worst)."""


class CheckedQuantity(Spec):
    """A quantity of one stage, measured here and predicted from several sources."""

    name: str
    unit: Literal["s", "bytes"]
    measured: float
    is_judged: bool = True
    """False where `plan probe` only shows the quantity, as under ZeRO-3."""
    predicted: dict[str, float]
    """By source: the profile that ships, the one measured here, the one calibrated here; and what the shipped tables
    measured."""

    def error_fraction(self, source: str) -> float | None:
        """measured / predicted − 1; None where the source says nothing of it."""
        predicted = self.predicted.get(source)
        return self.measured / predicted - 1 if predicted else None


class Part(Spec):
    """One part of a check. What happens to it leaves the others as they are."""

    kind: PartKind
    name: str
    status: PartStatus
    exit_code: int | None = None
    """The exit code that the part's own command would have ended with; null where it did not run."""
    seconds: float = 0.0
    detail: str = ""
    """The reason why it failed or was left out, or what it found."""
    lines: tuple[str, ...] = ()
    """More of what it found: the residuals of a profile, the factors of a calibration."""
    quantities: tuple[CheckedQuantity, ...] = ()


class Target(Spec):
    """One target of a check and what was reached."""

    name: str
    limit: str
    reached: str
    passed: bool | None
    """None where nothing was judged."""


class GpuCheck(Spec):
    """A check of one device."""

    schema_version: Literal[1] = 1
    date: str
    stand_in: str | None
    """The stand-in for a GPU in a rehearsal; null where a GPU ran. The numbers of a rehearsal say nothing of a GPU."""
    device: str
    memory_bytes: int
    num_devices: int
    software: str
    """Versions of torch, CUDA or ROCm, and the driver."""
    commit: str
    """The version of the planner that ran."""
    basis: str = ""
    """The source of predictions that is judged: `shipped` where a profile of the GPU ships, else `measured`."""
    hardware: str = ""
    """Name of the profile that the judged predictions come from."""
    budget_s: float
    elapsed_s: float = 0.0
    parts: tuple[Part, ...] = ()

    @property
    def sources(self) -> list[str]:
        """Every source of predictions, the judged one first."""
        named = {source: None for part in self.parts for each in part.quantities for source in each.predicted}
        return sorted(named, key=lambda source: source != self.basis)

    def errors(self, names: tuple[str, ...], source: str, but: str = "") -> list[float]:
        """Absolute errors of these quantities against a source, where they are judged, over all stages but the one
        named."""
        found = [
            each.error_fraction(source)
            for part in self.parts
            for each in part.quantities
            if part.kind == "stage" and each.name in names and each.is_judged and part.name != but
        ]
        return [abs(error) for error in found if error is not None]

    def targets(self) -> list[Target]:
        """All targets; none is judged in a rehearsal."""
        names = [*SECONDS, "bytes"]
        limits = dict.fromkeys(SECONDS, (MEDIAN_SECONDS, WORST_SECONDS))
        limits["bytes"] = (WORST_BYTES, WORST_BYTES)
        targets = []
        for name in names:
            errors = self.errors(BYTES if name == "bytes" else (name,), self.basis)
            middle, worst = limits[name]
            limit = f"worst {worst:.0%}" if middle == worst else f"median {middle:.0%}, worst {worst:.0%}"
            targets.append(
                Target(
                    name=name,
                    limit=limit,
                    reached=in_words(errors),
                    passed=self.judged(bool(errors) and median(errors) <= middle and max(errors) <= worst, errors),
                )
            )
        codes = [part.exit_code for part in self.parts if part.status != "left out"]
        others = [
            f"{part.name}: {'no end' if part.exit_code is None else part.exit_code}"
            for part in self.parts
            if part.status != "left out" and part.exit_code != 0
        ]
        reached = f"{codes.count(0)} of {len(codes)}" + (f" ({'; '.join(others)})" if others else "")
        exit_codes = Target(name="exit codes", limit="0 on all", reached=reached, passed=self.judged(not others, codes))
        return [*targets, exit_codes]

    def judged(self, passed: bool, numbers: list[float] | list[int | None]) -> bool | None:
        """`passed`, or None in a rehearsal and where there is nothing to judge."""
        return passed if numbers and self.stand_in is None else None

    @property
    def exit_code(self) -> int:
        """6 if a target is missed, 5 if no stage ran or, in a rehearsal, if any part failed, else 0."""
        failed = any(part.status == "failed" for part in self.parts)
        if not any(part.kind == "stage" and part.status == "ran" for part in self.parts):
            return 5
        if self.stand_in is not None:
            return 5 if failed else 0
        return 6 if any(target.passed is False for target in self.targets()) else 0


def in_words(errors: list[float]) -> str:
    """Errors as `median 0.8%, worst 2.4% of 12`."""
    if not errors:
        return "nothing measured"
    return f"median {median(errors):.1%}, worst {max(errors):.1%} of {len(errors)}"


REHEARSAL = "# A rehearsal of the GPU check: no GPU ran"
"""The first line of a rehearsal's page; a real check's begins with `# GPU check`."""
WORDS = {True: "met", False: "**missed**", None: "not judged"}
SHOWN = ("forward", "backward", "optimizer", *BYTES)


def page(report: GpuCheck) -> str:
    """The whole page as Markdown."""
    return "\n".join(_lines(report)).rstrip() + "\n"


def _lines(report: GpuCheck) -> Iterator[str]:
    yield from _page_head(report)
    yield "## Targets\n"
    yield from table(
        ("", "target", "reached", ""),
        [(target.name, target.limit, target.reached, WORDS[target.passed]) for target in report.targets()],
    )
    yield f"Forward, backward and bytes are errors against {report.basis or 'no source'}; exit codes are those with"
    yield "which the parts' own commands end, 6 for more than 10% off.\n"
    yield from _stages(report)
    yield from _sources(report)
    yield from _others(report)


def _page_head(report: GpuCheck) -> Iterator[str]:
    if report.stand_in is None:
        yield f"# GPU check on {report.device}\n"
    else:
        yield f"{REHEARSAL}\n"
        yield f"**{report.stand_in} stood in for a GPU.** The page shows that every part runs, and what it looks like."
        yield "Its numbers say nothing of a GPU, and none is judged.\n"
    yield "`tools/gpu_check` writes this page. No line of it is written by hand.\n"
    memory = f"{gib(report.memory_bytes):.1f} GiB"
    number = f", one of {report.num_devices} in the machine" if report.num_devices > 1 and not report.stand_in else ""
    rows = [
        ("device", f"{report.device}, {memory}{number}"),
        ("software", report.software),
        ("planner", report.commit),
        ("date", report.date),
        ("took", f"{report.elapsed_s:.0f} s of {report.budget_s:.0f} s"),
        ("judged against", f"{report.basis}: {report.hardware}" if report.basis else "nothing"),
    ]
    yield from table(("", ""), rows)


def _stages(report: GpuCheck) -> Iterator[str]:
    stages = [part for part in report.parts if part.kind == "stage" and part.quantities]
    if not stages:
        return
    yield "## Stages\n"
    yield f"Measured, and in brackets how far that is from {report.basis}. Seconds are of one micro-batch.\n"
    rows = []
    for part in stages:
        by_name = {each.name: each for each in part.quantities}
        cells = [_cell(by_name.get(name), report.basis) for name in SHOWN]
        rows.append((part.name, *cells, "" if part.exit_code is None else str(part.exit_code)))
    yield from table(("stage", *SHOWN, "exit code"), rows)


def _cell(quantity: CheckedQuantity | None, source: str) -> str:
    if quantity is None:
        return ""
    error = quantity.error_fraction(source)
    off = "" if error is None else f" ({100 * error:+.1f}%{'' if quantity.is_judged else ', not judged'})"
    shown = f"{gib(quantity.measured):.2f} GiB" if quantity.unit == "bytes" else f"{1e3 * quantity.measured:.4g} ms"
    return f"{shown}{off}"


def _sources(report: GpuCheck) -> Iterator[str]:
    """Errors against each source of predictions; a calibration is not held against the stage that it comes from."""
    if not report.sources:
        return
    first = next((part.detail.removeprefix("by ") for part in report.parts if part.kind == "calibration"), "")
    yield "## Errors against every source\n"
    rows = []
    for source in report.sources:
        but = first if source.startswith("calibrated") else ""
        rows.append((source, *(in_words(report.errors(names, source, but)) for names in _GROUPS.values())))
    yield from table(("source", *_GROUPS), rows)


_GROUPS = {**{name: (name,) for name in (*SECONDS, "optimizer")}, "bytes": BYTES}


def _others(report: GpuCheck) -> Iterator[str]:
    """Every part that is no stage, and every one that failed or was left out."""
    yield "## All parts\n"
    rows = [(part.name, _status(part), f"{part.seconds:.1f} s", part.detail or "") for part in report.parts]
    yield from table(("part", "", "took", ""), rows)
    for part in (part for part in report.parts if part.lines or (part.kind != "stage" and part.quantities)):
        yield f"### {part.name[0].upper()}{part.name[1:]}\n"
        yield from (f"- {line}" for line in part.lines)
        yield from (f"- {each.name}: {_cell(each, report.basis)}" for each in part.quantities)
        yield ""


def _status(part: Part) -> str:
    code = "" if part.exit_code is None else f", exit code {part.exit_code}"
    return {"ran": "ran", "failed": "**failed**", "left out": "left out"}[part.status] + code


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a Markdown table, and an empty one."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in row) + " |"
    yield ""
