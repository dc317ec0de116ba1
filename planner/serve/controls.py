"""A question that the page asks: the case to plan, and the command line that asks the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal, get_args

from planner.errors import SpecError
from planner.search.case import Case
from planner.shape import RANK_ORDERS
from planner.specs.base import Named, Texts
from planner.specs.problems import nearest
from planner.specs.registry import hardware_names, model_names
from planner.specs.training import OBJECTIVES, Dtype, Reference
from planner.trainers.load import RUNTIMES
from planner.trainers.optimizers import OPTIMIZERS

Options = Mapping[str, str]
"""The texts of the command line's options, by their names in Python; what is not there was not given."""
MAX_TIME_LIMIT_S = 120.0
"""The longest search that the page may ask for: a process is busy meanwhile."""
MAX_TOP = 50
"""The most alternatives that the page may ask for."""


@dataclass(frozen=True, slots=True)
class Question:
    """One job as the page asks it."""

    case: Case
    command: str

    @property
    def key(self) -> str:
        """A key that is equal for equal model, cluster, training, trainer and limits, however they were spelled."""
        case = self.case
        specs = (case.model, case.cluster, case.training, case.runtime, case.limits)
        data = [spec.model_dump(mode="json") for spec in specs]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


Reader = Callable[[Options], Question]
"""Reads options as the command line does; raises SpecError naming the option."""


def asked(read: Reader, options: Options) -> Question:
    """The question of the options. Raises SpecError as `read` does, and for a search that keeps others waiting."""
    question = read(options)
    limits = question.case.limits
    if limits.time_limit_s > MAX_TIME_LIMIT_S:
        raise SpecError(
            f"--time-limit: {limits.time_limit_s:g} s is longer than this page searches",
            f"at most {MAX_TIME_LIMIT_S:g} here; the command line takes any",
        )
    if limits.top > MAX_TOP:
        raise SpecError(f"--top: {limits.top} are more than this page shows", f"at most {MAX_TOP} here")
    return question


Kind = Literal["number", "text", "select", "flag"]
Form = Mapping[str, str]
"""The texts of the page's controls by name; empty ones were not given."""
NETWORK = "network_gb_per_s"
SWITCH = "switch."
"""The beginning of the names of controls that pin one switch each."""
MAX_TEXT = 2_000
"""Letters of one control's text at most."""


@dataclass(frozen=True, slots=True)
class Control:
    """One control of the page."""

    name: str
    """Name of the option it gives; `network_gb_per_s` and `switch.…` become parts of --assume and --switch."""
    label: str
    hint: str = ""
    """Words beside it: the unit, or how it is written."""
    kind: Kind = "text"
    choices: Texts = ()
    """The values of a select, the first standing for what was not given."""


_CHOICES = {
    "dtypes": get_args(Dtype), "optimizers": OPTIMIZERS, "objectives": OBJECTIVES, "references": get_args(Reference),
    "rank_orders": RANK_ORDERS,
}  # fmt: skip
"""The values of selects by the names that rows have for them."""


def _control(name: str, label: str, hint: str, kind: Kind, choices: str | list[str] = "") -> Control:
    """The control of a row: its label, words beside it, its kind, and the values of a select."""
    values = _CHOICES[choices] if isinstance(choices, str) and choices else choices
    return Control(name, label, hint, kind, ("", *values) if values else ())


_ROWS = json.loads(files("planner.serve").joinpath("controls.json").read_text(encoding="utf-8"))
GROUPS: Mapping[str, Mapping[str, Sequence[Control]]] = {
    title: {part: [_control(name, *row) for name, row in rows.items()] for part, rows in parts.items()}
    for title, parts in _ROWS.items()
}
"""Controls that open together, by the title of their group and the heading of their part."""
CONTROLS = {control.name: control for parts in GROUPS.values() for controls in parts.values() for control in controls}


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The names that the page may use; everything else is refused, and so are paths and addresses."""

    names: Mapping[str, Texts]
    """The names that a control may have, by control."""
    defaults: Options
    """The names of the defaults."""

    @classmethod
    def shipped(cls, start: Options, defaults: Options) -> Catalogue:
        """All that ships with the planner, and what `plan serve` itself was started with."""
        shipped = {"model": model_names(), "hardware": hardware_names(), "runtime": RUNTIMES}
        given = {field: [start[field]] if field in start else [] for field in shipped}
        return cls({field: tuple(dict.fromkeys([*given[field], *names])) for field, names in shipped.items()}, defaults)

    def names_of(self, field: str) -> Texts:
        """The names that a control may have."""
        return self.names.get(field, ())

    def check(self, options: Options) -> None:
        """Raise SpecError for a name that is none of these."""
        aliases = {"model": model_names, "hardware": hardware_names}
        for field, known in self.names.items():
            name = options.get(field)
            if name is None or name in known:
                continue
            others = [alias for names in aliases[field]().values() for alias in names] if field in aliases else []
            named = name.partition("@")[0] if field == "runtime" else name.lower()
            if named not in (*known, *others):
                raise SpecError(
                    f"--{field}: {name[:60]!r} is not in this page's list, and it reads no files",
                    f"start plan serve --{field} {name[:60]} to have it there{nearest(named, [*known, *others])}",
                )


def options_of(form: Form, catalogue: Catalogue) -> Named:
    """The options that the controls give. Raises SpecError for a control that does not exist, and for unknown names."""
    options, switches = {}, []
    for name, text in form.items():
        text = text.strip()
        if name not in CONTROLS and not name.startswith(SWITCH):
            raise SpecError(f"{name[:60]!r}: no such control", "reload the page")
        if len(text) > MAX_TEXT or not text.isprintable():
            raise SpecError(f"--{name[:60].replace('_', '-')}: is no text of one line", f"{MAX_TEXT:,} letters at most")
        if not text:
            continue
        if name.startswith(SWITCH):
            switches.append(f"{name.removeprefix(SWITCH)}={text}")
        elif name == "switch":
            switches.append(text)
        elif name != NETWORK:
            options[name] = text
    if form.get(NETWORK, "").strip():
        assumed = f"{NETWORK}={form[NETWORK].strip()}"
        options["assume"] = f"{assumed},{options['assume']}" if "assume" in options else assumed
    if switches:
        options["switch"] = ",".join(switches)
    catalogue.check(options)
    return options


def form_of(options: Options) -> Named:
    """The texts of the controls that give some options."""
    form = {name: text for name, text in options.items() if name not in ("switch", "assume")}
    for part in filter(None, options.get("switch", "").split(",")):
        switch, is_pinned, value = part.partition("=")
        form |= {f"{SWITCH}{switch}": value} if is_pinned else {"switch": part}
    assumed = [part for part in options.get("assume", "").split(",") if part]
    for part in [part for part in assumed if part.startswith(f"{NETWORK}=")]:
        form[NETWORK] = part.partition("=")[2]
        assumed.remove(part)
    if assumed:
        form["assume"] = ",".join(assumed)
    return form


def changed(form: Form, words: Sequence[str]) -> Named:
    """The form with the values that words of the command line, such as a remedy's, set."""
    return {**form, **form_of(dict(_pairs(words)))}


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`--gpus 48 --tp-across-nodes` as pairs."""
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            yield word[2:].replace("-", "_"), "on" if after.startswith("--") else after
