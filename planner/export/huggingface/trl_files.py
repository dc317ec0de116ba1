"""A plan for Hugging Face's trainers: a folder that TRL, Accelerate, DeepSpeed and peft train from as it is."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from planner.answer import Plan
from planner.export.huggingface.tuning_settings import (
    ACCELERATE_FILE,
    ADAPTER_FILE,
    OPTIMIZERS,
    QUANTIZATION_FILE,
    lora_config,
)
from planner.export.keyed_settings import table
from planner.export.launchers import node_environment, nodes_of
from planner.export.refusal import notes_on_price
from planner.export.run_settings import FIRST_RUN_STEPS, TUNING_RATE
from planner.export.stages import check_expressible
from planner.export.trainer_files import (
    ExportFile,
    LaunchCommand,
    TrainerFiles,
    as_json,
    as_yaml,
    header,
    notes_of,
    placeholders_of,
    promise,
    rendered,
    requirements_of,
    settings,
)
from planner.specs.base import Fields
from planner.specs.model import ModelSpec
from planner.trainers.rules.recipe import rules_for
from planner.trainers.rules.rule_rows import rules_of
from planner.trainers.spec import RuntimeSpec

_REPOSITORY = re.compile(r"config(?:\.json)? of ([\w.-]+/[\w.-]*\w)")


def repository_of(model: ModelSpec) -> str | None:
    """The repository whose configuration the model was read from; None where its source names none."""
    found = _REPOSITORY.search(" ".join(model.source.split()))
    return None if found is None else found[1]


def layer_class_of(model: ModelSpec) -> str | None:
    """The class of the model's decoder layers; None where only transformers knows it, which then says it itself."""
    repository = repository_of(model) or ""
    return next((name for part, name in table()["transformers"]["layers"].items() if re.search(part, repository)), None)


DEEPSPEED_FILE = "deepspeed.json"
Sharding = Literal["none", "ddp", "fsdp2", "deepspeed"]


def sharding_of(plan: Plan) -> Sharding:
    """The program that shards: DeepSpeed where the recipe says so or FSDP2 cannot, none on one GPU."""
    layout, runtime = plan.parallelism, plan.runtime_spec
    said = str(plan.best.recipe.get("sharding", ""))
    offloads = runtime.optimizer_offload_fraction > 0 and not said.startswith("fsdp")
    if "deepspeed" in said or offloads or layout.zero_stage == 1:
        return "deepspeed"
    if layout.num_gpus_used == 1:
        return "none"
    return "fsdp2" if layout.zero_stage >= 2 else "ddp"


def _names(plan: Plan) -> Fields:
    """The names that the settings of these packages and what objects to a plan know.

    Products are in bf16 beside weights that are not, in `mixed` precision: fp32 ones, those of adapters, or DeepSpeed's
    masters. Without, weights, gradients and moments are all in bf16, and FSDP2 must not widen them (Accelerate does so
    wherever mixed precision is on). `offloads_all`: FSDP2 keeps all three on the host between their uses.
    """
    runtime, sharding, (nodes, gpus, last) = plan.runtime_spec, sharding_of(plan), nodes_of(plan)
    return {
        "sharding": sharding, "nodes": nodes, "gpus": gpus, "last": last,
        "mixed": runtime.weight_bytes == 4 or plan.training.adapters is not None or sharding == "deepspeed",
        "offloads_all": runtime.optimizer_offload_fraction == 1 and sharding == "fsdp2",
        "optim": OPTIMIZERS.get(str(plan.best.recipe.get("optimizer", "adamw"))),
        "layer_class": layer_class_of(plan.model.spec),
        "attention": attention_name(runtime, plan.model.spec, plan.cluster.hardware.architecture),
    }  # fmt: skip


ARGUMENTS_FILE = "training_arguments.yaml"
ADAPTER_RATE = 10 * TUNING_RATE
"""Rate of adapters, as TRL's guide to peft has it."""
_ATTENTION = {"fastest": "flash_attention_3", "flash": "flash_attention_2", "flash1": "flash_attention_2"}


def attention_name(runtime: RuntimeSpec, model: ModelSpec, architecture: str = "hopper") -> str:
    """The value of `attn_implementation` for a runtime's attention; torch's own takes no soft caps and no sinks."""
    if not runtime.flash_attention:
        return "eager"
    if model.attention_sinks:
        # those that modeling_gpt_oss.py names; FlashAttention-3 has no kernels for Blackwell
        return "flash_attention_4" if architecture == "blackwell" else "kernels-community/vllm-flash-attn3"
    return _ATTENTION.get(runtime.for_model(model).attention_kernel, "sdpa")


def training_arguments(plan: Plan) -> Fields:
    """Fields of SFTConfig or DPOConfig, and of TrainingArguments."""
    rate = TUNING_RATE if plan.training.adapters is None else ADAPTER_RATE
    return settings("hf-arguments", plan, is_dpo=plan.training.objective.name == "dpo", rate=rate, **_names(plan))


TRAINING_FILE = "train.py"
LOG = "in the log: seconds of each step, and the first rank's peak in GiB (max_memory_allocated)"


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


WRITTEN_FOR = "transformers 5, TRL 1.16, Accelerate 1 and peft 0.21"


def export_hf(plan: Plan) -> TrainerFiles:
    """Training arguments, a program that hands them to TRL, and what Accelerate, DeepSpeed and peft are told.

    Raises Inexpressible for what they cannot run.
    """
    of_layout = (*rules_of("export half"), *rules_for(plan.runtime_spec))
    check_expressible(plan, "hf", rules_of("export hf"), of_layout, **_names(plan))
    notes = notes_of("hf", plan, full_rate=TUNING_RATE, adapter_rate=ADAPTER_RATE) + notes_on_price(plan)
    comments = header(plan, WRITTEN_FOR, notes)
    files = (
        ExportFile(ARGUMENTS_FILE, comments + as_yaml(training_arguments(plan))),
        ExportFile(TRAINING_FILE, comments + training_source(plan)),
        *_adapter_files(plan),
        *_launch_files(plan, comments),
    )
    model, *others = placeholders_of("hf")
    model = replace(model, default=repository_of(plan.model.spec) or "")
    command = LaunchCommand(
        program=_program(plan),
        starts_ranks=True,
        arguments={},
        placeholders=(model, *others),
        requirements=requirements_of("hf", plan, **_names(plan)),
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


def _adapter_files(plan: Plan) -> tuple[ExportFile, ...]:
    adapters = plan.training.adapters
    if adapters is None:
        return ()
    is_sharded = sharding_of(plan) == "fsdp2" or plan.parallelism.zero_stage == 3
    packed = settings("quantization", plan, adapters=adapters, is_sharded=is_sharded)  # none where they stay in 16 bits
    found = ((ADAPTER_FILE, lora_config(adapters, plan.model.spec)), (QUANTIZATION_FILE, packed))
    return tuple(ExportFile(name, as_json(data)) for name, data in found if data)


def _launch_files(plan: Plan, comments: str) -> tuple[ExportFile, ...]:
    """Accelerate's configuration, and DeepSpeed's; one GPU by itself needs neither."""
    sharding = sharding_of(plan)
    if sharding == "none":
        return ()
    accelerate = ExportFile(ACCELERATE_FILE, comments + as_yaml(settings("accelerate", plan, **_names(plan))))
    return (
        accelerate,
        *([ExportFile(DEEPSPEED_FILE, as_json(settings("hf-deepspeed", plan)))] if sharding == "deepspeed" else []),
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
