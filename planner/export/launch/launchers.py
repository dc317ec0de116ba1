"""Launchers for a shell, launch.sh and launch.sbatch, and preflight.py, which looks at a node before ranks start."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from planner.answer import Plan
from planner.export.run_settings import FIRST_RUN_STEPS
from planner.export.trainer_files import (
    ExportFile,
    LaunchCommand,
    Placeholder,
    RunPart,
    ShellText,
    Value,
    argv,
    comment,
    slug,
)

PREFLIGHT = "preflight.py"
_NO_CHECKS = 'json.loads("{}")'


def preflight(plan: Plan, command: LaunchCommand) -> ExportFile:
    """The program, and what it looks for: GPUs of a node, packages, placeholders, the trainer's version."""
    _, gpus, _ = nodes_of(plan)
    checks = {
        "gpus": gpus,
        "packages": [asdict(requirement) for requirement in command.requirements],
        "placeholders": [asdict(placeholder) for placeholder in command.placeholders],
        "trainer": asdict(command.trainer),
    }
    source = Path(__file__).with_name("node_check.py").read_text(encoding="utf-8")
    before, found, after = source.partition(_NO_CHECKS)
    assert found
    # JSON in a literal of Python: no text of a plan can leave it
    return ExportFile(PREFLIGHT, f"{before}json.loads({json.dumps(json.dumps(checks))}){after}")


def nodes_of(plan: Plan) -> tuple[int, int, int]:
    """(nodes, GPUs of each, GPUs of the last), equal where that takes no more nodes.

    A tensor-parallel group stays in one node, unless it is larger or the cluster has too few nodes for that.
    """
    used, node, tp = plan.parallelism.num_gpus_used, plan.cluster.node_size, plan.parallelism.tp
    if used <= node:
        return 1, used, used
    largest = node - node % tp if tp <= node else node
    if _num_nodes(used, largest) > _num_nodes(plan.cluster.num_gpus, node):
        largest = node
    nodes = _num_nodes(used, largest)
    gpus_per_node = used // nodes if used % nodes == 0 and used // nodes % tp == 0 else largest
    return nodes, gpus_per_node, used - (nodes - 1) * gpus_per_node


def _num_nodes(num_gpus: int, gpus_per_node: int) -> int:
    return -(-num_gpus // gpus_per_node)


def segment_of(plan: Plan) -> int:
    """Nodes that are asked for in one NVLink domain; 1 where NVLink joins no nodes.

    Slurm wants a number that divides the nodes (`--segment`).
    """
    nodes, gpus, _ = nodes_of(plan)
    most = plan.cluster.nvlink_domain_size // gpus if plan.cluster.is_rack else 1
    return max(size for size in range(1, max(1, min(nodes, most)) + 1) if nodes % size == 0)


def last_node_lines(plan: Plan, rank: str) -> list[str]:
    """Shell lines that set GPUS on node `rank`, where the last node starts fewer ranks; none elsewhere."""
    nodes, gpus, last = nodes_of(plan)
    return [] if last == gpus else [f"export GPUS={gpus}; [[ {rank} != {nodes - 1} ]] || GPUS={last}"]


def start_line(plan: Plan, command: LaunchCommand, rank: str) -> str:
    """Shell text that starts the ranks of node `rank`; torchrun numbers them by the ranks that each node starts."""
    nodes, gpus, last = nodes_of(plan)
    count = str(gpus) if last == gpus else '"$GPUS"'
    if command.starts_ranks:
        return f"exec env NNODES={nodes} NODE_RANK={rank} GPUS_PER_NODE={count} {command.program}"
    binding = '${NUMA_BINDING:+--numa-binding "$NUMA_BINDING"}'
    run = f"exec torchrun {binding} --nnodes {nodes} --nproc-per-node {count} --node-rank {rank}"
    return f'{run} --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" {command.program}'


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


def _added(part: RunPart) -> list[str]:
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


LAUNCH = "launch.sh"
_NODE_RANK = '"${NODE_RANK:-0}"'


def torchrun_script(plan: Plan, command: LaunchCommand) -> ExportFile:
    """launch.sh: runs this node's ranks; NODE_RANK and MASTER_ADDR say which node it is and where the first one is."""
    lines = [
        "#!/usr/bin/env bash",
        (command.comments + first_run_note(command, f"bash {LAUNCH}")).rstrip("\n"),
        *_per_node_note(plan),
        '[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"',
        *placeholders(command.placeholders),
        "set -euo pipefail",
        'PLAN_DIR="${PLAN_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}"',
        *prologue(command),
        ADDRESS,
        *last_node_lines(plan, _NODE_RANK),
        PREFLIGHT_LINE,
        f"{start_line(plan, command, _NODE_RANK)} \\\n  {passed_arguments(command)}",
    ]
    return ExportFile(LAUNCH, "\n".join(lines) + "\n", executable=True, placeholders=command.placeholders)


def _per_node_note(plan: Plan) -> list[str]:
    nodes, *_ = nodes_of(plan)
    return [f"# run on each of {nodes} nodes with NODE_RANK=0..{nodes - 1} and MASTER_ADDR"] if nodes > 1 else []


CONTAINER = (
    Placeholder("CONTAINER_IMAGE", "image for srun --container-image (pyxis)", is_optional=True, in_first_run=True),
    Placeholder("CONTAINER_MOUNTS", "further mounts for it, FROM:TO,…", is_optional=True, in_first_run=True),
)
_SLURM_NODE = '"${SLURM_NODEID:-0}"'
_MINUTES_TO_SAVE = 15
"""Minutes before the job's end at which a run saves and ends."""
_TASKS = "srun --ntasks-per-node=1 --kill-on-bad-exit=1"


def slurm_script(plan: Plan, command: LaunchCommand) -> ExportFile:
    """launch.sbatch: one task per node; the first node of the allocation is where all ranks meet."""
    lines = [
        "#!/usr/bin/env bash",
        *_directives(plan),
        (command.comments + first_run_note(command, "sbatch launch.sbatch")).rstrip("\n"),
        "# submit from the folder that holds this file: sbatch -A ACCOUNT -p PARTITION -t TIME launch.sbatch",
        *placeholders((*command.placeholders, *CONTAINER)),
        "set -euo pipefail",
        'PLAN_DIR="${PLAN_DIR:-${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}}"',
        *prologue(command),
        *_end_of_time(command),
        'if [[ -n "${SLURM_JOB_NODELIST:-}" ]]; then',
        '  mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        '  MASTER_ADDR="${HOSTS[0]}"',
        "fi",
        ADDRESS,
        "CONTAINER=()",
        'if [[ -n "$CONTAINER_IMAGE" ]]; then',
        '  MOUNTS="$PLAN_DIR:$PLAN_DIR${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"',
        '  CONTAINER=(--container-image="$CONTAINER_IMAGE" --container-mounts="$MOUNTS")',
        "fi",
        "",
        *_node_steps(plan, command),
    ]
    return ExportFile(
        "launch.sbatch", "\n".join(lines) + "\n", executable=True, placeholders=(*command.placeholders, *CONTAINER)
    )


def _directives(plan: Plan) -> list[str]:
    nodes, gpus, _ = nodes_of(plan)
    segment = segment_of(plan)
    return [
        f"#SBATCH --job-name={slug(plan.model.name)}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={gpus}",
        # nodes of a segment are joined by NVLink, where Slurm knows the racks as blocks
        *([f"#SBATCH --segment={segment}"] if segment > 1 else []),
        "#SBATCH --exclusive",
        "#SBATCH --mem=0",
        "#SBATCH --output=%x-%j.out",
        "#SBATCH --open-mode=append",
    ]


def _end_of_time(command: LaunchCommand) -> list[str]:
    """Lines that end training with a checkpoint before Slurm ends the job."""
    if not command.exit_minutes:
        return []
    minutes = f'"$(( (SLURM_JOB_END_TIME - $(date +%s)) / 60 - {_MINUTES_TO_SAVE} ))"'
    return [
        f'if ! {IS_FIRST_RUN} && [[ -n "${{SLURM_JOB_END_TIME:-}}" ]]; then',
        f"  ARGUMENTS+=({command.exit_minutes.format(minutes)})",
        "fi",
    ]


def _node_steps(plan: Plan, command: LaunchCommand) -> list[str]:
    """Lines that look at every node, and then start the ranks of every node."""
    smaller = "".join(f"{line}; " for line in last_node_lines(plan, _SLURM_NODE))
    return [
        'if [[ "${PREFLIGHT:-1}" != 0 ]]; then',
        "  # shellcheck disable=SC2016",
        f'  {_TASKS} "${{CONTAINER[@]}}" bash -c \\',
        f"""    '{smaller}exec python3 "$PLAN_DIR"/{PREFLIGHT} "$@"' bash "$@" """.rstrip(),
        "fi",
        "# shellcheck disable=SC2016",
        f'{_TASKS} "${{CONTAINER[@]}}" bash -c \\',
        f"  '{smaller}{start_line(plan, command, _SLURM_NODE)} \"$@\"' \\",
        f"  bash {passed_arguments(command)}",
    ]
