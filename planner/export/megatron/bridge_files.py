"""Files that start Megatron-Bridge: a plan as overrides of a recipe, and launchers that pass them as Hydra does."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from planner.answer import Plan
from planner.export.launchers import megatron_environment
from planner.export.megatron.megatron_files import (
    LOG,
    NEWEST,
    first_run_arguments,
    megatron_arguments,
    notes_on_options,
    requirements,
    training_arguments,
)
from planner.export.megatron.option_rows import BRIDGE, FLAGS, OF_BRIDGE, TANH, all_rows
from planner.export.megatron.plan_options import SWITCHING
from planner.export.refusal import refuse
from planner.export.run_settings import ROTARY_BASE, run_settings, stated
from planner.export.stages import objections_to
from planner.export.trainer_files import (
    Arguments,
    ExportFile,
    LaunchCommand,
    Requirement,
    RunPart,
    ShellText,
    TrainerFiles,
    TrainerVersion,
    header,
    notes_of,
    placeholders_of,
    promise,
    settings,
)
from planner.specs.base import Texts
from planner.specs.model import ModelSpec
from planner.specs.model_parts import RopeScalingSpec
from planner.trainers.rules.facts import every_nth, family_of, query_width, rotary_method

_KNOWN = {row.name for row in all_rows()} | SWITCHING
"""Every option that is written: those without a field of the same value are said otherwise below."""


def flag_fields(arguments: Arguments) -> dict[str, bool]:
    """The fields that stand for bare options, as the arguments have them."""
    return {flag.field: (flag.option in arguments) == flag.value for flag in FLAGS}


Overrides = dict[str, Any]


_OF_MODEL = (
    "bridge-activation", "bridge-windows", "bridge-unrotated", "bridge-llama3", "bridge-linear", "bridge-yarn",
    "bridge-experts", "bridge-mla", "bridge-gemma2", "bridge-scale", "bridge-gemma3",
)  # fmt: skip
"""Sections of settings.yaml that say a model, in their order."""


def model_overrides(model: ModelSpec, fuses_activation: bool) -> Overrides:
    """The fields; a field that a recipe sets for its own model is there even where it is the default."""
    model = stated(model)
    method, scaling = rotary_method(model), model.rope_scaling
    is_stretched = scaling is not None and method == "yarn"
    # experts weight what no fused kernel of a gated GELU does (core/transformer/mlp.py)
    fusible = model.moe is None if model.gated_mlp else model.has_mlp_bias
    names = {
        "model": model,
        "family": family_of(model),
        "method": method,
        "yarn": scaling if is_stretched else RopeScalingSpec(rope_type="yarn", factor=1.0),
        "slides": [kind.attention == "sliding" for kind in model.layers],
        "scale": model.attention_multiplier or query_width(model) ** -0.5,
        "fuses": fuses_activation,
        "fuses_tanh": fuses_activation and fusible and model.activation == "gelu_tanh",
        "tanh": TANH,
        "usual_base": ROTARY_BASE,
        "every_nth": every_nth,
        "whole": lambda scalar: round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
    }
    return {field: value for name in _OF_MODEL for field, value in settings(name, **names).items()}


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
        placeholders=placeholders_of("bridge"),
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


def _notes(plan: Plan) -> Texts:
    """Placeholders, notes on Megatron-LM's options, and downloads of the recipe."""
    download = OF_BRIDGE["downloads"].get(family_of(plan.model.spec))
    return (*run_settings(plan).notes, *notes_on_options(plan), *notes_of("bridge", plan, download=download))
