"""verl's overrides and ROLL's YAML as runs: an actor's update, or a fine-tuning, on Megatron core, FSDP, DeepSpeed."""

from __future__ import annotations

import re
from collections.abc import Collection

from planner.errors import SpecError
from planner.export.followed.shell_script import Script, read_script
from planner.export.huggingface.trainer_reading import run_of_arguments
from planner.export.imported_run import ConfigFile, ImportedRun, yaml_of
from planner.export.keyed_settings import (
    KeyedSettings,
    Settings,
    dialect,
    first,
    flat,
    fraction,
    is_any_on,
    is_off,
    is_on,
    number,
    overrides_of,
    refused_settings,
    resolved,
    value_of,
)
from planner.export.megatron.keyed_reading import add_adapters, add_lora, read_keys
from planner.export.named_models import model_called
from planner.specs.base import Named

_ACTOR, _MODEL, _ROLLOUT = (f"actor_rollout_ref.{part}." for part in ("actor", "model", "rollout"))
_ROW = dialect("verl")
_READ = re.compile("|".join(_ROW.read))
_OFFLOADS = ("param_offload", "grad_offload", "optimizer_offload")


_LENGTHS = {"gsm8k": 320, r"(^|[/'])math[/']": 704}
"""Tokens of a prompt and its answer in verl's examples: estimates, which no log was read for."""


def read_verl(config: ConfigFile) -> ImportedRun:
    """The run of a script or a YAML. Raises SpecError where neither trains a model."""
    settings, words = _overrides(config)
    is_rl = any(name.startswith("actor_rollout_ref.") for name in settings)
    model = first(settings, _MODEL + "path", "model.path", "model.partial_pretrain")
    if not settings:
        raise SpecError("the text overrides none of verl's settings", "give the script that calls verl.trainer")
    is_megatron = any(".megatron." in name for name in settings) or "megatron" in words
    is_megatron |= settings.get("engine.strategy") == "megatron" or settings.get("engine") == "megatron"
    imported = (_of_megatron if is_megatron else _of_fsdp)(settings, str(model or ""), is_rl)
    if imported.run["model"] is None and model:
        imported.model_name = str(model)
    _set_batch(imported, settings, is_rl)
    imported.refused += refused_settings(settings, "verl")
    if is_rl:
        imported.notes.append(
            "one update of the actor is priced (ppo_mini_batch_size × rollout.n sequences); the reference model and "
            "rewards are not"
        )
    return imported


def _overrides(config: ConfigFile) -> tuple[Settings, str]:
    """The overrides by their paths, and the words of the launch."""
    if re.search(r"^\w+:\s*$", config.text, re.MULTILINE) and not re.search(r"^\S+ .*\\$", config.text, re.MULTILINE):
        data = yaml_of(config.text, "give the configuration's file")
        return resolved(flat(data) if isinstance(data, dict) else {}), ""
    script = read_script(config.text, config.beside)
    words = max(script.commands, key=lambda words: sum("=" in word for word in words), default=[])
    found = {
        path: f"${{{script.unset[path]}}}" if value is None and path in script.unset else value
        for path, value in overrides_of(words).items()
    }
    gpus = script.variables.get("nproc_per_node") or []
    launched = re.search(r"--nproc[-_]per[-_]node[ =](\d+)", " ".join(words))
    if launched or gpus:
        found.setdefault("trainer.n_gpus_per_node", value_of(launched[1] if launched else gpus[0]))
    return found, " ".join(word for word in words if word.endswith((".yaml", "megatron_trainer", "megatron")))


def _num_gpus(settings: Settings) -> int | None:
    nodes, each = number(settings, "trainer.nnodes") or 1, number(settings, "trainer.n_gpus_per_node")
    return nodes * each if each else None


def _of_megatron(settings: Settings, model: str, is_rl: bool) -> ImportedRun:
    starts = (f"{_ACTOR}megatron.", "engine.", f"{_ACTOR}optim.override_optimizer_config.",
              "optim.override_optimizer_config.")  # fmt: skip
    keys, names = Settings(), Named()
    for path, value in settings.items():
        start = next((start for start in starts if path.startswith(start)), None)
        if start is None:
            continue
        key = re.sub(r"^override_\w+_config\.", "", path.removeprefix(start))
        if key not in _OFFLOADS and not _ROW.is_harmless(path):
            keys[key], names[key] = value, path
    micro = f"{_ACTOR}ppo_micro_batch_size_per_gpu" if is_rl else "data.micro_batch_size_per_gpu"
    if settings.get(micro):
        keys["micro_batch_size"] = settings[micro]
    imported = read_keys("verl-megatron", keys, _num_gpus(settings), named=model_called(model) if model else None)
    imported.rename({**names, "micro_batch_size": micro})
    if rank := first(settings, f"{_MODEL}lora.rank", f"{_MODEL}lora_rank", "model.lora.rank"):
        targets = first(settings, f"{_MODEL}lora.target_modules", "model.lora.target_modules")
        add_lora(imported, {"dim": rank, "target_modules": targets})
    imported.predicts_further = is_on(settings.get(f"{_MODEL}mtp.enable_train"))
    _offload(imported, settings, f"{_ACTOR}megatron.")
    _list_unread(imported, settings, names.values())
    return imported


def _of_fsdp(settings: Settings, model: str, is_rl: bool) -> ImportedRun:
    """FSDP around a model of transformers."""
    actor, own = (_ACTOR, _MODEL) if is_rl else ("", "model.")
    micro = f"{actor}ppo_micro_batch_size_per_gpu" if is_rl else "data.micro_batch_size_per_gpu"
    unsaid = {
        f"{own}enable_gradient_checkpointing": True,
        micro: None if is_rl else 4,
        f"{actor}fsdp_config.fsdp_size": -1,
    }
    get, given = settings.get, {**unsaid, **settings}
    sequence = "ulysses_sequence_parallel_size"
    arguments: Settings = {
        "model_name_or_path": model,
        "per_device_train_batch_size": given[micro],
        "gradient_checkpointing": given[f"{own}enable_gradient_checkpointing"],
        "fsdp": "full_shard", "bf16": True, "use_liger_kernel": get(f"{own}use_liger"), "packing": True,
        "activation_offloading": get(f"{own}enable_activation_offload"),
        "context_parallel_size": first(
            settings, actor + sequence, f"{actor}fsdp_config.{sequence}", f"engine.{sequence}"
        ),
    }  # fmt: skip
    if rank := get(f"{own}lora_rank"):
        arguments |= {"lora_rank": rank, "lora_target": get(f"{own}target_modules", "all-linear")}
    arguments = {key: value for key, value in arguments.items() if value not in (None, "")}
    keyed = KeyedSettings(arguments, Script(), _num_gpus(settings))
    imported = run_of_arguments(keyed, ConfigFile("", None), _ROW)
    imported.source = "verl"
    imported.assumed = {path: str(value) for path, value in unsaid.items() if path not in settings}
    size = number(settings, f"{actor}fsdp_config.fsdp_size", "engine.fsdp_size", "model.fsdp_config.fsdp_size") or -1
    if size > 0:
        imported.run["parallelism"]["fsdp"] = size
    dtype = first(settings, f"{actor}fsdp_config.model_dtype", "engine.model_dtype", "model.fsdp_config.model_dtype")
    if dtype in ("bf16", "bfloat16") and not imported.run.get("adapters"):
        imported.run["features"]["no_masters"] = True
    _offload(imported, settings, f"{actor}fsdp_config." if is_rl else "model.fsdp_config.")
    _list_unread(imported, settings, ())
    return imported


def _offload(imported: ImportedRun, settings: Settings, prefix: str) -> None:
    """verl moves weights, gradients and states to the host between phases: all are on the GPU while it updates."""
    found = [name for name in _OFFLOADS if is_on(settings.get(prefix + name))]
    if found:
        imported.notes.append(f"{', '.join(found)}: on the host during rollouts, on the GPU during the update")
    for name in ("offload_policy", "cpu_offload", "offload_params"):
        if is_on(settings.get(prefix + name)):
            imported.offload_all(prefix + name)


def _list_unread(imported: ImportedRun, settings: Settings, read: Collection[str]) -> None:
    known = {*imported.unknown, *imported.ignored, *read, *filter(_READ.fullmatch, settings)}
    _ROW.sort(
        imported,
        settings,
        known,
        lambda path, value: value in (None, False) or "." not in path or path.rpartition(".")[2] in _OFFLOADS,
    )


def _scored_tokens(settings: Settings, longest: int) -> int:
    """Tokens of a micro-batch of log-probabilities; 0 where their logits are never held."""
    chunked = (f"{_ACTOR}entropy_from_logits_with_chunking", f"{_MODEL}use_fused_kernels")
    if is_any_on(settings, *chunked):
        return 0
    own = f"{_ROLLOUT}log_prob_use_dynamic_bsz"
    if is_on(settings.get(own, settings.get(f"{_ACTOR}use_dynamic_bsz"))):
        named = f"{_ROLLOUT}log_prob_max_token_len_per_gpu", f"{_ACTOR}ppo_max_token_len_per_gpu"
        return number(settings, *named) or 16384
    count = number(settings, f"{_ROLLOUT}log_prob_micro_batch_size_per_gpu") or 0
    return count * (longest if count < 2 else _mean_length(settings, longest, longest // 2))


def _mean_length(settings: Settings, longest: int, unknown: int) -> int:
    """Tokens of a prompt and its answer in the mean, of data that is known or not; the most where all are padded."""
    if is_off(settings.get(f"{_MODEL}use_remove_padding", True)):
        return longest
    files = str(settings.get("data.train_files") or "").lower()
    known = [length for name, length in _LENGTHS.items() if re.search(name, files)]
    return min(longest, max(known, default=64 * -(-unknown // 64)))


def _keeps_reference(settings: Settings) -> bool:
    """A reference model stays on the GPUs: Megatron's, unless it is offloaded (FSDP's always is)."""
    asks = is_any_on(settings, f"{_ACTOR}use_kl_loss", "algorithm.use_kl_in_reward")
    is_megatron = any(name.startswith(f"{_ACTOR}megatron.") for name in settings)
    return asks and is_megatron and not is_on(settings.get("actor_rollout_ref.ref.megatron.param_offload"))


def _rollout_fraction(settings: Settings) -> float:
    """The share of memory that generation takes where the actor stays beside it: weights and states on the GPU."""
    offloads = is_any_on(settings, *(f"{_ACTOR}{part}.param_offload" for part in ("fsdp_config", "megatron")))
    return 0.0 if offloads else fraction(settings, f"{_ROLLOUT}gpu_memory_utilization", 0.5)


def _set_batch(imported: ImportedRun, settings: Settings, is_rl: bool) -> None:
    """Sequences of an update and their length; of dynamic micro-batches those that hold so many tokens."""
    run, layout = imported.run, imported.run["parallelism"]
    whole = number(settings, f"{_ACTOR}ppo_micro_batch_size" if is_rl else "data.micro_batch_size")
    ranks = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)
    if whole and run["num_gpus"]:
        # the older name counts the sequences of all replicas
        layout["micro_batch_size"] = max(1, whole * ranks // run["num_gpus"])
    prompt, response = number(settings, "data.max_prompt_length"), number(settings, "data.max_response_length")
    if is_rl:
        run["seq_length"] = longest = (prompt or 512) + (response or 512)
        is_dynamic = is_on(settings.get(f"{_ACTOR}use_dynamic_bsz"))
        if layout.get("micro_batch_size", 1) > 1 or is_dynamic:
            run["seq_length"] = _mean_length(settings, longest, longest if is_dynamic else longest // 2)
        if run["seq_length"] < longest:
            imported.notes.append(
                f"without padding, sequences are priced as of {run['seq_length']:,} tokens in the mean, up to "
                f"{longest:,}: --seq-length {longest} prices the longest alone"
            )
        samples = number(settings, "actor_rollout_ref.rollout.n") or 1
        update = number(settings, f"{_ACTOR}ppo_mini_batch_size") or 256
        prompts = number(settings, "data.train_batch_size")
        run["global_batch_size"] = update * samples
        is_alone = is_any_on(settings, *(f"{_ACTOR}{part}.optimizer_offload" for part in ("fsdp_config", "megatron")))
        asks = str(settings.get("algorithm.adv_estimator", "gae")) == "gae" or is_on(settings.get("critic.enable"))
        keeps = not any(name.startswith("critic.") and name.endswith("optimizer_offload") and is_on(value)
                        for name, value in settings.items())  # fmt: skip
        imported.reinforce(
            scored_tokens=_scored_tokens(settings, longest),
            scored_alone=is_alone,
            rollout_fraction=_rollout_fraction(settings),
            critics=int(asks and keeps),
            frozen_copies=int(_keeps_reference(settings)),
        )
        if (prompts or 1024) < update and not is_dynamic:
            imported.refused.append(f"data.train_batch_size {prompts or 1024} is below ppo_mini_batch_size {update}")
        if is_dynamic:
            tokens = number(settings, f"{_ACTOR}ppo_max_token_len_per_gpu") or 16384
            room = max(1, tokens * layout.get("cp", 1) // run["seq_length"])
            each = max(1, run["global_batch_size"] * ranks // (run["num_gpus"] or ranks))
            # a rank's sequences in as few balanced micro-batches as have room for them, here of one size
            balanced = each / -(-each // room)
            sizes = (size for size in range(1, each + 1) if each % size == 0)
            layout["micro_batch_size"] = min(sizes, key=lambda size: abs(size - balanced))
            if each > room:
                imported.notes.append(f"dynamic micro-batches hold up to {room} such sequences: priced as of one size")
    else:
        run["seq_length"] = number(settings, "data.max_length") or 1024
        run["global_batch_size"] = number(settings, "data.train_batch_size") or 256
    imported.microbatches_per_rank = None


_TRAINED = ("actor_train", "sft_train", "student_train", "student")
"""Workers of ROLL that train."""
_OF_ROLL = dialect("roll")


def read_roll(config: ConfigFile) -> ImportedRun:
    """The run of ROLL's YAML: what its worker that trains does. Raises SpecError where none does."""
    data = yaml_of(config.text, "give the configuration's file")
    given = resolved(flat(data) if isinstance(data, dict) else {})
    worker = next((name for name in _TRAINED if any(path.startswith(f"{name}.") for path in given)), None)
    if worker is None:
        raise SpecError("no worker of ROLL's trains", f"one of {', '.join(_TRAINED)}")
    own: Settings = {path.removeprefix(f"{worker}."): value for path, value in given.items() if path.startswith(worker)}
    strategy, start = str(own.get("strategy_args.strategy_name")), "strategy_args.strategy_config"
    keys = {
        path.removeprefix(f"{start}.").removeprefix("additional_configs."): value
        for path, value in own.items()
        if path.startswith(f"{start}.")
    }
    model = str(own.get("model_args.model_name_or_path") or given.get("pretrain") or "")
    told = {
        "per_device_train_batch_size": own.get("training_args.per_device_train_batch_size", 8),
        "gradient_accumulation_steps": own.get("training_args.gradient_accumulation_steps", 1),
    }
    gpus = _gpus_of(str(own.get("device_mapping", ""))) or _nodes_of(given)
    if adapts := own.get("model_args.lora_target"):
        told |= {"lora_rank": own.get("model_args.lora_rank", 8), "target_modules": adapts, "tuner_type": "lora"}
    if "megatron" in strategy:
        if is_on(keys.pop("moe_layer_recompute", False)):
            keys |= {"recompute_granularity": "selective", "recompute_modules": "moe"}
        if keys.get("recompute_granularity") == "full" and "recompute_method" not in keys:
            keys |= {"recompute_method": "uniform", "recompute_num_layers": 1}
        keys["micro_batch_size"] = told["per_device_train_batch_size"]
        if isinstance(modules := keys.get("recompute_modules"), str):
            keys["recompute_modules"] = modules.split(",")
        imported = read_keys("roll", keys, gpus, named=model_called(model) if model else None)
        imported.rename({"micro_batch_size": f"{worker}.training_args.per_device_train_batch_size"})
        imported.microbatches_per_rank = int(told["gradient_accumulation_steps"])
        imported.assumed.pop("--global-batch-size", None)
        add_adapters(imported, told)
    else:
        imported = _of_transformers(given, own, keys, told | {"model_name_or_path": model}, gpus)
    imported.source, imported.predicts_further = "roll", False
    imported.model_name = "" if imported.run["model"] else model
    _set_lengths(imported, given, own)
    return imported


def _of_transformers(given: Settings, own: Settings, keys: Settings, told: Settings, gpus: int | None) -> ImportedRun:
    """A worker around a model of transformers: DeepSpeed's configuration, named or given, or FSDP's sizes."""
    start = "strategy_args.strategy_config"
    told |= {"gradient_checkpointing": not is_on(own.get("model_args.disable_gradient_checkpointing")), "bf16": True}
    is_deepspeed = "deepspeed" in str(own.get("strategy_args.strategy_name"))
    told |= (
        {"deepspeed": own.get(start) or "zero3", "torch_dtype": "bfloat16"} if is_deepspeed else {"fsdp": "full_shard"}
    )
    if sequence := own.get("model_args.ulysses_size"):
        told["context_parallel_size"] = sequence
    imported = run_of_arguments(KeyedSettings(told, Script(), gpus), ConfigFile("", None), _OF_ROLL)
    if not is_deepspeed:
        if (size := number(keys, "fsdp_size") or 0) > 1:
            imported.run["parallelism"]["fsdp"] = size
        if keys.get("param_dtype") in ("bf16", "bfloat16") and not imported.run.get("adapters"):
            imported.run["features"]["no_masters"] = True
        if is_on(keys.get("offload_policy")):
            imported.offload_all(f"{start}.offload_policy")
        if (experts := number(keys, "ep_size") or 1) > 1:
            imported.unknown[f"{start}.ep_size"] = f"{experts}, priced as sharded over all ranks"
    return imported


def _gpus_of(mapping: str) -> int:
    """GPUs of `list(range(0,16)) + [16, 17]`."""
    ranges = re.findall(r"range\((?:(\d{1,6}), *)?(\d{1,6})\)", mapping)
    rest = re.sub(r"range\([\d, ]*\)", "", mapping)
    return sum(int(last) - int(first or 0) for first, last in ranges) + len(re.findall(r"\d{1,6}", rest))


def _nodes_of(given: Settings) -> int | None:
    each = number(given, "num_gpus_per_node")
    return each and each * (number(given, "num_nodes") or 1)


def _set_lengths(imported: ImportedRun, given: Settings, own: Settings) -> None:
    """The length of a sequence, and what reinforcement learning holds beside an update."""
    prompt, answer = number(given, "prompt_length"), number(given, "response_length")
    length = number(given, "sequence_length") or (prompt or 0) + (answer or 0)
    imported.run["seq_length"] = length or imported.run["seq_length"]
    if not is_any_on(own, "use_sequence_packing", "use_remove_padding"):
        imported.note_unpacked()
    if "chosen_key" in given:
        imported.run["objective"] = {"name": "dpo", "reference": "precomputed"}
        layout = imported.run["parallelism"]
        layout["micro_batch_size"] = 2 * layout.get("micro_batch_size", 1)
    elif any(path.partition(".")[0] == "actor_infer" for path in given):
        imported.reinforce(scored_tokens=length * (number(own, "infer_batch_size") or 1), scored_alone=True)
        imported.notes.append(
            "one update of the actor is priced; rollouts are not, nor models that are on the host meanwhile"
        )
