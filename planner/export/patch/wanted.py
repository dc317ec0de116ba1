"""The settings that a plan has in the words of a trainer, and those of a user's file that a plan decides."""

from __future__ import annotations

import json
from typing import Any

from planner.answer import Plan
from planner.export.common.arguments import argv
from planner.export.deepspeed.write import deepspeed_config
from planner.export.megatron.arguments import megatron_arguments
from planner.export.megatron.options import options_of
from planner.export.megatron.read_features import FEATURE_OPTIONS
from planner.export.megatron.read_layout import LAYOUT_OPTIONS
from planner.export.megatron.switches import SWITCH_OPTIONS
from planner.export.patch.change import Change
from planner.export.scripts.shell import Script
from planner.export.torchtitan.recipe import splits_backward
from planner.trainers.rules.torch import TORCH_CLASSES

_OF_MEGATRON = LAYOUT_OPTIONS | FEATURE_OPTIONS | {
    "--global-batch-size", "--seq-length", "--ckpt-format", "--hidden-dropout", "--attention-dropout",
}  # fmt: skip
"""Options of Megatron-LM that a plan decides; the user's own decide the model, the data and the learning."""
_REFUSED_ALONE = (
    "--recompute",
    "--sequence-parallel",
    "--num-virtual",
    "--num-layers-per-virtual",
    "--decoder-",
    "--account-",
)
"""Options that Megatron-LM refuses, or warns of, without those that a plan may have taken away."""
_OF_DEEPSPEED = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "bf16", "fp16", "data_types",
    "zero_optimization", "tensor_parallel", "activation_checkpointing",
)  # fmt: skip
"""Parts of a DeepSpeed configuration that a plan decides."""
_LAUNCH = ("--nnodes", "--nproc-per-node", "--nproc_per_node")


def megatron_changes(plan: Plan, script: Script) -> list[list[Change]]:
    """Changes, in groups that go together, that give a script of Megatron-LM the plan's layout, batch and switches."""
    present, wanted = options_of(script.words), options_of(argv(megatron_arguments(plan)))
    changes = {
        name: Change(name, tuple(words), is_needed=name in ("--bf16", "--fp16"))
        for name, words in wanted.items()
        if name in _OF_MEGATRON and present.get(name) != words and not _means(name, present.get(name), words)
    }
    for name in present:
        if name in _OF_MEGATRON and name not in wanted:
            changes[name] = Change(name, None, is_needed=name.startswith(_REFUSED_ALONE))
    groups: list[list[Change]] = []
    for row in SWITCH_OPTIONS:
        if len(row.settings) < 2 or row.is_read_only or not all(name in wanted for name in row.settings):
            continue
        group = [changes.pop(name) for name in row.settings if name in changes]
        groups += [group] if group else []
    return [
        *([change] for change in changes.values()),
        *groups,
        *([change] for change in _launch_changes(plan, script)),
    ]


def _means(name: str, present: list[str] | None, words: list[str]) -> bool:
    """The option means already what the plan says."""
    return (
        name == "--attention-backend"
        and words == ["auto"]
        and (present or ["auto"]) in (["auto"], ["flash"], ["fused"])
    )


def _launch_changes(plan: Plan, script: Script) -> list[Change]:
    """Nodes and GPUs of torchrun where the script names another number."""
    cluster = plan.cluster
    nodes = -(-cluster.num_gpus // cluster.node_size)
    wanted = {"--nnodes": nodes, "--nproc-per-node": min(cluster.node_size, cluster.num_gpus)}
    changes = []
    for word in script.words:
        name = word.partition("=")[0]
        value = wanted.get(name.replace("_", "-")) if name in _LAUNCH else None
        if value is not None and options_of(script.words).get(name.replace("_", "-")) != [str(value)]:
            changes.append(Change(name, (str(value),), is_needed=True))
    return changes


def torchtitan_changes(plan: Plan, present: dict[str, Any]) -> list[list[Change]]:
    """Changes that give a TOML file, or overrides, of torchtitan the plan's layout and batch."""
    layout, training = plan.parallelism, plan.training
    shard = layout.shard_size // layout.cp if layout.zero_stage >= 2 else 1
    steps = layout.num_microbatches if layout.pp > 1 else 1
    wanted: dict[str, Any] = {
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.pipeline_parallel_degree": layout.pp,
        "parallelism.context_parallel_degree": layout.cp,
        "parallelism.expert_parallel_degree": layout.ep,
        "parallelism.data_parallel_replicate_degree": layout.dp // shard,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.enable_sequence_parallel": layout.sequence_parallel,
        "parallelism.fsdp_reshard_after_forward": "never" if layout.zero_stage == 2 else "default",
        "activation_checkpoint.mode": layout.recompute,
        **_compiled(plan),
    }
    if any(name.startswith(("training.num_tokens", "training.max_context")) for name in present):
        wanted |= {
            "training.max_context_length": training.seq_length,
            "training.num_tokens_per_microbatch_per_dp_rank": layout.micro_batch_size * training.seq_length,
            "training.num_tokens_per_train_step": training.tokens_per_step,
            **({"parallelism.num_pp_microbatches": steps} if layout.pp > 1 else {}),
        }
    else:
        wanted |= {
            "training.seq_len": training.seq_length,
            "training.global_batch_size": training.global_batch_size,
            "training.local_batch_size": layout.micro_batch_size * steps,
        }
    if layout.pp > 1:
        wanted |= {
            "parallelism.pipeline_parallel_schedule": TORCH_CLASSES[layout.schedule],
            "parallelism.pipeline_parallel_microbatch_size": layout.micro_batch_size,
            "parallelism.module_fqns_per_model_part": _modules(plan),
        }
    if layout.recompute == "selective":
        wanted["activation_checkpoint.selective_ac_option"] = "op"
    return [[Change(name, (json.dumps(value),))] for name, value in wanted.items() if present.get(name) != value]


def _compiled(plan: Plan) -> dict[str, Any]:
    """Layers and loss compiled, the loss alone, or nothing, and products that hide exchanges."""
    runtime = plan.runtime_spec
    is_compiled = runtime.compiled and not splits_backward(plan)
    if not is_compiled and not runtime.fused_cross_entropy:
        return {"compile.enable": False}
    parts = [*(["model"] if is_compiled else []), *(["loss"] if runtime.fused_cross_entropy else [])]
    overlaps = is_compiled and runtime.tp_overlap_fraction > 0
    asynchronous = {"parallelism.enable_async_tensor_parallel": True} if overlaps else {}
    return {"compile.enable": True, "compile.components": parts, **asynchronous}


def _modules(plan: Plan) -> list[list[str]]:
    """Names of the modules of every stage."""
    chunks = sorted((first, last) for stage in plan.stages for first, last in stage.chunks)
    names = [[f"layers.{layer}" for layer in range(first, last)] for first, last in chunks]
    return [["tok_embeddings", *names[0]], *names[1:-1], [*names[-1], "norm", "output"]]


def deepspeed_changes(plan: Plan, present: dict[str, Any]) -> list[list[Change]]:
    """Changes that give a DeepSpeed configuration the plan's batch, sharding and precision."""
    changes: list[Change] = []
    for name, value in deepspeed_config(plan).items():
        if name not in _OF_DEEPSPEED:
            continue
        if isinstance(value, dict):
            section = present.get(name) or {}
            changes += [
                Change(f"{name}.{key}", (json.dumps(inner),))
                for key, inner in value.items()
                if section.get(key) != inner
            ]
        elif present.get(name) != value:
            changes.append(Change(name, (json.dumps(value),)))
    other = "fp16" if plan.training.dtype == "bf16" else "bf16"
    if (present.get(other) or {}).get("enabled") is not False and other in present:
        changes.append(Change(f"{other}.enabled", ("false",)))
    for name in ("activation_checkpointing", "tensor_parallel"):
        if name in present and name not in deepspeed_config(plan):
            changes.append(Change(name, None))
    # what is left to "auto" only Hugging Face's Trainer fills in
    return [[change._replace(is_needed=True)] for change in changes]
