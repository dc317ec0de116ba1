"""A plan for DeepSpeed: its JSON configuration, and a PipelineModule with the plan's stages."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.environment import node_environment
from planner.export.imported_run import ConfigFile, ImportedRun, json_of, positive_number
from planner.export.keyed_settings import beginnings, dialect, flat, refused_settings
from planner.export.named_models import exported_model
from planner.export.refusal import Objections, broken_rules, hint_for, notes_on_price
from planner.export.run_settings import FIRST_RUN_STEPS, run_settings
from planner.export.stages import VirtualStage, all_full, check_modules, check_recompute, virtual_stages
from planner.export.trainer_files import (
    ExportFile,
    LaunchCommand,
    Placeholder,
    Requirement,
    TrainerFiles,
    as_json,
    header,
    promise,
    rendered,
    settings,
)
from planner.trainers.rules.named import DEEPSPEED_MODEL_RULES, DEEPSPEED_RULES

TRAINING_FILE = "planned_training.py"
PLACEHOLDERS = (
    Placeholder("MODEL", "folder with the model's config.json, or its name at Hugging Face", in_first_run=True),
    Placeholder("DATA_PATH", "file of token ids: one dimension, as numpy.save writes it", kind="file"),
    Placeholder("CHECKPOINTS", "folder for checkpoints, which all nodes share", kind="new folder"),
)
REQUIREMENTS = (
    Requirement("torch", "everything", "torch", "2.4"),
    Requirement("deepspeed", "the trainer", "deepspeed", "0.16", "pip install deepspeed"),
    Requirement("transformers", "the model", "transformers", "4.50", "pip install transformers"),
    Requirement("accelerate", "transformers beside DeepSpeed", hint="pip install accelerate"),
    Requirement("numpy", "the data", hint="pip install numpy"),
)
LOG = "in the log: seconds of each step, and the first rank's peak in GiB (max_memory_allocated)"

WRITTEN_FOR = "DeepSpeed 0.19"
CONFIG_FILE, PIPELINE_FILE = "ds_config.json", "planned_pipeline.py"


def export_deepspeed(plan: Plan) -> TrainerFiles:
    """`ds_config.json` for `deepspeed.initialize`, and a program that calls it on a model of Hugging Face's.

    At pp > 1 a module cuts the list of layers that the user's own script makes, and no program is written.
    Raises Inexpressible for what DeepSpeed cannot run.
    """
    stages = virtual_stages(plan.best, plan.model.spec.num_hidden_layers)
    _check_expressible(plan, stages)
    files = [ExportFile(CONFIG_FILE, as_json(deepspeed_config(plan)))]
    run = run_settings(plan)
    notes = [*run.notes, *notes_on_price(plan)]
    if plan.parallelism.pp > 1:
        return _pipeline_files(plan, stages, files, notes)
    notes.append(f"{TRAINING_FILE} evaluates nothing; DeepSpeed saves while training waits")
    if plan.parallelism.tp > 1:
        notes.append(
            f"a script of your own passes {CONFIG_FILE} without train_batch_size, which counts ranks of TP, too"
        )
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
        placeholders=PLACEHOLDERS,
        requirements=REQUIREMENTS,
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
    return TrainerFiles(WRITTEN_FOR, tuple(files), command, tuple(notes))


def _pipeline_files(
    plan: Plan, stages: tuple[VirtualStage, ...], files: list[ExportFile], notes: list[str]
) -> TrainerFiles:
    """A module with a pipeline, for the user's own script."""
    run = run_settings(plan)
    notes += [
        f"{PIPELINE_FILE}: pipeline([embedding, *layers, final_norm, head]) is the model to pass with it",
        f"your script passes {CONFIG_FILE} to deepspeed.initialize, with its own layers, data and tokenizer",
        "your script calls engine.load_checkpoint(FOLDER) first, and engine.save_checkpoint(FOLDER) every "
        f"{run.save_interval_steps} steps",
        f"export DEEPSPEED_TIMEOUT={run.init_timeout_minutes}: minutes that ranks wait for each other",
    ]
    pipeline = rendered(
        "deepspeed_pipeline.py",
        layout=plan.parallelism,
        num_layers=stages[-1].last_layer,
        boundaries=_boundaries(stages),
    )
    files.append(ExportFile(PIPELINE_FILE, header(plan, WRITTEN_FOR, notes) + pipeline))
    return TrainerFiles(WRITTEN_FOR, tuple(files), None, tuple(notes))


def _check_expressible(plan: Plan, stages: tuple[VirtualStage, ...]) -> None:
    """Raise Inexpressible, with every reason, where DeepSpeed cannot run the plan."""
    layout = plan.parallelism
    rules = (*DEEPSPEED_MODEL_RULES, *DEEPSPEED_RULES)
    hint = hint_for(plan, "deepspeed", DEEPSPEED_MODEL_RULES)
    objections = Objections("deepspeed", broken_rules(rules, plan), hint)
    check_recompute(plan.best, stages, objections)
    objections.when(layout.cp > 1, "cp", f"it has no context parallelism like the plan's (cp {layout.cp})")
    objections.when(layout.schedule not in ("1f1b", "none"), "schedule", f"{layout.schedule}: its pipeline runs 1f1b")
    objections.when(
        layout.zero_stage > 1 and layout.pp > 1, "zero_stage", f"ZeRO-{layout.zero_stage} does not go with its pipeline"
    )
    objections.when(
        layout.zero_stage == 0 and layout.dp > 1 and plan.runtime_spec.gradient_bytes == 4,
        "zero_stage",
        "without ZeRO it sums gradients of 16 bits in 16 bits: --zero-stage 1 sums them in fp32",
    )
    objections.when(layout.sequence_parallel and layout.tp > 1, "sequence_parallel", "it splits no sequence beside tp")
    objections.when(
        plan.training.dtype not in ("bf16", "fp16"), "dtype", f"it computes in bf16 or fp16, not {plan.training.dtype}"
    )
    objections.when(layout.recompute == "selective", "recompute_selective", "it recomputes whole layers")
    objections.when(
        layout.recompute == "full" and not all_full(plan.best), "recompute_some_layers", "it recomputes all or none"
    )
    check_modules(stages, objections)
    share = plan.runtime_spec.optimizer_offload_fraction
    objections.when(
        0 < share < 1 and layout.zero_stage < 3,
        "optimizer_offload",
        f"below ZeRO-3 it offloads all or none, not {share:g}",
    )
    objections.raise_any()


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's configuration: batch, precision, ZeRO, tensor parallelism without a pipeline."""
    layout, training, runtime, run = plan.parallelism, plan.training, plan.runtime_spec, run_settings(plan)
    optimizer = run.optimizer
    is_linear = optimizer.decay_style == "linear"
    return settings(
        "deepspeed",
        layout=layout,
        training=training,
        runtime=runtime,
        run=run,
        optimizer=optimizer,
        model=plan.model.spec,
        bf16=training.dtype == "bf16",
        fp16=training.dtype != "bf16",
        accumulated="fp32" if runtime.gradient_bytes == 4 else training.dtype,
        # one rank shards nothing, and sums in fp32 under ZeRO alone
        stage=layout.zero_stage or int(runtime.gradient_bytes == 4),
        overlaps=runtime.gradient_overlap_fraction > 0,
        offloads=runtime.optimizer_offload_fraction > 0 and layout.zero_stage > 0,
        curve="WarmupDecayLR" if is_linear else "WarmupCosineLR",
        linear_rate=optimizer.learning_rate if is_linear else None,
        cosine_end=None if is_linear else round(optimizer.min_learning_rate / optimizer.learning_rate, 6),
        recomputes=layout.recompute == "full",
        splits_tensors=layout.pp == 1 and layout.tp > 1,
    )


def _boundaries(stages: tuple[VirtualStage, ...]) -> list[int]:
    """The first item of each stage in the list [embedding, *layers, final norm, head], and the list's length."""
    num_layers = stages[-1].last_layer
    return [0, *(1 + stage.first_layer for stage in stages[1:]), num_layers + 3]


DEEPSPEED_RUNTIME = "deepspeed"
"""The trainer that is DeepSpeed around a model of torch."""
_ADAMS = ("adam", "adamw", "fusedadam", "deepspeedcpuadam", "auto", "")
_ZERO_READ = {
    "stage", "overlap_comm", "offload_optimizer", "offload_param", "zero_hpz_partition_size", "cpu_offload",
}  # fmt: skip
_ZERO_HARMLESS = beginnings(
    "allgather_ reduce_ contiguous round_robin sub_group stage3_ load_from elastic ignore_unused cpu_offload_ "
    "grad_hooks memory_efficient use_multi_rank legacy override max_ param_persist mics_ gather_16bit"
)
_OFFLOAD = {"device", "ratio", "pin_memory", "nvme_path", "buffer_count", "buffer_size", "fast_init", "max_in_cpu",
            "pipeline", "pipeline_read", "pipeline_write"}  # fmt: skip
_AUTO = (None, "auto")


@dataclass(slots=True)
class DeepSpeedConfig:
    """A configuration, as far as a run needs it; None for what is left to others or to `auto`."""

    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    dtype: str | None = None
    layout: dict[str, Any] = field(default_factory=dict)
    features: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)


def parse_json(text: str) -> dict[str, Any]:
    """The object of a `ds_config.json`; words that a script replaces (`CONFIG_BATCH_SIZE`) are null."""
    quoted = re.sub(r"(:\s*|\[\s*|,\s*)([A-Z][A-Z0-9_]{2,})(?=\s*[,}\]])", r"\1null", text)
    config = json_of(quoted, "give the file that is passed as --deepspeed_config")
    if not isinstance(config, dict):
        raise SpecError("the file holds no JSON object", "give the file that is passed as --deepspeed_config")
    return config


def read_config(config: dict[str, Any]) -> DeepSpeedConfig:
    """The parts of a configuration that a run needs. Raises SpecError for values that DeepSpeed would not take."""
    zero = section(config, "zero_optimization")
    found = DeepSpeedConfig(
        train_batch_size=positive_number(config, "train_batch_size", "write a number or auto", _AUTO),
        micro_batch_size=positive_number(config, "train_micro_batch_size_per_gpu", "write a number or auto", _AUTO),
        accumulation_steps=positive_number(config, "gradient_accumulation_steps", "write a number or auto", _AUTO),
    )
    for dtype in ("fp16", "bf16", "bfloat16"):
        if section(config, dtype).get("enabled") is True:
            found.dtype = "fp16" if dtype == "fp16" else "bf16"
    found.layout = _layout(config, zero)
    stage = found.layout["zero_stage"]
    found.features = {
        "overlap_grad_reduce": bool(zero.get("overlap_comm", stage == 3)),
        "optimizer_offload": _offloaded(zero),
    }
    if section(config, "data_types").get("grad_accum_dtype") == "bf16":
        found.features["bf16_gradients"] = True
    _sort(config, zero, found)
    return found


def section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of the configuration; empty where it is missing. SpecError for a value that is none."""
    part = config.get(name)
    if part is None:
        return {}
    if isinstance(part, bool):
        return {"enabled": part}
    if not isinstance(part, dict):
        raise SpecError(f"{name}: {part!r:.60} is no object", "write { … }")
    return part


def _layout(config: dict[str, Any], zero: dict[str, Any]) -> dict[str, Any]:
    """Sharding, tensor and sequence parallelism, and recompute."""
    stage = zero.get("stage", 0)
    stage = 0 if stage in _AUTO else stage
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise SpecError(f"zero_optimization: stage: {stage!r:.60} is none", "one of 0, 1, 2, 3")
    layout: dict[str, Any] = {"zero_stage": stage, "sequence_parallel": False}
    tensor = section(config, "tensor_parallel")
    tp = tensor.get("autotp_size") or section(tensor, "tp").get("tp_size") or 1
    if not isinstance(tp, int):
        raise SpecError(f"tensor_parallel: autotp_size: {tp!r:.60} is no number", "write a number")
    layout["tp"] = tp
    if isinstance(cp := config.get("sequence_parallel_size"), int) and cp > 1:
        layout["cp"] = cp
    checkpointing = section(config, "activation_checkpointing")
    if any(value for name, value in checkpointing.items() if name != "profile"):
        layout["recompute"] = "full"
    return layout


def _offloaded(zero: dict[str, Any]) -> float:
    """The share of the optimizer's states that stays on the host; all of them unless a ratio is given."""
    offload = section(zero, "offload_optimizer")
    ratio = offload.get("ratio", 1.0)
    if not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
        raise SpecError(f"offload_optimizer: ratio: {ratio!r:.60} is no share", "write a number between 0 and 1")
    return float(ratio) if offload.get("device") == "cpu" or zero.get("cpu_offload") is True else 0.0


def _sort(config: dict[str, Any], zero: dict[str, Any], found: DeepSpeedConfig) -> None:
    """Note every key that is not read as ignored where it is known to be harmless, else as unknown."""
    row = dialect("deepspeed")
    for key, read in (("offload_optimizer", ("none", "cpu")), ("offload_param", ("none",))):
        if section(zero, key).get("device", "none") not in (*read, None):
            found.unknown[f"zero_optimization.{key}"] = json.dumps(zero[key])
    for key, value in zero.items():
        inner = value if isinstance(value, dict) and key.startswith("offload") else {}
        others = inner.keys() - _OFFLOAD
        found.unknown |= {f"zero_optimization.{key}.{name}": str(inner[name]) for name in sorted(others)}
        if key not in _ZERO_READ and not _ZERO_HARMLESS.match(key):
            found.unknown[f"zero_optimization.{key}"] = json.dumps(value)
    if zero.get("stage") == 3 and zero.get("zero_hpz_partition_size", 1) not in (1, "auto"):
        told = f"{zero['zero_hpz_partition_size']}, whose second copy of the weights in 16 bits is not priced"
        found.unknown["zero_optimization.zero_hpz_partition_size"] = told
    kind = section(config, "optimizer").get("type")
    if str(kind or "").lower() not in _ADAMS:
        found.unknown["optimizer.type"] = str(kind)
    for key, value in config.items():
        if key not in row.read:
            is_off = isinstance(value, dict) and value.get("enabled") is False
            (found.ignored if row.is_harmless(key) or is_off else found.unknown)[key] = json.dumps(value)


_PIPELINE = "planned_pipeline.py"


def read_deepspeed(config: ConfigFile) -> ImportedRun:
    """The part of a run that `ds_config.json` holds. Raises SpecError where it is no JSON object."""
    data = parse_json(config.text)
    found, row = read_config(data), dialect("deepspeed")
    pipeline = config.beside(_PIPELINE) or ""
    layout = {"micro_batch_size": found.micro_batch_size or 1, **found.layout, **_pipeline(pipeline)}
    imported = ImportedRun(
        "deepspeed",
        {
            "model": exported_model(pipeline),
            "num_gpus": None,
            "runtime": DEEPSPEED_RUNTIME,
            "seq_length": None,
            "global_batch_size": found.train_batch_size,
            "dtype": found.dtype or "bf16",
            "parallelism": layout,
            "features": found.features,
        },
        ignored=found.ignored,
        unknown=found.unknown,
        assumed={path: str(value) for path, value in row.left_out(flat(data)).items()},
        documented=row.documented,
        refused=refused_settings(data, "deepspeed"),
    )
    imported.notes.append("a DeepSpeed configuration names no model, sequence length or pipeline: add them as options")
    if found.dtype is None:
        imported.notes.append("neither bf16 nor fp16 is enabled, so that it trains in fp32: priced as bf16")
    steps = found.accumulation_steps or 1
    if found.train_batch_size and found.micro_batch_size:
        dp, rest = divmod(found.train_batch_size, found.micro_batch_size * steps)
        if rest:
            imported.refused.append(f"train_batch_size is no multiple of {found.micro_batch_size} × {steps}")
        imported.notes.append(
            f"{found.train_batch_size} sequences, micro-batches of {found.micro_batch_size}, {steps} a step: dp {dp}"
        )
        layout["dp"] = max(1, dp)
        imported.run["num_gpus"] = layout["dp"] * layout["tp"] * layout.get("pp", 1) * layout.get("cp", 1)
    elif found.micro_batch_size:
        imported.microbatches_per_rank = steps
    return imported


def _pipeline(source: str) -> dict[str, Any]:
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
