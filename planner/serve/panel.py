"""Pieces of HTML that a report has no use for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal
from urllib.parse import urlencode

from planner.answer import Plan, SearchReport
from planner.errors import Infeasible, PlannerError
from planner.export.targets import LAUNCHERS, TRAINERS
from planner.plan_file import with_alternative
from planner.report.format import gibibytes, is_proven, percent, seconds
from planner.report.html import STYLE, Card, Html, beside, cards, folded, joined, section, table, tag
from planner.report.page import breakdown, drawn, header
from planner.report.pictures import pictures
from planner.report.rows import MFU, Entry
from planner.report.small import ChangeRow
from planner.report.view import SECTIONS, View, view_of
from planner.serve.controls import GROUPS, SWITCH, SWITCHES_PART, Catalogue, Control, Form, Question, changed
from planner.trainers.load import switches_of
from planner.trainers.switches import SWITCHES, written

State = Literal["same", "first", "all", "final"]
_NARROWEST_GAP = 1e-4
"""The gap asked for at least, as far as the bar of progress goes."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One state of the page's side that shows the answer."""

    html: Html
    status: str
    """The same in a sentence, for a screen reader and for the line that phones show."""
    title: str
    """The title of the browser's window."""


def plan_panel(plan: Plan, question: Question, form: Form, state: State, alternative: int = 0) -> Panel:
    """The panel of a plan's best layout, or of one of its alternatives."""
    alternative = alternative if 0 < alternative <= len(plan.alternatives) else 0
    shown = with_alternative(plan, alternative or None)
    ended = shown.search if state == "final" else None  # what a search has not proved yet is said above its bar alone
    view = view_of(shown.model_copy(update={"command": question.command, "search": ended}))
    pictured = pictures(shown)
    parts = [
        header(replace(view, command="")),
        _progress(plan, question, state),
        _looking_at(plan, form, alternative) if alternative else Html(""),
        _command(question, alternative),
        _downloads(form, alternative) if state == "final" else Html(""),
        *_sections(plan, view, pictured, form, alternative, state),
    ]
    status = f"{_briefly(shown, question, state)}: step {seconds(shown.step.step_s)}, {shown.parallelism}"
    return Panel(joined(parts), status, f"{seconds(shown.step.step_s)} · {view.job}")


def waiting_panel(question: Question) -> Panel:
    """The panel before the first answer."""
    case = question.case
    job = f"{case.model.name} on {case.cluster.num_gpus:,} × {case.cluster.hardware.name}"
    looking = _going("Looking for a layout that fits …")
    names = ("step", "tokens/s", MFU, "fullest stage", "sustained over months")
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
        return _going(f"A first answer, {near} among the few that are tried first. Looking at all others …")
    share = max(_closed(search), min((search.seconds or 0.0) / question.case.limits.time_limit_s, 1.0))
    return _going(f"The best so far, {near} of all layouts. The search goes on …", share)


def _closed(search: SearchReport) -> float:
    """The share of the way from a gap of one to the gap asked for, in their logarithms."""
    asked, gap = (max(each or 0.0, _NARROWEST_GAP) for each in (search.asked_gap_fraction, search.gap))
    return min(max(1 - math.log(gap / asked) / math.log(1 / asked), 0.0), 1.0) if asked < 1 else 1.0


def _going(words: str, share: float | None = None) -> Html:
    """A line above a bar: as full as the search is done, or moving where nothing is known of all layouts yet."""
    done = () if share is None else (tag("i", "", style=f"width:{max(100 * share, 2):.0f}%"),)
    return tag("p", words, tag("span", *done, class_=f"bar{'' if done else ' moving'}"), class_="progress")


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
    hidden = joined((tag("input", type="hidden", name_=name, value=text) for name, text in query.items() if text), "")
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
    best = view_of(plan) if alternative else view
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


def whole_page(form: Form, catalogue: Catalogue, question: Question | None, answer: Html) -> str:
    """The page as it opens; its script asks for the answer."""
    title = "planner"
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", title),
        Html('<link rel="stylesheet" href="/page.css"><link rel="icon" href="/icon.svg" type="image/svg+xml">'),
        Html('<script src="/page.js" defer></script>'),
    )
    body = tag(
        "body",
        tag("a", "Skip to the answer", href="#answer", class_="skip"),
        tag("p", "", id_="status", role="status", aria_live="polite"),
        tag("div", _controls(form, catalogue, question), _answer(answer), class_="app"),
    )
    return f'<!doctype html>\n<html lang="en">{head}{body}</html>\n'


def _answer(inside: Html) -> Html:
    return tag("main", inside, id_="answer", tabindex="-1", aria_label="The answer")


def _controls(form: Form, catalogue: Catalogue, question: Question | None) -> Html:
    groups = []
    for group in GROUPS:
        inside = []
        for title, controls in group.parts.items():
            inside += [tag("p", title, class_="part")] if title else []
            inside += [_field(control, form, catalogue) for control in controls]
            if title == SWITCHES_PART:
                inside.append(tag("div", switch_fields(form, question), id_="switches"))
        is_given = any(form.get(control.name) for control in group.controls)
        is_pinned = SWITCHES_PART in group.parts and any(name.startswith(SWITCH) for name in form)
        groups.append(_group(group.title, inside, group.is_open or is_given or is_pinned))
    go = tag("button", "Plan", type="submit", class_="button primary")
    clear = tag("a", "Start again", href="/", class_="button")
    brand = tag("p", tag("b", "plan"), " serve", class_="brand")
    return tag(
        "form", brand, joined(groups), tag("p", go, clear, class_="go"), id_="controls", action="/", method="get",
        aria_label="The job", autocomplete="off",
    )  # fmt: skip


def _group(title: str, fields: Iterable[Html], is_open: bool) -> Html:
    opened = {"open": "open"} if is_open else {}
    inside = tag("div", joined(fields), role="group", aria_label=title, class_="fields")
    return tag("details", tag("summary", title), inside, **opened)


def switch_fields(form: Form, question: Question | None) -> Html:
    """A choice for each switch of the question's trainer."""
    if question is None:
        return tag("p", "The trainer's switches appear with its first answer.", class_="soft")
    has = switches_of(question.case.runtime)
    fields = [
        _field(Control(f"{SWITCH}{name}", name, SWITCHES[name].says, "select", ("", *map(written, values))), form, None)
        for name, values in has.items()
    ]
    return joined(fields)


def placeholders(question: Question) -> dict[str, str]:
    """The defaults that empty controls show."""
    case = question.case
    tier = case.cluster.tiers[-1]
    return {
        "seq_length": str(case.training.seq_length),
        "global_batch_size": str(case.training.global_batch_size),
        "gpus_per_node": str(case.cluster.node_size),
        "network_gb_per_s": f"{tier.gb_per_s:g}",
        "oom_risk": f"{case.limits.oom_risk:g}",
        "top": str(case.limits.top),
        "time_limit": f"{case.limits.time_limit_s:g}",
    }


def _field(control: Control, form: Form, catalogue: Catalogue | None) -> Html:
    name, value, id_ = control.name, form.get(control.name, ""), f"c-{control.name}"
    described = {"aria_describedby": f"{id_}-hint"} if control.hint else {}
    common: dict[str, object] = {"id_": id_, "name_": name, **described}
    if control.kind == "flag":
        drawn = tag("input", type="checkbox", value="on", **common, **({"checked": "checked"} if value else {}))
    elif control.kind == "select":
        drawn = tag("select", joined(_options(control, value, catalogue)), **common)
    else:
        mode = "decimal" if control.kind == "number" else "text"
        drawn = tag("input", type="text", inputmode=mode, value=value, spellcheck="false", **common)
    hint = tag("small", control.hint, id_=f"{id_}-hint") if control.hint else Html("")
    words = tag("label", control.label, for_=id_)
    wide = " whole" if name in WIDE else ""
    return tag("div", words, drawn, hint, class_=f"field {control.kind}{wide}")


def _options(control: Control, chosen: str, catalogue: Catalogue | None) -> Iterator[Html]:
    """The values of a select; an empty one, where something stands for what was not given, comes first."""
    names = control.choices or (catalogue.names_of(control.name) if catalogue else ())
    default = catalogue.defaults.get(control.name, _UNSET.get(control.name, "chosen")) if catalogue else "chosen"
    known = [name for name in names if name and name != default]
    if control.name != "model":
        # an option without a value attribute has its words for a value
        yield tag("option", default, value=" ", **({} if chosen else {"selected": "selected"}))
    for value in dict.fromkeys([*known, *([chosen] if chosen else [])]):
        yield tag("option", value, **({"selected": "selected"} if value == chosen else {}))


WIDE = ("model", "hardware", "runtime", "tier", "allow", "assume", "lora_targets", "rank_order", "switch")
"""Controls that take the whole width of the form."""
_UNSET = {"dtype": "bf16", "runtime": "the GPU's own"}


@cache
def style() -> str:
    """The report's style sheet and what the page has beside it."""
    return STYLE + files("planner.serve").joinpath("static/page.css").read_text(encoding="utf-8")


@cache
def script() -> str:
    """The page's only script."""
    return files("planner.serve").joinpath("static/page.js").read_text(encoding="utf-8")


ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path fill="#0072B2" d="M1 2h8v3H1z"/>'
    '<path fill="#009E73" d="M5 7h8v3H5z"/><path fill="#E69F00" d="M9 12h6v3H9z"/></svg>'
)
"""Three stages of a pipeline."""
