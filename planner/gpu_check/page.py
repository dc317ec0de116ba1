"""The page of a GPU check: docs/GPU_CHECK.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.gpu_check.report import BYTES, SECONDS, CheckedQuantity, GpuCheck, Part, in_words
from planner.specs.units import gib

REHEARSAL = "# A rehearsal of the GPU check: no GPU ran"
"""The first line of a rehearsal's page; a real check's begins with `# GPU check`."""
WORDS = {True: "met", False: "**missed**", None: "not judged"}
SHOWN = ("forward", "backward", "optimizer", *BYTES)


def page(report: GpuCheck) -> str:
    """The whole page as Markdown."""
    return "\n".join(_lines(report)).rstrip() + "\n"


def _lines(report: GpuCheck) -> Iterator[str]:
    yield from _head(report)
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


def _head(report: GpuCheck) -> Iterator[str]:
    if report.stand_in is None:
        yield f"# GPU check on {report.device}\n"
    else:
        yield f"{REHEARSAL}\n"
        yield f"**{report.stand_in} stood in for a GPU.** The page shows that every part runs, and what it looks like."
        yield "Its numbers say nothing of a GPU, and none is judged.\n"
    yield "`scripts/gpu_check` writes this page. No line of it is written by hand.\n"
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
