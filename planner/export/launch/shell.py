"""The parts that shell launchers share: variables, setup, and the array of the trainer's arguments."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from planner.export.common.arguments import Value, argv
from planner.export.common.trainer_files import LaunchCommand

ADDRESS = 'export PLAN_DIR MASTER_ADDR="${MASTER_ADDR:-localhost}" MASTER_PORT="${MASTER_PORT:-29500}"'


CPU_BINDING = (
    "# ranks run on the CPUs beside their GPU where torchrun (2.9 and above) and numactl can bind them",
    "if command -v numactl >/dev/null && python3 -c 'from importlib.metadata import version; import sys; "
    """sys.exit(tuple(map(int, version("torch").split(".")[:2])) < (2, 9))' 2>/dev/null; then""",
    "  export NUMA_BINDING=node NCCL_IGNORE_CPU_AFFINITY=1",
    "fi",
)
"""Shell lines that decide if torchrun binds ranks to CPUs; NCCL's own threads then stay where they are put."""


def prologue(command: LaunchCommand) -> list[str]:
    """Lines that set variables, prepare, and fill ARGUMENTS."""
    lines = [f"export {name}={shell_words([value])}" for name, value in command.environment.items()]
    lines += [*CPU_BINDING, *command.setup]
    if command.arguments or command.words:
        lines.append(shell_array("ARGUMENTS", command.arguments, command.words))
    return ["", *lines, ""]


def passed_arguments(command: LaunchCommand) -> str:
    """Shell text for the command's arguments and those that the launcher itself is given."""
    return '"${ARGUMENTS[@]}" "$@"' if command.arguments or command.words else '"$@"'


def shell_array(name: str, arguments: Mapping[str, Value], words: Iterable[str] = ()) -> str:
    """A bash array with one option, or one further word, a line, each quoted."""
    lines = [shell_words(argv({option: value})) for option, value in arguments.items()]
    lines += [shell_words([word]) for word in words]
    return "\n".join([f"{name}=(", *(f"  {line}" for line in lines), ")"])


def shell_words(words: Iterable[str]) -> str:
    """Words joined by blanks, each quoted where the shell would read it otherwise."""
    return " ".join(map(shlex.quote, words))
