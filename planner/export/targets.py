"""Every export target by name: trainers, and launchers that start one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.bridge.write import export_bridge
from planner.export.bundle import Bundle, ExportFile, plan_sha256
from planner.export.common.trainer_files import Exported
from planner.export.deepspeed.write import export_deepspeed
from planner.export.launch.torchrun import IMAGE, Command, kubernetes_manifest, slurm_script, torchrun_script
from planner.export.megatron.write import export_megatron
from planner.export.torch.write import export_torch
from planner.export.torchtitan.write import export_torchtitan
from planner.specs.problems import nearest

TRAINERS: dict[str, Callable[[Plan], Exported]] = {
    "megatron": export_megatron,
    "bridge": export_bridge,
    "torchtitan": export_torchtitan,
    "torch": export_torch,
    "deepspeed": export_deepspeed,
}
LAUNCHERS = ("torchrun", "slurm", "kubernetes")
TARGETS = (*TRAINERS, *LAUNCHERS)
_TRAINER_OF = {"megatron": "megatron", "torchtitan": "torchtitan", "torch-eager": "torch"}
"""Trainer of each runtime, for a launcher that is asked for alone."""


def export(plan: Plan, targets: Sequence[str], image: str = IMAGE) -> Bundle:
    """All files for `targets`: at most one trainer and any launchers.

    A trainer alone comes with torchrun and Slurm launchers; a launcher alone starts the trainer the plan was made for.
    Raises SpecError for unknown or contradicting targets, and Inexpressible where the trainer cannot run the plan.
    """
    unknown = [name for name in targets if name not in TARGETS]
    if unknown or not targets:
        name = unknown[0] if unknown else ""
        raise SpecError(f"--to: unknown target {name!r}", f"one of {', '.join(TARGETS)}{nearest(name, TARGETS)}")
    trainers = [name for name in dict.fromkeys(targets) if name in TRAINERS]
    if len(trainers) > 1:
        raise SpecError(f"--to: {' and '.join(trainers)} are two trainers", "export each into its own folder")
    trainer = trainers[0] if trainers else _trainer_of(plan)
    exported = TRAINERS[trainer](plan)
    launchers = [name for name in dict.fromkeys(targets) if name in LAUNCHERS]
    if not launchers and exported.command is not None:
        launchers = ["torchrun", "slurm"]
    return Bundle(
        targets=(trainer, *launchers),
        written_for=(exported.written_for,),
        plan_sha256=plan_sha256(plan),
        inputs_sha256=plan.inputs_sha256,
        planner_version=plan.planner_version,
        files=(*exported.files, *_launchers(plan, exported.command, launchers, image)),
        notes=(*exported.notes, *_about(plan)),
        world_size=plan.parallelism.num_gpus_used,
    )


def _about(plan: Plan) -> tuple[str, ...]:
    """What the user should know about the plan itself."""
    return () if plan.fits else ("this layout does not fit in the GPUs' memory as planned",)


def _trainer_of(plan: Plan) -> str:
    trainer = _TRAINER_OF.get(plan.runtime)
    if trainer is None or trainer not in TRAINERS:
        raise SpecError(
            f"--to: the plan's runtime {plan.runtime!r} is no target", f"name a trainer too: {', '.join(TRAINERS)}"
        )
    return trainer


def _launchers(plan: Plan, command: Command | None, names: Sequence[str], image: str) -> list[ExportFile]:
    if not names:
        return []
    if command is None:
        raise SpecError(
            f"--to: {names[0]} has nothing to start", "this trainer is a library: your own script starts it"
        )
    files = []
    for name in names:
        if name == "torchrun":
            files.append(torchrun_script(plan, command))
        elif name == "slurm":
            files.append(slurm_script(plan, command))
        else:
            files.append(kubernetes_manifest(plan, command, image))
    return files
