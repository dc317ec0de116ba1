"""A question that the page asks: the case to plan, and the command line that asks the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from planner.errors import SpecError
from planner.search.case import Case
from planner.shape import RANK_ORDERS
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
    kind: Literal["number", "text", "select", "flag"] = "text"
    choices: tuple[str, ...] = ()
    """The values of a select, the first standing for what was not given."""


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Controls that open together: parts with a heading each."""

    title: str
    parts: Mapping[str, tuple[Control, ...]]
    is_open: bool = False

    @property
    def controls(self) -> Iterator[Control]:
        """The controls of all parts."""
        for part in self.parts.values():
            yield from part


_ANY = ""
SWITCHES_PART = "Switches"
"""The heading below which a control stands for each switch of the trainer."""
GROUPS = (
    ControlGroup(
        "Job",
        {
            "": (
                Control("model", "Model", kind="select"),
                Control("gpus", "GPUs", "in all", "number"),
                Control("tokens", "Tokens of the run", "adds days, cost"),
                Control("hardware", "GPU", kind="select"),
                Control("seq_length", "Sequence", "tokens", "number"),
                Control("global_batch_size", "Batch", "sequences", "number"),
                Control("dtype", "Products in", kind="select", choices=(_ANY, *get_args(Dtype))),
                Control("batch_tokens", "Batch tokens", "such as 16M"),
                Control("runtime", "Trainer", kind="select"),
                Control("images", "Images of a sequence", "4x256, 0: text alone"),
            )
        },
        is_open=True,
    ),
    ControlGroup(
        "Hardware, fine-tuning, run",
        {
            "Hardware": (
                Control("nodes", "Nodes", "not GPUs", "number"),
                Control("gpus_per_node", "GPUs of a node", kind="number"),
                Control(NETWORK, "GB/s of a GPU", "between nodes", "number"),
                Control("network", "Network", "ib, roce, efa, …"),
                Control("host", "CPU", "such as xeon-8480c"),
                Control("tier", "Network tiers", "NAME:GPUS:GB/S[:Nx],…"),
                Control("memory_headroom", "GiB left free", kind="number"),
                Control("oom_risk", "Risk of OOM", "0.1 accepts 10%", "number"),
            ),
            "Fine-tuning": (
                Control("finetune", "All weights of a trained model", kind="flag"),
                Control("lora", "LoRA: adapters beside frozen weights", kind="flag"),
                Control("qlora", "QLoRA: frozen weights of 4 bits", kind="flag"),
                Control("lora_rank", "Rank", kind="number"),
                Control("lora_dropout", "Dropout", kind="number"),
                Control("lora_targets", "Adapters on", "all-linear, attention, q_proj, …"),
                Control("base_bits", "Frozen bits", kind="select", choices=(_ANY, "4", "8", "16")),
                Control("optimizer", "Optimizer", kind="select", choices=(_ANY, *OPTIMIZERS)),
                Control("objective", "Objective", kind="select", choices=(_ANY, *OBJECTIVES)),
                Control("reference", "Reference", kind="select", choices=(_ANY, *get_args(Reference))),
                Control("examples", "Examples", "such as 50k"),
                Control("epochs", "Epochs", kind="number"),
                Control("example_lengths", "Their tokens", "MEAN:MAX"),
                Control("batching", "Batches", kind="select", choices=(_ANY, "packed", "padded")),
            ),
            "The whole run": (
                Control("usd_per_gpu_hour", "$ a GPU-hour", kind="number"),
                Control("storage_gb_per_s", "Storage", "GB/s of all ranks", "number"),
                Control("failures_per_1000_gpu_days", "Failures", "in 1,000 GPU-days", "number"),
                Control("spares", "Spare nodes", kind="number"),
            ),
        },
    ),
    ControlGroup(
        "Layout, switches, search",
        {
            "Pin the layout": (
                Control("tp", "TP", "8 or 4,8"),
                Control("pp", "PP"),
                Control("cp", "CP"),
                Control("dp", "DP"),
                Control("ep", "EP"),
                Control("etp", "ETP"),
                Control("vpp", "VPP"),
                Control("micro_batch_size", "Micro-batch"),
                Control("zero_stage", "ZeRO"),
                Control("shard_size", "Shard over"),
                Control("recompute", "Recompute", "none,full"),
                Control("schedule", "Schedules", "such as 1f1b,zb-v"),
                Control("rank_order", "Rank order", kind="select", choices=(_ANY, *RANK_ORDERS)),
                Control("tp_across_nodes", "TP may leave a node", kind="flag"),
            ),
            "Assumptions and search": (
                Control("allow", "Allow", "what changes numerics, such as fp8"),
                Control("moe_imbalance", "Fullest expert", "× the mean", "number"),
                Control("straggler_fraction", "Slowest rank", "slower by", "number"),
                Control("assume", "Assume", "NAME=X,…"),
                Control("top", "Alternatives", kind="number"),
                Control("time_limit", "Seconds", "to search", "number"),
                Control("no_history", "Without your own runs", kind="flag"),
                Control("fastest", "The fastest, however fragile", kind="flag"),
            ),
            SWITCHES_PART: (Control("switch", "Switches", "those not pinned", "select", (_ANY, "default")),),
        },
    ),
)
CONTROLS = {control.name: control for group in GROUPS for control in group.controls}


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The names that the page may use; everything else is refused, and so are paths and addresses."""

    models: tuple[str, ...]
    hardware: tuple[str, ...]
    runtimes: tuple[str, ...]
    defaults: Options
    """The names of the defaults."""

    @classmethod
    def shipped(cls, start: Options, defaults: Options) -> Catalogue:
        """All that ships with the planner, and what `plan serve` itself was started with."""

        def listed(field: str, names: Sequence[str]) -> tuple[str, ...]:
            given = start.get(field)
            return tuple(names) if given is None else tuple(dict.fromkeys([given, *names]))

        return cls(
            models=listed("model", list(model_names())),
            hardware=listed("hardware", list(hardware_names())),
            runtimes=listed("runtime", list(RUNTIMES)),
            defaults=defaults,
        )

    def names_of(self, field: str) -> tuple[str, ...]:
        """The names that a control may have."""
        return {"model": self.models, "hardware": self.hardware, "runtime": self.runtimes}.get(field, ())

    def check(self, options: Options) -> None:
        """Raise SpecError for a name that is none of these."""
        aliases = {"model": model_names, "hardware": hardware_names}
        for field in ("model", "hardware", "runtime"):
            name = options.get(field)
            known = self.names_of(field)
            if name is None or name in known:
                continue
            others = [alias for names in aliases[field]().values() for alias in names] if field in aliases else []
            named = name.partition("@")[0] if field == "runtime" else name.lower()
            if named not in (*known, *others):
                raise SpecError(
                    f"--{field}: {name[:60]!r} is not in this page's list, and it reads no files",
                    f"start plan serve --{field} {name[:60]} to have it there{nearest(named, [*known, *others])}",
                )


def options_of(form: Form, catalogue: Catalogue) -> dict[str, str]:
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


def form_of(options: Options) -> dict[str, str]:
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


def changed(form: Form, words: Sequence[str]) -> dict[str, str]:
    """The form with the values that words of the command line, such as a remedy's, set."""
    return {**form, **form_of(dict(_pairs(words)))}


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`--gpus 48 --tp-across-nodes` as pairs."""
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            yield word[2:].replace("-", "_"), "on" if after.startswith("--") else after
