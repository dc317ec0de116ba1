"""The whole page: controls on the left (on phones on top), the answer beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files

from planner.report.html.pieces import STYLE, Html, joined, tag
from planner.serve.controls import GROUPS, SWITCH, SWITCHES_PART, Catalogue, Control, Form
from planner.serve.pieces import empty
from planner.serve.question import Question
from planner.trainers.load import switches_of
from planner.trainers.switches import SWITCHES, written


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
    """The texts that stand for controls left empty."""
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
        drawn = empty("input", type="checkbox", value="on", **common, **({"checked": "checked"} if value else {}))
    elif control.kind == "select":
        drawn = tag("select", joined(_options(control, value, catalogue)), **common)
    else:
        mode = "decimal" if control.kind == "number" else "text"
        drawn = empty("input", type="text", inputmode=mode, value=value, spellcheck="false", **common)
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
"""Controls as wide as the form."""
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
