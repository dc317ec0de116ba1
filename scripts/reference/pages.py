"""The pages of the reference that are written from the program: commands, trainers, schedules, exit codes, glossary."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reference import schemas

import planner
from planner import errors
from planner.cli.app import COMMANDS, _root
from planner.observe.gap_rows import GAP_ROWS, RECORDINGS
from planner.schedule.orders import SCHEDULES
from planner.trainers.load import RUNTIMES, checkpoint_of, load_runtime, since_of, switches_of, versions_of
from planner.trainers.rules.recipe import export_rules_for, recipe_rules, rules_for
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES, written

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
_CODES = {
    0: "an answer",
    8: "`plan check`: refused",
    9: "`plan check`: worse than before",
    10: "`plan check`: unknown",
    130: "Ctrl-C",
}


def help_of(command: str = "") -> str:
    """What `plan [command] --help` prints, 80 columns wide."""
    root = _root()
    context = root.make_context("plan", [], resilient_parsing=True, terminal_width=80, max_content_width=80)
    if command:
        context = root.get_command(context, command).make_context(
            command, [], parent=context, resilient_parsing=True, terminal_width=80, max_content_width=80
        )
    return "\n".join(line.rstrip() for line in context.get_help().splitlines())


def commands() -> str:
    """The command line."""
    lines = [
        "# Command line",
        "",
        "This is what `--help` prints. The plain `plan` plans a job; every other command stands behind it. stdout",
        "carries the answer and stderr everything else; `--json` prints the answer as JSON ([schemas](schemas.md)),",
        "and the [exit code](exit-codes.md) says how a command ended.",
        "",
    ]
    for name in ("", *COMMANDS):
        lines += [f"## {f'plan {name}'.strip()}", "", "```text", help_of(name), "```", ""]
    return "\n".join(lines)


def exit_codes() -> str:
    """The exit codes, from the errors that have them."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PlannerError)]
    lines = [
        "# Exit codes",
        "",
        "A failure prints one line `error:` and, where something helps, one line `hint:` on stderr. With `--json` the",
        "same stands on stdout as JSON ([error.json](../schemas/error.json)).",
        "",
        "| code | error in Python | meaning |",
        "|---:|---|---|",
        f"| 0 |  | {_CODES[0]} |",
    ]
    for kind in sorted(kinds, key=lambda kind: kind.exit_code):
        lines.append(f"| {kind.exit_code} | `{kind.__name__}` | {_sentence(kind.__doc__)} |")
    lines += [f"| {code} |  | {says} |" for code, says in _CODES.items() if code]
    return "\n".join([*lines, ""])


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


def glossary() -> str:
    """The glossary: words of the field, and the program's own, which stand in AGENTS.md."""
    table = re.search(r"## Glossary\n\n(.*?)\n\n", (ROOT / "AGENTS.md").read_text(), re.DOTALL)
    assert table is not None
    field = (Path(__file__).parent / "field_words.md").read_text()
    return (
        f"# Glossary\n\n## Words of the field\n\n{field}\n## Words of this program\n\nThe program uses each of these"
        f" for one thing. The table stands in `AGENTS.md`, for all who work on the code.\n\n{table[1]}\n"
    )


def schedules() -> str:
    """The pipeline schedules."""
    lines = [
        "# Schedules",
        "",
        "A schedule is a row of `SCHEDULES` in `planner/schedule/orders.py`; the [guide](../guide/schedules.md)",
        "draws them. *Chunks* is the number of virtual stages of a rank. A plan is made only of schedules that train",
        "one copy of the model and end each step before the next one begins.",
        "",
        "| name | source | chunks | splits the backward | plans use it | tried without being named |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in SCHEDULES.items():
        most = "any" if row.max_vpp > 1000 else str(row.max_vpp)
        chunks = str(row.min_vpp) if str(row.min_vpp) == most else f"{row.min_vpp} to {most}"
        flags = (row.splits_backward, row.trains_one_copy, row.is_tried_by_default)
        cells = [f"`{name}`", row.source, chunks, *("yes" if flag else "no" for flag in flags)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def trainers() -> str:
    """Each trainer with its versions, its switches and its rules."""
    lines = [
        "# Trainers",
        "",
        "What each trainer offers and refuses, from its file in `planner/trainers/data` and the rules in",
        "`planner/trainers/rules`. `NAME@VERSION` names a version: it has no switch, and no value of a switch, that",
        "came later.",
        "A value in *italics* changes numerics, checks or tokens, and is chosen only with `--allow`.",
        "",
    ]
    runtimes = [load_runtime(name) for name in RUNTIMES]
    for runtime in runtimes:
        lines += _trainer(runtime)
    lines += ["## Switches", "", "| switch | effect | evidence |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {row.says} | {row.source or ''} |" for name, row in SWITCHES.items() if not row.is_described
    ]
    lines += _refusals("Layouts that are refused", {runtime.name: rules_for(runtime) for runtime in runtimes})
    lines += _refusals("Models that an export refuses", {it.name: export_rules_for(it) for it in runtimes})
    lines += ["", "## Rules of switches", "", "A recipe that breaks one of these is refused, whatever the trainer.", ""]
    lines += ["| switch | rule |", "|---|---|"]
    lines += [f"| `{rule.switch}` | {rule.says} |" for rule in recipe_rules()]
    return "\n".join([*lines, ""])


def _trainer(runtime: RuntimeSpec) -> Iterator[str]:
    yield from (f"## {runtime.name}", "")
    having = {name: values for name, values in switches_of(runtime).items() if not SWITCHES[name].is_described}
    facts = {
        "year": str(runtime.year or ""),
        "versions": ", ".join(versions_of(runtime)),
        "schedules": ", ".join(f"`{name}`" for name in runtime.schedules),
        "ZeRO stages": ", ".join(map(str, runtime.zero_stages)),
        "recomputes by itself": ", ".join(f"`{name}`" for name in runtime.selective_recompute_modules),
        "checkpoints": "; ".join(dict.fromkeys(_checkpoint(runtime, stage) for stage in runtime.zero_stages)),
        "switches": "; ".join(
            f"`{name}`: " + ", ".join(_value(runtime, name, value) for value in values)
            for name, values in having.items()
        ),
    }
    yield from (f"- {title}: {text}" for title, text in facts.items() if text)
    yield ""


def _checkpoint(runtime: RuntimeSpec, zero_stage: int) -> str:
    """What has to stay for a checkpoint to be loaded as it is, and what helps otherwise."""
    row = checkpoint_of(runtime, zero_stage)
    stages = [stage for stage in runtime.zero_stages if checkpoint_of(runtime, stage) == row]
    stay = f"{', '.join(row.keeps)} must stay" if row.keeps else "any layout loads it"
    way = f", or {row.rewritten.says}" if row.rewritten else ""
    return f"of ZeRO {', '.join(map(str, stages))} {stay}{way}"


def gap() -> str:
    """The rows of the gap between a run and its plan."""
    lines = [
        "# Rows of the gap",
        "",
        "What `plan observe` may find that makes a run slow or takes its memory, from `planner/observe/gap.yaml`;",
        "[Observe](../OBSERVE.md#the-gap) says when one is shown. Switches are changed and priced.",
        "",
        "| row | is | evidence | what would show it | what to do |",
        "|---|---|---|---|---|",
    ]
    for name, row in GAP_ROWS.items():
        seen = [row.evidence] * bool(row.evidence)
        seen += ["The log's own arguments."] if row.switches or not seen else []
        priced = ", ".join(f"`{switch}`" for switch in row.switches)
        helps = "; ".join(filter(None, (row.helps, priced)))
        lines.append(f"| `{name}` | {row.says} | {' '.join(seen)} | {RECORDINGS[row.record]} | {helps} |")
    return "\n".join([*lines, ""])


def _refusals(title: str, of_trainer: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """Each reason once, with the trainers that refuse by it."""
    by_reason: dict[str, list[str]] = {}
    for trainer, rules in of_trainer.items():
        for reason in dict.fromkeys(rule.reason for rule in rules):
            by_reason.setdefault(reason, []).append(trainer)
    by_trainers: dict[str, list[str]] = {}
    for reason, trainers in by_reason.items():
        told = "all" if len(trainers) == len(of_trainer) else ", ".join(trainers)
        by_trainers.setdefault(told, []).append(f"`{reason}`")
    yield from ("", f"## {title}", "", "| trainers | reasons |", "|---|---|")
    yield from (f"| {told} | {', '.join(reasons)} |" for told, reasons in by_trainers.items())


def _value(runtime: RuntimeSpec, name: str, value: Any) -> str:
    since, text = since_of(runtime, name, value), f"`{written(value)}`"
    text = f"*{text}*" if value in SWITCHES[name].consent else text
    return f"{text} (since {since})" if since else text


def python() -> str:
    """What `import planner` offers: functions, types and errors, and the descriptions that mkdocstrings puts below."""
    offered = {name: getattr(planner, name) for name in planner.__all__}
    types = {name: kind for name, kind in offered.items() if isinstance(kind, type)}
    wrong = {name: kind for name, kind in types.items() if issubclass(kind, Exception)}
    groups = {
        "function": {name: kind for name, kind in offered.items() if name not in types},
        "type": {name: kind for name, kind in types.items() if name not in wrong},
        "error": wrong,
    }
    lines = [
        "# Python",
        "",
        "What `import planner` offers. A first use:",
        "",
        "```python",
        "from planner import ClusterSpec, TrainingSpec, plan",
        "",
        'cluster = ClusterSpec(hardware="h100", num_gpus=64)',
        'answer = plan("8b", cluster, TrainingSpec(seq_length=8192, global_batch_size=512))',
        "print(answer.parallelism, answer.step.step_s)",
        'answer.save("plan.json")',
        "```",
        "",
    ]
    for title, names in groups.items():
        lines += [f"| {title} | what it is |", "|---|---|"]
        lines += [f"| [`{name}`][planner.{name}] | {_sentence(kind.__doc__)} |" for name, kind in names.items()]
        lines += [""]
    return "\n".join([*lines, "::: planner", "    options:", '      filters: ["!^_"]', ""])


PAGES: Mapping[str, Callable[[], str]] = {
    "commands.md": commands,
    "exit-codes.md": exit_codes,
    "gap.md": gap,
    "glossary.md": glossary,
    "python.md": python,
    "schedules.md": schedules,
    "schemas.md": schemas.page,
    "trainers.md": trainers,
}
"""Each page of the reference that is written, by its file in docs/reference."""


def texts() -> dict[str, str]:
    """The text of each written page, by its file."""
    os.environ.pop("COLUMNS", None)
    return {name: page() for name, page in PAGES.items()}
