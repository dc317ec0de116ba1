"""A plan as the files that a trainer or a scheduler takes as they are: the library's side of `plan export`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.launchers import LAUNCH, node_check, nodes_of, preflight, promised
from planner.export.refusal import Inexpressible, Reason, check_fits, priced_for
from planner.export.targets import ALSO_CALLED, LAUNCHERS, TARGETS, TRAINERS, TrainerTarget
from planner.export.trainer_files import (
    IMAGE,
    IMAGE_OF_AMD,
    ExportFile,
    LaunchCommand,
    Placeholder,
    plan_sha256,
    rendered,
    slug,
)
from planner.files import FolderFile, write_folder
from planner.record import record
from planner.specs.base import Fields, Texts, filled
from planner.specs.hardware import HardwareSpec
from planner.specs.model import ModelSpec
from planner.specs.problems import nearest
from planner.specs.registry import load_hardware, load_model
from planner.specs.shipped import Kind, find
from planner.trainers.generations import objection_to_silicon
from planner.trainers.load import RUNTIMES, coefficients, load_runtime, versions_of

MANIFEST = "manifest.json"


@record(kw_only=True)
class Bundle:
    """The files of a trainer and of the launchers that start it, and what the user should know about them."""

    targets: Texts
    """Names of the trainer, which comes first, and of the launchers."""
    written_for: Texts
    """Versions of the trainer the files were written for."""
    plan_sha256: str
    inputs_sha256: str
    planner_version: str
    job: Fields
    """Facts of the job that the files may leave out: model, hardware, GPUs, tokens of a sequence, texts, imbalance."""
    files: tuple[ExportFile, ...]
    notes: Texts
    """Things that the plan does not decide and the export had to."""
    first_run: str = ""
    """The command of the short run to hold against the plan; empty where the user's own script trains."""

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        """The values that the user fills in, each once, in whichever files they stand."""
        return tuple(dict.fromkeys(place for file in self.files for place in file.placeholders))

    def manifest(self) -> Fields:
        """Every file's sha256, the plan's hash and the versions."""
        return {
            "planner_version": self.planner_version,
            "plan_sha256": self.plan_sha256,
            "inputs_sha256": self.inputs_sha256,
            "targets": list(self.targets),
            "written_for": list(self.written_for),
            "world_size": self.job["num_gpus"],
            "job": self.job,
            "notes": list(self.notes),
            "placeholders": [asdict(place) for place in self.placeholders],
            "first_run": self.first_run,
            "files": {file.name: file.sha256 for file in self.files},
        }

    def with_manifest(self) -> tuple[ExportFile, ...]:
        """All files, the manifest last."""
        return (*self.files, ExportFile(MANIFEST, json.dumps(self.manifest(), indent=2) + "\n"))

    def folder_files(self, folder: str = "") -> Iterator[FolderFile]:
        """All files as they are written, in a folder's folder where one is named."""
        for file in self.with_manifest():
            yield FolderFile(os.path.join(folder, file.name), file.text.encode(), file.executable)


def write_bundle(bundle: Bundle, folder: Path, force: bool = False) -> list[Path]:
    """Write every file and the manifest into `folder`, making it where it is missing: all of them or none.

    Raises SpecError, before anything is written, where a file exists and `force` is not given, or a folder does.
    """
    return write_folder(folder, list(bundle.folder_files()), force)


_FIRST_RUNS = {
    "torchrun": "MOCK=1 bash launch.sh",
    "slurm": "MOCK=1 sbatch launch.sbatch",
    "kubernetes": "set MOCK to '1' in kubernetes.yaml, then kubectl apply -f kubernetes.yaml",
    "kubernetes-jobset": "set MOCK to '1' in kubernetes-jobset.yaml, then kubectl apply -f it",
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
        job={
            "model": _shipped("model", plan.model.spec),
            "num_gpus": plan.parallelism.num_gpus_used,
            "seq_length": plan.training.seq_length,
            **_machines(plan),
            **_unwritten(plan),
        },
        files=(*written.files, *_launcher_files(plan, written.command, launchers, image)),
        notes=(*written.notes, *unfit),
        first_run=_first_run(written.command, launchers),
    )


_UNWRITTEN = {
    "document_lengths", "batching", "moe_imbalance", "moe_peak_imbalance", "moe_spread", "straggler_fraction",
}  # fmt: skip


def _machines(plan: Plan) -> Fields:
    """The GPUs and what stands around them, by their profile's name where it says all, and the trainer's version.

    A launcher may start fewer ranks on each node than it has GPUs.
    """
    cluster, runtime, adapters = plan.cluster, plan.runtime_spec, plan.training.adapters
    hardware, rate = cluster.hardware, cluster.network_gb_per_s
    if cluster.network_tiers:
        hardware = hardware.model_copy(update={"tiers": cluster.tiers})
    version = runtime.version or next(iter(versions_of(runtime)[-1:]), "")
    shipped = runtime.name if runtime.name in RUNTIMES else runtime.family
    dated = f"{shipped}@{version}" if version and shipped == runtime.family else None
    said = {
        "hardware": _shipped("hardware", hardware),
        "gpus_per_node": cluster.gpus_per_node or (cluster.node_size if nodes_of(plan)[0] > 1 else None),
        "inter_node": rate and f"{8 * rate} Gb/s per GPU",
        "runtime": dated,
        "runtime_fields": coefficients(load_runtime(dated or shipped).for_adapters(adapters), runtime) or None,
    }
    return filled(said.items())


def _shipped(kind: Kind, spec: HardwareSpec | ModelSpec) -> str | Fields:
    """The name of a spec that ships, and all fields of another."""
    load = load_model if kind == "model" else load_hardware
    is_shipped = find(kind, spec.name) is not None and spec == load(spec.name)
    return spec.name if is_shipped else spec.model_dump(mode="json")


def _unwritten(plan: Plan) -> Fields:
    """Facts of the data and the ranks that a plan is priced with, and no trainer's file says."""
    said = plan.training.model_dump(mode="json", include=_UNWRITTEN, exclude_defaults=True)
    return said if plan.model.spec.moe is None else {"moe_imbalance": plan.training.moe_imbalance, **said}


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
    names = list(dict.fromkeys(ALSO_CALLED.get(name.strip(), name.strip()) for name in given))
    unknown = [name for name in names if name not in TARGETS]
    if unknown or not names:
        name = unknown[0] if unknown else ""
        raise SpecError(f"--to: unknown target {name!r}", f"one of {', '.join(TARGETS)}{nearest(name, TARGETS)}")
    return names


def _trainer_of(plan: Plan) -> TrainerTarget:
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


RANK, RUN, LIST = "rank_trials.py", "run_trials.sh", "trials.json"


_STEPS = {"torchtitan": " --training.steps 20"}
"""Options that end a run soon."""


@record
class ShortRun:
    """One layout with the files that run it."""

    folder: str
    plan: Plan
    bundle: Bundle
    command: str
    """The command of the short run, in the trial's folder."""


def trials_of(
    plans: Sequence[Plan], to: str | Iterable[str], image: str | None, force: bool = False
) -> tuple[list[ShortRun], list[str]]:
    """The trials of a plan, which comes first, and of its alternatives; and notes on those that the target cannot run.

    Raises SpecError where a target has nothing to start.
    """
    trials: list[ShortRun] = []
    notes: list[str] = []
    for number, plan in enumerate(plans):
        try:
            bundle = bundle_of(plan, to, image, force)
        except Inexpressible as error:
            if not number:
                raise
            notes.append(f"{plan.parallelism} is no trial: {error.message}")
            continue
        command = bundle.first_run or _short_run(bundle)
        if not command:
            raise SpecError(
                f"--trials: {bundle.targets[0]} starts nothing by itself", "your own script trains: time it"
            )
        trials.append(ShortRun(f"trial-{number}", plan, bundle, command))
    return trials, notes


def _short_run(bundle: Bundle) -> str:
    """The launcher with a few steps, for a target whose files name no first run; nothing where none starts."""
    if LAUNCH not in {file.name for file in bundle.files}:
        return ""
    return f"bash {LAUNCH}{_STEPS.get(bundle.targets[0], '')}"


def write_trials(trials: Sequence[ShortRun], folder: Path, force: bool) -> list[Path]:
    """Write every trial into its folder, and beside them what runs and ranks them. The paths of all files."""
    rows = json.dumps({"trials": [_row(trial) for trial in trials]}, indent=2) + "\n"
    together = [
        *(file for trial in trials for file in trial.bundle.folder_files(trial.folder)),
        FolderFile(LIST, rows.encode()),
        FolderFile(RANK, node_check({}).encode(), executable=True),
        FolderFile(RUN, rendered("run_trials.sh", trials=trials, rank=RANK).encode(), executable=True),
    ]
    return write_folder(folder, together, force)


def _row(trial: ShortRun) -> Fields:
    """The facts about a trial that the ranking script needs."""
    return {"folder": trial.folder, **promised(trial.plan), "first_run": trial.command}
