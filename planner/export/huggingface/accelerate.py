"""An Accelerate configuration (`accelerate config`, `accelerate launch --config_file`) as part of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.errors import SpecError
from planner.export.common.config_file import ConfigFile
from planner.export.common.imported_run import ImportedRun
from planner.export.common.markup import yaml_of
from planner.export.deepspeed.config import DEEPSPEED_RUNTIME
from planner.export.huggingface.fine_tuning import beside_adapters, read_fine_tuning
from planner.export.huggingface.settings import (
    FSDP_RUNTIME,
    Settings,
    apply_deepspeed,
    deepspeed_beside,
    dtype_of,
    fsdp_layout,
    is_on,
    new_run,
    number,
)

_READ = {
    "distributed_type", "num_processes", "mixed_precision", "deepspeed_config", "fsdp_config", "megatron_lm_config",
    "parallelism_config", "num_machines",
}  # fmt: skip
_IGNORED = {
    "compute_environment", "debug", "downcast_bf16", "machine_rank", "main_process_ip", "main_process_port",
    "main_training_function", "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "use_cpu",
    "gpu_ids", "enable_cpu_affinity", "command_file", "commands", "tpu_name", "tpu_zone", "deepspeed_hostfile",
    "dynamo_backend", "ipex_config", "mpirun_config", "rdzv_conf", "monitor_interval", "max_restarts",
}  # fmt: skip
IN_FP32 = "mixed_precision: no, so that it trains in fp32: priced as bf16"
_MEGATRON = {"tp_degree": "tp", "pp_degree": "pp"}


def read_accelerate(config: ConfigFile) -> ImportedRun:
    """The part of a run that Accelerate's YAML holds. Raises SpecError where it is no mapping."""
    settings = read_yaml(config.text)
    imported = new_run("accelerate")
    apply_accelerate(imported, settings, config)
    read_fine_tuning(imported, beside_adapters(settings, config))
    imported.notes.append("an Accelerate configuration names no model, batch or sequence length: add them as options")
    for name, value in settings.items():
        if name not in _READ:
            (imported.ignored if name in _IGNORED or not value else imported.unknown)[name] = str(value)
    return imported


def read_yaml(text: str) -> dict[str, Any]:
    data = yaml_of(text, "give the configuration's file")
    if not isinstance(data, dict):
        raise SpecError("the file holds no settings", "give the configuration's file")
    return data


def apply_accelerate(imported: ImportedRun, settings: Settings, config: ConfigFile) -> None:
    """Put what Accelerate's settings say into a run."""
    run = imported.run
    kind = str(settings.get("distributed_type") or "NO").upper()
    if kind in ("MULTI_CPU", "MULTI_XPU", "XLA", "TPU", "MULTI_NPU", "MULTI_HPU"):
        raise SpecError(
            f"distributed_type: {kind} runs on no GPU that is planned", "MULTI_GPU, FSDP, DEEPSPEED or MEGATRON_LM"
        )
    run["num_gpus"] = number(settings, "num_processes") or run["num_gpus"]
    dtype = dtype_of(settings)
    if dtype is not None:
        run["dtype"] = dtype
    elif str(settings.get("mixed_precision")) == "no":
        imported.notes.append(IN_FP32)
    if kind == "FSDP":
        run["runtime"] = FSDP_RUNTIME
        options = _section(settings, "fsdp_config")
        run["parallelism"] |= fsdp_layout({}, options)
        if is_on(options.get("fsdp_offload_params")):
            imported.unknown["fsdp_config.fsdp_offload_params"] = "true"
        _apply_parallelism(imported, _section(settings, "parallelism_config"))
    elif kind == "DEEPSPEED":
        _apply_deepspeed(imported, _section(settings, "deepspeed_config"), config)
    elif kind == "MEGATRON_LM":
        _apply_megatron(imported, _section(settings, "megatron_lm_config"))


def _section(settings: Settings, name: str) -> dict[str, Any]:
    part = settings.get(name) or {}
    if not isinstance(part, Mapping):
        raise SpecError(f"{name}: {part!r:.60} is no mapping", "write its fields below it")
    return dict(part)


def _apply_parallelism(imported: ImportedRun, options: dict[str, Any]) -> None:
    """Sizes of tensor and context parallelism, and of groups that shard."""
    sizes = {name.removeprefix("parallelism_config_"): value for name, value in options.items()}
    layout = imported.run["parallelism"]
    for axis in ("tp", "cp"):
        layout[axis] = number(sizes, f"{axis}_size") or 1
    replicate, shard = number(sizes, "dp_replicate_size") or 1, number(sizes, "dp_shard_size") or 1
    if replicate > 1 and shard > 1:
        layout["fsdp"] = shard * layout["cp"]
    if layout["tp"] > 1 or layout["cp"] > 1:
        imported.run["runtime"] = "torchtitan"
        imported.notes.append(
            "FSDP2 beside tensor or context parallelism is priced as torchtitan, which is the same torch"
        )


def _apply_deepspeed(imported: ImportedRun, options: dict[str, Any], config: ConfigFile) -> None:
    imported.run["runtime"] = DEEPSPEED_RUNTIME
    if name := options.get("deepspeed_config_file"):
        found = deepspeed_beside(config, name)
        if found is None:
            raise SpecError(
                f"deepspeed_config_file: {name!r:.80} is not beside the file", "put it there, or import it itself"
            )
        apply_deepspeed(imported, found)
        return
    layout = imported.run["parallelism"]
    layout["zero_stage"] = number(options, "zero_stage") or 0
    imported.microbatches_per_rank = number(options, "gradient_accumulation_steps")
    imported.run["features"]["optimizer_offload"] = float(options.get("offload_optimizer_device") == "cpu")
    if options.get("offload_optimizer_device") == "nvme":
        imported.unknown["deepspeed_config.offload_optimizer_device"] = "nvme"
    if options.get("offload_param_device") in ("cpu", "nvme"):
        imported.unknown["deepspeed_config.offload_param_device"] = str(options["offload_param_device"])


def _apply_megatron(imported: ImportedRun, options: dict[str, Any]) -> None:
    sizes = {name.removeprefix("megatron_lm_"): value for name, value in options.items()}
    layout, run = imported.run["parallelism"], imported.run
    run["runtime"] = "megatron"
    for name, axis in _MEGATRON.items():
        layout[axis] = number(sizes, name) or 1
    layout["sequence_parallel"] = is_on(sizes.get("sequence_parallelism")) and layout["tp"] > 1
    layout["zero_stage"] = 1 if is_on(sizes.get("use_distributed_optimizer")) else 0
    if is_on(sizes.get("recompute_activations")) or is_on(sizes.get("recompute_activation")):
        layout["recompute"] = "selective"
    imported.microbatches_per_rank = number(sizes, "num_micro_batches") or 1
