"""The top of a report: the job, the layout, the command that made it, and the key figures."""

from __future__ import annotations

from collections.abc import Iterator

from planner.report.format import large
from planner.report.html.pieces import Card, Html, cards, tag
from planner.report.rows import Figure
from planner.report.view import View


def header(view: View) -> Html:
    """All of it, before the first section."""
    said = [
        tag("h1", tag("bdi", view.job)),
        tag("p", view.layout, class_="layout"),
        tag("p", f"{' · '.join(view.manner)} · {view.batch}"),
        tag("p", " · ".join(view.placement), class_="soft"),
        tag("p", view.batch_offer),
        tag("p", view.misfit, class_="alarm"),
        tag("p", " · ".join(view.corrected), class_="soft"),
    ]
    command = (
        tag("pre", tag("code", view.command), aria_label="the command that made this plan") if view.command else ""
    )
    return tag("header", *(part for part in said if "></p>" not in part), command, cards(_cards(view)))


def _cards(view: View) -> Iterator[Card]:
    """The step, its speed, its memory, and the whole run."""
    figures = {figure.name: figure for figure in view.figures}
    step, rate, each, flops, mfu = (
        figures.pop(name) for name in ("step", "tokens/s", "tokens/s/GPU", "TFLOP/s/GPU", "MFU")
    )
    yield Card(step.name, step.brief, tuple(map(_named, figures.values())))
    yield Card(rate.name, rate.brief, (_named(each),))
    yield Card(mfu.name, mfu.brief, (_named(flops),))
    yield Card(view.peak.name, view.peak.brief, (f"of {view.capacity} a GPU", *filter(None, [view.fit])))
    if view.sustained is not None:
        yield Card(view.sustained.name, view.sustained.brief, (view.sustained.ends,))
    if view.cost:
        days, *rest = view.cost
        hours = [figure.text for figure in rest if figure.unit == "GPU-hours"]
        yield Card(f"{large(view.tokens or 0)} tokens", days.brief, (*filter(None, [days.ends]), *hours))
        for figure in rest:
            if figure.unit != "GPU-hours":
                yield Card(figure.name, figure.brief, tuple(filter(None, [figure.ends])))
    if view.goodput:
        effective = view.goodput[0]
        yield Card(effective.name, effective.brief, (effective.ends, "of the run's time trains"))


def _named(figure: Figure) -> str:
    return f"{figure.name} {figure.text}" if figure.unit in ("s", "fraction") else f"{figure.text} {figure.name}"
