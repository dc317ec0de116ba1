"""A plan for torch.distributed.pipelining, which our own runner executes: its files, and a run read from them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import yaml

from planner.answer import Plan
from planner.distribution import install_line
from planner.errors import SpecError
from planner.export.imported_run import ConfigFile, ImportedRun, new_run, positive_number, yaml_of
from planner.export.keyed_settings import dialect, readings
from planner.export.launchers import node_environment
from planner.export.named_models import exported_model
from planner.export.refusal import broken_rules, notes_on_price
from planner.export.stages import (
    ORDER_FILE,
    Stages,
    check_expressible,
    recomputed_layers,
    virtual_stages,
)
from planner.export.trainer_files import (
    ExportFile,
    LaunchCommand,
    Requirement,
    TrainerFiles,
    as_json,
    header,
    notes_of,
    settings,
)
from planner.layout.price import order_of
from planner.schedule.actions import Schedule
from planner.schedule.graph import to_torch_csv
from planner.specs.base import Fields, Said, Texts
from planner.trainers.rules.facts import TORCH_CLASSES, has_groups, rotary_method
from planner.trainers.rules.rule_rows import rules_of, schedule_rules

_HINT = "give a plan.torch.yaml that plan export wrote"


def read_torch(config: ConfigFile) -> ImportedRun:
    """The run that the runner's file describes. Raises SpecError for what is none."""
    data = yaml_of(config.text, _HINT)
    if not isinstance(data, Mapping) or not isinstance(data.get("chunks"), list):
        raise SpecError("the file has no chunks", _HINT)
    imported = new_run("torch", "torch-eager", model=exported_model(config.text) or data.get("model"))
    imported.put(readings("torch", data, count=partial(_number, data), hint=_HINT))
    dialect("torch").sort(imported, data)
    return imported


def _number(data: Said, name: str) -> int:
    return (positive_number(data, name, _HINT, unsaid=()) if name in data else None) or 1


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
    stages, traced = virtual_stages(plan), plan.model.spec.traced
    runner = _RUNNER if traced is None else _MODULE_RUNNER
    of_model, of_layout = rules_of("export torch-eager"), rules_of("layout torch-eager", "module", "export bf16")
    check_expressible(plan, "torch-eager", of_model, of_layout, stages, target="torch", rows="torch")
    order = order_of(plan.best)
    notes = _notes(plan)
    comments = header(plan, WRITTEN_FOR, notes)
    files = (
        ExportFile(PLAN_FILE, comments + _plan_yaml(plan, stages, order)),
        ExportFile(ORDER_FILE, to_torch_csv(order)),
        ExportFile(PIPELINING_FILE, as_json(_pipelining(plan, stages, order))),
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


def _notes(plan: Plan) -> Texts:
    """Differences between the plan and what the runner does."""
    planned, names = plan.as_planned, {"rotary_method": rotary_method, "has_groups": has_groups}
    notes = notes_of(
        "torch",
        plan,
        kept=sorted(set(planned.parallelism.recompute_modules) - _RECOMPUTABLE),
        left_out=[*settings("torch-left-out", plan, **names)],
        planned_exchange=planned.runtime_spec.cp_comm_type,
    )
    return (*notes, *notes_on_price(plan))


def _plan_yaml(plan: Plan, stages: Stages, order: Schedule) -> str:
    """Everything a rank needs to build its part; sequences are whole, and the order stands in `schedule_csv`."""
    layout = plan.parallelism
    modules = sorted(set(layout.recompute_modules) & _RECOMPUTABLE) if layout.recompute == "selective" else []
    counts = zip(stages, recomputed_layers(plan.best, stages), strict=True)
    chunks = [settings("torch-chunk", stage=stage, count=count) for stage, count in counts]
    names = {"modules": modules, "chunks": chunks, "ranks": list(order.stage_to_rank), "order_file": ORDER_FILE}
    data = settings("torch-runner", plan, **names)
    return yaml.dump(data, Dumper=_Compact, sort_keys=False, width=118, allow_unicode=True)


def _pipelining(plan: Plan, stages: Stages, order: Schedule) -> Fields:
    """The schedule's torch class where one would take the plan, the ranks and layers of its stages, and the CSV."""
    schedule = plan.parallelism.schedule
    takes_plan = not broken_rules(schedule_rules(schedule) or (), plan)
    names = {"stages": stages, "ranks": list(order.stage_to_rank), "order_file": ORDER_FILE}
    schedule_class = TORCH_CLASSES.get(schedule) if takes_plan else None
    return settings("torch-pipelining", plan, schedule_class=schedule_class, **names)


class _Compact(yaml.SafeDumper):
    """Writes a chunk, and a list of numbers, on one line."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        scalars = all(isinstance(item, (int, str)) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=scalars)

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        return super().represent_mapping(tag, mapping, flow_style="first_layer" in mapping)
