"""A plan for Hugging Face's trainers: a folder that TRL, Accelerate, DeepSpeed and peft train from as it is."""

from __future__ import annotations

import re
from typing import Any, Literal

from planner.answer import Plan
from planner.export.environment import node_environment
from planner.export.huggingface.tuning_settings import (
    ACCELERATE_FILE,
    ADAPTER_FILE,
    OPTIMIZERS,
    QUANTIZATION_FILE,
    lora_config,
    quantization_config,
)
from planner.export.launchers import nodes_of
from planner.export.refusal import Objections, broken_rules, hint_for, notes_on_price
from planner.export.run_settings import FIRST_RUN_STEPS
from planner.export.stages import all_full
from planner.export.trainer_files import (
    ExportFile,
    LaunchCommand,
    Placeholder,
    Requirement,
    TrainerFiles,
    as_json,
    as_yaml,
    header,
    promise,
    rendered,
    settings,
)
from planner.specs.model import ModelSpec
from planner.trainers.rules.common import BF16_ONLY
from planner.trainers.rules.named import HF_MODEL_RULES
from planner.trainers.rules.recipe import rules_for
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import Value

_REPOSITORY = re.compile(r"config(?:\.json)? of ([\w.-]+/[\w.-]*\w)")
_LAYER_CLASSES = (
    (r"Llama-[23]", "LlamaDecoderLayer"),
    (r"Llama-4", "Llama4TextDecoderLayer"),
    (r"Qwen2\.5", "Qwen2DecoderLayer"),
    (r"Qwen3-Next", "Qwen3NextDecoderLayer"),
    (r"Qwen3-\d+B-A", "Qwen3MoeDecoderLayer"),
    (r"Qwen3", "Qwen3DecoderLayer"),
    (r"Mixtral", "MixtralDecoderLayer"),
    (r"gpt-oss", "GptOssDecoderLayer"),
    (r"gemma-3", "Gemma3DecoderLayer"),
    (r"DeepSeek-V2", "DeepseekV2DecoderLayer"),
    (r"DeepSeek-V3$", "DeepseekV3DecoderLayer"),
    (r"GLM-4\.5", "Glm4MoeDecoderLayer"),
    (r"Olmo-3", "Olmo3DecoderLayer"),
    (r"Seed-OSS", "SeedOssDecoderLayer"),
    (r"Falcon-H1", "FalconH1DecoderLayer"),
    (r"granite-4\.0-h", "GraniteMoeHybridDecoderLayer"),
    (r"gpt-neox", "GPTNeoXLayer"),
    (r"bloom", "BloomBlock"),
)
"""Parts of a repository's name, and the layers that its models have in transformers (`_no_split_modules`)."""


def repository_of(model: ModelSpec) -> str | None:
    """The repository whose configuration the model was read from; None where its source names none."""
    found = _REPOSITORY.search(" ".join(model.source.split()))
    return None if found is None else found[1]


def layer_class_of(model: ModelSpec) -> str | None:
    """The class of the model's decoder layers; None where only transformers knows it, which then says it itself."""
    repository = repository_of(model) or ""
    return next((name for part, name in _LAYER_CLASSES if re.search(part, repository)), None)


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


def is_in_mixed_precision(plan: Plan) -> bool:
    """Products are in bf16 beside weights that are not: fp32 ones, those of adapters, or DeepSpeed's masters.

    Without, weights, gradients and moments are all in bf16, and FSDP2 must not widen them (Accelerate does so wherever
    mixed precision is on).
    """
    runtime = plan.runtime_spec
    return runtime.weight_bytes == 4 or plan.training.adapters is not None or sharding_of(plan) == "deepspeed"


def accelerate_config(plan: Plan) -> dict[str, Any]:
    """Accelerate's configuration of the launch."""
    nodes, *_ = nodes_of(plan)
    sharding, layout = sharding_of(plan), plan.parallelism
    kinds = {"none": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "deepspeed": "DEEPSPEED"}
    mixed = "bf16" if is_in_mixed_precision(plan) else "no"
    return settings(
        "accelerate",
        layout=layout,
        nodes=nodes,
        kind=kinds[sharding],
        fsdp=sharding == "fsdp2",
        deepspeed=sharding == "deepspeed",
        replicas=layout.dp // layout.shard_size if sharding == "fsdp2" and layout.shard_size < layout.dp else 0,
        shards_weights=layout.zero_stage == 3,
        offloads_all=offloads_all(plan),
        layer_class=layer_class_of(plan.model.spec),
        mixed_precision=None if sharding == "deepspeed" else mixed,
    )


def offloads_all(plan: Plan) -> bool:
    """FSDP2 keeps weights, gradients and states on the host between their uses."""
    return plan.runtime_spec.optimizer_offload_fraction == 1 and sharding_of(plan) == "fsdp2"


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's configuration; a part of the states stays on the host under ZeRO-3 alone."""
    layout, runtime = plan.parallelism, plan.runtime_spec
    share = runtime.optimizer_offload_fraction
    return settings(
        "hf-deepspeed",
        layout=layout,
        training=plan.training,
        shards=layout.zero_stage > 0,
        overlaps=runtime.gradient_overlap_fraction > 0 if layout.zero_stage else None,
        offloads=share > 0,
        ratio=share if share < 1 and layout.zero_stage == 3 else None,
        shards_weights=layout.zero_stage == 3,
        is_adam=plan.best.recipe.get("optimizer", "adamw") == "adamw",
    )


ARGUMENTS_FILE = "training_arguments.yaml"
FULL_RATE, ADAPTER_RATE = 2e-5, 2e-4
"""Learning rates: SFTConfig's own default, and ten times that for adapters, as TRL's guide to peft has it."""
_ATTENTION = {"fastest": "flash_attention_3", "flash": "flash_attention_2", "flash1": "flash_attention_2"}


def optimizer_name(recipe: dict[str, Value]) -> str | None:
    """The value of `optim` for a recipe; None for an optimizer that transformers has no name for."""
    return OPTIMIZERS.get(str(recipe.get("optimizer", "adamw")))


def attention_name(runtime: RuntimeSpec, model: ModelSpec) -> str:
    """The value of `attn_implementation` for a runtime's attention; torch's own takes no soft caps and no sinks."""
    if not runtime.flash_attention:
        return "eager"
    if model.attention_sinks:
        return "kernels-community/vllm-flash-attn3"
    plain = "sdpa" if model.attn_logit_softcapping is None else "flash_attention_2"
    return _ATTENTION.get(runtime.attention_kernel, plain)


def training_arguments(plan: Plan) -> dict[str, Any]:
    """Fields of SFTConfig or DPOConfig, and of TrainingArguments."""
    layout, training, runtime, recipe = plan.parallelism, plan.training, plan.runtime_spec, plan.best.recipe
    is_dpo, is_masked = training.objective.name == "dpo", training.document_lengths is not None
    return settings(
        "hf-arguments",
        layout=layout,
        training=training,
        runtime=runtime,
        # of pairs, where an example is two sequences
        examples=layout.micro_batch_size // training.objective.row.num_sequences,
        precomputes=training.objective.reference == "precomputed" if is_dpo else None,
        packs=not is_dpo,
        packing=None if is_dpo else "bfd" if is_masked and runtime.masks_documents else "wrapped",
        epochs=1 if training.tokens is None else None,
        steps=None if training.tokens is None else max(1, round(training.tokens / training.tokens_per_step)),
        rate=FULL_RATE if training.adapters is None else ADAPTER_RATE,
        optim=optimizer_name(recipe),
        mixed=is_in_mixed_precision(plan),
        recomputes=layout.recompute == "full",
        liger=bool(recipe.get("liger")),
        offloads_activations=runtime.offloaded_layers > 0,
        dtype="float32" if runtime.weight_bytes == 4 and training.adapters is None else "bfloat16",
        attention=attention_name(runtime, plan.model.spec),
        unused=False if sharding_of(plan) == "ddp" else None,
    )


def notes_on_arguments(plan: Plan) -> list[str]:
    """The values that no plan decides, and their origins."""
    adapters = plan.training.adapters
    rate = f"{ADAPTER_RATE:g}, ten times TRL's own for whole models" if adapters else f"{FULL_RATE:g}, TRL's own"
    notes = [f"learning_rate {rate}, is a first value: it costs no time, and decides what is learned"]
    if adapters is not None:
        notes.append("lora_alpha is twice the rank, as in TRL's defaults; it costs nothing")
    if plan.training.tokens is None:
        notes.append("the plan states no tokens: one pass over the data (num_train_epochs); --tokens says how many")
    if plan.training.objective.name == "dpo":
        return [*notes, f"every answer was priced with its prompt as {plan.training.seq_length:,} tokens (max_length)"]
    notes.append(
        f"sequences are packed to {plan.training.seq_length:,} tokens, as they were priced; packing: false pads instead"
    )
    return notes


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
        ExportFile(ARGUMENTS_FILE, comments + as_yaml(training_arguments(plan))),
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
    return tuple(ExportFile(name, as_json(data)) for name, data in found if data is not None)


def _launch_files(plan: Plan, comments: str) -> tuple[ExportFile, ...]:
    """Accelerate's configuration, and DeepSpeed's; one GPU by itself needs neither."""
    sharding = sharding_of(plan)
    if sharding == "none":
        return ()
    accelerate = ExportFile(ACCELERATE_FILE, comments + as_yaml(accelerate_config(plan)))
    return (
        accelerate,
        *([ExportFile(DEEPSPEED_FILE, as_json(deepspeed_config(plan)))] if sharding == "deepspeed" else []),
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
