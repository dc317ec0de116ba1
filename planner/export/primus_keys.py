"""The keys of Primus' Megatron backend as a run: most are arguments of Megatron-LM by the names of its parser."""

from __future__ import annotations

import re
from typing import Any

from planner.errors import SpecError
from planner.export.followed.shell_script import Script
from planner.export.imported_run import ImportedRun
from planner.export.megatron.keyed_reading import add_lora
from planner.export.megatron.option_rows import NEGATED, PRIMUS_SCHEDULES, Options, key_of
from planner.export.megatron.script_reading import READ_OPTIONS, run_of
from planner.export.named_models import Model, num_layers_of

Values = dict[str, Any]
TURBO = frozenset({
    "enable_primus_turbo", "use_turbo_deepep", "moe_enable_deepep", "turbo_sync_free_moe_stage",
    "use_turbo_grouped_gemm", "use_turbo_grouped_mlp", "moe_use_legacy_grouped_gemm", "cpu_offload",
    "patch_moe_overlap",
})  # fmt: skip
"""Keys that are read for features."""
SCHEDULES = frozenset({
    "patch_primus_pipeline", "pp_algorithm", "pp_max_mem", "patch_zero_bubble", "enable_zero_bubble",
    "zero_bubble_v_schedule", "zero_bubble_v_schedule_mem_setup", "enable_1f1b_v", "zero_bubble_max_pending_backward",
})  # fmt: skip
"""Keys that are read for the schedule of a pipeline."""
ALGORITHMS = {"1f1b": "1f1b", "1f1b-interleaved": "interleaved-1f1b"} | {
    row["algorithm"]: name for name, row in PRIMUS_SCHEDULES.items()
}
"""Values of `pp_algorithm`, and the schedules that they are."""
_V_SHAPED = {"half": "v-half", "min": "v-min", "zb": "zb-v"}
"""Values of `zero_bubble_v_schedule_mem_setup`."""


def features(values: Values) -> Values:
    """Features of a run with Megatron's backend that Primus' own keys say."""
    turbo = bool(values.get("enable_primus_turbo"))
    stage = values.get("turbo_sync_free_moe_stage") or 0
    if type(stage) is not int or not 0 <= stage <= 3:
        raise SpecError(f"turbo_sync_free_moe_stage: {stage!r:.60} is no stage", "write 0, 1, 2 or 3")
    found: Values = {}
    if values.get("patch_moe_overlap"):
        found["ep_overlap"] = True
    if values.get("num_experts"):
        deepep = (turbo and (values.get("use_turbo_deepep") or stage > 1)) or values.get("moe_enable_deepep")
        if deepep:
            found["dispatcher"] = "deepep"
        found["sync_free_moe"] = stage if turbo else 0
        in_turbo = turbo and (values.get("use_turbo_grouped_gemm") or stage > 1)
        found["grouped_gemm"] = "turbo" if in_turbo else "legacy"
    return found


def torchtitan_features(own: Values) -> Values:
    """Features of a run with torchtitan's backend."""
    if not own.get("primus_turbo.enable_primus_turbo", True):
        return {}
    return {"async_tp": True} if own.get("parallelism.enable_async_tensor_parallel") else {}


def pipeline(values: Values, pp: int) -> Values:
    """The schedule, where one of Primus' own two pipelines runs it; Megatron-LM's say theirs by the layout."""
    if pp == 1:
        return {}
    if values.get("patch_zero_bubble"):
        return _zero_bubble(values)
    if not values.get("patch_primus_pipeline"):
        return {}
    name = str(values.get("pp_algorithm", "1f1b-interleaved"))
    schedule = ALGORITHMS.get(name)
    if schedule is None:
        raise SpecError(f"pp_algorithm: {name[:60]!r} is unknown", f"one of {', '.join(ALGORITHMS)}")
    return _layout(schedule)


def _zero_bubble(values: Values) -> Values:
    """The schedules of the fork of Qi et al. that Primus carries along."""
    if values.get("zero_bubble_v_schedule"):
        setup = str(values.get("zero_bubble_v_schedule_mem_setup", "half"))
        if setup not in _V_SHAPED:
            raise SpecError(
                f"zero_bubble_v_schedule_mem_setup: {setup[:60]!r} is unknown", f"one of {', '.join(_V_SHAPED)}"
            )
        return _layout(_V_SHAPED[setup])
    if values.get("enable_1f1b_v"):
        raise SpecError("enable_1f1b_v: this schedule is not modelled", "write `zero_bubble_v_schedule: true`")
    return _layout("zb-h1") if values.get("enable_zero_bubble", True) else {}


def _layout(schedule: str) -> Values:
    """The schedule with its chunks: two a rank where it is shaped as a V."""
    if schedule == "interleaved-1f1b":
        return {}
    return {"schedule": schedule} | ({"vpp": 2} if schedule in ("zb-v", "v-half", "v-min") else {})


MODEL_KEYS = frozenset({
    "use_sink_attention", "sink_sliding_window", "sink_window_even_layers_only", "final_logit_softcapping",
    "attn_logit_softcapping", "router_logit_softcapping", "lfm_layer_types", "conv_L_cache", "conv_bias",
    "experimental_attention_variant", "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "model_type", "spec",
})  # fmt: skip
"""Keys that are read here."""
_OTHERS = {
    "mamba": "Mamba, a state-space model, or one of its hybrids",
    "deepseek_v4": "DeepSeek-V4, whose layers choose keys from compressed ones and keep several residual streams",
    "kimi_k3": "Kimi K3, whose layers attend to the residuals of earlier ones",
}
"""Values of `model_type`, and what they are."""


def check_is_transformer(values: Values) -> None:
    """Raise SpecError for a model whose layers are none that this planner has."""
    kind = str(values.get("model_type") or "gpt")
    if kind != "gpt":
        what = _OTHERS.get(kind, "a diffusion model" if re.search("flux|diffusion|wan", kind) else f"{kind[:40]!r}")
        raise SpecError(f"model_type: this is {what}", "only decoder-only transformers in training are planned")
    if re.search(r"mamba|hybrid", str(values.get("spec") or "")):
        raise SpecError(f"spec: {str(values['spec'])[:80]}: this is a hybrid", "give the experiment of a transformer")


def add_to_model(model: Values, values: Values) -> None:
    """Put what Primus' own keys say of a model into its fields."""
    for cap in ("final_logit_softcapping", "attn_logit_softcapping"):
        if isinstance(values.get(cap), (int, float)) and values[cap]:
            model[cap] = values[cap]
    if values.get("use_sink_attention"):
        model["attention_sinks"] = True
        window = values.get("sink_sliding_window") or 0
        if type(window) is int and window > 0:
            model["sliding_window"] = window
            if values.get("sink_window_even_layers_only", True):
                model["sliding_window_pattern"] = 2
    if (kinds := values.get("lfm_layer_types")) is not None:
        if not isinstance(kinds, list):
            raise SpecError(f"lfm_layer_types: {kinds!r:.60} is no list of layers", "write [conv, full_attention, …]")
        model["layer_types"] = ["conv" if kind == "conv" else "full" for kind in kinds]
        model["short_conv_kernel"] = values.get("conv_L_cache") or 3
    if (variant := values.get("experimental_attention_variant")) == "gated_delta_net":
        _add_delta_net(model, values)
    elif variant is not None:
        raise SpecError(f"experimental_attention_variant: {str(variant)[:40]} is not modelled", "leave it out")


def _add_delta_net(model: Values, values: Values) -> None:
    """Gated delta nets on all layers but every n-th, which attends."""
    every = values.get("linear_attention_freq")
    if type(every) is not int or every < 2:
        raise SpecError(f"linear_attention_freq: {every!r:.60} is no interval of layers", "write a number from 2 on")
    model["layer_types"] = (["gated_delta"] * (every - 1) + ["full"])[: model["num_hidden_layers"]]
    model["linear_attention"] = {
        "num_key_heads": values.get("linear_num_key_heads"),
        "num_value_heads": values.get("linear_num_value_heads"),
        "key_head_dim": values.get("linear_key_head_dim"),
        "value_head_dim": values.get("linear_value_head_dim"),
        "conv_kernel": values.get("linear_conv_kernel_dim"),
    }


_OPTIONS = {key_of(option): option for option in sorted(READ_OPTIONS, reverse=True)} | {
    "norm_epsilon": "--norm-epsilon",
    "apply_layernorm_1p": "--apply-layernorm-1p",
    "add_position_embedding": "--no-position-embedding",
    "original_max_position_embeddings": "--yarn-original-max-position-embeddings",
}
"""Key to the option of Megatron-LM that sets it."""
_OFF = frozenset({*NEGATED.values(), "add_position_embedding"})
"""Keys that an option sets to false."""
_LISTS = ("recompute_modules", "offload_modules", "cuda_graph_modules", "cuda_graph_scope", "cp_comm_type")
"""Keys whose options take several words."""
_OWN = frozenset({
    "recompute_layer_ids", "decoder_pipeline_manual_split_list", "torch_fsdp2_reshard_after_forward", "mock_data",
    "lora", "stage", "peft", "flavor", "recipe", "precision_config", "num_virtual_stages_per_pipeline_rank",
    "virtual_pipeline_model_parallel_size", "data_parallel_replicate_degree",
})  # fmt: skip
_HARMLESS = re.compile(
    r"(\w+_sink_level|(log|mlflow|wandb|tensorboard|profile|torch_profiler|pytorch_profiler|memory_snapshot)_\w+|"
    r"disable_(mlflow|tensorboard|wandb|last_saving|delayed_scaling_patches)|auto_continue_train|pp_warmup|skip_save|"
    r"hf_path|mock|enable_packed_sequences|use_packed_attention|apply_rope_fusion|no_fp8_weight_transpose_cache|"
    r"turbo_deepep_num_cu|use_turbo_(attention|gemm|rms_norm|fused_act_with_probs|permute_padding))$"
)
"""Keys of Primus' own that change neither seconds nor bytes of a step, or whose kernels the trainer has anyway."""


def run_of_keys(values: Values, written: Values, named: Model | None = None) -> ImportedRun:
    """The run that an experiment's values describe; `written` are those that its own file says.

    `named` is a model that the experiment names and does not describe.
    """
    if named is None:
        check_is_transformer(values)
    imported = run_of(options_of_values(values), Script(), "primus", named=named)
    run, layout = imported.run, imported.run["parallelism"]
    run["runtime"] = "primus-megatron"
    run["features"] |= features(values)
    layout |= _sharding(values, layout) | pipeline(values, layout["pp"])
    layout |= _split(values, layout) | _recomputed_layers(values, layout, num_layers_of(named))
    if run["model"] is not None and named is None:
        add_to_model(run["model"], values)
        imported.notes += _without_unplaced_blocks(run["model"], layout)
    _read_four_bits(imported, values)
    lora = values.get("lora")
    if isinstance(lora, dict) and lora.get("enabled"):
        add_lora(imported, lora)
    _sort(imported, written)
    imported.notes += _notes(values)
    return imported


def options_of_values(values: Values) -> Options:
    """Keys and values as options of Megatron-LM; those that are off or unsaid are left out."""
    options: dict[str, list[str]] = {}
    for key, value in values.items():
        if value is None or key in TURBO or key in SCHEDULES or key in _OWN - {"num_virtual_stages_per_pipeline_rank"}:
            continue
        option = _OPTIONS.get(key, "--" + key.replace("_", "-"))
        if key in _OFF:
            if value is False:
                options[option] = []
        elif value is True:
            options[option] = []
        elif isinstance(value, list) and key in _LISTS:
            options[option] = [str(item) for item in value]
        elif value is not False and value != "" and value != []:
            options[option] = [str(value)]
    if values.get("layernorm_epsilon") is not None:
        options["--norm-epsilon"] = [str(values["layernorm_epsilon"])]
    if (copies := values.get("data_parallel_replicate_degree")) not in (None, 1):
        options["--num-distributed-optimizer-instances"] = [str(copies)]
    if values.get("num_query_groups") is None and "num_query_groups" in values:
        options.pop("--group-query-attention", None)
    if values.get("tensor_model_parallel_size") == 1:
        options.pop("--sequence-parallel", None)
    return options


def _sharding(values: Values, layout: Values) -> Values:
    """torch's FSDP2 keeps weights between forward and backward where it is told not to shard them again."""
    keeps = values.get("use_torch_fsdp2") and values.get("torch_fsdp2_reshard_after_forward") is False
    return {"zero_stage": 2} if keeps else {}


def _split(values: Values, layout: Values) -> Values:
    """The layers of every stage, where they are listed."""
    counts = values.get("decoder_pipeline_manual_split_list")
    if counts is None or layout["pp"] == 1:
        return {}
    if not isinstance(counts, list) or not all(type(count) is int for count in counts):
        raise SpecError(f"decoder_pipeline_manual_split_list: {counts!r:.60} is no list of numbers", "write [4, 4, …]")
    return {"layers_per_stage": counts}


def _recomputed_layers(values: Values, layout: Values, num_layers: int | None) -> Values:
    """The layers that are recomputed by their numbers; those beyond the last are of multi-token prediction."""
    listed = values.get("recompute_layer_ids")
    if listed is None or layout.get("recompute") != "full":
        return {}
    words = listed if isinstance(listed, list) else str(listed).split(",")
    if not all(re.fullmatch(r"\s*\d{1,6}\s*", str(word)) for word in words):
        raise SpecError(f"recompute_layer_ids: {str(listed)[:60]!r} is no list of layers", 'write "0,1,2"')
    layers = sorted({int(word) for word in words})
    last = values.get("num_layers") if num_layers is None else num_layers
    blocks = values.get("mtp_num_layers") or 0
    if type(last) is int and type(blocks) is int:
        layers = [n for n in layers if not last <= n < last + blocks]
    return {"recompute_layers": layers, "recompute_num_layers": None}


def _without_unplaced_blocks(model: Values, layout: Values) -> list[str]:
    """Leave out multi-token-prediction blocks that a layout has no place for: DeepSeek-V3's experiments ship so."""
    if not model.get("num_nextn_predict_layers") or "m" in (layout.get("layout") or "m"):
        return []
    model["num_nextn_predict_layers"] = 0
    return [
        "pipeline_model_parallel_layout has no place (m) for the multi-token-prediction block, which Megatron-LM asks "
        "for: priced without the block; `mtp_num_layers: null` says so"
    ]


def _read_four_bits(imported: ImportedRun, values: Values) -> None:
    """MXFP4, which no profile has a rate for."""
    if values.get("fp4") and (values.get("fp4_recipe") == "mxfp4" or values.get("fp4") == "mxfp4"):
        imported.run["dtype"] = "mxfp8"
        imported.notes.append("products in MXFP4 are priced as MXFP8, the narrowest that GPUs here have rates for")


def _sort(imported: ImportedRun, written: Values) -> None:
    """Options that were not read and that the experiment itself gives are harmless, or not understood."""
    said = {_OPTIONS.get(key, "--" + key.replace("_", "-")): key for key in written}
    ignored = {said[name]: value for name, value in imported.ignored.items() if name in said}
    unknown = {said[name]: value for name, value in imported.unknown.items() if name in said}
    harmless = {key for key in unknown if _HARMLESS.match(key) or key in MODEL_KEYS}
    imported.ignored = ignored | {key: unknown[key] for key in harmless}
    imported.unknown = {key: value for key, value in unknown.items() if key not in harmless}


def _notes(values: Values) -> list[str]:
    notes = []
    if values.get("mock_data") and not values.get("vocab_size") and "num_layers" in values:
        notes.append(
            "mock_data: since April 2026 Primus trains on a vocabulary of 131,072 then, whatever the tokenizer's: "
            "add --vocab-size 131072 to price that"
        )
    if values.get("stage") == "sft":
        notes.append("fine-tuning of all weights is priced as training on full sequences")
    if (vpp := values.get("virtual_pipeline_model_parallel_size")) not in (None, 1) and "num_layers" in values:
        notes.append(
            f"virtual_pipeline_model_parallel_size {vpp} is what Megatron-LM works out itself: it has no effect"
        )
    return notes
