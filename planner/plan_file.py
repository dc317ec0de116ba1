"""Plans that were saved with -o, read back.

A plan is a pure function of its inputs. One that still has its digest is believed as it stands; one that has none, as
versions before 0.2 saved it, is priced again from its inputs; an edited one is refused, by the name of the field.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from math import isclose
from typing import Any, Final, TypeVar

from planner.answer import SCHEMA_VERSION, Plan, PricedLayout, StagePlan
from planner.distribution import __version__
from planner.errors import PlannerError, SpecError
from planner.layout.candidate import Candidate
from planner.layout.evaluate import assemble
from planner.layout.price import price_layout, reprice
from planner.layout.variation import SELDOM_SAID, told_assumptions, with_unsaid
from planner.saved import KEY, changed_entry, said
from planner.schedule.actions import Action
from planner.schedule.graph import made_order
from planner.specs.model import ModelSpec
from planner.specs.problems import checked
from planner.specs.reading import label, load_yaml, printable

_log = logging.getLogger(__name__)
_BESIDE: Final = ("inputs_sha256", "resume", KEY)
"""Keys that an answer has beside the plan: the hash of its inputs, the ways of `plan --from`, and the digest."""
T = TypeVar("T")
_ITEMS: Final = tuple(
    f"{name}_bytes" for name in ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
)
"""The items of a stage's memory that torch allocates."""


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
    refuse_contradiction(plan, where)
    if KEY not in data:
        return _at_todays_prices(plan, where)
    _refuse_edit(plan, data, where)
    if plan.planner_version != __version__:
        _note_move(plan, where, _priced(where, step_now_s, plan))
    return plan


def refuse_contradiction(plan: Plan, where: str) -> None:
    """Raise SpecError where fields of a plan do not go together."""
    named = [("best", plan.best), *((f"alternatives[{i}]", other) for i, other in enumerate(plan.alternatives))]
    problems = (f"{name}: {problem}" for name, layout in named if (problem := _contradiction(layout, plan)))
    problem = next(problems, None) or _impossible(plan)
    if problem:
        raise SpecError(f"{where}: {problem}", _instead(plan))


def _refuse_edit(plan: Plan, data: dict[str, Any], where: str) -> None:
    """Raise SpecError where a plan is not the one that was saved: with the field and its price, where it has one."""
    try:
        name = changed_entry(data, beside=("resume",))
    except (RecursionError, TypeError, ValueError):  # nested without end, or with keys that JSON has not
        raise SpecError(f"{where}: is no JSON that the planner wrote", _instead(plan)) from None
    if name is None:
        return
    problem = said(name)
    if name.startswith("best."):
        with suppress(SpecError):
            found = _priced(where, first_difference, plan)
            problem = problem if found is None else f"{found[0]}: is {_short(found[1])}, priced {_short(found[2])}"
    raise SpecError(f"{where}: {problem}", _instead(plan))


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else printable(str(value), 60)


def _instead(plan: Plan) -> str:
    """The thing to do in place of editing a plan: a command with other options."""
    command = plan.command if plan.command.startswith("plan ") else "plan --model … --gpus …"
    return f"a saved plan is not for editing: change the options of the command that made it: {printable(command, 150)}"


def _at_todays_prices(plan: Plan, where: str) -> Plan:
    """A plan without a digest at the prices of this version: whatever numbers it has, its inputs decide."""
    again = _priced(where, priced_again, plan)
    _log.info("%s: has no digest: its layouts are priced again, what else its search said is left out", where)
    _note_move(plan, where, again.step.step_s)
    return again


def _note_move(plan: Plan, where: str, now_s: float) -> None:
    """Warn where this version prices a plan's step otherwise than the version that made it."""
    step_s = plan.step.step_s
    if abs(now_s / step_s - 1) > MOVED:
        version = printable(plan.planner_version, 20)
        _log.warning("%s: priced by planner %s at %.4g s; now %.4g s", where, version, step_s, now_s)


def _priced(where: str, price: Callable[[Plan], T], plan: Plan) -> T:
    """A price of the plan; SpecError where its inputs cannot be priced, as somebody may have edited them."""
    try:
        return price(plan)
    except PlannerError as error:
        raise SpecError(f"{where}: cannot be priced: {error.message}", _instead(plan)) from None
    except (ArithmeticError, LookupError, ValueError, TypeError, AssertionError) as error:
        raise SpecError(f"{where}: cannot be priced ({type(error).__name__})", _instead(plan)) from None


def _contradiction(layout: PricedLayout, plan: Plan) -> str | None:
    """A problem of a layout that somebody may have edited; None where its fields go together."""
    sizes, stages = layout.parallelism, layout.stages
    ranks = sizes.tp * sizes.cp * sizes.pp * sizes.dp
    if not ranks == sizes.num_gpus_used <= plan.cluster.num_gpus:
        return f"{ranks} ranks, num_gpus_used {sizes.num_gpus_used}, num_gpus {plan.cluster.num_gpus}"
    if len(stages) != sizes.pp or any(len(stage.chunks) != sizes.vpp for stage in stages):
        return f"stages are not pp {sizes.pp} of vpp {sizes.vpp} chunks"
    if layout.rank_factors and len(layout.rank_factors) != sizes.pp:
        return f"rank_factors are not one factor for each of {sizes.pp} stages"
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
    step = layout.step
    parts_s = sum(getattr(step.breakdown, name) for name in type(step.breakdown).model_fields)
    if abs(parts_s - step.step_s) > 1e-6 * step.step_s:
        return f"its breakdown adds up to {parts_s:g} s, step_s is {step.step_s:g}"
    for number, stage in enumerate(layout.stages):
        memory = stage.memory
        items = sum(getattr(memory, name) for name in _ITEMS)
        if items != memory.peak_allocated_bytes or items + memory.reserved_bytes != memory.total_bytes:
            return f"stages[{number}].memory: its items do not add up to peak_allocated_bytes and total_bytes"
    return None


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
    """A batch or a text that no plan has."""
    sizes = plan.parallelism
    batch = sizes.dp * sizes.micro_batch_size * sizes.num_microbatches
    if batch != plan.training.global_batch_size:
        return f"best: dp · micro-batch · micro-batches = {batch}, global_batch_size {plan.training.global_batch_size}"
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
        count = len(plan.alternatives)
        hint = f"1 to {count}" if count else "leave it out: a plan made with --top 5 has others"
        raise SpecError(f"--alternative {number}: the plan has {count}", hint)
    chosen = plan.alternatives[number - 1]
    best = chosen.model_copy(update={"runtime_spec": None})
    return plan.model_copy(update={"best": best, "runtime_spec": chosen.runtime_spec or plan.runtime_spec})


MOVED: Final = 1e-3
"""Changes of a step below this share are no news."""
_ROUNDING: Final = 1e-9
_PRICED: Final = (
    "evidence", "fits", "parallelism", "stages", "step", "recipe", "rank_order", "placement", "oom_probability",
)  # fmt: skip
"""The fields of a layout that follow from its inputs alone."""


def step_now_s(plan: Plan) -> float:
    """Seconds of the best layout's step by this version of the planner."""
    return _again(reprice(plan, plan.best), plan.best, exact=True).step.step_s


def first_difference(plan: Plan) -> tuple[str, object, object] | None:
    """The first field of the best layout that is not what its inputs price to: its name, its value and the price."""
    again = _again(reprice(plan, plan.best), plan.best, exact=True)
    saved, priced = (layout.model_dump(mode="json", include=set(_PRICED)) for layout in (plan.best, again))
    return next(_differences(saved, priced, "best"), None)


def priced_again(plan: Plan) -> Plan:
    """The plan's inputs and layouts at the prices of this version. What its search alone knew is left out."""
    candidate = reprice(plan, plan.best)
    layouts = [_again(candidate, plan.best, exact=True)]
    layouts += [_again(reprice(plan, other), other, exact=False) for other in plan.alternatives]
    told = told_assumptions(candidate, with_switches=plan.search is None)
    made = assemble(candidate.pricing, candidate.pricing.totals, layouts, told)
    return made.model_copy(update={"planner_version": plan.planner_version, "command": plan.command})


def _again(candidate: Candidate, layout: PricedLayout, exact: bool) -> PricedLayout:
    priced = price_layout(candidate, exact=exact)
    if layout.unsaid:
        priced = with_unsaid(candidate, priced, all(one.switch in SELDOM_SAID for one in layout.unsaid))
    kept = {"warnings": layout.warnings, "id": layout.id, "runtime_spec": layout.runtime_spec}
    return priced.model_copy(update=kept)


def _differences(saved: Any, priced: Any, name: str) -> Iterator[tuple[str, object, object]]:
    """Every field of two plain data that differs, in order."""
    if isinstance(saved, dict) and isinstance(priced, dict):
        for key in (*saved, *(key for key in priced if key not in saved)):
            yield from _differences(saved.get(key), priced.get(key), f"{name}.{key}")
    elif isinstance(saved, list) and isinstance(priced, list) and len(saved) == len(priced):
        for index, pair in enumerate(zip(saved, priced, strict=True)):
            yield from _differences(*pair, f"{name}[{index}]")
    elif isinstance(saved, float) and isinstance(priced, float):
        if not isclose(saved, priced, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
            yield name, saved, priced
    elif saved != priced:
        yield name, saved, priced
