"""Plans that were saved with -o, read back."""

from __future__ import annotations

from planner.errors import SpecError
from planner.plan import SCHEMA_VERSION, Plan
from planner.specs.checking import checked
from planner.specs.reading import label, load_yaml


def read_plan(path: str) -> Plan:
    """The plan in a file, `-` for stdin; SpecError where the file holds no plan of this version."""
    data, where = load_yaml(path), label(path)
    if not {"schema_version", "best"} <= data.keys():
        raise SpecError(f"{where}: is not a plan", "save one with plan --model 405b --gpus 2048 -o plan.json")
    if data["schema_version"] != SCHEMA_VERSION:
        raise SpecError(
            f"{where}: schema_version {data['schema_version']!r}, this version reads {SCHEMA_VERSION}", "plan again"
        )
    return checked(Plan, {key: value for key, value in data.items() if key != "inputs_sha256"}, where)


def with_alternative(plan: Plan, number: int | None) -> Plan:
    """The plan with its `number`-th alternative, counted from 1, as its best layout; None for the plan as it is."""
    if number is None:
        return plan
    if not 1 <= number <= len(plan.alternatives):
        raise SpecError(
            f"--alternative {number}: the plan has {len(plan.alternatives)}", "plan … --top N keeps more of them"
        )
    return plan.model_copy(update={"best": plan.alternatives[number - 1]})
