"""The answer's side of the page: how sure it is, the plan with its pictures, or why there is none and what helps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlencode

from planner.answer import Plan, SearchReport
from planner.errors import Infeasible, PlannerError
from planner.export.targets import LAUNCHERS, TRAINERS
from planner.plan_file import with_alternative
from planner.report.format import gibibytes, percent, seconds
from planner.report.html.pieces import Card, Html, beside, cards, folded, joined, section, table, tag
from planner.report.labels import is_proven
from planner.report.page import breakdown, drawn, header
from planner.report.rows import MFU, Entry
from planner.report.small import ChangeRow
from planner.report.view import SECTIONS, View, view_of
from planner.serve.controls import Form, changed
from planner.serve.pictures import pictures
from planner.serve.pieces import empty
from planner.serve.question import Question

State = Literal["same", "first", "all", "final"]
WIDEST_GAP = 0.1
"""The gap at which the bar of progress is empty."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One state of the answer's side."""

    html: Html
    status: str
    """The same in a sentence, for a screen reader and for the line that phones show."""
    title: str
    """The title of the browser's window."""


def plan_panel(plan: Plan, question: Question, form: Form, state: State, alternative: int = 0) -> Panel:
    """A plan; its `alternative` instead of its best layout if it has so many."""
    alternative = alternative if 0 < alternative <= len(plan.alternatives) else 0
    shown = with_alternative(plan, alternative or None)
    view = view_of(shown.model_copy(update={"command": ""}))
    pictured = pictures(shown)
    parts = [
        header(view),
        _progress(plan, question, state),
        _looking_at(plan, form, alternative) if alternative else Html(""),
        _command(question, alternative),
        _downloads(form, alternative) if state == "final" else Html(""),
        *_sections(plan, view, pictured, form, alternative, state),
    ]
    status = f"{_briefly(shown, question, state)}: step {seconds(shown.step.step_s)}, {shown.parallelism}"
    return Panel(joined(parts), status, f"{seconds(shown.step.step_s)} · {view.job}")


def waiting_panel(question: Question) -> Panel:
    """Nothing is known yet."""
    case = question.case
    job = f"{case.model.name} on {case.cluster.num_gpus:,} × {case.cluster.hardware.name}"
    looking = _going("Looking for a layout that fits …")
    names = ("step", "tokens/s", MFU, "fullest stage")
    awaited = tag("div", cards(Card(name, "…") for name in names), class_="awaited", aria_hidden="true")
    head = tag("header", tag("h1", job), tag("p", "…", class_="layout"), looking, awaited)
    titles = (
        "Where the seconds of a step go",
        "Alternatives, and what each trades",
        "Memory",
        "The timeline of a step",
    )
    blocks = (section(title, tag("div", "", class_="block")) for title in titles)
    below = tag("div", joined(blocks), class_="awaited", aria_hidden="true")
    return Panel(joined([head, _command(question, 0), below]), f"Searching: {job}", f"… · {job}")


def error_panel(error: PlannerError, form: Form, question: Question | None = None) -> Panel:
    """The reason why there is no plan, and what would help, to be applied by a click."""
    is_infeasible = isinstance(error, Infeasible)
    title = "Nothing fits" if is_infeasible else "This cannot be planned"
    parts = [tag("h1", title), tag("p", error.message, class_="alarm reason")]
    if error.hint:
        parts.append(tag("p", tag("b", "What helps: "), error.hint, class_="hint"))
    if isinstance(error, Infeasible) and error.remedy is not None:
        words = [str(word) for word in error.remedy["options"]]
        parts.append(tag("p", _link(f"Apply {' '.join(words)}", changed(form, words), "button primary")))
    if question is not None:
        parts.append(_command(question, 0))
    if isinstance(error, Infeasible) and error.rejections:
        counts = sorted(error.rejections.items(), key=lambda pair: -pair[1])
        rows = [(f"{count:,}", reason.replace("_", " ")) for reason, count in counts]
        parts.append(section("Rejected shapes, by reason", table(("shapes", "reason"), rows, "rl")))
    field = error.message.partition(":")[0].removeprefix("--").replace("-", "_") if not is_infeasible else ""
    body = tag("div", joined(parts), class_="problem", data_field=field)
    return Panel(body, f"{title}: {error.hint if is_infeasible and error.hint else error.message}", title)


def _progress(plan: Plan, question: Question, state: State) -> Html:
    """How far the search is, in a line with the page's only bar, which ends with the search; nothing afterwards."""
    if state == "final":
        return Html("")
    search = plan.search
    if state == "same" or search is None:
        return _going(
            f"The layout on the screen under these controls. {_lacks(plan, question)}Looking for a better one …"
        )
    near = f"within {percent(search.gap)} of the best"
    if state == "first":
        return _going(f"A first answer, {near} among the few that are tried first. Looking at all others …", search)
    return _going(f"The best so far, {near} of all layouts. The search goes on …", search)


def _going(words: str, search: SearchReport | None = None) -> Html:
    """A line above a bar: as full as the gap is closed, or moving where no gap is known yet."""
    if search is None:
        bar = tag("span", "", class_="bar moving")
    else:
        wide = 100 * (1 - min(search.gap / WIDEST_GAP, 1.0))
        bar = tag("span", tag("i", "", style=f"width:{max(wide, 2):.0f}%"), class_="bar")
    return tag("p", words, bar, class_="progress")


def _lacks(plan: Plan, question: Question) -> str:
    """The memory that a layout lacks beside what the question leaves free; empty where it lacks none."""
    needs_bytes = plan.best.worst_stage.memory.total_bytes
    has_bytes = plan.cluster.hardware.memory_bytes - question.case.headroom_bytes
    if needs_bytes <= has_bytes:
        return ""
    return f"It needs {gibibytes(needs_bytes)} GiB of the {gibibytes(has_bytes)} that may be filled. "


def _briefly(plan: Plan, question: Question, state: State) -> str:
    search = plan.search
    if state == "same":
        return "The same layout does not fit" if _lacks(plan, question) else "Same layout, priced again"
    if search is None:
        return "Priced"
    gap = f"gap {percent(search.gap, 2)}"
    if state in ("first", "all"):
        return f"{'First answer' if state == 'first' else 'So far'}, {gap}"
    return f"{'Proven' if is_proven(search) else 'Best found'}, {gap}"


def _command(question: Question, alternative: int) -> Html:
    words = (
        f"Alternative {alternative} of it: export and trace with --alternative {alternative}." if alternative else ""
    )
    copy = tag("button", "Copy", type="button", data_copy="command", aria_label="Copy the command line")
    line = tag("pre", tag("code", question.command, id_="command"), tabindex="0", aria_label="Command line")
    return tag("div", line, copy, tag("p", words, class_="soft") if words else Html(""), class_="command")


def _downloads(form: Form, alternative: int) -> Html:
    """Links to files of this very plan, and a choice of export targets."""
    query = {**form, **({"alternative": str(alternative)} if alternative else {})}
    files = [
        tag("a", name, href=f"/files/{name}?{urlencode(query)}", download=name, class_="button")
        for name in ("report.html", "plan.json", "trace.json")
    ]
    trainer = _choice("to", "Trainer", TRAINERS)
    launcher = _choice("launcher", "Launcher", ["", *LAUNCHERS])
    hidden = joined((empty("input", type="hidden", name_=name, value=text) for name, text in query.items() if text), "")
    export = tag(
        "form", hidden, trainer, launcher, tag("button", "Export as zip", type="submit", class_="button"),
        action="/files/export.zip", method="get", class_="export", aria_label="Export",
    )  # fmt: skip
    return tag(
        "nav", tag("span", "Download", class_="soft"), *files, export, class_="downloads", aria_label="Downloads"
    )


def _choice(name: str, label: str, values: Iterable[str]) -> Html:
    options = (tag("option", value or "torchrun and slurm", value=value or "default") for value in values)
    return tag("label", tag("span", label), tag("select", joined(options), name_=name))


def _looking_at(plan: Plan, form: Form, alternative: int) -> Html:
    words = f"This is alternative {alternative} of {len(plan.alternatives)}, not the best. "
    return tag("p", words, _link("Back to the best", form, "button"), class_="looking")


def _offers(plan: Plan, form: Form, state: State) -> Iterator[Html]:
    """Changes that would make it faster, each to be tried by a click."""
    if state != "final":
        return
    rows: list[tuple[object, ...]] = []
    now_s = plan.step.step_s
    for offer in plan.best.offers:
        words = ["--allow", ",".join(dict.fromkeys([*filter(None, form.get("allow", "").split(",")), *offer.allow]))]
        gain = f"{percent(1 - offer.step_s / now_s)} faster, changes {offer.changes}"
        rows.append((_link(" ".join(words), changed(form, words), "button"), gain))
    if (batch := plan.batch_offer) is not None:
        words = ["--global-batch-size", str(batch.global_batch_size)]
        gain = f"{percent(batch.tokens_per_s / plan.step.tokens_per_s - 1)} more tokens/s"
        rows.append((_link(" ".join(words), {**changed(form, words), "batch_tokens": ""}, "button"), gain))
    if (risk := plan.risk_offer) is not None:
        words = ["--oom-risk", f"{risk.oom_risk:g}"]
        rows.append(
            (_link(" ".join(words), changed(form, words), "button"), f"{percent(1 - risk.step_s / now_s)} faster")
        )
    if rows:
        yield section("What would make it faster", table(("try", "what it gives"), rows, "nl"))


def _alternative(entry: Entry, number: int, form: Form, shown: int) -> tuple[object, ...]:
    look: object = _link(entry.sizes, {**form, "alternative": str(number)} if number else form, "")
    if number == shown:
        look = tag("b", entry.sizes, aria_current="true")
    return entry.name, look, entry.step, entry.more, entry.peak, entry.fit, percent(entry.mfu), entry.how


def _sections(
    plan: Plan, view: View, drawn_of: Mapping[str, Html], form: Form, alternative: int, state: State
) -> Iterator[Html]:
    """The sections of the report, in its order, with links that apply what they say; those that explain are folded."""
    best = view_of(plan)
    for name in SECTIONS:
        shown = (best if name == "alternatives" else view).section(name)
        if name == "timeline":
            yield section("The timeline of a step", drawn_of["timeline"])
        elif shown is None:
            continue
        elif name == "seconds":
            yield section(shown.title, breakdown(view))
            yield from _offers(plan, form, state)
        elif name == "alternatives":
            heads = ("", "layout", "step", "", "GiB", "fits with", "MFU", "how, and what it trades")
            entries = enumerate((best.best, *best.alternatives))
            rows = [_alternative(entry, number, form, alternative) for number, entry in entries]
            yield section(shown.title, tag("div", table(heads, rows, "lnrrrrrl", folds=True), class_="layouts"))
        elif name == "changes":
            rows = [(*row.cells, _change(row, form)) for row in view.changes]
            yield section(shown.title, table(("change", "GiB", "step", "what it changes beside", ""), rows, "lrrll"))
        elif name == "stages":
            yield section(f"Memory, of {view.capacity} a GPU", beside(drawn_of["stacks"], drawn_of["curve"]))
            yield folded(shown.title, joined(map(drawn, shown.parts)))
        else:
            body = joined(map(drawn, shown.parts))
            yield section(shown.title, body) if name in _OPEN else folded(shown.title, body)


_OPEN = ("sure", "room", "warnings")
"""Sections that are not folded, beside those with pictures and links."""


def _change(row: ChangeRow, form: Form) -> Html | str:
    return _link(row.options, changed(form, row.words), "button") if row.words else ""


def _link(words: object, form: Form, class_: str) -> Html:
    """A link to the page with other controls; the page's script applies it in place."""
    query = urlencode({name: text for name, text in form.items() if text})
    return tag("a", words, href=f"/?{query}", class_=class_, data_apply="yes")
