"""A plan as TrainingArguments, in TRL's names: batch, precision, recomputation, optimizer, kernels, data."""

from __future__ import annotations

from typing import Any

from planner.answer import Plan
from planner.export.huggingface.sharding import is_in_mixed_precision, sharding_of
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import Value

ARGUMENTS_FILE = "training_arguments.yaml"
FULL_RATE, ADAPTER_RATE = 2e-5, 2e-4
"""Learning rates: SFTConfig's own default, and ten times that for adapters, as TRL's guide to peft has it."""
_WARMUP_STEPS = 0.03
"""Share of the steps, which `warmup_steps` below 1 is: QLoRA's (Dettmers et al. 2023, appendix B.2)."""
_SAVE_STEPS = 500
_WORKERS = 4
OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw-8bit": "adamw_8bit",
    "paged-adamw": "paged_adamw_32bit",
    "paged-adamw-8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
"""Values of the switch `optimizer`, and their names in `optim`; it has none for Muon."""
_ATTENTION = {"fastest": "flash_attention_3", "flash": "flash_attention_2", "flash1": "flash_attention_2"}


def optimizer_name(recipe: dict[str, Value]) -> str | None:
    """The value of `optim` for a recipe; None for an optimizer that transformers has no name for."""
    return OPTIMIZERS.get(str(recipe.get("optimizer", "adamw")))


def attention_name(runtime: RuntimeSpec) -> str:
    """The value of `attn_implementation` for a runtime's attention."""
    if not runtime.flash_attention:
        return "eager"
    return _ATTENTION.get(runtime.attention_kernel, "sdpa")


def training_arguments(plan: Plan) -> dict[str, Any]:
    """Fields of SFTConfig, and of TrainingArguments, which it is one of."""
    layout, training, runtime, recipe = plan.parallelism, plan.training, plan.runtime_spec, plan.best.recipe
    recomputes = layout.recompute == "full"
    arguments: dict[str, Any] = {
        "output_dir": "checkpoints",
        # of pairs, where an example is two sequences
        "per_device_train_batch_size": layout.micro_batch_size // training.objective.row.num_sequences,
        "gradient_accumulation_steps": layout.num_microbatches,
        "max_length": training.seq_length,
        **_packing(plan),
        **_length(plan),
        "learning_rate": FULL_RATE if training.adapters is None else ADAPTER_RATE,
        "lr_scheduler_type": "cosine",
        "warmup_steps": _WARMUP_STEPS,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": optimizer_name(recipe),
        "bf16": is_in_mixed_precision(plan),
        "gradient_checkpointing": recomputes,
        **({"gradient_checkpointing_kwargs": {"use_reentrant": False}} if recomputes else {}),
        "torch_compile": runtime.compiled,
        **({"use_liger_kernel": True} if recipe.get("liger") else {}),
        **({"activation_offloading": True} if _offloads_activations(plan) else {}),
        "model_init_kwargs": {
            "dtype": "float32" if runtime.weight_bytes == 4 and training.adapters is None else "bfloat16",
            "attn_implementation": attention_name(runtime),
        },
        "dataloader_num_workers": _WORKERS,
        "dataloader_pin_memory": True,
        "dataloader_drop_last": True,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": _SAVE_STEPS,
        "report_to": "none",
    }
    if sharding_of(plan) == "ddp":
        arguments["ddp_find_unused_parameters"] = False
    return arguments


def _packing(plan: Plan) -> dict[str, Any]:
    """Full sequences: documents cut to length, or packed whole where attention stays within them.

    Pairs of answers are never packed.
    """
    if plan.training.objective.name == "dpo":
        return {"precompute_ref_log_probs": plan.training.objective.reference == "precomputed"}
    masked = plan.training.document_lengths is not None and plan.runtime_spec.masks_documents
    return {"packing": True, "packing_strategy": "bfd" if masked else "wrapped"}


def _length(plan: Plan) -> dict[str, Any]:
    """Steps of the tokens that are planned; one pass over the data without."""
    tokens = plan.training.tokens
    if tokens is None:
        return {"num_train_epochs": 1}
    return {"max_steps": max(1, round(tokens / plan.training.tokens_per_step))}


def _offloads_activations(plan: Plan) -> bool:
    """All that layers keep for the backward waits in host memory."""
    return plan.runtime_spec.offloaded_layers > 0


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
