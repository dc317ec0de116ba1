"""A plan for Hugging Face's trainers: a folder that TRL, Accelerate, DeepSpeed and peft train from as it is."""

from __future__ import annotations

import json
from typing import Any

import yaml

from planner.answer import Plan
from planner.export.environment import node_environment
from planner.export.huggingface.adapter_files import ADAPTER_FILE, QUANTIZATION_FILE, lora_config, quantization_config
from planner.export.huggingface.trl_arguments import (
    ACCELERATE_FILE,
    ARGUMENTS_FILE,
    DEEPSPEED_FILE,
    accelerate_config,
    deepspeed_config,
    notes_on_arguments,
    offloads_all,
    optimizer_name,
    repository_of,
    sharding_of,
    training_arguments,
)
from planner.export.launch.launchers import nodes_of
from planner.export.refusal import Objections, broken_rules, hint_for
from planner.export.run_settings import FIRST_RUN_STEPS
from planner.export.stages import all_full
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
from planner.trainers.rules.common import BF16_ONLY
from planner.trainers.rules.hf_model import HF_MODEL_RULES
from planner.trainers.rules.of_trainer import rules_for

TRAINING_FILE = "train.py"
LOG = "in the log: seconds of each step, and the first rank's peak in GiB (max_memory_allocated)"


def placeholders_of(plan: Plan) -> tuple[Placeholder, ...]:
    """The values that the user fills in."""
    repository = repository_of(plan.model.spec) or ""
    says = "the model: its repository at Hugging Face, or a folder with its config.json, weights and tokenizer"
    return (
        Placeholder("MODEL", says, default=repository, in_first_run=True),
        Placeholder("DATASET", "the data: its repository at Hugging Face, or a .jsonl or .parquet file"),
        Placeholder("CHECKPOINTS", "folder for checkpoints, which all nodes share", kind="new folder"),
    )


def requirements_of(plan: Plan) -> tuple[Requirement, ...]:
    """The packages that every node must have."""
    adapters, attention = plan.training.adapters, plan.runtime_spec.attention_kernel
    needs = [
        Requirement("torch", "everything", "torch", "2.6"),
        Requirement("transformers", "the model", "transformers", "5.0", "pip install transformers"),
        Requirement("trl", "the trainer", "trl", "1.0", "pip install trl"),
        Requirement("accelerate", "the launch", "accelerate", "1.7", "pip install accelerate"),
        Requirement("datasets", "the data", hint="pip install datasets"),
    ]
    if adapters is not None:
        needs.append(Requirement("peft", "adapters", "peft", "0.17", "pip install peft"))
        if adapters.base_bits < 16:
            needs.append(
                Requirement("bitsandbytes", "packed weights", "bitsandbytes", "0.45", "pip install bitsandbytes")
            )
    if attention in ("flash", "flash1"):
        needs.append(Requirement("flash_attn", "attention", hint="pip install flash-attn --no-build-isolation"))
    return tuple(needs)


def training_source(plan: Plan) -> str:
    """The program, which `accelerate launch` starts on every rank, or Python on one."""
    adapters = plan.training.adapters
    return rendered(
        "trl_training.py",
        adapters=adapters is not None,
        packed=adapters is not None and adapters.base_bits < 16,
        kind="DPO" if plan.training.objective.name == "dpo" else "SFT",
        first_run_steps=FIRST_RUN_STEPS,
        arguments_file=ARGUMENTS_FILE,
        adapter_file=ADAPTER_FILE,
        quantization_file=QUANTIZATION_FILE,
    )


WRITTEN_FOR = "transformers 5, TRL 1, Accelerate 1 and peft 0.21"


def export_hf(plan: Plan) -> TrainerFiles:
    """Training arguments, a program that hands them to TRL, and what Accelerate, DeepSpeed and peft are told.

    Raises Inexpressible for what they cannot run.
    """
    _check_expressible(plan)
    notes = [*notes_on_arguments(plan), *notes_on_price(plan)]
    comments = header(plan, WRITTEN_FOR, notes)
    files = (
        ExportFile(ARGUMENTS_FILE, comments + _yaml(training_arguments(plan))),
        ExportFile(TRAINING_FILE, comments + training_source(plan)),
        *_adapter_files(plan),
        *_launch_files(plan, comments),
    )
    command = LaunchCommand(
        program=_program(plan),
        starts_ranks=True,
        arguments={},
        placeholders=placeholders_of(plan),
        requirements=requirements_of(plan),
        promise=promise(plan, LOG),
        environment={
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "TOKENIZERS_PARALLELISM": "false",
            **node_environment(plan),
        },
        setup=('export MOCK="${MOCK:-0}"',),
        comments=comments,
        files=files,
    )
    return TrainerFiles(WRITTEN_FOR, files, command, tuple(notes))


def _check_expressible(plan: Plan) -> None:
    """Raise Inexpressible, with every reason, where no files of these packages say what the plan says."""
    layout, runtime, adapters = plan.parallelism, plan.runtime_spec, plan.training.adapters
    hint = hint_for(plan, "hf", HF_MODEL_RULES)
    objections = Objections("hf", broken_rules((*HF_MODEL_RULES, BF16_ONLY, *rules_for(runtime)), plan), hint)
    objections.when(layout.recompute == "selective", "recompute_selective", "gradient checkpointing is of whole layers")
    objections.when(
        layout.recompute == "full" and not all_full(plan.best), "recompute_some_layers", "it recomputes all or none"
    )
    name = plan.best.recipe.get("optimizer", "adamw")
    objections.when(optimizer_name(plan.best.recipe) is None, "optimizer", f"transformers has no optim for {name}")
    sharded = sharding_of(plan) == "fsdp2" or layout.zero_stage == 3
    objections.when(
        adapters is not None and adapters.base_bits == 8 and sharded,
        "base_bits",
        "bitsandbytes' weights of 8 bits are not sharded: --base-bits 4, or --zero-stage 0",
    )
    share = runtime.optimizer_offload_fraction
    objections.when(
        0 < share < 1 and layout.zero_stage < 3 and not offloads_all(plan),
        "optimizer_offload",
        f"below ZeRO-3 DeepSpeed offloads all or none, not {share:g}",
    )
    objections.when(
        sharding_of(plan) == "deepspeed" and layout.shard_size not in (1, layout.dp),
        "shard_size",
        f"DeepSpeed shards over all {layout.dp} ranks, not {layout.shard_size}",
    )
    _, gpus, last = nodes_of(plan)
    objections.when(gpus != last, "num_gpus", f"accelerate launch starts equally many ranks on each node, not {last}")
    objections.raise_any()


def _adapter_files(plan: Plan) -> tuple[ExportFile, ...]:
    adapters = plan.training.adapters
    if adapters is None:
        return ()
    packed = quantization_config(adapters, sharding_of(plan) == "fsdp2" or plan.parallelism.zero_stage == 3)
    found = ((ADAPTER_FILE, lora_config(adapters, plan.model.spec)), (QUANTIZATION_FILE, packed))
    return tuple(ExportFile(name, _json(data)) for name, data in found if data is not None)


def _launch_files(plan: Plan, comments: str) -> tuple[ExportFile, ...]:
    """Accelerate's configuration, and DeepSpeed's; one GPU by itself needs neither."""
    sharding = sharding_of(plan)
    if sharding == "none":
        return ()
    accelerate = ExportFile(ACCELERATE_FILE, comments + _yaml(accelerate_config(plan)))
    return (
        accelerate,
        *([ExportFile(DEEPSPEED_FILE, _json(deepspeed_config(plan)))] if sharding == "deepspeed" else []),
    )


def _program(plan: Plan) -> str:
    """Shell text that starts the ranks of a node; NODE_RANK and MASTER_ADDR are the launcher's."""
    script = f'"$PLAN_DIR"/{TRAINING_FILE}'
    sharding, (nodes, *_) = sharding_of(plan), nodes_of(plan)
    if sharding == "none":
        return f"python {script}"
    words = [f'accelerate launch --config_file "$PLAN_DIR"/{ACCELERATE_FILE}']
    if sharding == "deepspeed":
        words.append(f'--deepspeed_config_file "$PLAN_DIR"/{DEEPSPEED_FILE}')
    if nodes > 1:
        rank = '"${NODE_RANK:-${SLURM_NODEID:-0}}"'
        words.append(f'--machine_rank {rank} --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT"')
    return " ".join([*words, script])


def _yaml(data: dict[str, Any]) -> str:
    return yaml.safe_dump(data, sort_keys=False, width=118, allow_unicode=True)


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"
