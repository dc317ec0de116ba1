"""How a plan's ranks share weights, gradients and states, as Accelerate and DeepSpeed are told."""

from __future__ import annotations

from typing import Any, Literal

from planner.answer import Plan
from planner.export.huggingface.names import layer_class_of
from planner.export.launch.nodes import nodes_of

ACCELERATE_FILE, DEEPSPEED_FILE = "accelerate_config.yaml", "deepspeed.json"
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
    """Accelerate's configuration of the launch; launch.sh adds what it knows of the machine it runs on."""
    nodes, *_ = nodes_of(plan)
    sharding, layout = sharding_of(plan), plan.parallelism
    kinds = {"none": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "deepspeed": "DEEPSPEED"}
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kinds[sharding],
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
    }
    if sharding == "fsdp2":
        config["fsdp_config"] = _fsdp(plan)
        if layout.shard_size < layout.dp:
            config["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": layout.dp // layout.shard_size,
                "parallelism_config_dp_shard_size": layout.shard_size,
                "parallelism_config_tp_size": 1,
                "parallelism_config_cp_size": 1,
            }
    if sharding == "deepspeed":
        config["deepspeed_config"] = {
            "deepspeed_config_file": DEEPSPEED_FILE,
            "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": layout.zero_stage == 3,
        }
    precision = {} if sharding == "deepspeed" else {"mixed_precision": "bf16" if is_in_mixed_precision(plan) else "no"}
    return config | {
        "machine_rank": 0,
        "main_training_function": "main",
        **precision,
        "num_machines": nodes,
        "num_processes": layout.num_gpus_used,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }


def _fsdp(plan: Plan) -> dict[str, Any]:
    """FSDP2 around every decoder layer."""
    name = layer_class_of(plan.model.spec)
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        **({"fsdp_transformer_layer_cls_to_wrap": name} if name is not None else {}),
        "fsdp_reshard_after_forward": plan.parallelism.zero_stage == 3,
        "fsdp_offload_params": offloads_all(plan),
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_activation_checkpointing": False,
    }


def offloads_all(plan: Plan) -> bool:
    """FSDP2 keeps weights, gradients and states on the host between their uses."""
    return plan.runtime_spec.optimizer_offload_fraction == 1 and sharding_of(plan) == "fsdp2"


def deepspeed_config(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's configuration; transformers fills in what is `auto` from the training arguments."""
    layout, runtime = plan.parallelism, plan.runtime_spec
    zero: dict[str, Any] = {"stage": layout.zero_stage}
    if layout.zero_stage:
        zero |= {"overlap_comm": runtime.gradient_overlap_fraction > 0, "contiguous_gradients": True}
    if runtime.optimizer_offload_fraction > 0:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True, **_ratio(plan)}
    if layout.zero_stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    adam = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    is_adam = plan.best.recipe.get("optimizer", "adamw") == "adamw"
    return {
        "train_batch_size": plan.training.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches,
        "gradient_clipping": "auto",
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        # its own Adam, which has a kernel for the host too; transformers makes the others
        **({"optimizer": {"type": "AdamW", "params": adam}} if is_adam else {}),
    }


def _ratio(plan: Plan) -> dict[str, float]:
    """The share that stays on the host, which DeepSpeed takes under ZeRO-3."""
    share = plan.runtime_spec.optimizer_offload_fraction
    return {"ratio": share} if share < 1 and plan.parallelism.zero_stage == 3 else {}
