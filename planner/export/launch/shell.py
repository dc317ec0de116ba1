"""The parts that shell launchers share: placeholders, variables, setup, and the array of the trainer's arguments."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from planner.export.common.arguments import ShellText, Value, argv
from planner.export.common.header import comment
from planner.export.common.run_settings import FIRST_RUN_STEPS
from planner.export.common.trainer_files import LaunchCommand, Part, Placeholder
from planner.export.launch.preflight import PREFLIGHT

ADDRESS = 'export PLAN_DIR MASTER_ADDR="${MASTER_ADDR:-localhost}" MASTER_PORT="${MASTER_PORT:-29500}"'
IS_FIRST_RUN = '[[ "${MOCK:-0}" == 1 ]]'
PREFLIGHT_LINE = f'[[ "${{PREFLIGHT:-1}}" == 0 ]] || python3 "$PLAN_DIR"/{PREFLIGHT} "$@"'
"""The line that ends the launch before any rank starts where a node lacks something."""


CPU_BINDING = (
    "# ranks run on the CPUs beside their GPU where torchrun (2.9 and above) and numactl can bind them",
    "if command -v numactl >/dev/null && python3 -c 'from importlib.metadata import version; import sys; "
    """sys.exit(tuple(map(int, version("torch").split(".")[:2])) < (2, 9))' 2>/dev/null; then""",
    "  export NUMA_BINDING=node NCCL_IGNORE_CPU_AFFINITY=1",
    "fi",
)
"""Shell lines that decide if torchrun binds ranks to CPUs; NCCL's own threads then stay where they are put."""


def placeholders(places: Iterable[Placeholder]) -> list[str]:
    """The block at the top: one line for each value that the user fills in, or sets before the start."""
    places = tuple(places)
    lines = []
    for place in places:
        needed = "optional; " if place.is_optional else ""
        lines.append(f'{place.name}="${{{place.name}:-{place.default}}}"  # {needed}{place.meaning}')
    if not lines:
        return []
    exported = f"export {' '.join(place.name for place in places)}"
    return ["# ---- fill in here, or set before the start ----", *lines, exported, "# ----", *_unasked(places), ""]


def _unasked(places: Iterable[Placeholder]) -> list[str]:
    """Lines that make the run a first one where nothing that training needs is filled in, and say so."""
    needed = [f"${place.name}" for place in places if not (place.in_first_run or place.is_optional)]
    if not needed:
        return []
    return [
        f'if [[ -z "${{MOCK:-}}{"".join(needed)}" ]]; then',
        "  export MOCK=1",
        "  echo 'nothing is filled in: this is a first run on random tokens (MOCK=0 insists on training)' >&2",
        "fi",
    ]


def first_run_note(command: LaunchCommand, script: str) -> str:
    """A comment that names the run to begin with."""
    if not command.promise:
        return ""
    spared = [place.name for place in command.placeholders if not (place.in_first_run or place.is_optional)]
    without = f", without {', '.join(spared)}" if spared else ""
    return comment(
        f"first run: MOCK=1 {script} takes {FIRST_RUN_STEPS} steps{without}, and prints what the plan promises"
    )


def prologue(command: LaunchCommand) -> list[str]:
    """Lines that set variables, prepare, and fill ARGUMENTS."""
    lines = [f"export {name}={shell_words([value])}" for name, value in command.environment.items()]
    lines += [*(() if command.starts_ranks else CPU_BINDING), *command.setup]
    if _has_arguments(command):
        lines.append(shell_array("ARGUMENTS", command.arguments, command.words))
    return ["", *lines, *_parts(command), ""]


def _parts(command: LaunchCommand) -> list[str]:
    """Lines that add the arguments of a first run, beside the plan's promise, or of training."""
    if not command.promise:
        return []
    says = [f"  {shlex.quote(line)}" for line in command.promise]
    lines = [
        f"if {IS_FIRST_RUN}; then",
        " \\\n".join(["printf 'first run: %s\\n' >&2", *says]),
        *_added(command.first_run),
    ]
    training = _added(command.training_run)
    return [*lines, *(["else", *training] if training else []), "fi"]


def _added(part: Part) -> list[str]:
    """Lines that add a part's arguments; none where it has none."""
    if not (part.arguments or part.words):
        return []
    splits = any(isinstance(value, ShellText) and '"' not in value for value in part.arguments.values())
    silenced = ["# shellcheck disable=SC2206  # the words in the variable"] if splits else []
    return [*silenced, shell_array("ARGUMENTS+", part.arguments, part.words)]


def _has_arguments(command: LaunchCommand) -> bool:
    return bool(command.arguments or command.words)


def passed_arguments(command: LaunchCommand) -> str:
    """Shell text for the command's arguments and those that the launcher itself is given."""
    return '"${ARGUMENTS[@]}" "$@"' if _has_arguments(command) else '"$@"'


def shell_array(name: str, arguments: Mapping[str, Value], words: Iterable[str] = ()) -> str:
    """A bash array with one option, or one further word, a line, each quoted."""
    lines = [shell_words(argv({option: value})) for option, value in arguments.items()]
    lines += [shell_words([word]) for word in words]
    return "\n".join([f"{name}=(", *(f"  {line}" for line in lines), ")"])


def shell_words(words: Iterable[str]) -> str:
    """Words joined by blanks, each quoted where the shell would read it otherwise."""
    return " ".join(word if isinstance(word, ShellText) else shlex.quote(word) for word in words)
