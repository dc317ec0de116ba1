"""Files that start AMD's Primus: an experiment in YAML, and launchers that hand it to `primus-cli`."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, NamedTuple

from planner.answer import Plan
from planner.export.launchers import primus_environment
from planner.export.megatron.megatron_files import LOG, megatron_arguments, notes_on_options, training_arguments
from planner.export.megatron.option_rows import NEGATED, PRIMUS_SCHEDULES, key_of
from planner.export.named_models import FLAVORS
from planner.export.refusal import notes_on_price, unstretched
from planner.export.run_settings import FIRST_RUN_STEPS, notes_on_model, run_settings
from planner.export.stages import VirtualStage, check_expressible, virtual_stages
from planner.export.trainer_files import (
    Arguments,
    ExportFile,
    LaunchCommand,
    Placeholder,
    RunPart,
    ShellText,
    TrainerFiles,
    TrainerVersion,
    Value,
    as_yaml,
    header,
    placeholders_of,
    plain,
    promise,
    settings,
    slug,
)
from planner.specs.base import Texts
from planner.specs.model import ModelSpec
from planner.specs.reading import literal, parse_expression
from planner.specs.registry import load_model
from planner.trainers.rules.facts import PRIMUS_CORE, TORCH_CLASSES
from planner.trainers.rules.rule_rows import rules_of, torchtitan_rules

_RELEASE = "torchtitan 0.2.2, which Primus v26.5 pins,"
_PRESETS = {
    "llama3": "llama3.1_8B.yaml",
    "deepseek_v3": "deepseek_v3_16b.yaml",
    "qwen3": "qwen3_8b.yaml",
    "gpt_oss": "gpt_oss_20b.yaml",
}
"""A preset of each family that Primus has; name, flavor and converters are written out."""
_SPLIT = ("zb-h1", "zb-v", "dualpipe-v")
"""Schedules that split backwards, which compiled layers and FlexAttention cannot."""


def model_preset(plan: Plan) -> str:
    """The preset that the experiment names."""
    module, _ = _flavor(plan.model.spec) or ("llama3", "")
    return _PRESETS[module]


def _flavor(model: ModelSpec) -> tuple[str, str] | None:
    """The family and flavor of torchtitan's registry that is this model; None where none has all of its fields."""
    unsaid = {"training", "source", "rope_scaling", "max_position_embeddings"}
    for names, published in FLAVORS.items():
        if (
            names[0] in _PRESETS
            and published == model.name
            and load_model(published).model_dump(exclude=unsaid) == model.model_dump(exclude=unsaid)
        ):
            return names
    return None


def torchtitan_keys(plan: Plan) -> Keys:
    """The sections of a plan. Raises Inexpressible."""
    stages = virtual_stages(plan)
    of_layout = (*torchtitan_rules(plan.parallelism.schedule), *rules_of("export bf16"))
    check_expressible(
        plan, "primus-torchtitan", (), of_layout, stages, target="primus", flavor=_flavor(plan.model.spec),
        release=_RELEASE, published=_published(), classes=TORCH_CLASSES,
    )  # fmt: skip
    run, layout = run_settings(plan), plan.parallelism
    module, flavor = _flavor(plan.model.spec) or ("", "")
    return settings(
        "primus-torchtitan",
        plan,
        run=run,
        optimizer=run.optimizer,
        module=module,
        flavor=flavor,
        folder=f"{_OUTPUT}/{slug(plan.model.name)}",
        shard=layout.shard_size // layout.cp if layout.zero_stage >= 2 else 1,
        schedule=TORCH_CLASSES[layout.schedule] if layout.pp > 1 else None,
        modules=[_modules(stage) for stage in stages] if layout.pp > 1 else None,
        components=_compiled(plan),
    )


def notes_on_torchtitan(plan: Plan) -> Texts:
    """Notes on the settings."""
    return (
        *notes_on_model(plan.model.spec),
        *notes_on_price(plan),
        "rotary frequencies are those of torchtitan's flavor of the model",
    )


def _modules(stage: VirtualStage) -> list[str]:
    """Names of a stage's modules."""
    layers = [f"layers.{i}" for i in range(stage.first_layer, stage.last_layer)]
    return [*(["tok_embeddings"] if stage.embedding else []), *layers, *(["norm", "output"] if stage.head else [])]


def _compiled(plan: Plan) -> list[str]:
    """The parts that are compiled: layers and loss, the loss alone, or none."""
    runtime = plan.runtime_spec
    layers = runtime.compiled and plan.parallelism.schedule not in _SPLIT
    return [*(["model"] if layers else []), *(["loss"] if runtime.fused_cross_entropy else [])]


def _published() -> str:
    return ", ".join(name for (module, _), name in FLAVORS.items() if module in _PRESETS)


WRITTEN_FOR = "Primus 26.5"
_EXPERIMENT = "primus.yaml"
_OUTPUT = "${CHECKPOINTS:./output}/planner/plan"
"""The workspace of an experiment's group and user (settings.yaml)."""


def export_primus(plan: Plan) -> TrainerFiles:
    """The experiment, and the command that `primus-cli` takes it with.

    Raises Inexpressible where Primus cannot run the plan.
    """
    backend = _torchtitan(plan) if plan.runtime_spec.family == "torchtitan" else _megatron(plan)
    notes = (*run_settings(plan).notes, *backend.notes)
    comments = header(plan, WRITTEN_FOR, notes)
    experiment = settings(
        "primus",
        name=slug(plan.model.name),
        framework=backend.framework,
        model=backend.model,
        overrides=backend.overrides,
    )
    file = ExportFile(_EXPERIMENT, comments + as_yaml(experiment))
    command = LaunchCommand(
        program='bash "$PRIMUS_PATH"/runner/primus-cli direct -- train pretrain',
        starts_ranks=True,
        arguments={"--config": ShellText(f'"$PLAN_DIR"/{_EXPERIMENT}')},
        first_run=RunPart(backend.first_run),
        placeholders=backend.placeholders,
        trainer=backend.version,
        promise=promise(plan, backend.log),
        environment=primus_environment(plan),
        exit_minutes=backend.exit_minutes,
        comments=comments,
        files=(file,),
    )
    return TrainerFiles(WRITTEN_FOR, (file,), command, notes)


class _Backend(NamedTuple):
    """The parts of an experiment that its backend decides."""

    framework: str
    model: str
    overrides: Keys
    first_run: Arguments
    """Arguments of a short run on random tokens with balanced experts, which saves nothing."""
    placeholders: tuple[Placeholder, ...]
    log: str
    notes: Texts
    version: TrainerVersion = TrainerVersion()
    exit_minutes: str = ""


def _megatron(plan: Plan) -> _Backend:
    folder = f"{_OUTPUT}/{slug(plan.model.name)}/checkpoints"
    return _Backend(
        framework="megatron",
        # the preset that all others extend: every field of the model is written out
        model="language_model.yaml",
        overrides=megatron_keys(plan) | settings("primus-megatron", folder=folder),
        first_run=settings("primus-megatron-first-run", plan, steps=FIRST_RUN_STEPS),
        placeholders=placeholders_of("primus-megatron"),
        log=LOG,
        notes=notes_on_megatron(plan),
        version=TrainerVersion(
            "Megatron core",
            is_exactly=PRIMUS_CORE,
            folder="PRIMUS_PATH",
            file="third_party/Megatron-LM/megatron/core/package_info.py",
        ),
        exit_minutes="--exit_duration_in_mins {}",
    )


def _torchtitan(plan: Plan) -> _Backend:
    return _Backend(
        framework="torchtitan",
        model=model_preset(plan),
        overrides=torchtitan_keys(plan),
        first_run=settings("primus-torchtitan-first-run", plan, steps=FIRST_RUN_STEPS),
        placeholders=placeholders_of("primus-torchtitan"),
        log="in the log: tps (tokens/s/GPU) and memory (GiB, max_memory_reserved) of each rank",
        notes=notes_on_torchtitan(plan),
    )


Keys = dict[str, Any]
"""Keys of `overrides:` and their values."""

_PATTERNS = ("--no-rope-freq", "--window-attn-skip-freq", "--window-size")
"""Options whose text the parser evaluates; Primus does so itself for `moe_layer_freq` alone."""


def keys_of(arguments: Mapping[str, Value]) -> Keys:
    """Arguments of Megatron-LM as keys of Primus and their values, without those that it has other means for."""
    return {
        key: _value(option, value) for option, value in arguments.items() if (key := key_of(option)) not in _LEFT_OUT
    }


def _value(option: str, value: Value) -> Any:
    if option in NEGATED:
        return False
    return _evaluated(value) if option in _PATTERNS and isinstance(value, str) else plain(value)


def _evaluated(text: str) -> Any:
    """The list that an expression such as `([0]*3+[1]*58)` or `(127,0)` stands for."""
    tree = parse_expression(text)
    return list(_items(tree)) if not isinstance(tree, ast.Constant) else tree.value


def _items(tree: ast.expr) -> list[int]:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        return _items(tree.left) + _items(tree.right)
    if isinstance(tree, ast.BinOp):
        return _items(tree.left) * int(literal(tree.right))
    items: tuple[int, ...] | list[int] = literal(tree)
    return list(items)


def schedule_keys(plan: Plan) -> Keys:
    """The keys of a schedule that Megatron-LM does not have; none for the others."""
    row = PRIMUS_SCHEDULES.get(plan.parallelism.schedule)
    if row is None:
        return {}
    held = _of_stages(row["held"], plan) if "held" in row else None
    return settings("primus-tables", algorithm=row["algorithm"], held=held)


def _of_stages(numbers: list[int], plan: Plan) -> int:
    """Micro-batches as a·pp + b."""
    return numbers[0] * plan.parallelism.pp + numbers[1]


def turbo_keys(plan: Plan, keys: Keys) -> Keys:
    """The keys of Megatron-LM with Primus-Turbo's own."""
    if plan.model.spec.moe is None:
        return keys
    in_deepep = keys.get("moe_flex_dispatcher_backend") == "deepep" or bool(keys.get("moe_enable_deepep"))
    kept = {name: value for name, value in keys.items() if not (in_deepep and name in _FLEX)}
    own = settings("primus-turbo", plan, in_deepep=in_deepep)
    is_turbo = any(name.startswith(("use_turbo", "turbo_")) for name in own)
    return {**kept, **own, **({"enable_primus_turbo": True} if is_turbo else {})}


_FLEX = ("moe_flex_dispatcher_backend", "moe_enable_deepep")


_LEFT_OUT = ("data_path", "split", "tokenizer_type", "tokenizer_model", "save", "load", "async_strategy")
"""Keys of arguments that Primus has other means for."""


def megatron_keys(plan: Plan) -> Keys:
    """The overrides of a plan, but for data, tokenizer and checkpoints. Raises Inexpressible."""
    plan, _ = with_core(plan)
    stages = virtual_stages(plan)
    row = PRIMUS_SCHEDULES.get(plan.parallelism.schedule)
    least = _of_stages(row["least"], plan) if row else 0
    check_expressible(plan, "primus-megatron", (), (), stages, target="primus", row=row, least=least)
    keys = keys_of(megatron_arguments(plan, "primus", own_schedules=tuple(PRIMUS_SCHEDULES)) | training_arguments(plan))
    return turbo_keys(plan, settings("primus-unasked") | keys | schedule_keys(plan))


def notes_on_megatron(plan: Plan) -> Texts:
    """Notes on the options that differ in the core that Primus pins, or that it cannot state."""
    pinned, note = with_core(plan)
    return (*notes_on_options(pinned), *([note] if note else []))


def with_core(plan: Plan) -> tuple[Plan, str]:
    """The plan for the version of Megatron core that Primus pins, and a note where that stretches no positions."""
    runtime = plan.runtime_spec.model_copy(update={"version": PRIMUS_CORE})
    return unstretched(plan.model_copy(update={"runtime_spec": runtime}), plan.runtime)
