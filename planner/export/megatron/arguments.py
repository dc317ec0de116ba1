"""A plan in Megatron-LM's arguments: grid, stages, batch, precision, recompute, overlaps; and its refusals.

Flags and constraints as of Megatron-LM core 0.20.0 (main, August 2026).
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.answer import Plan
from planner.export.common.arguments import Arguments
from planner.export.common.recipe import broken_rules_of_recipe, unspelled
from planner.export.common.recompute import block_size, check_recompute
from planner.export.common.refusal import Objections, broken_rules, hint_for
from planner.export.common.stages import VirtualStage, is_even, is_looped, virtual_stages
from planner.export.megatron.layout_string import layout_string
from planner.export.megatron.model.write import model_arguments
from planner.export.megatron.recipe import switch_arguments
from planner.export.megatron.run_options import run_arguments
from planner.export.megatron.runtime import data_parallel, is_fsdp, kernels, precision
from planner.export.megatron.switches import SWITCH_OPTIONS
from planner.trainers.load import has_dtype
from planner.trainers.rules.common import Rule
from planner.trainers.rules.megatron import MEGATRON_CP_RULES, MEGATRON_RULES
from planner.trainers.rules.megatron_model import megatron_model_rules

NEWEST = "0.20"
WRITTEN_FOR = f"Megatron-LM core {NEWEST}.0"
_SCHEDULES = ("1f1b", "interleaved-1f1b", "none")
_RECOMPUTABLE = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


def written_for(plan: Plan) -> str:
    """Megatron-LM and the version that the arguments are for."""
    version = plan.runtime_spec.version
    return f"Megatron-LM core {version}" if version else WRITTEN_FOR


def megatron_arguments(
    plan: Plan,
    target: str = "megatron",
    of_model: tuple[Rule, ...] | None = None,
    own_schedules: tuple[str, ...] = (),
) -> Arguments:
    """All arguments of `pretrain_gpt.py` but for data, length and checkpoints, which a first run has not.

    Another target puts them into its own words, under its own rules, and says by itself what its own schedules need.

    Raises Inexpressible with every reason where Megatron-LM cannot run the plan as it is.
    """
    stages = virtual_stages(plan.best, plan.model.spec.num_hidden_layers)
    rules = megatron_model_rules(plan.runtime_spec.version) if of_model is None else of_model
    _check_expressible(plan, stages, target, rules, own_schedules)
    runtime = plan.runtime_spec
    return {
        **model_arguments(plan.model.spec, plan.training.seq_length, runtime.vocab_divisible_by, runtime.dropout),
        **_grid(plan),
        **_pipeline(plan, stages),
        **_batch(plan),
        **data_parallel(plan),
        **precision(plan),
        **_recompute(plan, stages),
        **kernels(plan),
        **switch_arguments(plan),
        **run_arguments(plan),
    }


def _check_expressible(
    plan: Plan,
    stages: tuple[VirtualStage, ...],
    target: str,
    of_model: tuple[Rule, ...],
    own_schedules: tuple[str, ...],
) -> None:
    """Raise Inexpressible, with every reason, where Megatron-LM cannot run the plan."""
    layout, runtime = plan.parallelism, plan.runtime_spec
    rules = (*of_model, *MEGATRON_RULES, *MEGATRON_CP_RULES[runtime.cp_comm_type])
    objections = Objections(target, broken_rules(rules, plan), hint_for(plan, target, of_model))
    objections.when(
        not has_dtype(runtime, plan.training.dtype), "dtype", f"{written_for(plan)} has no {plan.training.dtype}"
    )
    check_recompute(plan.best, stages, objections)
    schedules = (*_SCHEDULES, *own_schedules)
    objections.when(
        layout.schedule not in schedules, "schedule", f"{layout.schedule} is none of {', '.join(schedules)}"
    )
    is_placed = is_looped(stages, layout.pp) or layout.schedule in own_schedules
    objections.when(not is_placed, "placement", "virtual stage j must be on rank j mod pp")
    objections.when(
        any(stage.mtp and stage.chunk < layout.vpp - 1 for stage in stages),
        "mtp_placement",
        "MTP blocks belong to the last chunk of a rank",
    )
    objections.when(
        is_fsdp(plan) and layout.pp > 1, "zero_stage", f"FSDP (zero_stage {layout.zero_stage}) at pp {layout.pp}"
    )
    objections.reasons += broken_rules_of_recipe(plan)
    objections.reasons += unspelled(plan, SWITCH_OPTIONS, "Megatron core")
    for module, obstacle in _unknown_modules(plan):
        objections.when(True, "recompute_modules", f"{module} {obstacle}")
    objections.raise_any()


def _unknown_modules(plan: Plan) -> Iterator[tuple[str, str]]:
    """Modules of selective recompute that Megatron-LM or this model does not have, and why not."""
    model = plan.model.spec
    modules = plan.parallelism.recompute_modules if plan.parallelism.recompute == "selective" else ()
    for module in modules:
        if module not in _RECOMPUTABLE:
            yield module, f"is none of {', '.join(_RECOMPUTABLE)}"
        elif module == "mla_up_proj" and model.mla is None:
            yield module, "needs latent attention"
        elif module == "moe_act" and model.moe is None:
            yield module, "needs experts"


def _grid(plan: Plan) -> Arguments:
    layout = plan.parallelism
    arguments: Arguments = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": layout.cp,
    }
    if layout.tp > 1 and layout.sequence_parallel:
        arguments["--sequence-parallel"] = True
    if layout.dp_outermost:
        arguments["--use-tp-pp-dp-mapping"] = True
    if plan.model.spec.moe is None and layout.dp_outermost and layout.cp > 1:
        # it asks for as many replicas of experts as of the rest, also where there are none
        arguments["--expert-tensor-parallel-size"] = layout.tp * layout.cp
    if plan.model.spec.moe is not None:
        # the default would be tp
        arguments["--expert-model-parallel-size"] = layout.ep
        arguments["--expert-tensor-parallel-size"] = layout.etp
    return arguments


def _pipeline(plan: Plan, stages: tuple[VirtualStage, ...]) -> Arguments:
    """The split of layers: even stages by their number, all others by a layout string."""
    layout, arguments = plan.parallelism, Arguments()
    if layout.pp == 1:
        return arguments
    if not is_even(stages):
        arguments["--pipeline-model-parallel-layout"] = layout_string(stages, plan.model.spec.num_nextn_predict_layers)
    elif layout.vpp > 1:
        arguments["--num-virtual-stages-per-pipeline-rank"] = layout.vpp
    return arguments


def _batch(plan: Plan) -> Arguments:
    return {
        "--seq-length": plan.training.seq_length,
        "--micro-batch-size": plan.parallelism.micro_batch_size,
        "--global-batch-size": plan.training.global_batch_size,
    }


def _recompute(plan: Plan, stages: tuple[VirtualStage, ...]) -> Arguments:
    layout = plan.parallelism
    if layout.recompute == "none":
        return {}
    if layout.recompute == "selective":
        return {
            "--recompute-granularity": "selective",
            "--recompute-modules": layout.recompute_modules or ("core_attn",),
        }
    size = block_size(plan.best, stages)
    method, layers = ("uniform", 1) if size is None else ("block", size)
    return {"--recompute-granularity": "full", "--recompute-method": method, "--recompute-num-layers": layers}
