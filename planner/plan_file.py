"""Plans that were saved with -o, read back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import Any, Final

from planner.answer import SCHEMA_VERSION, Plan, PricedLayout, StagePlan
from planner.errors import SpecError
from planner.schedule.actions import Action
from planner.schedule.torch_csv import made_order
from planner.specs.checking import checked
from planner.specs.model import ModelSpec
from planner.specs.reading import label, load_yaml, printable

_BESIDE: Final = ("inputs_sha256", "resume")
"""Keys that an answer has beside the plan: the hash of its inputs, and the ways of `plan --from`."""
_ROUNDING: Final = -1e-6
"""Differences of seconds may round to a little less than nothing; every other number is at least 0."""


def read_plan(path: str) -> Plan:
    """The plan in a file, `-` for stdin; SpecError where the file holds no plan of this version."""
    return plan_of(load_yaml(path), label(path))


def plan_of(data: dict[str, Any], where: str) -> Plan:
    """The plan in what a file held; SpecError where it is none of this version, or was edited."""
    if not {"schema_version", "best"} <= data.keys():
        raise SpecError(f"{where}: is not a plan", "save one with plan --model 405b --gpus 2048 -o plan.json")
    if data["schema_version"] != SCHEMA_VERSION:
        version = printable(str(data["schema_version"]), 40)
        raise SpecError(
            f"{where}: schema_version {version!r}, this version reads {SCHEMA_VERSION}",
            "plan again",
        )
    plan = checked(Plan, {key: value for key, value in data.items() if key not in _BESIDE}, where)
    named = [("best", plan.best), *((f"alternatives[{i}]", other) for i, other in enumerate(plan.alternatives))]
    problems = (f"{name}: {problem}" for name, layout in named if (problem := _contradiction(layout, plan)))
    problem = next(problems, None) or _impossible(plan)
    if problem:
        raise SpecError(f"{where}: {problem}", "plan again: a saved plan is not for editing")
    return plan


def _contradiction(layout: PricedLayout, plan: Plan) -> str | None:
    """A problem of a layout that somebody may have edited; None where its fields go together."""
    sizes, stages = layout.parallelism, layout.stages
    numbers = (sizes.tp, sizes.cp, sizes.pp, sizes.vpp, sizes.dp, sizes.ep, sizes.etp, sizes.micro_batch_size)
    if min(*numbers, sizes.num_microbatches, sizes.shard_size) < 1:
        return "parallelism has a size below 1"
    ranks = sizes.tp * sizes.cp * sizes.pp * sizes.dp
    if not ranks == sizes.num_gpus_used <= plan.cluster.num_gpus:
        return f"{ranks} ranks, num_gpus_used {sizes.num_gpus_used}, num_gpus {plan.cluster.num_gpus}"
    if len(stages) != sizes.pp or any(len(stage.chunks) != sizes.vpp for stage in stages):
        return f"stages are not pp {sizes.pp} of vpp {sizes.vpp} chunks"
    if layout.rank_factors and (len(layout.rank_factors) != sizes.pp or min(layout.rank_factors) <= 0):
        return f"rank_factors are not one factor above 0 for each of {sizes.pp} stages"
    return _wrong_layers(stages, plan.model.spec) or _wrong_numbers(layout) or _wrong_order(layout)


def _wrong_layers(stages: Sequence[StagePlan], model: ModelSpec) -> str | None:
    """A problem of the layers that stages hold and recompute."""
    chunks = sorted(chunk for stage in stages for chunk in stage.chunks)
    lengths = [last - first for first, last in chunks]
    if min(lengths) < 0 or sum(lengths) != model.num_hidden_layers or any(a[1] != b[0] for a, b in pairwise(chunks)):
        return f"its chunks do not hold layers 0 to {model.num_hidden_layers} one after the other"
    if not all(_holds_what_it_recomputes(stage, model) for stage in stages):
        return "its stages recompute layers that they do not hold"
    return None


def _holds_what_it_recomputes(stage: StagePlan, model: ModelSpec) -> bool:
    counts = stage.num_recomputed
    if not counts:
        return 0 <= stage.recompute.get("full", 0) <= sum(last - first for first, last in stage.chunks)
    layers = [[model.layers[first:last].count(kind) for kind in model.kinds] for first, last in stage.chunks]
    if [len(row) for row in counts] != [len(row) for row in layers]:
        return False
    return all(
        0 <= n <= most for row, having in zip(counts, layers, strict=True) for n, most in zip(row, having, strict=True)
    )


def _wrong_numbers(layout: PricedLayout) -> str | None:
    """A problem of a layout's seconds and bytes."""
    for name, value in _numbers(layout.model_dump(exclude={"runtime_spec", "parallelism"})):
        if not _ROUNDING <= value < inf:
            return f"{name} is {value:g}"
    step = layout.step
    parts_s = sum(getattr(step.breakdown, name) for name in type(step.breakdown).model_fields)
    if not step.step_s > 0 or abs(parts_s - step.step_s) > 1e-6 * step.step_s:
        return f"its breakdown adds up to {parts_s:g} s, step_s is {step.step_s:g}"
    return None


def _numbers(data: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number in plain data, with the name of the field that holds it."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _numbers(value, key)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _numbers(value, name)
    elif isinstance(data, int | float):
        yield name, data


def _wrong_order(layout: PricedLayout) -> str | None:
    """A problem of the actions of a schedule that was made to measure."""
    sizes = layout.parallelism
    if not layout.actions:
        return None
    try:
        ranks = tuple(tuple(map(Action.parse, line.split())) for line in layout.actions)
        rank_of = {action.stage: rank for rank, actions in enumerate(ranks) for action in actions}
        placement = tuple(rank_of[stage] for stage in sorted(rank_of))
        chunks = Counter(placement)
        if len(ranks) != sizes.pp or [chunks[rank] for rank in range(sizes.pp)] != [sizes.vpp] * sizes.pp:
            return f"actions are not of pp {sizes.pp} ranks with {sizes.vpp} chunks each"
        last = max(action.microbatch for actions in ranks for action in actions)
        if max(rank_of) >= len(rank_of) or last >= sizes.num_microbatches:
            return "actions name a stage or a micro-batch that the layout does not have"
        made_order(layout.actions, sizes.schedule)
    except SpecError as error:
        return f"actions: {error.message}"
    return None


def _impossible(plan: Plan) -> str | None:
    """A batch, a number of the search or of the cost, or a text that no plan has."""
    sizes = plan.parallelism
    batch = sizes.dp * sizes.micro_batch_size * sizes.num_microbatches
    if batch != plan.training.global_batch_size:
        return f"best: dp · micro-batch · micro-batches = {batch}, global_batch_size {plan.training.global_batch_size}"
    for name, spec in (("search", plan.search), ("run_cost", plan.run_cost), ("goodput", plan.goodput)):
        for field, value in _numbers({} if spec is None else spec.model_dump()):
            if not _ROUNDING <= value < inf:
                return f"{name}: {field} is {value:g}"
    if plan.search is not None and plan.search.lower_bound_s <= 0:
        return "search: lower_bound_s is 0"
    strange = next((text for text in _texts(plan.model_dump()) if not text.replace("\n", " ").isprintable()), None)
    return None if strange is None else f"{strange[:40]!r} has characters that cannot be printed"


def _texts(data: Any) -> Iterator[str]:
    """Every text in plain data."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from (*_texts(key), *_texts(value))
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _texts(value)


def with_alternative(plan: Plan, number: int | None) -> Plan:
    """The plan with its `number`-th alternative, counted from 1, as its best layout; None for the plan as it is."""
    if number is None:
        return plan
    if not 1 <= number <= len(plan.alternatives):
        raise SpecError(
            f"--alternative {number}: the plan has {len(plan.alternatives)}", "plan … --top N keeps more of them"
        )
    chosen = plan.alternatives[number - 1]
    best = chosen.model_copy(update={"runtime_spec": None})
    return plan.model_copy(update={"best": best, "runtime_spec": chosen.runtime_spec or plan.runtime_spec})
