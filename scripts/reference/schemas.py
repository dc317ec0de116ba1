"""JSON Schemas of what the commands print with --json, of the files that they save, and of those that they read.

The types are the program's own; an answer that the program writes as plain data is put together here from them. A test
holds `docs/schemas` against these types, and the answers of the commands against `docs/schemas`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model

from planner.answer import Layout, Plan, PricedLayout
from planner.decide.check import CheckedFile
from planner.decide.compare import Compared
from planner.decide.job import Resume
from planner.decide.next import NextAnswer
from planner.decide.phases import PhaseAnswer, PhasesAnswer
from planner.decide.sweep import Goal, Point
from planner.layout.alive import MemoryAnswer
from planner.layout.runs import RunSpec
from planner.observe.follower import FollowedRun
from planner.observe.observation import Observed
from planner.observe.traces.recorded import ObservedFiles
from planner.probe.result import ProbeResult, ProbeStart
from planner.profile.doctor import Findings
from planner.search.why.explanation import Explanation
from planner.search.why.recipe import RecipeTable
from planner.specs.base import descriptions
from planner.specs.hardware import HardwareSpec
from planner.specs.model import MLASpec, ModelSpec, MoESpec
from planner.specs.phases import LogNormal, PhasesFile, PhaseSpec, Rampup
from planner.specs.training import DocumentLength
from planner.trainers.spec import RuntimeSpec

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"
Numbers = dict[str, Any]


def _type(name: str, says: str, base: type[BaseModel] | None = None, /, **fields: Any) -> type[BaseModel]:
    """A type of plain data; a field is required unless it has a default."""
    defined = {key: kind if isinstance(kind, tuple) else (kind, ...) for key, kind in fields.items()}
    made: type[BaseModel] = create_model(
        name, __base__=base, __config__=None if base else ConfigDict(extra="forbid"), __doc__=says, **defined
    )
    return made


def _copy(name: str, says: str, of: type[BaseModel], /, **changed: Any) -> type[BaseModel]:
    """A type with the fields of another, some of them of another kind; what the other computes is no field of it."""
    says_of = descriptions(of)
    fields = {}
    for key, field in of.model_fields.items():
        if not field.exclude:
            described = copy(field)
            described.description = says_of.get(key, field.description)
            fields[key] = (field.annotation, described)
    return _type(name, says, **{**fields, **changed})


Digest = Annotated[dict[str, str], Field(description="A short hash of each entry, to name an edited one.")]
Hash = _copy("SavedPlan", "A plan, and the hash of what it was made from.", Plan, inputs_sha256=str, digest=Digest)
SavedRun = _copy("SavedObservation", "What a run shows, beside its prediction.", Observed, digest=Digest)
SavedFiles = _copy("SavedFiles", "What the files of a run show.", ObservedFiles, digest=Digest)
SavedProbe = _copy("SavedProbe", "A probe's result.", ProbeResult, digest=Digest)
Resumed = _copy("ResumedPlan", "A plan for other GPUs, and all ways to go on with them.", Hash, resume=Resume)
ErrorText = _type("ErrorText", "A failure in words.", type=str, message=str, hint=str)
Failed = _type(
    "Failed", "A failure; the exit code says of which kind.", schema_version=(Literal[1], 1), error=ErrorText,
    rejections=(dict[str, int], {}), nearest=(Numbers | None, None), remedy=(Numbers | None, None),
)  # fmt: skip
RunFailed = _type("RunFailed", "A line that has no price, and why.", id=(Any, None), error=ErrorText)
Term = _type("Term", "A term of the difference of two steps.", term=str, seconds=float)
Sides = _type(
    "Comparison", "Plans, probes and runs beside each other.", files=list[str], differences=dict[str, list[Any]],
    waterfall=list[Term], waterfalls=list[list[Term]], sides=list[Compared],
)  # fmt: skip
CheckOfFile = _type(
    "CheckOfFile", "A launch file, the one that it replaces, and what differs.", new=CheckedFile,
    old=CheckedFile | None, slower_fraction=float | None, exit_code=int, comparison=Sides | None,
)  # fmt: skip
Checked = _type("Checked", "Every file that was checked.", checks=list[CheckOfFile])
Swept = _type(
    "Sweep", "Every point that was planned, and which of them answer the question.", points=list[Point],
    pareto=list[int], answers=dict[str, int | None], goal=Goal,
)  # fmt: skip
StepDifference = _type(
    "StepDifference", "An item of a step, in both layouts.", item=str, best_s=float, pinned_s=float, difference_s=float
)
MemoryDifference = _type(
    "MemoryDifference", "An item of the fullest rank's memory, in both layouts.", item=str, best_bytes=float,
    pinned_bytes=float, difference_bytes=float,
)  # fmt: skip
Explained = _type(
    "Explained", "Why this layout, or why not another.", Explanation,
    step_differences=(list[StepDifference], []), memory_differences=(list[MemoryDifference], []),
)  # fmt: skip
ProgramText = _type("ProgramText", "The integer program of a layout.", parallelism=Layout, program=str)
Counted = _type("CountedModel", "A model and its size.", ModelSpec, num_parameters=int, num_active_parameters=int)
_MANIFEST: Mapping[str, Any] = {
    "planner_version": str, "plan_sha256": str, "inputs_sha256": str, "targets": list[str], "written_for": list[str],
    "world_size": int, "job": Numbers, "notes": list[str], "placeholders": list[Numbers], "first_run": str | None,
    "files": dict[str, str],
}  # fmt: skip
Manifest = _type("Manifest", "The files of an export, with their sha256.", **_MANIFEST)
Exported = _type("Exported", "An export that was written.", Manifest, folder=str)
DryRun = _type("DryRun", "The files of an export as texts.", Manifest, texts=dict[str, str])
Imported = _type(
    "Imported", "A run that was read from a configuration, its price, and the planner's own choice.", source=str,
    run=Numbers, unknown=Numbers, ignored=Any, notes=Any, refused=list[str], evaluated=Hash, own=PricedLayout | None,
    why=str,
)  # fmt: skip
StageMoved = _type(
    "StageMoved", "A stage before and after.", stage=int, rank_factor=float, rank_factor_guessed=str | None,
    num_layers_before=int, num_layers_after=int, microbatch_before_s=float, microbatch_after_s=float,
)  # fmt: skip
Rebalanced = _type(
    "Rebalanced", "A plan whose layers were moved off slow ranks.", step_before_s=float, step_after_s=float,
    gain_fraction=float, stages=list[StageMoved], best=PricedLayout,
)  # fmt: skip
Timed = _type("TimedAction", "An action, as torch spells it, and its seconds.", action=str, start_s=float, end_s=float)
Replay = _type(
    "ScheduleReplay", "A schedule with the start and the end of every action.", schedule=str, pp=int, vpp=int,
    num_microbatches=int, makespan_s=float, bubble_fraction=float, bubble_of_useful_fraction=float,
    busy_s=list[float], idle_s=dict[str, list[float]], peak_in_flight_microbatches=list[float],
    stage_to_rank=list[int], ranks=list[list[Timed]], lower_bound_s=(float | None, None), gap=(float | None, None),
    best_named=(str | None, None), best_named_s=(float | None, None), straggler=(Numbers | None, None),
)  # fmt: skip
Row = _type(
    "ScheduleRow", "A schedule of a comparison; `refused` stands in the place of its numbers.", schedule=str, vpp=int,
    refused=(str | None, None), step_s=(float | None, None), bubble_fraction=(float | None, None),
    peak_in_flight_microbatches=(list[float] | None, None), num_weight_copies=(int | None, None),
    splits_backward=(bool | None, None), asynchronous=(bool | None, None),
)  # fmt: skip
Phase = _copy("PhasePlan", "A phase and its plan.", PhaseAnswer, plan=Hash)
Phases = _copy(
    "PhasesPlan", "A plan of each phase of a run.", PhasesAnswer, schema_version=(Literal[1], 1), phases=list[Phase]
)


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


Validated = _type(
    "Validated", "Agreement with published runs, by source; further questions have keys of their own.", _Open,
    families=(list[Numbers], []), rows=(list[Numbers], []),
)  # fmt: skip
Diagnosed = _copy("Diagnosed", "What is installed and found, and what is wrong with it.", Findings, troubles=list[str])
RunLine = _type("RunLine", "A line of the file that `plan evaluate --runs` reads.", _Open, id=(Any, None), run=RunSpec)
Sourced = _type("Sourced", "A number, and where it is from.", value=Any, source=str)


def _trainer_file() -> type[BaseModel]:
    """A trainer's file: each field of a runtime as it is, or with its source, and what stands beside them."""
    fields = {name: (field.annotation | Sourced, None) for name, field in RuntimeSpec.model_fields.items()}
    beside = {"base": (str, None), "features": (Numbers, None), "switches": (dict[str, list[Any]], None)}
    beside |= {"versions": (list[Any], None), "since": (dict[str, Any], None)}
    beside |= {"likely": (list[Numbers], None), "checkpoint": (list[Numbers], None)}
    says = "A trainer; what it leaves out is as in the file that `base` names, or as `RuntimeSpec` has it."
    return _type("TrainerFile", says, **fields, **beside, source=str)


Count = Annotated[int | float | str, Field(description="A number, such as 15T, 252M or 1048576.")]
Ramp = _copy("RampupInFile", "A batch that grows.", Rampup, tokens=(Count | None, None), samples=(Count | None, None))
PhaseInFile = _copy(
    "PhaseInFile", "One phase.", PhaseSpec, tokens=(Count | None, None), rampup=(Ramp | None, None),
    lengths=(list[DocumentLength] | LogNormal | dict[str, float] | None, None),
)  # fmt: skip
PhasesInFile = _copy("PhasesInFile", "The phases of a run.", PhasesFile, phases=list[PhaseInFile])
ModelInFile = _copy(
    "ModelInFile", "A model; the fields of `moe` and `mla` may stand at the top too, as in a config.json.", ModelSpec,
    **dict.fromkeys(sorted(MoESpec.model_fields | MLASpec.model_fields), (Any, None)),
    **dict.fromkeys(("head_dim", "num_key_value_heads", "position_embedding"), (Any, None)),
)  # fmt: skip


class Schema(NamedTuple):
    """A published schema."""

    says: str
    """The command or the file that it is about."""
    kind: Any
    is_read: bool = False
    """True for a file that users write."""


SCHEMAS: Mapping[str, Schema] = {
    "plan": Schema("`plan --json`, `plan evaluate --json`, and the file that `-o` saves", Hash),
    "resume": Schema("`plan --from PLAN.json --gpus N --json`", Resumed),
    "phases": Schema("`plan --phases FILE --json`", Phases),
    "runs": Schema("a line of `plan evaluate --runs FILE --json`", PricedLayout | RunFailed),
    "explain": Schema("`plan explain --json`", Explained),
    "recipe": Schema("`plan explain --recipe --json`", RecipeTable),
    "program": Schema("`plan explain --program --json`", ProgramText),
    "sweep": Schema("`plan sweep --json`", Swept),
    "compare": Schema("`plan compare --json`", Sides),
    "check": Schema("`plan check --json`", Checked),
    "next": Schema("`plan next --json`", NextAnswer),
    "show": Schema("`plan show --json`: what the file holds", dict[str, Any]),
    "model": Schema("`plan models NAME --json`; without a name, a list of these", Counted | list[Counted]),
    "hardware": Schema(
        "`plan hardware NAME --json`, `plan profile --json`; without a name, a list", HardwareSpec | list[HardwareSpec]
    ),
    "export": Schema("`plan export --json`, with `texts` where nothing is written", Exported | DryRun | Manifest),
    "import": Schema("`plan import --json`", Imported),
    "observe": Schema("`plan observe --json`, and the file that `-o` saves", SavedFiles | SavedRun),
    "follow": Schema("a line of `plan observe --follow --json`", FollowedRun),
    "memory": Schema("`plan memory --json`", MemoryAnswer),
    "schedule": Schema("`plan schedule NAME --json`", Replay),
    "schedules": Schema("`plan schedule --compare --json`", list[Row]),
    "probe": Schema("`plan probe --json`, and the file that `-o` saves", SavedProbe),
    "rebalance": Schema("`plan rebalance --json`", Rebalanced),
    "probe-start": Schema("`plan probe --dry-run --json`", ProbeStart),
    "validate": Schema("`plan validate --json`, whatever it is asked", Validated),
    "doctor": Schema("`plan doctor --json`", Diagnosed),
    "error": Schema("what any command prints with `--json` when it fails", Failed),
    "model-file": Schema("a model, `--model FILE.yaml`", ModelInFile, True),
    "hardware-file": Schema("a hardware profile, `--hardware FILE.yaml`", HardwareSpec, True),
    "trainer-file": Schema("a trainer, `--runtime FILE.yaml`", _trainer_file(), True),
    "phases-file": Schema("the phases of a run, `--phases FILE`", PhasesInFile, True),
    "runs-file": Schema("a line of the file that `plan evaluate --runs` reads", RunLine, True),
}
"""Every schema, by the name of its file."""


def schema_of(name: str) -> dict[str, Any]:
    """One schema as plain data."""
    row = SCHEMAS[name]
    schema = TypeAdapter(row.kind).json_schema(mode="validation" if row.is_read else "serialization")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": f"Of {row.says}."}
    return {**head, **schema}


def texts() -> dict[str, str]:
    """The text of each file of `docs/schemas`, by its name."""
    return {f"{name}.json": _text(schema_of(name)) for name in SCHEMAS}


def _text(schema: dict[str, Any]) -> str:
    """A schema with one type a line."""
    one = partial(json.dumps, ensure_ascii=False)
    parts = {key: one(value) for key, value in schema.items()}
    if "$defs" in schema:
        types = ",\n".join(f"  {one(name)}: {one(type_)}" for name, type_ in schema["$defs"].items())
        parts["$defs"] = f"{{\n{types}\n }}"
    rows = ",\n".join(f" {one(key)}: {value}" for key, value in parts.items())
    return f"{{\n{rows}\n}}\n"


def page() -> str:
    """The page that lists them."""
    lines = [
        "# JSON Schemas",
        "",
        "Every answer that `--json` prints, every file that a command saves, and every file that you may write has a",
        "schema (JSON Schema, draft 2020-12). `scripts/docs` writes them from the program's types, and tests hold the",
        "commands' answers against them. Seconds are in fields that end in `_s`, bytes in those that end in `_bytes`.",
        "Fields are added and never renamed, so a reader should ignore those that it does not know.",
        "",
    ]
    for title, is_read in (("Answers and saved files", False), ("Files that you write", True)):
        lines += [f"## {title}", "", "| schema | of |", "|---|---|"]
        lines += [
            f"| [{name}.json](../schemas/{name}.json) | {row.says} |"
            for name, row in SCHEMAS.items()
            if row.is_read == is_read
        ]
        lines.append("")
    lines += [
        "A check with the package `jsonschema`:",
        "",
        "```python",
        "import json, jsonschema",
        "",
        'jsonschema.validate(json.load(open("plan.json")), json.load(open("docs/schemas/plan.json")))',
        "```",
        "",
    ]
    return "\n".join(lines)
