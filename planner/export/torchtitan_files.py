"""A plan as a torchtitan recipe: a Python file with one function that returns the trainer's configuration."""

from __future__ import annotations

from itertools import groupby

from planner.answer import Plan
from planner.export.launchers import node_environment, variables
from planner.export.refusal import notes_on_price
from planner.export.run_settings import BIAS_UPDATE_RATE, FIRST_RUN_STEPS, notes_on_model, run_settings, stated
from planner.export.stages import (
    ORDER_FILE,
    Stages,
    all_full,
    check_expressible,
    is_looped,
    recomputed_layers,
    virtual_stages,
)
from planner.export.trainer_files import (
    ExportFile,
    LaunchCommand,
    TrainerFiles,
    header,
    imports_of,
    names_of,
    notes_of,
    placeholders_of,
    promise,
    rendered,
    requirements_of,
    settings,
)
from planner.layout.price import order_of
from planner.schedule.graph import to_torch_csv
from planner.specs.base import Fields, Texts
from planner.specs.model import ModelSpec
from planner.trainers.rules.facts import TORCH_CLASSES, rotary_method
from planner.trainers.rules.rule_rows import rules_of, torchtitan_rules
from planner.trainers.switches import SWITCHES


def rotary_numbers(model: ModelSpec) -> Fields:
    """Base and stretching of rotary frequencies."""
    method, scaling = rotary_method(model), model.rope_scaling
    names = {"yarn": scaling if method == "yarn" else None, "llama": None if method in (None, "yarn") else scaling}
    return settings("torchtitan-rotary", model=model, method=method, **names)


def balancing_rate(model: ModelSpec) -> float | None:
    """The step of a balancing bias, with which it balances models whose own way is a loss, too; None for neither."""
    moe = stated(model).moe
    if moe is None:
        return None
    return moe.bias_update_rate or (BIAS_UPDATE_RATE if moe.router_aux_loss_coef and not moe.balancing_bias else None)


_CLASSES = {
    "llama3": ("Llama3Model", "Llama3TransformerBlock"),
    "qwen3": ("Qwen3Model", "Qwen3TransformerBlock"),
    "deepseek_v3": ("DeepSeekV3Model", "DeepSeekV3TransformerBlock"),
}


def _family_of(model: ModelSpec) -> str:
    """torchtitan's module whose blocks are made of the same parts."""
    if model.attention_sinks:
        return "gpt_oss"
    if model.mla is not None:
        return "deepseek_v3"
    return "qwen3" if model.qk_norm or model.moe is not None else "llama3"


def model_source(model: ModelSpec, seq_length: int, attention: str) -> tuple[list[str], str]:
    """Imports, and the source of a function `model_spec()`; `attention` is torchtitan's name of a backend."""
    model, family = stated(model), _family_of(model)
    if family == "gpt_oss":
        flavor = {24: "20b", 36: "120b"}[model.num_hidden_layers]
        body = f'def model_spec():\n    return model_registry("{flavor}", attn_backend="{attention}")\n'
        return ["from torchtitan.models.gpt_oss import model_registry"], body
    runs = [(key, len(list(group))) for key, group in groupby(kind.mlp == "moe" for kind in model.layers)]
    body = rendered(
        "torchtitan_model.py",
        model=model,
        mla=model.mla,
        moe=model.moe,
        heads=model.num_attention_heads,
        seq_length=seq_length,
        attention=attention,
        is_mixed=len({kind.mlp for kind in model.layers}) > 1,
        runs_of_experts=" + ".join(f"[{key}] * {length}" for key, length in runs),
        rotary=rotary_numbers(model),
        has_feed_forward=_has_feed_forward(model),
        has_shared=_has_shared(model),
        balancing_rate=balancing_rate(model),
        model_class=_CLASSES[family][0],
        block_class=_CLASSES[family][1],
    )
    names = {"model": model, "family": family, "classes": _CLASSES[family], "feeds": _has_feed_forward(model)}
    return imports_of("torchtitan-model", {**names, "method": rotary_method(model)}), body


def _has_shared(model: ModelSpec) -> bool:
    return model.moe is not None and model.moe.shared_expert_intermediate_size > 0


def _has_feed_forward(model: ModelSpec) -> bool:
    return _has_shared(model) or any(kind.mlp == "dense" for kind in model.layers)


_CHECKPOINT = {"selective": "SelectiveAC", "full": "FullAC"}


def recipe_source(plan: Plan, stages: Stages) -> str:
    """The recipe's text below its header."""
    layout = plan.parallelism
    attention = "varlen" if splits_backward(plan) else "flex"
    model_imports, model = model_source(plan.model.spec, plan.training.seq_length, attention)
    names = {
        "policies": _CHECKPOINT,
        "recomputes_some": _recomputes_some(plan),
        "has_order": has_order_of_its_own(plan),
        "family": _family_of(stated(plan.model.spec)),
    }
    imports = [*imports_of("torchtitan", names_of(plan) | names), *model_imports]
    torchtitan = sorted((line for line in imports if "torchtitan" in line), key=lambda line: line.split()[1])
    others = [line for line in imports if "torchtitan" not in line]
    recomputed = zip(stages, recomputed_layers(plan.best, stages), strict=True) if _recomputes_some(plan) else ()
    run, spec = run_settings(plan), stated(plan.model.spec)
    body = rendered(
        "torchtitan_recipe.py",
        model_source=model,
        layout=layout,
        training=plan.training,
        stages=stages,
        recomputed=[f"range({stage.first_layer}, {stage.first_layer + count})" for stage, count in recomputed if count],
        run=run,
        optimizer=run.optimizer,
        first_run_steps=FIRST_RUN_STEPS,
        schedule=_schedule_class(plan),
        order_file=ORDER_FILE if has_order_of_its_own(plan) else "",
        shard=layout.shard_size // layout.cp if layout.zero_stage >= 2 else 1,
        in_pipeline=layout.num_microbatches if layout.pp > 1 else 1,
        mtp_scale=spec.mtp_loss_scaling_factor if spec.num_nextn_predict_layers else None,
        policy="PlannedAC" if _recomputes_some(plan) else _CHECKPOINT.get(layout.recompute),
        compiled=_compiled(plan),
        graph_policy=SWITCHES["memory_policy"].value_of(plan.runtime_spec) if plan.runtime_spec.saves_products else "",
        deterministic=plan.runtime_spec.deterministic,
    )
    return "\n".join([*_standard_first(others), "", *torchtitan, "", "", body])


def _recomputes_some(plan: Plan) -> bool:
    """Some layers are recomputed whole and others are not."""
    return plan.parallelism.recompute == "full" and not all_full(plan.best)


def _standard_first(lines: list[str]) -> list[str]:
    """Standard library, then torch after an empty line."""
    standard = sorted((line for line in lines if "torch" not in line), key=lambda line: (line[:4] == "from", line))
    torch = [line for line in lines if "torch" in line]
    return [*standard, "", *torch] if torch else standard


def _schedule_class(plan: Plan) -> str:
    """torch's class for the schedule; for an order of its own, a class that places the stages on the same ranks."""
    layout = plan.parallelism
    if layout.pp == 1:
        return "1F1B"
    if layout.schedule in TORCH_CLASSES:
        return TORCH_CLASSES[layout.schedule]
    if not is_looped(virtual_stages(plan), layout.pp):
        return TORCH_CLASSES["zb-v"]
    return TORCH_CLASSES["interleaved-1f1b" if layout.vpp > 1 else "1f1b"]


def _compiled(plan: Plan) -> str:
    """Arguments of CompileConfig: layers and loss, the loss alone, or nothing."""
    runtime = plan.runtime_spec
    if not runtime.saves_products and runtime.fused_cross_entropy and (not runtime.compiled or splits_backward(plan)):
        return 'enable=True, components=["loss"]'
    overlaps = runtime.compiled and runtime.tp_overlap_fraction > 0
    return f"enable={runtime.compiled}{', enable_async_tensor_parallel=True' if overlaps else ''}"


def has_order_of_its_own(plan: Plan) -> bool:
    """torch has no class for the schedule, so that its runtime reads the order from a file."""
    return plan.parallelism.pp > 1 and plan.parallelism.schedule not in TORCH_CLASSES


def splits_backward(plan: Plan) -> bool:
    """The plan's schedule runs gradients of inputs and of weights apart."""
    return plan.parallelism.pp > 1 and order_of(plan.best).splits_backward


WRITTEN_FOR = "torchtitan 0.3.0 and main of August 2026"
RECIPE = "planned_recipe"


def export_torchtitan(plan: Plan) -> TrainerFiles:
    """The recipe, and the command that names it. Raises Inexpressible where torchtitan cannot run the plan."""
    stages = virtual_stages(plan)
    check_expressible(
        plan, "torchtitan", rules_of("export torchtitan"),
        (*torchtitan_rules(plan.parallelism.schedule), *rules_of("export bf16")), stages,
        rows="torchtitan_pipeline" if plan.parallelism.pp > 1 else "torchtitan", is_split=splits_backward(plan),
    )  # fmt: skip
    notes = _notes(plan)
    comments = header(plan, WRITTEN_FOR, notes)
    files = [ExportFile(f"{RECIPE}.py", comments + recipe_source(plan, stages))]
    if has_order_of_its_own(plan):
        files.append(ExportFile(ORDER_FILE, to_torch_csv(order_of(plan.best))))
    command = LaunchCommand(
        program="-m torchtitan.train",
        arguments={"--module": RECIPE, "--config": "plan"},
        environment={**variables(plan, "environment-torchtitan"), **node_environment(plan)},
        placeholders=placeholders_of("torchtitan"),
        requirements=requirements_of("torchtitan", plan),
        promise=promise(plan, "in the log: tps (tokens/s/GPU) and memory (GiB, max_memory_reserved) of each rank"),
        setup=('export MOCK="${MOCK:-0}" PYTHONPATH="$PLAN_DIR${PYTHONPATH:+:$PYTHONPATH}"',),
        comments=comments,
        files=tuple(files),
    )
    return TrainerFiles(WRITTEN_FOR, tuple(files), command, notes)


def _notes(plan: Plan) -> Texts:
    """Placeholders, and differences between the plan and what torchtitan does."""
    model = plan.model.spec
    rate, is_split, moe = balancing_rate(model), splits_backward(plan), stated(model).moe
    return (
        *run_settings(plan).notes,
        *notes_of("torchtitan", plan),
        *notes_on_model(model),
        *notes_of("torchtitan-plan", plan, rate=rate, is_split=is_split, moe=moe),
        *notes_on_price(plan),
        *notes_of("torchtitan-parallel", plan),
    )
