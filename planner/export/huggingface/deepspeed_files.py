"""A plan for DeepSpeed: its JSON configuration, and a PipelineModule with the plan's stages."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import pairwise

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.imported_run import ConfigFile, ImportedRun, new_run, object_of, positive_number
from planner.export.keyed_settings import beginnings, dialect, flat, is_off, readings, refused_settings
from planner.export.launchers import node_environment
from planner.export.named_models import exported_model
from planner.export.refusal import notes_on_price
from planner.export.run_settings import FIRST_RUN_STEPS, run_settings
from planner.export.stages import Stages, check_expressible, virtual_stages
from planner.export.trainer_files import (
    ExportFile,
    LaunchCommand,
    TrainerFiles,
    as_json,
    header,
    notes_of,
    placeholders_of,
    promise,
    rendered,
    requirements_of,
    settings,
)
from planner.specs.base import Fields, Said, Texts
from planner.trainers.rules.rule_rows import rules_of

TRAINING_FILE = "planned_training.py"
LOG = "in the log: seconds of each step, and the first rank's peak in GiB (max_memory_allocated)"

WRITTEN_FOR = "DeepSpeed 0.19"
CONFIG_FILE, PIPELINE_FILE = "ds_config.json", "planned_pipeline.py"


def export_deepspeed(plan: Plan) -> TrainerFiles:
    """`ds_config.json` for `deepspeed.initialize`, and a program that calls it on a model of Hugging Face's.

    At pp > 1 a module cuts the list of layers that the user's own script makes, and no program is written.
    Raises Inexpressible for what DeepSpeed cannot run.
    """
    stages = virtual_stages(plan)
    of_layout = rules_of("layout deepspeed", runtime=plan.runtime_spec)
    check_expressible(plan, "deepspeed", rules_of("export deepspeed"), of_layout, stages)
    files = [ExportFile(CONFIG_FILE, as_json(deepspeed_config(plan)))]
    run = run_settings(plan)
    notes = (*run.notes, *notes_on_price(plan), *notes_of("deepspeed", plan, run=run))
    if plan.parallelism.pp > 1:
        return _pipeline_files(plan, stages, files, notes)
    comments = header(plan, WRITTEN_FOR, notes)
    training = rendered(
        "deepspeed_training.py",
        layout=plan.parallelism,
        training=plan.training,
        run=run,
        first_run_steps=FIRST_RUN_STEPS,
        config_file=CONFIG_FILE,
        dtype="bfloat16" if plan.training.dtype == "bf16" else "float16",
    )
    files.append(ExportFile(TRAINING_FILE, comments + training))
    command = LaunchCommand(
        program=f'"$PLAN_DIR"/{TRAINING_FILE}',
        arguments={},
        placeholders=placeholders_of("deepspeed"),
        requirements=requirements_of("deepspeed", plan),
        promise=promise(plan, LOG),
        environment={
            "DEEPSPEED_TIMEOUT": str(run.init_timeout_minutes),
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            **node_environment(plan),
        },
        setup=('export MOCK="${MOCK:-0}"',),
        comments=comments,
        files=tuple(files),
    )
    return TrainerFiles(WRITTEN_FOR, tuple(files), command, notes)


def _pipeline_files(plan: Plan, stages: Stages, files: list[ExportFile], notes: Texts) -> TrainerFiles:
    """A module with a pipeline, for the user's own script."""
    pipeline = rendered(
        "deepspeed_pipeline.py",
        layout=plan.parallelism,
        num_layers=stages[-1].last_layer,
        boundaries=_boundaries(stages),
    )
    files.append(ExportFile(PIPELINE_FILE, header(plan, WRITTEN_FOR, notes) + pipeline))
    return TrainerFiles(WRITTEN_FOR, tuple(files), None, notes)


def deepspeed_config(plan: Plan) -> Fields:
    """DeepSpeed's configuration: batch, precision, ZeRO, tensor parallelism without a pipeline."""
    run = run_settings(plan)
    return settings("deepspeed", plan, run=run, optimizer=run.optimizer)


def _boundaries(stages: Stages) -> list[int]:
    """The first item of each stage in the list [embedding, *layers, final norm, head], and the list's length."""
    num_layers = stages[-1].last_layer
    return [0, *(1 + stage.first_layer for stage in stages[1:]), num_layers + 3]


DEEPSPEED_RUNTIME = "deepspeed"
"""The trainer that is DeepSpeed around a model of torch."""
_ADAMS = ("adam", "adamw", "fusedadam", "deepspeedcpuadam", "auto", "")
_AUTO = (None, "auto")


def apply_deepspeed(imported: ImportedRun, config: Fields) -> None:
    """Put a configuration into a run; what it leaves to `auto` stays as the trainer says it.

    Raises SpecError for values that DeepSpeed would not take.
    """
    run = imported.run
    positive = partial(positive_number, config, hint="write a number or auto", unsaid=_AUTO)
    known = {"run": run, "layout": run["parallelism"], "steps": imported.microbatches_per_rank}
    imported.put(readings("deepspeed", config, section=section, positive=positive, **known))
    _sort(config, imported)


def section(config: Said, name: str) -> Fields:
    """A part of the configuration; empty where it is missing. SpecError for a value that is none."""
    part = config.get(name)
    if part is None:
        return {}
    if isinstance(part, bool):
        return {"enabled": part}
    if not isinstance(part, dict):
        raise SpecError(f"{name}: {part!r:.60} is no object", "write { … }")
    return part


def name_sections(imported: ImportedRun, config: Fields) -> None:
    """Note what the sections of a configuration hold and is not read."""
    zero = section(config, "zero_optimization")
    for key, is_read in (("offload_optimizer", True), ("offload_param", zero.get("stage") == 3)):
        if section(zero, key).get("device") not in (None, "none", *["cpu"] * is_read):
            imported.unknown[f"zero_optimization.{key}"] = json.dumps(zero[key])
    if zero.get("stage") == 3 and zero.get("zero_hpz_partition_size", 1) not in (1, "auto"):
        told = f"{zero['zero_hpz_partition_size']}, whose second copy of the weights in 16 bits is not priced"
        imported.unknown["zero_optimization.zero_hpz_partition_size"] = told
    for name, words in dialect("deepspeed").renamed.items():
        for path, value in flat(section(config, name)).items():
            if not is_off(value) and beginnings(words).match(path) is None:
                imported.unknown[f"{name}.{path}"] = str(value)


def _sort(config: Fields, imported: ImportedRun) -> None:
    """Note every key that is not read as ignored where it is known to be harmless, else as unknown."""
    name_sections(imported, config)
    kind = section(config, "optimizer").get("type")
    if str(kind or "").lower() not in _ADAMS:
        imported.unknown["optimizer.type"] = str(kind)
    off = {key for key, value in config.items() if isinstance(value, dict) and value.get("enabled") is False}
    # the compiler splits sequences
    is_autosp = "autosp" in (section(config, "compile").get("passes") or ())
    shown = {key: json.dumps(value) for key, value in config.items() if key != "compile" or not is_autosp}
    dialect("deepspeed").sort(imported, shown, (), lambda key, value: key in off)


_PIPELINE = "planned_pipeline.py"


def read_deepspeed(config: ConfigFile) -> ImportedRun:
    """The part of a run that `ds_config.json` holds. Raises SpecError where it is no JSON object."""
    data, row = object_of(config.text), dialect("deepspeed")
    pipeline = config.beside(_PIPELINE) or ""
    imported = new_run("deepspeed", DEEPSPEED_RUNTIME, model=exported_model(pipeline), dtype=None)
    apply_deepspeed(imported, data)
    layout = imported.run["parallelism"]
    layout |= _pipeline(pipeline)
    row.assume(imported, row.left_out(flat(data)))
    imported.refused = refused_settings(data, "deepspeed")
    known = {"dtype": imported.run["dtype"], "batch": imported.run["global_batch_size"], "layout": layout}
    imported.put(readings("deepspeed-alone", data, section=section, steps=imported.microbatches_per_rank or 1, **known))
    return imported


def _pipeline(source: str) -> Fields:
    """The grid and the stages in the module that plan export writes beside the configuration; nothing without one."""
    grid = re.search(r"num_pp=(\d{1,4}), num_mp=(\d{1,4}), num_dp=\d+", source)
    bounds = re.search(r"^BOUNDARIES = \[([\d, ]+)\]$", source, re.MULTILINE)
    if grid is None or bounds is None:
        return {}
    items = [int(item) for item in bounds[1].split(",")]
    counts = [last - first for first, last in pairwise(items)]
    if len(counts) != int(grid[1]) or len(counts) < 2:
        return {}
    # the embedding is the first item, the final norm and the head are the last two
    counts[0] -= 1
    counts[-1] -= 2
    return {"pp": int(grid[1]), "tp": int(grid[2]), "layers_per_stage": counts, "schedule": "1f1b"}
