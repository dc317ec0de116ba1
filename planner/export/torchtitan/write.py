"""A plan as a torchtitan recipe: a Python file with one function that returns the trainer's configuration."""

from __future__ import annotations

from collections.abc import Iterator

from planner.answer import Plan
from planner.export.common.environment import Row, node_environment, variables_of
from planner.export.common.header import header
from planner.export.common.model import notes_on_model, stated
from planner.export.common.promise import promise
from planner.export.common.recompute import check_mixture
from planner.export.common.refusal import Objections, broken_rules, hint_for
from planner.export.common.run_settings import run_settings
from planner.export.common.stages import VirtualStage, virtual_stages
from planner.export.common.target_price import notes_on_price
from planner.export.common.trainer_files import ExportFile, LaunchCommand, Requirement, TrainerFiles
from planner.export.torch.order import ORDER_FILE, check_order, order_of
from planner.export.torchtitan.model_numbers import balancing_rate
from planner.export.torchtitan.recipe import has_order_of_its_own, recipe_source, splits_backward
from planner.export.torchtitan.run_source import PLACEHOLDERS
from planner.schedule.torch_csv import to_torch_csv
from planner.specs.model import ModelSpec
from planner.trainers.rules.common import BF16_ONLY
from planner.trainers.rules.torch import TORCH_SCHEDULE_RULES, UNCOMPILED
from planner.trainers.rules.torchtitan import TORCHTITAN_LAYOUT_RULES, TORCHTITAN_RULES
from planner.trainers.rules.torchtitan_model import TORCHTITAN_MODEL_RULES

WRITTEN_FOR = "torchtitan 0.3.0 and main of August 2026"
RECIPE = "planned_recipe"
_ENVIRONMENT = (
    # as torchtitan's own run_train.sh has it; not every ROCm build of torch has such segments
    Row("PYTORCH_ALLOC_CONF", "expandable_segments:True", lambda plan: not plan.cluster.hardware.is_amd),
)


def export_torchtitan(plan: Plan) -> TrainerFiles:
    """The recipe, and the command that names it. Raises Inexpressible where torchtitan cannot run the plan."""
    stages = virtual_stages(plan.best, plan.model.spec.num_hidden_layers)
    _check_expressible(plan, stages)
    notes = _notes(plan)
    comments = header(plan, WRITTEN_FOR, notes)
    files = [ExportFile(f"{RECIPE}.py", comments + recipe_source(plan, stages))]
    if has_order_of_its_own(plan):
        files.append(ExportFile(ORDER_FILE, to_torch_csv(order_of(plan.best))))
    command = LaunchCommand(
        program="-m torchtitan.train",
        arguments={"--module": RECIPE, "--config": "plan"},
        environment={**variables_of(_ENVIRONMENT, plan), **node_environment(plan)},
        placeholders=PLACEHOLDERS,
        requirements=tuple(_requirements(plan)),
        promise=promise(plan, "in the log: tps (tokens/s/GPU) and memory (GiB, max_memory_reserved) of each rank"),
        setup=('export MOCK="${MOCK:-0}" PYTHONPATH="$PLAN_DIR${PYTHONPATH:+:$PYTHONPATH}"',),
        comments=comments,
        files=tuple(files),
    )
    return TrainerFiles(WRITTEN_FOR, tuple(files), command, notes)


def _check_expressible(plan: Plan, stages: tuple[VirtualStage, ...]) -> None:
    """Raise Inexpressible, with every reason, where torchtitan cannot run the plan."""
    layout = plan.parallelism
    schedule_rules = TORCH_SCHEDULE_RULES.get(layout.schedule)
    layout_rules = TORCHTITAN_RULES if schedule_rules is None else (*TORCHTITAN_LAYOUT_RULES, *schedule_rules)
    rules = (*TORCHTITAN_MODEL_RULES, *layout_rules, BF16_ONLY)
    hint = hint_for(plan, "torchtitan", TORCHTITAN_MODEL_RULES)
    objections = Objections("torchtitan", broken_rules(rules, plan), hint)
    check_mixture(plan.best, objections)
    if layout.pp > 1:
        check_order(plan, stages, objections)
    objections.when(
        any(stage.is_empty for stage in stages), "empty_stage", "a stage without a module has nothing to run"
    )
    objections.when(
        layout.zero_stage == 1, "zero_stage", "its optimizer is sharded with gradients and weights (2, 3) or not at all"
    )
    objections.when(
        layout.zero_stage == 0 and layout.cp > 1,
        "zero_stage",
        f"it shards weights over the ranks of cp {layout.cp}, always",
    )
    if splits_backward(plan):
        # VarlenAttention has neither
        needs = "split backwards need VarlenAttention, which has no"
        objections.when(layout.cp > 1, "split_backward_with_cp", f"{needs} context parallelism")
        objections.when(plan.model.spec.attention_sinks, "split_backward_with_sinks", f"{needs} attention sinks")
    objections.raise_any()


def _requirements(plan: Plan) -> Iterator[Requirement]:
    """The packages that the recipe needs on every node."""
    yield Requirement("torch", "everything", "torch", "2.13", "pip install torch, or a nightly")
    yield Requirement("torchtitan", "the trainer", hint="pip install torchtitan")
    if plan.parallelism.cp > 1:
        yield Requirement("spmd_types", "context parallelism", hint="pip install spmd-types, and a torch nightly")
    if plan.model.spec.moe is not None and plan.parallelism.ep > 1 and plan.runtime_spec.sends_tokens_once:
        yield Requirement("deep_ep", "exchanges of experts by DeepEP", hint="install deepseek-ai/DeepEP")


def _notes(plan: Plan) -> tuple[str, ...]:
    """Placeholders, and differences between the plan and what torchtitan does."""
    model = plan.model.spec
    notes = [
        *run_settings(plan).notes,
        "initial weights are drawn with a plain std of 0.02",
    ]
    notes += [*notes_on_model(model), *_notes_on_balance(model)]
    if plan.parallelism.recompute == "selective":
        notes.append("SelectiveAC chooses operations itself: it recomputes others than the plan's modules")
    if splits_backward(plan):
        notes += [UNCOMPILED] if plan.runtime_spec.compiled else []
        notes.append(
            "backwards are split: VarlenAttention, since FlexAttention is compiled always and then has one backward "
            "(pytorch/torchtitan issue 3584); it takes FlashAttention 3 on Hopper and 4 on Blackwell"
        )
    notes += notes_on_price(plan)
    if plan.parallelism.cp > 1:
        notes.append("context parallelism needs spmd_types, and that a torch nightly")
    return tuple(notes)


def _notes_on_balance(model: ModelSpec) -> Iterator[str]:
    """The means that balance experts instead of a loss, which torchtitan does not have."""
    moe = stated(model).moe
    if moe is not None and moe.router_aux_loss_coef:
        rate = balancing_rate(model)
        instead = f", and balances by a bias that moves by {rate:g} a step" if rate else ""
        yield f"it has no load-balancing loss (the model's has weight {moe.router_aux_loss_coef:g}){instead}"
