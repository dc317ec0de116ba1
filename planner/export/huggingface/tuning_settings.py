"""Settings of the trainers around Hugging Face's, Accelerate, axolotl, LLaMA-Factory and of adapters, as a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf, isfinite
from typing import Any

from planner.errors import SpecError
from planner.export.huggingface.deepspeed_files import DEEPSPEED_RUNTIME, apply_deepspeed, parse_json, section
from planner.export.imported_run import ConfigFile, ImportedRun, json_of, new_run
from planner.export.keyed_settings import (
    dialect,
    first,
    flat,
    fraction,
    is_any_on,
    is_empty,
    is_on,
    mapping_of,
    number,
    refused_settings,
    table,
    word,
)
from planner.export.named_models import has_towers, model_called, num_layers_of
from planner.specs.base import Fields, Named, Said
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model
from planner.specs.training import ATTENTION, GROUPS, LATENT, OBJECTIVES, TARGETS, AdapterSpec
from planner.trainers.load import load_runtime, switches_of

FSDP_RUNTIME, HF_RUNTIME = "torch-fsdp", "hf"
"""FSDP around fp32 weights, which mixed precision makes of them; and transformers' own weights as they are loaded."""
_SHARDING = {str(name): stage for name, stage in table()["accelerate"]["strategies"].items()}
"""FSDP's strategies, by name and by Accelerate's number, and the ZeRO stage that each is."""


def dtype_of(settings: Said) -> str | None:
    """bf16 or fp16 as flags or as `mixed_precision` say; None for fp32."""
    mixed = word(settings, "mixed_precision")
    for dtype in ("bf16", "fp16", "fp8"):
        if is_on(settings.get(dtype)) or (settings.get(dtype) == "auto" and dtype == "bf16") or mixed == dtype:
            return dtype
    named = word(settings, "dtype", "torch_dtype")
    return {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}.get(named)


def apply_fsdp(imported: ImportedRun, words: str, options: Said) -> None:
    """Put what FSDP's options mean into a run, by their own names or Accelerate's; `words` are those of `fsdp`."""
    said = {str(name).removeprefix("fsdp_"): value for name, value in options.items()}
    named = (name.upper() for name in (*words.split(), str(said.get("sharding_strategy"))))
    reshards, strategy = said.get("reshard_after_forward"), next((n for n in named if n in _SHARDING), "FULL_SHARD")
    is_kept = False
    if isinstance(reshards, str) and reshards.upper() in _SHARDING:
        strategy = reshards.upper()
    elif reshards is not None:
        is_kept = not is_on(reshards)
    layout = imported.run["parallelism"]
    layout["zero_stage"] = 2 if is_kept else _SHARDING[strategy]
    if "HYBRID" in strategy or strategy in ("4", "5"):
        layout["fsdp"] = 8
    if is_on(said.get("activation_checkpointing")):
        layout["recompute"] = "full"
    if "offload" in words or is_on(said.get("offload_params")):
        imported.offload_all("fsdp", f"{words} offload of parameters".strip())


def deepspeed_beside(config: ConfigFile, name: Any) -> Fields | None:
    """The DeepSpeed configuration that a setting names, or holds; None where it cannot be read."""
    if isinstance(name, Mapping):
        return dict(name)
    text = config.beside(str(name)) if name else None
    return None if text is None else parse_json(text)


def set_model(imported: ImportedRun, name: Any) -> None:
    """The model that a setting names; a note where the planner does not know it."""
    if not isinstance(name, str) or not name:
        return
    imported.run["model"] = found = model_called(name)
    if found is None:
        imported.model_name = name
    elif (tower := load_model(found).vision) is not None:
        tokens = f"{tower.image_tokens:,} tokens"
        imported.notes.append(
            f"{name[:80]}: planned with a frozen tower and an image of {tokens} a sequence (--images)"
        )
    elif has_towers(name):
        imported.notes.append(f"{name[:80]}: the language model alone is planned")


OPTIMIZERS: Named = table()["transformers"]["optimizers"]
"""Values of the switch `optimizer`, and their names in `optim`; it has none for Muon."""
_ADAMS = re.compile(r"adamw?(_torch|_hf|_torch_fused|_apex_fused|_torch_xla)?$")
_OPTIMIZERS = {name: value for value, name in OPTIMIZERS.items()} | table()["transformers"]["older_optimizers"]
_BF16 = ("bf16", "bfloat16")
_FP32 = ("float32", "fp32")
_WORDS = ("lora", "qlora")
_KINDS = ("finetuning_type", "tuner_type", "train_type", "sft_type")


def beside_adapters(settings: Said, config: ConfigFile) -> Fields:
    """Fields of peft's and bitsandbytes' files beside training arguments; none where the arguments name adapters."""
    if says_adapters(settings) or "peft_type" in settings:
        return {}
    found: Fields = {}
    for name in (ADAPTER_FILE, QUANTIZATION_FILE):
        data = json_of(config.beside(name) or "{}", f"mend {name}")
        found |= data if isinstance(data, dict) else {}
    return found if "peft_type" in found else {}


def says_adapters(settings: Said) -> bool:
    """The settings of a trainer train adapters, by any of their words."""
    named = word(settings, "adapter", *_KINDS)
    given = word(settings, "lora_r", "lora_rank", "lora_dim") not in ("", "0")
    is_off = named in ("full", "freeze") or any(
        name in settings and not is_on(settings[name]) for name in ("use_peft", "use_lora")
    )
    is_asked = is_any_on(settings, "use_peft", "use_lora", "use_qlora", "peft", "q_lora")
    return named in _WORDS or is_asked or (given and not is_off)


def read_fine_tuning(imported: ImportedRun, settings: Fields) -> None:
    """Put adapters, the optimizer and kernels into a run, and choose the trainer that keeps weights as it does."""
    run = imported.run
    if says_adapters(settings) or str(settings.get("peft_type")).upper() == "LORA":
        bits = 4 if word(settings, "adapter") == "qlora" or is_any_on(settings, "use_qlora", "q_lora") else None
        run["adapters"], unknown = read_adapters(settings, bits)
        imported.unknown |= unknown
    elif bits_of(settings) < 16:
        imported.unknown["quantization"] = f"weights of {bits_of(settings)} bits that are trained whole"
    for kind in _KINDS:
        if str(settings.get(kind)).lower() not in ("none", "full", *_WORDS):
            imported.unknown[kind] = f"{settings[kind]}, priced as {'lora' if run.get('adapters') else 'all weights'}"
    _read_objective(imported, settings)
    _read_sharding(imported, settings)
    _read_optimizer(imported, settings)
    _read_kernels(imported, settings)


_OBJECTIVES: Mapping[str, str | None] = table()["huggingface"]["objectives"]
"""Trainers' words for what they learn, and our objective; none for what is not priced."""


def stage_of(settings: Said) -> str:
    """The trainer's own word for the objective; an empty one for the next token."""
    named = word(settings, "rl", "rlhf_type", "stage")
    preferred = word(settings, "pref_loss", "loss_type")
    if named == "dpo" and preferred in ("orpo", "simpo"):
        return preferred
    told = {"num_generations": "grpo", "precompute_ref_log_probs": "dpo"}
    return named or next((stage for name, stage in told.items() if name in settings), "")


def policy_length(settings: Said, said: int | None) -> int | None:
    """Tokens of a prompt and its answer in a policy's update; `said`, the length in the settings, for anything else."""
    answer = number(settings, "max_completion_length")
    if _OBJECTIVES.get(stage_of(settings)) != "policy":
        return said
    if "rlhf_type" in settings:
        return (said or 1024) + (answer or 512)
    return said or (number(settings, "max_prompt_length") or 512) + (answer or 256)


def _read_objective(imported: ImportedRun, settings: Said) -> None:
    """Pairs of answers, a policy's update, or what else is not the next token; what has no price is not understood."""
    stage = stage_of(settings)
    name = _OBJECTIVES.get(stage, "lm")
    layout = imported.run["parallelism"]
    if name is None:
        imported.unknown["stage"] = f"{stage}, priced as learning the next token"
        if stage in ("rm", "reward"):
            # both answers of a pair are in one batch
            layout["micro_batch_size"] = 2 * layout.get("micro_batch_size", 1)
    elif name == "policy":
        _read_policy(imported, settings)
    elif name != "lm":
        reference = "adapters" if imported.run.get("adapters") else "model"
        is_before = is_on(settings.get("precompute_ref_log_probs"))
        imported.run["objective"] = {"name": name, "reference": "precomputed" if is_before else reference}
        if OBJECTIVES[name].num_sequences > 1:
            layout["micro_batch_size"] = 2 * layout.get("micro_batch_size", 1)


def _read_policy(imported: ImportedRun, settings: Said) -> None:
    """Price a policy's update, with its reference and an engine that generates answers beside it.

    TRL keeps no reference where beta is 0, as it has been since 0.18 unless told; ms-swift's beta is 0.04.
    """
    is_swift = "rlhf_type" in settings
    is_kept = str(settings.get("beta", 0.04 * is_swift)) not in ("0", "0.0") and not imported.run.get("adapters")
    is_beside = is_on(settings.get("use_vllm")) and word(settings, "vllm_mode") in ("", "colocate")
    imported.reinforce(
        rollout_fraction=is_beside * fraction(settings, "vllm_gpu_memory_utilization", 0.9 if is_swift else 0.3),
        rollout_stays=is_beside
        and not (is_on(settings.get("vllm_enable_sleep_mode")) or number(settings, "sleep_level")),
        scored_alone=is_any_on(settings, "offload_optimizer", "offload_model"),
        frozen_copies=int(is_kept),
    )
    imported.notes.append("one update of the policy is priced; answers and rewards are not")


def _read_sharding(imported: ImportedRun, settings: Said) -> None:
    """The one who shards, where adapters are trained or the model is loaded in bf16; others keep their own trainer."""
    run = imported.run
    named, sharded = _named_dtype(settings), run["parallelism"].get("zero_stage", 0)
    # FSDP makes fp32 masters of any weights, and DeepSpeed of bf16 ones
    is_tuned = run.get("adapters") or named in _BF16 or (named in _FP32 and sharded >= 2)
    if not is_tuned or run["runtime"] not in (FSDP_RUNTIME, DEEPSPEED_RUNTIME):
        if run["runtime"] == FSDP_RUNTIME and not sharded and dtype_of(settings) is not None:
            run["features"]["autocast"] = True
        return
    if run["runtime"] == DEEPSPEED_RUNTIME:
        kept = {
            name: run["features"][name]
            for name in ("optimizer_offload", "parameter_offload")
            if run["features"].get(name)
        }
        run["features"] = {"sharding": "deepspeed", **kept}
    else:
        run["features"]["sharding"] = "fsdp" if sharded >= 2 else "ddp"
    run["runtime"] = HF_RUNTIME


def _named_dtype(settings: Said) -> str:
    """The dtype in which the model is loaded."""
    return word(settings, "dtype", "torch_dtype").removeprefix("torch.")


def _read_optimizer(imported: ImportedRun, settings: Said) -> None:
    given = str(first(settings, "optim", "optimizer", default="adamw_torch"))
    value = _OPTIMIZERS.get(given)
    if _ADAMS.fullmatch(given):
        return
    if value in switches_of(load_runtime(HF_RUNTIME))["optimizer"] and imported.run["runtime"] != DEEPSPEED_RUNTIME:
        imported.run["features"]["optimizer"] = value
    else:
        imported.unknown["optim"] = given


def _read_kernels(imported: ImportedRun, settings: Said) -> None:
    """Attention, compiled and fused kernels, and activations on the host."""
    features = imported.run["features"]
    attention = word(settings, "attn_implementation", "attn_impl")
    if attention == "eager":
        features["flash_attention"] = False
    elif is_on(settings.get("flash_attention")) or "fa2" in str(settings.get("flash_attn")) or "flash" in attention:
        features["attention_kernel"] = "fastest" if re.search("[34]", attention) else "flash"
    if is_on(settings.get("torch_compile")):
        features["compile"] = True
    is_older = bool(settings.keys() & {*table()["trl"]["older"].split()})
    if is_any_on(
        settings, "use_liger_kernel", "liger_kernel", "enable_liger_kernel", "liger_fused_linear_cross_entropy"
    ):
        # LLaMA-Factory and ms-swift take log-probabilities of logits where more than the next token is learned
        takes_logits = _OBJECTIVES.get(stage_of(settings), "lm") != "lm" and any(name in settings for name in _KINDS)
        features["liger"] = "layers" if takes_logits else True
    elif settings.get("loss_type") == "chunked_nll" and not is_older and "objective" not in imported.run:
        features["liger"] = "loss"
    if is_on(settings.get("activation_offloading")) or _offloads_inputs(settings):
        layers = num_layers_of(imported.run["model"])
        if layers is None:
            imported.unknown["activation_offloading"] = "true"
        else:
            features["cpu_offloading_num_layers"] = layers


def _offloads_inputs(settings: Said) -> bool:
    """Checkpointing keeps its layers' inputs on the host, as transformers, axolotl and Unsloth ask for it."""
    kwargs = settings.get("gradient_checkpointing_kwargs")
    named = (settings.get(name) for name in ("gradient_checkpointing", "use_gradient_checkpointing"))
    is_asked = is_on(settings.get("use_unsloth_gc")) or (isinstance(kwargs, Mapping) and is_on(kwargs.get("offload")))
    return is_asked or any(v in ("offload", "unsloth") for v in named)


_READ_OF_SECTIONS = re.compile(
    r"(fsdp_)?(sharding_strategy|reshard_after_forward|activation_checkpointing|version|offload_params)|zero_stage"
    r"|gradient_accumulation_steps|offload_(optimizer|param)_device|deepspeed_config_file"
    r"|parallelism_config_((tp|cp|sp|dp_replicate|dp_shard)_size|cp_comm_strategy)"
    r"|megatron_lm_(tp_degree|pp_degree|sequence_parallelism|use_distributed_optimizer|recompute_activations?"
    r"|num_micro_batches)"
)
IN_FP32 = "mixed_precision: no, so that it trains in fp32: priced as bf16"


def read_accelerate(config: ConfigFile) -> ImportedRun:
    """The part of a run that Accelerate's YAML holds. Raises SpecError where it is no mapping."""
    settings = mapping_of(config.text)
    imported = new_run("accelerate", FSDP_RUNTIME, parallelism={"zero_stage": 0})
    apply_accelerate(imported, settings, config)
    read_fine_tuning(imported, beside_adapters(settings, config))
    imported.notes.append("an Accelerate configuration names no model, batch or sequence length: add them as options")
    row, given = dialect("accelerate"), flat(settings)
    row.sort(imported, settings, (), lambda name, value: not value)
    row.assume(imported, {path: v for path, v in row.left_out(given).items() if path.partition(".")[0] in settings})
    imported.refused = refused_settings(settings, "accelerate")
    note_sections(imported, given)
    return imported


def note_sections(imported: ImportedRun, given: Said) -> None:
    """List the options in sections of Accelerate's that are not read; `given` are settings by their paths."""
    row = dialect("accelerate")
    for path, value in given.items():
        if "." in path and _READ_OF_SECTIONS.fullmatch(path.partition(".")[2]) is None and not row.is_harmless(path):
            (imported.ignored if is_empty(value) else imported.unknown)[path] = str(value)


def apply_accelerate(imported: ImportedRun, settings: Said, config: ConfigFile) -> None:
    """Put what Accelerate's settings say into a run."""
    run = imported.run
    kind = word(settings, "distributed_type").upper()
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
        apply_fsdp(imported, "", section(settings, "fsdp_config"))
        apply_parallelism(imported, section(settings, "parallelism_config"))
    elif kind == "DEEPSPEED":
        _apply_deepspeed(imported, section(settings, "deepspeed_config"), config)
    elif kind == "MEGATRON_LM":
        _apply_megatron(imported, section(settings, "megatron_lm_config"))


def apply_parallelism(imported: ImportedRun, options: Fields) -> None:
    """Sizes of tensor and context parallelism, and of groups that shard."""
    sizes = {str(name).removeprefix("parallelism_config_"): value for name, value in options.items()}
    layout = imported.run["parallelism"]
    layout["tp"], layout["cp"] = number(sizes, "tp_size") or 1, number(sizes, "cp_size") or 1
    replicate, shard = number(sizes, "dp_replicate_size") or 1, number(sizes, "dp_shard_size") or 1
    if replicate > 1 and shard > 1:
        layout["fsdp"] = shard * layout["cp"]
    if layout["tp"] > 1 or layout["cp"] > 1:
        imported.run["runtime"] = "torchtitan"
        # of a year in which transformers splits models: torch deals parts of sequences evenly, and chooses their kernel
        imported.run["features"] |= {"flex_attention": True} | (
            {"attention_kernel": "fastest"} if layout["cp"] > 1 else {}
        )
        imported.notes.append(
            "FSDP2 beside tensor or context parallelism is priced as torchtitan, which is the same torch"
        )


def _apply_deepspeed(imported: ImportedRun, options: Fields, config: ConfigFile) -> None:
    devices = {name: options.get(f"{name}_device") for name in ("offload_optimizer", "offload_param")}
    found: Fields | None = {
        "zero_optimization": {"stage": number(options, "zero_stage") or 0}
        | {name: {"device": device} for name, device in devices.items()},
        "gradient_accumulation_steps": number(options, "gradient_accumulation_steps"),
    }
    if name := options.get("deepspeed_config_file"):
        found = deepspeed_beside(config, name)
    if found is None:
        raise SpecError(
            f"deepspeed_config_file: {name!r:.80} is not beside the file", "put it there, or import it itself"
        )
    apply_deepspeed(imported, found)


def _apply_megatron(imported: ImportedRun, options: Fields) -> None:
    sizes = {name.removeprefix("megatron_lm_"): value for name, value in options.items()}
    layout, run = imported.run["parallelism"], imported.run
    run["runtime"] = "megatron"
    layout["tp"], layout["pp"] = number(sizes, "tp_degree") or 1, number(sizes, "pp_degree") or 1
    layout["sequence_parallel"] = is_on(sizes.get("sequence_parallelism")) and layout["tp"] > 1
    layout["zero_stage"] = 1 if is_on(sizes.get("use_distributed_optimizer")) else 0
    if is_any_on(sizes, "recompute_activations", "recompute_activation"):
        layout["recompute"] = "selective"
    imported.microbatches_per_rank = number(sizes, "num_micro_batches") or 1


ADAPTER_FILE, QUANTIZATION_FILE = "adapter_config.json", "quantization_config.json"
ACCELERATE_FILE = "accelerate_config.yaml"
EVERY_LINEAR = "all-linear"
ALPHA_OVER_RANK = 2
"""lora_alpha over r that TRL's own defaults have (32 and 16); it scales what adapters add, and costs nothing."""
_EXPERTS = "experts."


def lora_config(adapters: AdapterSpec, model: ModelSpec) -> Fields:
    """Fields of peft's LoraConfig."""
    modules = [name for name in _modules(adapters, model) if not name.startswith(_EXPERTS)]
    tensors = [name for name in _modules(adapters, model) if name.startswith(_EXPERTS)]
    every = adapters.targets == (EVERY_LINEAR,)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapters.rank,
        "lora_alpha": ALPHA_OVER_RANK * adapters.rank,
        "lora_dropout": adapters.dropout,
        "bias": "none",
        "target_modules": EVERY_LINEAR if every else modules,
        # the experts of a layer are one tensor, and no module
        **({"target_parameters": tensors} if tensors else {}),
    }


def _modules(adapters: AdapterSpec, model: ModelSpec) -> list[str]:
    """The names of the targets, in peft's order, without those of the other kind of attention."""
    absent = ATTENTION[:3] if model.mla is not None else LATENT
    named = [name for name in TARGETS if name in adapters.modules]
    return [name for name in named if name not in absent or name in adapters.targets]


def quantization_config(adapters: AdapterSpec, is_sharded: bool) -> Fields | None:
    """Fields of BitsAndBytesConfig for the frozen weights; None where they stay in 16 bits.

    Sharded weights of 4 bits are stored as bf16, whose tensors can be split as all others are.
    """
    if adapters.base_bits == 8:
        return {"load_in_8bit": True}
    if adapters.base_bits == 4:
        return {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "bfloat16" if is_sharded else "uint8",
        }
    return None


def read_adapters(settings: Said, bits: int | None = None) -> tuple[Fields, Named]:
    """Fields of AdapterSpec that settings of peft, or of a trainer around it, say; and what it cannot say.

    Raises SpecError for a rank or a dropout that is no number.
    """
    adapters: Fields = {"base_bits": bits or bits_of(settings)}
    unknown: Named = {}
    rank, dropout = first(settings, "r", "lora_r", "lora_rank"), first(settings, "lora_dropout")
    if rank is not None:
        adapters["rank"] = int(_number("r", rank))
    if dropout is not None:
        adapters["dropout"] = _number("lora_dropout", dropout)
    adapters["targets"], others = _targets(settings)
    if others:
        unknown["target_modules"] = ", ".join(others)
    for name in ("use_dora", "modules_to_save", "lora_modules_to_save", "layers_to_transform", "rank_pattern"):
        if settings.get(name) not in (None, False, [], {}, ""):
            unknown[name] = str(settings[name])[:200]
    kind = str(settings.get("peft_type") or "LORA").upper()
    if kind != "LORA":
        unknown["peft_type"] = kind
    return adapters, unknown


_IN_4_BITS = re.compile(r"(?i)[-_](gptq(?!.{0,5}int8)|bnb-4bit|int4|nf4)\b")


def bits_of(settings: Said) -> int:
    """Bits of the frozen weights, by the flags of bitsandbytes and trainers around it, or by the name of the model."""
    named = word(settings, "quantization_bit", "load_in_bits")
    called = " ".join(str(settings.get(name) or "") for name in ("model", "model_name_or_path", "base_model"))
    if is_on(settings.get("load_in_4bit")) or named == "4" or _IN_4_BITS.search(called):
        return 4
    return 8 if is_on(settings.get("load_in_8bit")) or named == "8" else 16


def _targets(settings: Said) -> tuple[list[str], list[str]]:
    """Targets that the planner knows, and names that it does not."""
    given = first(settings, "target_modules", "lora_target_modules", "lora_target")
    named = [*_listed(given), *_listed(settings.get("target_parameters"))]
    short = [name for name in map(_short, map(str, named)) if name]
    if "all" in short or EVERY_LINEAR in short or settings.get("lora_target_linear") in (True, "true"):
        return [EVERY_LINEAR, *(name for name in short if name in TARGETS and name not in GROUPS[EVERY_LINEAR])], []
    known = [name for name in dict.fromkeys(short) if name in TARGETS]
    # peft adapts the projections of queries and values where nothing is named, and Unsloth all
    unnamed = [EVERY_LINEAR] if named or is_on(settings.get("use_unsloth")) else ["q_proj", "v_proj"]
    return known or unnamed, [n for n in short if n not in TARGETS]


def _listed(given: Any) -> list[Any]:
    """Names as a list of them, or as a text that holds several; what is neither is one name, which nobody knows."""
    if isinstance(given, str):
        return re.split(r"[\s,|()]+", given)
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def _short(name: str) -> str:
    """The end of a module's path, by which peft finds it."""
    tail = name.strip(" .*\\^$").rpartition(".")[2]
    return f"{_EXPERTS}{tail}" if f"{_EXPERTS}{tail}" in name else tail


def _number(name: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = inf
    if not isfinite(found):
        raise SpecError(f"{name}: {value!r:.60} is no number", "write a number")
    return found
