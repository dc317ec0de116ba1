"""A plan as the files that a trainer or a scheduler takes as they are: the library's side of `plan export`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.bundle import Bundle, write_bundle
from planner.export.common.header import plan_sha256, slug
from planner.export.common.refusal import Inexpressible, Reason
from planner.export.common.target_price import check_fits, priced_for
from planner.export.common.trainer_files import IMAGE, IMAGE_OF_AMD, ExportFile, LaunchCommand
from planner.export.launch.preflight import preflight
from planner.export.targets import LAUNCHERS, TARGETS, TRAINERS, Trainer
from planner.specs.problems import nearest
from planner.trainers.generations import objection_to_silicon
from planner.trainers.load import load_runtime

_FIRST_RUNS = {
    "torchrun": "MOCK=1 bash launch.sh",
    "slurm": "MOCK=1 sbatch launch.sbatch",
    "kubernetes": "set MOCK to '1' in kubernetes.yaml, then kubectl apply -f kubernetes.yaml",
    "kubernetes-pytorchjob": "set MOCK to '1' in kubernetes-pytorchjob.yaml, then kubectl apply -f it",
}
_DEFAULT_LAUNCHERS = ("torchrun", "slurm")


def export(
    plan: Plan, to: str | Iterable[str], out: str | Path | None = None, *, image: str | None = None, force: bool = False
) -> list[Path]:
    """Write a plan for a trainer, for launchers that start one, or for both, and return the paths of the files.

        from planner.export.export import export

        *files, manifest = export(plan, to="megatron", out="run")
        export(plan, to=["megatron", "kubernetes"], out="pods", image="registry/image:1")

    `to` holds names that `plan export --to` takes: several of them, or one string with commas. Without `out` the folder
    is named after model and trainer. The last path is the manifest, whose `notes` say what the plan does not decide.
    Raises SpecError for targets that make no sense together and, before anything is written, for files that exist where
    `force` is not given; Inexpressible, with every reason, where the trainer cannot run the plan; Infeasible where the
    plan was made for another trainer and does not fit under this one, unless `force` is given.
    """
    bundle = bundle_of(plan, to, image, force)
    return write_bundle(bundle, Path(out or default_folder(plan, bundle)), force)


def bundle_of(plan: Plan, to: str | Iterable[str], image: str | None = None, force: bool = False) -> Bundle:
    """The files that `export` writes, in memory: those of at most one trainer and of any launchers.

    A trainer alone comes with torchrun and Slurm launchers; a launcher alone starts the trainer the plan was made for.
    A plan that was made for another trainer is priced under this one first. Raises as `export` does before it writes.
    """
    targets = _targets(to)
    trainers = [name for name in targets if name in TRAINERS]
    if len(trainers) > 1:
        raise SpecError(f"--to: {' and '.join(trainers)} are two trainers", "export each into its own folder")
    trainer = TRAINERS[trainers[0]] if trainers else _trainer_of(plan)
    runtime = trainer.runtime_for(plan)
    if (objection := objection_to_silicon(load_runtime(runtime), plan.cluster.hardware)) is not None:
        raise Inexpressible(trainer.name, [Reason("hardware", objection)], f"--to {load_runtime(runtime).family}")
    plan = priced_for(plan, runtime, trainer.recomputes)
    written = trainer.write(plan)
    if not force:
        check_fits(plan, trainer.name)
    launchers = [name for name in targets if name in LAUNCHERS]
    if not launchers and written.command is not None:
        launchers = [*_DEFAULT_LAUNCHERS]
    unfit = () if plan.fits else ("this layout does not fit in the GPUs' memory as planned",)
    return Bundle(
        targets=(trainer.name, *launchers),
        written_for=(written.written_for,),
        plan_sha256=plan_sha256(plan),
        inputs_sha256=plan.as_planned.inputs_sha256,
        planner_version=plan.planner_version,
        world_size=plan.parallelism.num_gpus_used,
        files=(*written.files, *_launcher_files(plan, written.command, launchers, image)),
        notes=(*written.notes, *unfit),
        first_run=_first_run(written.command, launchers),
    )


def _first_run(command: LaunchCommand | None, launchers: Sequence[str]) -> str:
    """The command of the first run, by the first launcher that was written."""
    if command is None or not command.promise or not launchers:
        return ""
    return _FIRST_RUNS[launchers[0]]


def default_folder(plan: Plan, bundle: Bundle) -> str:
    """The folder's name where the user gives none: model and trainer."""
    return f"{slug(plan.model.name)}-{bundle.targets[0]}"


def _targets(to: str | Iterable[str]) -> list[str]:
    """Names of targets, each once; SpecError where one is unknown or there are none."""
    given = to.split(",") if isinstance(to, str) else to
    names = list(dict.fromkeys(name.strip() for name in given))
    unknown = [name for name in names if name not in TARGETS]
    if unknown or not names:
        name = unknown[0] if unknown else ""
        raise SpecError(f"--to: unknown target {name!r}", f"one of {', '.join(TARGETS)}{nearest(name, TARGETS)}")
    return names


def _trainer_of(plan: Plan) -> Trainer:
    """The trainer that the plan was made for."""
    for trainer in TRAINERS.values():
        if plan.runtime in trainer.runtimes:
            return trainer
    raise SpecError(
        f"--to: the plan's runtime {plan.runtime!r} is no target", f"name a trainer too: {', '.join(TRAINERS)}"
    )


def _launcher_files(
    plan: Plan, command: LaunchCommand | None, launchers: Sequence[str], image: str | None
) -> tuple[ExportFile, ...]:
    if not launchers:
        return ()
    if command is None:
        raise SpecError(
            f"--to: {launchers[0]} has nothing to start", "this trainer is a library: your own script starts it"
        )
    command = replace(command, image=image or (IMAGE_OF_AMD if plan.cluster.hardware.is_amd else IMAGE))
    written = [LAUNCHERS[name].write(plan, command) for name in launchers]
    # pods have it in their ConfigMap
    needs_file = any(not name.startswith("kubernetes") for name in launchers)
    return (*written, *([preflight(plan, command)] if needs_file else []))
