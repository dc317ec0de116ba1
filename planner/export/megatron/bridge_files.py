"""Files that start Megatron-Bridge: a plan as overrides of a recipe, and launchers that pass them as Hydra does."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from planner.answer import Plan
from planner.export.environment import megatron_environment
from planner.export.megatron.megatron_files import (
    LOG,
    NEWEST,
    PLACEHOLDERS,
    first_run_arguments,
    megatron_arguments,
    notes_on_options,
    requirements,
    training_arguments,
)
from planner.export.megatron.option_rows import BRIDGE, FLAGS, OF_BRIDGE, TANH, YARN, all_rows
from planner.export.megatron.plan_options import SWITCHING
from planner.export.refusal import refuse
from planner.export.run_settings import ROTARY_BASE, run_settings, stated
from planner.export.stages import objections_to
from planner.export.trainer_files import (
    Arguments,
    ExportFile,
    LaunchCommand,
    Placeholder,
    Requirement,
    RunPart,
    ShellText,
    TrainerFiles,
    TrainerVersion,
    header,
    promise,
    settings,
)
from planner.specs.model import ModelSpec
from planner.specs.model_parts import RopeScalingSpec
from planner.trainers.rules.facts import every_nth, family_of, query_width, rotary_method

_KNOWN = {row.name for row in all_rows()} | SWITCHING
"""Every option that is written: those without a field of the same value are said otherwise below."""


def flag_fields(arguments: Arguments) -> dict[str, bool]:
    """The fields that stand for bare options, as the arguments have them."""
    return {flag.field: (flag.option in arguments) == flag.value for flag in FLAGS}


Overrides = dict[str, Any]


def model_overrides(model: ModelSpec, fuses_activation: bool) -> Overrides:
    """The fields; a field that a recipe sets for its own model is there even where it is the default."""
    model = stated(model)
    family = family_of(model)
    overrides: Overrides = {
        "model.gated_linear_unit": model.gated_mlp,
        **_activation(model, fuses_activation),
        **_windows(model),
        **(_rotary(model) if model.position_embedding == "rope" else {}),
        **_experts(model),
    }
    if family == "mla":
        overrides |= _latent(model)
    elif family == "gemma2":
        overrides |= _gemma2(model)
    else:
        overrides["model.softmax_scale"] = model.attention_multiplier
    if family == "gemma3":
        overrides |= _gemma3(model)
    return overrides


def _activation(model: ModelSpec, fuses: bool) -> Overrides:
    """The activation, and its fusion with a bias, which makes every GELU the tanh's."""
    fused = fuses and model.gated_mlp and model.activation in ("silu", "quick_gelu")
    name = {"relu2": "squared_relu", "gelu_tanh": TANH}.get(model.activation, model.activation)
    if fuses and model.activation == "gelu_tanh" and model.has_mlp_bias and not model.gated_mlp:
        name, fused = "gelu", True
    return {"model.activation_func": name, "model.bias_activation_fusion": fused}


def _windows(model: ModelSpec) -> Overrides:
    slides = [kind.attention == "sliding" for kind in model.layers]
    if model.sliding_window is None or not any(slides):
        return {}
    nth = every_nth([not slide for slide in slides])
    skipped: int | list[int] | None = None if all(slides) else nth or [int(slide) for slide in slides]
    return {"model.window_size": [model.sliding_window - 1, 0], "model.window_attn_skip_freq": skipped}


def _rotary(model: ModelSpec) -> Overrides:
    """How frequencies are stretched, and the layers without rotary positions."""
    overrides: Overrides = {}
    n, layers = model.no_rope_layer_interval, model.num_hidden_layers
    if n is not None and n <= layers:
        overrides["model.no_rope_freq"] = [int((i + 1) % n == 0) for i in range(layers)]
    scaling, method = model.rope_scaling, rotary_method(model)
    if scaling is None or method is None or model.mla is not None:
        return overrides
    if method == "llama3":
        return overrides | {"model.rope_scaling": True, "model.rope_scaling_factor": scaling.factor}
    if method == "linear":
        return overrides | {"model.seq_len_interpolation_factor": scaling.factor}
    return overrides | {
        **dict(zip((plain for plain, _, _ in YARN), _yarn(scaling), strict=True)),
        "model.yarn_correction_range_round_to_int": scaling.truncate is not False,
    }


def _yarn(scaling: RopeScalingSpec) -> tuple[float | None, ...]:
    """Numbers of yarn, in the order of their names; those that are not given are usual.

    Weights of null are those that follow from the factor.
    """
    positions = scaling.original_max_position_embeddings or 4096
    scales = (scaling.beta_fast or 32.0, scaling.beta_slow or 1.0)
    return (scaling.factor or 1.0, positions, *scales, scaling.mscale, scaling.mscale_all_dim)


def _experts(model: ModelSpec) -> Overrides:
    if model.moe is None and model.mla is None:
        return {}
    # the recipe with latent attention has experts
    return {"model.moe_layer_freq": [int(kind.mlp == "moe") for kind in model.layers]}


def _latent(model: ModelSpec) -> Overrides:
    """Latent attention's own numbers, which the recipe has from DeepSeek-V3; yarn by 1 stretches nothing."""
    assert model.mla is not None
    method, scaling = rotary_method(model), model.rope_scaling
    used = scaling if scaling is not None and method == "yarn" else RopeScalingSpec(rope_type="yarn", factor=1.0)
    return {
        "model.q_lora_rank": model.mla.q_lora_rank,
        "model.num_query_groups": model.num_attention_heads,
        **dict(zip((latent for _, latent, _ in YARN), _yarn(used), strict=True)),
        "model.mscale": 1.0 if used.mscale is None else used.mscale,
        "model.mscale_all_dim": used.mscale_all_dim or 0.0,
    }


def _gemma2(model: ModelSpec) -> Overrides:
    """Capped logits, and the number whose root divides attention's."""
    scale = model.attention_multiplier or query_width(model) ** -0.5
    scalar = scale**-2
    return {
        "model.query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
        "model.attn_logit_softcapping": model.attn_logit_softcapping,
        "model.final_logit_softcapping": model.final_logit_softcapping,
    }


def _gemma3(model: ModelSpec) -> Overrides:
    """Bases of sliding and of full layers, the latter's stretching, and after how many sliding layers a full one is."""
    base, method = round(model.rope_theta or ROTARY_BASE), rotary_method(model)
    factor = model.rope_scaling.factor if model.rope_scaling is not None and method == "linear" else None
    n = every_nth([kind.attention == "full" for kind in model.layers]) or 1
    return {
        "model.rotary_base": [round(model.rope_local_base_freq or base), base],
        "model.rope_scaling_factor": factor or 1.0,
        "model.seq_len_interpolation_factor": None,
        "model.softmax_scale": model.attention_multiplier or query_width(model) ** -0.5,
        "model.window_size": model.sliding_window,
        "model.window_attn_skip_freq": None,
        "model.interleaved_attn_pattern": [n - 1, 1],
    }


def arguments_for_bridge(plan: Plan) -> Arguments:
    """Megatron-LM's arguments under the rules of Bridge. Raises Inexpressible where Bridge cannot run the plan."""
    return megatron_arguments(plan, "bridge")


def bridge_overrides(plan: Plan) -> Overrides:
    """All overrides of a plan. Raises Inexpressible where Megatron-LM or Bridge cannot run it."""
    arguments = arguments_for_bridge(plan)
    refuse("bridge", objections_to(plan, "bridge_positions"), "export to megatron")
    model = plan.model.spec
    overrides = settings("bridge-unasked") | ({} if model.mla is None else settings("bridge-unasked-latent"))
    for option, value in arguments.items():
        assert option in _KNOWN, option
        if option in BRIDGE:
            overrides[BRIDGE[option]] = list(value) if isinstance(value, tuple) else value
    return overrides | _derived(plan, arguments) | model_overrides(model, plan.runtime_spec.fused_activation)


def _derived(plan: Plan, arguments: Arguments) -> Overrides:
    """Fields that Bridge spells differently, and fields that its recipes set and a plan must unset."""
    names = {
        "arguments": arguments,
        "overlaps_p2p": plan.parallelism.vpp > 1 and "--no-overlap-p2p-communication" not in arguments,
        "moments": OF_BRIDGE["moments"],
    }
    overrides = settings("bridge", plan, **names) | _mixed_precision(plan, arguments) | flag_fields(arguments)
    if "--cuda-graph-modules" in arguments:
        # the older name of the field, which recipes set; Megatron core refuses both
        overrides["model.cuda_graph_scope"] = None
    return overrides if plan.model.spec.mla is None else overrides | settings("bridge-latent", plan, **names)


def _mixed_precision(plan: Plan, arguments: Arguments) -> Overrides:
    """Precision, field by field: Bridge's names for precisions also decide the dtype of gradients and outer layers.

    One recipe holds such a name, which an object replaces; the other holds an object, whose fields are set.
    """
    half, is_latent = plan.training.dtype == "fp16", plan.model.spec.mla is not None
    name = "float16" if half else "bfloat16"
    dtype = name if is_latent else {"_target_": f"torch.{name}", "_call_": False}
    fields = settings("bridge-precision", arguments=arguments, half=half, dtype=dtype)
    if is_latent:
        return {f"mixed_precision.{field}": value for field, value in fields.items()}
    return {"mixed_precision": {"_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig", **fields}}


_LEFT_OUT = ("--padded-vocab-size", "--mock-data", "--save-retain-interval")
"""The model's own vocabulary is a field already, mock data is an option of run_recipe.py, and Bridge deletes old
checkpoints by their number."""
_KEPT_CHECKPOINTS = 10


def first_run(plan: Plan) -> RunPart:
    """A short run on mock data, which saves nothing."""
    words = [*_words(first_run_arguments(plan)), "checkpoint.save=null", "checkpoint.load=null"]
    return RunPart({"--dataset": "mock"}, tuple(words))


def training_run(plan: Plan) -> RunPart:
    """Training, on the user's data."""
    kept = f"checkpoint.most_recent_k={_KEPT_CHECKPOINTS}"
    return RunPart(words=(*_words(training_arguments(plan)), kept))


def hydra(value: Any) -> str:
    """A value in Hydra's grammar for overrides: JSON, except that keys of a dictionary have no quotes."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def _words(arguments: Arguments) -> list[str]:
    words: list[str] = []
    for option, value in arguments.items():
        if option in _LEFT_OUT:
            continue
        if isinstance(value, ShellText):
            words.append(ShellText(f'"{BRIDGE[option]}=\\"{value.unquoted}\\""'))
        else:
            words.append(f"{BRIDGE[option]}={hydra(value)}")
    return words


_RELEASES = {"0.17": "0.4", "0.18": "0.5", "0.19": "0.6", "0.20": "0.7"}
"""Megatron core to the release of Megatron-Bridge whose submodule it is."""
_NEWEST = "0.7.0"
_OVERRIDES_FILE = "bridge.json"
_CHECKOUT = Placeholder("BRIDGE_PATH", "checkout of Megatron-Bridge", default="$PWD", kind="folder", in_first_run=True)


def export_bridge(plan: Plan) -> TrainerFiles:
    """Overrides of a recipe that needs no download, and the command that passes them.

    Raises Inexpressible where Bridge cannot run the plan.
    """
    version = plan.runtime_spec.version
    unknown = objections_to(plan, "bridge", releases=_RELEASES)
    refuse("bridge", unknown, f"plan again with --runtime bridge@{max(_RELEASES)}")
    written_for = f"Megatron-Bridge {_RELEASES[version] if version else _NEWEST}"
    overrides = bridge_overrides(plan)
    words = [f"{path}={hydra(value)}" for path, value in overrides.items()]
    notes = _notes(plan)
    variables = megatron_environment(plan)
    comments = header(plan, written_for, notes)
    recipe = OF_BRIDGE["recipes"][family_of(plan.model.spec)]
    first, training = first_run(plan), training_run(plan)
    data = {
        "recipe": recipe,
        "world_size": plan.parallelism.num_gpus_used,
        "env": variables,
        "overrides": words,
        "first_run": _unquoted(first.words),
        "training_run": _unquoted(training.words),
    }
    command = LaunchCommand(
        program='"$BRIDGE_PATH"/scripts/training/run_recipe.py',
        arguments={"--recipe": recipe, "--mode": "pretrain"},
        words=tuple(words),
        first_run=first,
        training_run=training,
        placeholders=(_CHECKOUT, *PLACEHOLDERS),
        requirements=(
            *requirements(arguments_for_bridge(plan)),
            Requirement("megatron.bridge", "the trainer", hint="pip install megatron-bridge"),
        ),
        trainer=TrainerVersion(
            "Megatron core", is_exactly=version, at_least="" if version else NEWEST, package="megatron-core"
        ),
        promise=promise(plan, LOG),
        environment=variables,
        exit_minutes="train.exit_duration_in_mins={}",
        comments=comments,
    )
    file = ExportFile(_OVERRIDES_FILE, json.dumps(data, indent=2) + "\n")
    return TrainerFiles(written_for, (file,), command, notes)


def _unquoted(words: Iterable[str]) -> list[str]:
    """Words as Hydra sees them, with variables as `${NAME}`."""
    return [word[1:-1].replace('\\"', '"') if isinstance(word, ShellText) else word for word in words]


def _notes(plan: Plan) -> tuple[str, ...]:
    """Placeholders, notes on Megatron-LM's options, and downloads of the recipe."""
    notes = [
        *run_settings(plan).notes,
        *notes_on_options(plan),
    ]
    if download := OF_BRIDGE["downloads"].get(family_of(plan.model.spec)):
        notes.append(f"the recipe reads the configuration of {download} from Hugging Face or its cache")
    return tuple(notes)
