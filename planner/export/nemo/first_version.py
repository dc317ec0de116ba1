"""The names of NeMo's first version (its megatron_gpt_config.yaml) for fields of models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner.export.megatron.tokenizers import vocabulary_of

_RENAMED = {
    "encoder_seq_length": "model.seq_length",
    "micro_batch_size": "train.micro_batch_size",
    "global_batch_size": "train.global_batch_size",
    "activations_checkpoint_granularity": "model.recompute_granularity",
    "activations_checkpoint_method": "model.recompute_method",
    "activations_checkpoint_num_layers": "model.recompute_num_layers",
    "rotary_percentage": "model.rotary_percent",
    "ub_tp_comm_overlap": "comm_overlap.tp_comm_overlap",
    "moe_shared_expert_intermediate_size": "model.moe_shared_expert_intermediate_size",
    "vocab_size": "model.vocab_size",
}
"""Fields of `model:` with another name."""
_HARMLESS = """
    use_scaled_init ffn_dropout pre_process post_process transformer_block_type normalize_attention
    attention_type native_amp hysteresis grad_allreduce_chunk grad_div_ar get_attention_mask seed apex_
    gradient_as_bucket megatron_amp_O2 max_position gc_interval embedding_init resume restore dist_ckpt
    transformer_engine fp8 name version data nsys openai_gelu qkv_bias override_vocab use_flash sync_batch
    use_emha ub_tp_comm hf_ target precision optim tokenizer num_layers answer_only peft bias_gelu rotary
    reduce_amax validation mcore do_layer nccl_ tp_comm_atomic log_ skip_train
"""
NO_EFFECT = re.compile(rf"model\.({'|'.join(_HARMLESS.split())})")
"""Fields of `model:` that change neither seconds nor bytes of a step."""
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}


def as_fields(tree: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """The fields of a Megatron-Bridge tree that a NeMo tree says, and the number of GPUs."""
    model, trainer = tree["model"], tree.get("trainer") or {}
    fields: dict[str, Any] = {}
    for name, value in model.items():
        if not isinstance(value, Mapping):
            fields[_RENAMED.get(name, f"model.{name}")] = value
    activation = str(model.get("activation", "gelu"))
    if "glu" in activation:
        fields["model.gated_linear_unit"] = True
    fields["model.activation_func"] = "squared_relu" if activation in ("squared-relu", "squared_relu") else activation
    fields["model.add_bias_linear"] = bool(model.get("bias", True))
    fields["model.normalization"] = _NORMS.get(str(model.get("normalization", "layernorm")), "LayerNorm")
    fields |= _precision(model, trainer) | _optimizer(model)
    if not fields.get("model.vocab_size"):
        tokenizer = model.get("tokenizer") or {}
        name = str(tokenizer.get("model") or tokenizer.get("type") or "")
        fields["model.vocab_size"] = vocabulary_of(str(tokenizer.get("type") or ""), name)
    for name in ("model.bias", "model.activation", "model.mcore_gpt", "model.precision"):
        fields.pop(name, None)
    nodes, devices = trainer.get("num_nodes", 1), trainer.get("devices")
    return fields, nodes * devices if isinstance(nodes, int) and isinstance(devices, int) else None


def _precision(model: Mapping[str, Any], trainer: Mapping[str, Any]) -> dict[str, Any]:
    """fp8 is a switch of the model; the trainer says bf16 or 16."""
    name = str(trainer.get("precision", "bf16"))
    fields: dict[str, Any] = {
        "mixed_precision.fp16": name in ("16", "16-mixed"),
        "mixed_precision.bf16": "bf16" in name,
    }
    if model.get("fp8"):
        fields |= {
            "mixed_precision.fp8": "e4m3" if model.get("fp8_e4m3") else "hybrid",
            "mixed_precision.fp8_recipe": "delayed",
        }
    return fields


def _optimizer(model: Mapping[str, Any]) -> dict[str, Any]:
    """The distributed optimizer by name, its overlaps and the dtype of its gradients."""
    optimizer = model.get("optim") or {}
    is_sharded = (
        "distributed" in str(optimizer.get("name", "")) or str(optimizer.get("name", "")) == "mcore_distributed_optim"
    )
    fields: dict[str, Any] = {"ddp.use_distributed_optimizer": is_sharded}
    if is_sharded:
        fields["ddp.overlap_grad_reduce"] = bool(optimizer.get("overlap_grad_sync", False))
        fields["ddp.overlap_param_gather"] = bool(optimizer.get("overlap_param_sync", False))
        if "grad_sync_dtype" in optimizer:
            fields["mixed_precision.grad_reduce_in_fp32"] = optimizer["grad_sync_dtype"] in ("fp32", 32, "float32")
    return fields
