"""A plan for DeepSpeed: its JSON configuration, and a PipelineModule with the plan's stages."""

from __future__ import annotations

import json
from typing import Any

from planner.answer import Plan
from planner.export.environment import node_environment
from planner.export.refusal import Objections, broken_rules, hint_for
from planner.export.run_settings import FIRST_RUN_STEPS, RunSettings, run_settings
from planner.export.stages import VirtualStage, all_full, check_recompute, virtual_stages
from planner.export.target_price import notes_on_price
from planner.export.templating import rendered
from planner.export.trainer_files import (
    ExportFile,
    LaunchCommand,
    Placeholder,
    Requirement,
    TrainerFiles,
    header,
    promise,
)
from planner.trainers.rules.huggingface import DEEPSPEED_MODEL_RULES, DEEPSPEED_RULES

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
    files = [ExportFile(CONFIG_FILE, json.dumps(deepspeed_config(plan), indent=2) + "\n")]
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
    objections.when(layout.sequence_parallel and layout.tp > 1, "sequence_parallel", "it splits no sequence beside tp")
    objections.when(
        plan.training.dtype not in ("bf16", "fp16"), "dtype", f"it computes in bf16 or fp16, not {plan.training.dtype}"
    )
    objections.when(layout.recompute == "selective", "recompute_selective", "it recomputes whole layers")
    objections.when(
        layout.recompute == "full" and not all_full(plan.best), "recompute_some_layers", "it recomputes all or none"
    )
    objections.when(
        any(stage.is_empty for stage in stages), "empty_stage", "a stage without a module has nothing to run"
    )
    share = plan.runtime_spec.optimizer_offload_fraction
    objections.when(
        0 < share < 1 and layout.zero_stage < 3,
        "optimizer_offload",
        f"below ZeRO-3 it offloads all or none, not {share:g}",
    )
    objections.raise_any()


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's configuration: batch, precision, ZeRO, tensor parallelism without a pipeline."""
    layout, training, runtime = plan.parallelism, plan.training, plan.runtime_spec
    run = run_settings(plan)
    optimizer = run.optimizer
    overlaps = runtime.gradient_overlap_fraction > 0
    data: dict[str, Any] = {
        "train_batch_size": training.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches,
        "gradient_clipping": optimizer.clip_grad,
        "steps_per_print": 1,
        "bf16" if training.dtype == "bf16" else "fp16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32" if runtime.gradient_bytes == 4 else training.dtype},
        "zero_optimization": {"stage": layout.zero_stage, "overlap_comm": overlaps},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimizer.learning_rate,
                "betas": [optimizer.beta1, optimizer.beta2],
                "eps": optimizer.epsilon,
                "weight_decay": optimizer.weight_decay,
            },
        },
        "scheduler": _scheduler(run),
    }
    if runtime.optimizer_offload_fraction > 0 and layout.zero_stage > 0:
        offload = {"device": "cpu", "pin_memory": True, "ratio": runtime.optimizer_offload_fraction}
        data["zero_optimization"]["offload_optimizer"] = offload
    if layout.recompute == "full":
        data["activation_checkpointing"] = {"number_checkpoints": plan.model.spec.num_hidden_layers}
    if layout.pp == 1 and layout.tp > 1:
        data["tensor_parallel"] = {"autotp_size": layout.tp}
    return data


def _scheduler(run: RunSettings) -> dict[str, Any]:
    """The schedule of the learning rate; DeepSpeed's falls from the warm-up on, to a share of the highest or to 0."""
    steps = {"total_num_steps": run.num_steps, "warmup_num_steps": run.warmup_steps, "warmup_type": "linear"}
    optimizer = run.optimizer
    if optimizer.decay_style == "linear":
        return {"type": "WarmupDecayLR", "params": {**steps, "warmup_max_lr": optimizer.learning_rate}}
    least = optimizer.min_learning_rate / optimizer.learning_rate
    return {"type": "WarmupCosineLR", "params": {**steps, "cos_min_ratio": round(least, 6)}}


def _boundaries(stages: tuple[VirtualStage, ...]) -> list[int]:
    """The first item of each stage in the list [embedding, *layers, final norm, head], and the list's length."""
    num_layers = stages[-1].last_layer
    return [0, *(1 + stage.first_layer for stage in stages[1:]), num_layers + 3]
