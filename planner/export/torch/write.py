"""A plan for torch.distributed.pipelining: stages, order and grid in one YAML file, which our own runner executes."""

from __future__ import annotations

import json
from typing import Any

import yaml

from planner.answer import Plan
from planner.distribution import install_line
from planner.export.common.environment import node_environment
from planner.export.common.header import header
from planner.export.common.recompute import recomputed_layers
from planner.export.common.refusal import Objections, broken_rules, hint_for
from planner.export.common.stages import VirtualStage, virtual_stages
from planner.export.common.target_price import notes_on_price
from planner.export.common.trainer_files import ExportFile, LaunchCommand, Requirement, TrainerFiles
from planner.export.torch.order import ORDER_FILE, check_order, order_of
from planner.schedule.actions import Schedule
from planner.schedule.torch_csv import to_torch_csv
from planner.specs.model import ModelSpec
from planner.trainers.rules.common import BF16_ONLY
from planner.trainers.rules.facts import has_groups, rotary_method
from planner.trainers.rules.torch import TORCH_CLASSES, TORCH_EAGER_RULES, TORCH_SCHEDULE_RULES
from planner.trainers.rules.torch_model import TORCH_MODEL_RULES

WRITTEN_FOR = "torch 2.13"
PLAN_FILE, PIPELINING_FILE = "plan.torch.yaml", "pipelining.json"
_RUNNER = "planner.probe.worker"
_RECOMPUTABLE = frozenset({"core_attn", "mlp", "moe", "shared_experts"})
"""Modules that the runner can recompute by themselves."""


def export_torch(plan: Plan) -> TrainerFiles:
    """The runner's file, the order as torch's CSV, and what torch.distributed.pipelining itself needs to know.

    Raises Inexpressible where torch's runtime or the runner cannot run the plan.
    """
    stages = virtual_stages(plan.best, plan.model.spec.num_hidden_layers)
    _check_expressible(plan, stages)
    order = order_of(plan.best)
    notes = _notes(plan)
    comments = header(plan, WRITTEN_FOR, notes)
    files = (
        ExportFile(PLAN_FILE, comments + _plan_yaml(plan, stages, order)),
        ExportFile(ORDER_FILE, to_torch_csv(order)),
        ExportFile(PIPELINING_FILE, json.dumps(_pipelining(plan, stages, order), indent=2) + "\n"),
    )
    command = LaunchCommand(
        program=f'-m {_RUNNER} --config "$PLAN_DIR"/{PLAN_FILE}',
        arguments={},
        requirements=(
            Requirement("torch", "everything", "torch", "2.9", install_line("probe")),
            Requirement("planner.probe.worker", "the runner", hint=install_line("probe")),
        ),
        environment=node_environment(plan),
        comments=comments,
        files=files[:2],
    )
    return TrainerFiles(WRITTEN_FOR, files, command, notes)


def _check_expressible(plan: Plan, stages: tuple[VirtualStage, ...]) -> None:
    """Raise Inexpressible, with every reason, where torch's runtime or the runner cannot run the plan."""
    rules = (*TORCH_MODEL_RULES, *TORCH_EAGER_RULES, BF16_ONLY)
    objections = Objections("torch", broken_rules(rules, plan), hint_for(plan, "torch-eager", TORCH_MODEL_RULES))
    check_order(plan, stages, objections)
    objections.when(
        any(stage.is_empty for stage in stages), "empty_stage", "a stage without a module has nothing to run"
    )
    objections.raise_any()


def _notes(plan: Plan) -> tuple[str, ...]:
    """Differences between the plan and what the runner does."""
    notes = ["the runner trains on random tokens and saves nothing: it shows that the layout runs, and how fast"]
    kept = sorted(set(plan.as_planned.parallelism.recompute_modules) - _RECOMPUTABLE)
    if kept:
        notes.append(f"the runner does not recompute {', '.join(kept)} by themselves: they are kept")
    if plan.model.spec.partial_rotary_factor < 1:
        notes.append(f"the runner rotates whole heads, not {plan.model.spec.partial_rotary_factor:g} of each")
    notes += _left_out(plan.model.spec)
    exchange = plan.as_planned.runtime_spec.cp_comm_type
    if plan.parallelism.cp > 1 and exchange != "all_gather":
        notes.append(f"the runner gathers keys and values over cp, which was planned as {exchange}")
    return (*notes, *notes_on_price(plan))


def _left_out(model: ModelSpec) -> list[str]:
    """A note on numbers of the model that the runner does not compute with, and that change no time."""
    parts = {
        "rope_scaling": rotary_method(model) is not None,
        "no_rope_layer_interval": model.no_rope_layer_interval is not None,
        "multipliers": {model.embedding_multiplier, model.residual_multiplier, model.logits_scaling} != {1.0},
        "soft caps": bool(model.attn_logit_softcapping or model.final_logit_softcapping),
        "swiglu_limit": model.swiglu_limit is not None,
        "n_group": model.moe is not None and has_groups(model.moe),
    }
    names = [name for name, is_there in parts.items() if is_there]
    return [f"the runner computes without the model's {', '.join(names)}, which take no time"] if names else []


def _plan_yaml(plan: Plan, stages: tuple[VirtualStage, ...], order: Schedule) -> str:
    """Everything a rank needs to build its part; sequences are whole, and the order stands in `schedule_csv`."""
    layout = plan.parallelism
    modules = sorted(set(layout.recompute_modules) & _RECOMPUTABLE) if layout.recompute == "selective" else []
    data = {
        "schedule": layout.schedule,
        "schedule_csv": ORDER_FILE,
        "num_microbatches": layout.num_microbatches,
        "micro_batch_size": layout.micro_batch_size,
        "seq_length": plan.training.seq_length,
        "dtype": "bfloat16",
        "tp": layout.tp,
        "cp": layout.cp,
        "dp": layout.dp,
        "ep": layout.ep,
        "sequence_parallel": layout.sequence_parallel and layout.tp > 1,
        "zero": layout.zero_stage > 0,
        "recompute_modules": modules,
        "balanced_routing": plan.model.spec.moe is not None,
        "stage_to_rank": list(order.stage_to_rank),
        "chunks": _chunks(plan, stages),
        "model": plan.model.spec.model_dump(mode="json", exclude_none=True, exclude={"training", "aliases"}),
    }
    return yaml.dump(data, Dumper=_Compact, sort_keys=False, width=118, allow_unicode=True)


def _chunks(plan: Plan, stages: tuple[VirtualStage, ...]) -> list[dict[str, Any]]:
    counts = recomputed_layers(plan.best, stages)
    return [
        {
            "first_layer": stage.first_layer,
            "last_layer": stage.last_layer,
            **{name: True for name in ("embedding", "mtp", "head") if getattr(stage, name)},
            **({"num_recomputed": count} if count else {}),
        }
        for stage, count in zip(stages, counts, strict=True)
    ]


def _pipelining(plan: Plan, stages: tuple[VirtualStage, ...], order: Schedule) -> dict[str, Any]:
    """The schedule's torch class where one would take the plan, the ranks and layers of its stages, and the CSV."""
    layout = plan.parallelism
    class_takes_plan = not broken_rules(TORCH_SCHEDULE_RULES.get(layout.schedule, ()), plan)
    schedule_class = TORCH_CLASSES.get(layout.schedule) if class_takes_plan else None
    return {
        **({"schedule": schedule_class} if schedule_class else {}),
        "pp": layout.pp,
        "n_microbatches": layout.num_microbatches,
        "stage_layers": [stage.num_layers for stage in stages],
        "stage_to_rank": list(order.stage_to_rank),
        "csv": ORDER_FILE,
    }


class _Compact(yaml.SafeDumper):
    """Writes a chunk, and a list of numbers, on one line."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        scalars = all(isinstance(item, (int, str)) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=scalars)

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        return super().represent_mapping(tag, mapping, flow_style="first_layer" in mapping)
