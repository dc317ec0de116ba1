"""A plan for Hugging Face's trainers: a folder that TRL, Accelerate, DeepSpeed and peft train from as it is."""

from __future__ import annotations

import json
from typing import Any

import yaml

from planner.answer import Plan
from planner.export.common.environment import node_environment
from planner.export.common.header import header
from planner.export.common.promise import promise
from planner.export.common.recompute import all_full
from planner.export.common.refusal import Objections, broken_rules, hint_for
from planner.export.common.target_price import notes_on_price
from planner.export.common.trainer_files import ExportFile, LaunchCommand, TrainerFiles
from planner.export.huggingface.adapters import ADAPTER_FILE, QUANTIZATION_FILE, lora_config, quantization_config
from planner.export.huggingface.sharding import (
    ACCELERATE_FILE,
    DEEPSPEED_FILE,
    accelerate_config,
    deepspeed_config,
    offloads_all,
    sharding_of,
)
from planner.export.huggingface.training_arguments import (
    ARGUMENTS_FILE,
    notes_on_arguments,
    optimizer_name,
    training_arguments,
)
from planner.export.huggingface.training_source import (
    LOG,
    TRAINING_FILE,
    placeholders_of,
    requirements_of,
    training_source,
)
from planner.export.launch.nodes import nodes_of
from planner.trainers.rules.common import BF16_ONLY
from planner.trainers.rules.hf_model import HF_MODEL_RULES
from planner.trainers.rules.of_trainer import rules_for

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
