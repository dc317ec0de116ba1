"""launch.sbatch: a Slurm job with one torchrun per node."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.header import slug
from planner.export.common.trainer_files import ExportFile, LaunchCommand
from planner.export.launch.nodes import nodes_of, torchrun_line
from planner.export.launch.shell import ADDRESS, passed_arguments, prologue


def slurm_script(plan: Plan, command: LaunchCommand) -> ExportFile:
    """launch.sbatch: one task per node; the first node of the allocation is where all ranks meet."""
    nodes, gpus, _ = nodes_of(plan)
    run = torchrun_line(plan, '"${SLURM_NODEID:-0}"')
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={slug(plan.model.name)}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={gpus}",
        "#SBATCH --exclusive",
        "#SBATCH --output=%x-%j.out",
        command.comments.rstrip("\n"),
        "# submit from the folder that holds this file: sbatch launch.sbatch",
        "set -euo pipefail",
        'PLAN_DIR="${PLAN_DIR:-${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}}"',
        *prologue(command),
        'if [[ -n "${SLURM_JOB_NODELIST:-}" ]]; then',
        '  mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        '  MASTER_ADDR="${HOSTS[0]}"',
        "fi",
        ADDRESS,
        "",
        "srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c \\",
        f"  '{run} {command.program} \"$@\"' \\",
        f"  bash {passed_arguments(command)}",
    ]
    return ExportFile("launch.sbatch", "\n".join(lines) + "\n", executable=True)
