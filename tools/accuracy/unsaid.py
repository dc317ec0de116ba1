"""Published runs without what they say of their switches: how many are inside the intervals that they then get."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from planner.answer import half_width
from planner.cli.output import dumps, show
from planner.report.format import percent
from planner.report.pieces import columns
from planner.validate.rows import PublishedRun
from planner.validate.score import Scored, evaluate_rows

MOVED = 0.05
"""A run's step moves where its prediction changes by more than this share once its switches are unsaid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsaid:
    """Coverage of a kind of runs, as they say their switches and as they do not; weighted as `plan validate` does."""

    name: str
    num_runs: int
    said_coverage: float
    """Share inside the 80% interval, with what the runs say."""
    coverage: float
    """Share inside, without."""
    said_width: float
    """Mean half-width of the interval, in natural logarithms."""
    width: float


def unsaid_runs(scored: Sequence[Scored]) -> list[Unsaid]:
    """Coverage of the rows that count: all, by kind, and those whose step moves by more than 5%."""
    said = [run for run in scored if run.row.counts and run.layout is not None]
    pairs = [(run, bare) for run, bare in zip(said, without_switches(r.row for r in said), strict=True) if bare.layout]
    groups = {
        "all": pairs,
        **{kind: [pair for pair in pairs if kind_of(pair[0]) == kind] for kind in ("dense", "mixtures", "FSDP")},
        f"moved by over {MOVED:.0%}": [pair for pair in pairs if abs(_step_s(pair[1]) / _step_s(pair[0]) - 1) > MOVED],
    }
    return [_coverage(name, members) for name, members in groups.items() if members]


def without_switches(rows: Iterable[PublishedRun]) -> list[Scored]:
    """The rows, priced as if they said nothing of their switches."""
    return evaluate_rows(
        row.model_copy(update={"run": {key: value for key, value in row.run.items() if key != "features"}})
        for row in rows
    )


def kind_of(run: Scored) -> str:
    """The kind of a run: a mixture of experts, or a dense model with its weights sharded (FSDP, ZeRO-3) or whole."""
    assert run.run is not None
    assert run.layout is not None
    if run.run.model.moe is not None:
        return "mixtures"
    return "FSDP" if run.layout.parallelism.zero_stage == 3 else "dense"


def _coverage(name: str, pairs: Sequence[tuple[Scored, Scored]]) -> Unsaid:
    weights = [said.row.weight for said, _ in pairs]

    def mean(values: Iterable[float]) -> float:
        return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)

    return Unsaid(
        name=name,
        num_runs=len(pairs),
        said_coverage=mean(bool(said.in_interval) for said, _ in pairs),
        coverage=mean(bool(bare.in_interval) for _, bare in pairs),
        said_width=mean(_width(said) for said, _ in pairs),
        width=mean(_width(bare) for _, bare in pairs),
    )


def _step_s(run: Scored) -> float:
    assert run.layout is not None
    return run.layout.step.step_s


def _width(run: Scored) -> float:
    assert run.layout is not None
    return half_width(run.layout.step.step_s_interval or (1.0, 1.0))


def show_unsaid(scored: Sequence[Scored], as_json: bool) -> None:
    """Print how many runs are inside their intervals, with and without what they say of their switches."""
    found = unsaid_runs(scored)
    if as_json:
        sys.stdout.write(dumps({"unsaid": [asdict(kind) for kind in found]}))
        return
    if not found:
        show("none of these runs counts")
        return
    table = columns("lrrrrr", gap=1)
    table.add_row("runs", "n", "in 80%", "unsaid", "± said", "± unsaid", style="dim")
    for kind in found:
        shares = (percent(kind.said_coverage, 0), percent(kind.coverage, 0))
        table.add_row(kind.name, str(kind.num_runs), *shares, percent(kind.said_width), percent(kind.width))
    show(table)
    show("unsaid: the same runs without what they say of their switches, inside the intervals that they then get")
