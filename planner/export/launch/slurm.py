"""launch.sbatch: a Slurm job with one torchrun per node."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.header import slug
from planner.export.common.trainer_files import ExportFile, LaunchCommand, Placeholder
from planner.export.launch.nodes import last_node_lines, nodes_of, segment_of, start_line
from planner.export.launch.preflight import PREFLIGHT
from planner.export.launch.shell import (
    ADDRESS,
    IS_FIRST_RUN,
    first_run_note,
    passed_arguments,
    placeholders,
    prologue,
)

CONTAINER = (
    Placeholder("CONTAINER_IMAGE", "image for srun --container-image (pyxis)", is_optional=True, in_first_run=True),
    Placeholder("CONTAINER_MOUNTS", "further mounts for it, FROM:TO,…", is_optional=True, in_first_run=True),
)
_NODE = '"${SLURM_NODEID:-0}"'
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
    smaller = "".join(f"{line}; " for line in last_node_lines(plan, _NODE))
    return [
        'if [[ "${PREFLIGHT:-1}" != 0 ]]; then',
        "  # shellcheck disable=SC2016",
        f'  {_TASKS} "${{CONTAINER[@]}}" bash -c \\',
        f"""    '{smaller}exec python3 "$PLAN_DIR"/{PREFLIGHT} "$@"' bash "$@" """.rstrip(),
        "fi",
        "# shellcheck disable=SC2016",
        f'{_TASKS} "${{CONTAINER[@]}}" bash -c \\',
        f"  '{smaller}{start_line(plan, command, _NODE)} \"$@\"' \\",
        f"  bash {passed_arguments(command)}",
    ]
