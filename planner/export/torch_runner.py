"""A plan for torch.distributed.pipelining, which our own runner executes: its files, and a run read from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from planner.answer import Plan
from planner.distribution import install_line
from planner.errors import SpecError
from planner.export.imported_run import ConfigFile, ImportedRun, new_run, positive_number, yaml_of
from planner.export.keyed_settings import dialect
from planner.export.launchers import node_environment
from planner.export.named_models import exported_model
from planner.export.refusal import broken_rules, hint_for, notes_on_price, refuse
from planner.export.stages import (
    ORDER_FILE,
    Stages,
    objections_to,
    recomputed_layers,
    virtual_stages,
)
from planner.export.trainer_files import ExportFile, LaunchCommand, Requirement, TrainerFiles, header, notes_of
from planner.layout.price import order_of
from planner.schedule.actions import Schedule
from planner.schedule.graph import to_torch_csv
from planner.specs.base import Fields, Said, Texts
from planner.trainers.rules.facts import TORCH_CLASSES, has_groups, rotary_method
from planner.trainers.rules.rule_rows import rules_of, schedule_rules

_HINT = "give a plan.torch.yaml that plan export wrote"
_AXES = ("tp", "cp", "dp", "ep", "micro_batch_size")


def read_torch(config: ConfigFile) -> ImportedRun:
    """The run that the runner's file describes. Raises SpecError for what is none."""
    data = yaml_of(config.text, _HINT)
    if not isinstance(data, Mapping) or not isinstance(data.get("chunks"), list):
        raise SpecError("the file has no chunks", _HINT)
    layout = _layout(data)
    ranks = layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"]
    steps = _number(data, "num_microbatches")
    imported = new_run(
        "torch",
        "torch-eager",
        model=exported_model(config.text) or data.get("model"),
        num_gpus=ranks,
        seq_length=_number(data, "seq_length"),
        global_batch_size=layout["micro_batch_size"] * steps * layout["dp"],
        parallelism=layout,
    )
    dialect("torch").sort(imported, data)
    return imported


def _number(data: Said, name: str) -> int:
    return (positive_number(data, name, _HINT, unsaid=()) if name in data else None) or 1


def _layout(data: Said) -> Fields:
    """The grid, the stages and what is recomputed."""
    chunks = data["chunks"]
    if not chunks or not all(isinstance(chunk, Mapping) for chunk in chunks):
        raise SpecError("chunks: holds no stages", _HINT)
    placement = data.get("stage_to_rank")
    ranks = placement if isinstance(placement, list) else []
    pp = 1 + max((rank for rank in ranks if isinstance(rank, int)), default=0)
    if pp < 1:
        raise SpecError(f"stage_to_rank: {placement!r:.60} names no rank", _HINT)
    counts = [_span(chunk) for chunk in chunks]
    layout: Fields = {
        **{axis: _number(data, axis) for axis in _AXES},
        "pp": pp,
        "vpp": max(1, len(chunks) // pp),
        "sequence_parallel": bool(data.get("sequence_parallel")),
        "zero_stage": 1 if data.get("zero") else 0,
        **_recompute(data, chunks, counts),
    }
    if pp > 1:
        layout |= {"schedule": str(data.get("schedule")), "layers_per_stage": counts}
    return layout


def _span(chunk: Said) -> int:
    first, last = chunk.get("first_layer"), chunk.get("last_layer")
    if not isinstance(first, int) or not isinstance(last, int) or not 0 <= last - first <= 10_000:
        raise SpecError(f"chunks: first_layer {first!r:.40} and last_layer {last!r:.40} are no range", _HINT)
    return last - first


def _recompute(data: Said, chunks: list[Any], counts: list[int]) -> Fields:
    modules = data.get("recompute_modules")
    if modules:
        return {
            "recompute": "selective",
            "recompute_modules": list(map(str, modules)) if isinstance(modules, list) else [],
        }
    recomputed = [chunk.get("num_recomputed", 0) for chunk in chunks]
    most = max(recomputed)
    if not most:
        return {}
    return {"recompute": "full"} if recomputed == counts else {"recompute": "full", "recompute_num_layers": most}


WRITTEN_FOR = "torch 2.13"
PLAN_FILE, PIPELINING_FILE = "plan.torch.yaml", "pipelining.json"
_RUNNER, _MODULE_RUNNER = "planner.probe.worker", "planner.trace.run"
"""The program of ranks, and that for a module of the user's own."""
_RECOMPUTABLE = frozenset({"core_attn", "mlp", "moe", "shared_experts"})
"""Modules that the runner can recompute by themselves."""


def export_torch(plan: Plan) -> TrainerFiles:
    """The runner's file, the order as torch's CSV, and what torch.distributed.pipelining itself needs to know.

    Raises Inexpressible where torch's runtime or the runner cannot run the plan.
    """
    stages, traced = virtual_stages(plan.best, plan.model.spec.num_hidden_layers), plan.model.spec.traced
    runner = _RUNNER if traced is None else _MODULE_RUNNER
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
        program=f'-m {runner} --config "$PLAN_DIR"/{PLAN_FILE}',
        arguments={},
        requirements=(
            Requirement("torch", "everything", "torch", "2.9", install_line("probe", here=False)),
            Requirement(runner, "the runner", hint=install_line("probe", here=False)),
        ),
        environment=node_environment(plan),
        comments=comments,
        files=files[:2],
    )
    return TrainerFiles(WRITTEN_FOR, files, command, notes)


def _check_expressible(plan: Plan, stages: Stages) -> None:
    """Raise Inexpressible, with every reason, where torch's runtime or the runner cannot run the plan."""
    of_model = rules_of("export torch-eager")
    reasons = broken_rules((*of_model, *rules_of("layout torch-eager", "module", "export bf16")), plan)
    refuse("torch", [*reasons, *objections_to(plan, "torch", stages)], hint_for(plan, "torch-eager", of_model))


def _notes(plan: Plan) -> Texts:
    """Differences between the plan and what the runner does."""
    planned, model = plan.as_planned, plan.model.spec
    # numbers of the model that the runner does not compute with, and that change no time
    parts = {
        "rope_scaling": rotary_method(model) is not None,
        "no_rope_layer_interval": model.no_rope_layer_interval is not None,
        "multipliers": {model.embedding_multiplier, model.residual_multiplier, model.logits_scaling} != {1.0},
        "soft caps": bool(model.attn_logit_softcapping or model.final_logit_softcapping),
        "swiglu_limit": model.swiglu_limit is not None,
        "n_group": model.moe is not None and has_groups(model.moe),
    }
    notes = notes_of(
        "torch",
        plan,
        kept=sorted(set(planned.parallelism.recompute_modules) - _RECOMPUTABLE),
        left_out=[name for name, is_there in parts.items() if is_there],
        planned_exchange=planned.runtime_spec.cp_comm_type,
    )
    return (*notes, *notes_on_price(plan))


def _plan_yaml(plan: Plan, stages: Stages, order: Schedule) -> str:
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


def _chunks(plan: Plan, stages: Stages) -> list[Fields]:
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


def _pipelining(plan: Plan, stages: Stages, order: Schedule) -> Fields:
    """The schedule's torch class where one would take the plan, the ranks and layers of its stages, and the CSV."""
    layout = plan.parallelism
    class_takes_plan = not broken_rules(schedule_rules(layout.schedule) or (), plan)
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
