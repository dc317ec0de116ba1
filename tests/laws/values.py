"""Strategies for any value of any spec: what its fields' types and limits allow."""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
from hypothesis import assume
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from laws.jobs import HARDWARE, jobs, models, runtimes
from planner.answer import Plan, PricedLayout
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.spec import RuntimeSpec

NAMES = st.text("abcdefgh-0123456789 é·", min_size=1, max_size=6)
_LARGEST = 10.0**9


def values_of(kind: type[BaseModel]) -> st.SearchStrategy[BaseModel]:
    """Instances of a spec; fields with defaults are left out now and then."""
    if kind in _shipped():
        return _shipped()[kind]
    fields = kind.model_fields

    @st.composite
    def drawn(draw: st.DrawFn) -> BaseModel:
        given = {
            name: draw(_value(field.annotation, tuple(field.metadata)))
            for name, field in fields.items()
            if not field.exclude and (field.is_required() or draw(st.integers(0, 2)) == 0)
        }
        try:
            return kind(**given)
        except (ValidationError, ValueError):
            assume(False)
            raise

    return drawn()


def _limits(metadata: tuple[Any, ...]) -> dict[str, Any]:
    """The limits in a field's metadata by name: ge, gt, le, lt, min_length, max_length."""
    limits: dict[str, Any] = {}
    for entry in metadata:
        parts = entry.metadata if isinstance(entry, FieldInfo) else [entry]
        for part in parts:
            for name in ("ge", "gt", "le", "lt", "min_length", "max_length"):
                value = getattr(part, name, None)
                if value is not None and isinstance(part, annotated_types.BaseMetadata):
                    limits[name] = value
    return limits


def _number(kind: type, limits: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    low, high = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
    if kind is int:
        least = -5 if low is None else int(low) + ("gt" in limits)
        return st.integers(least, min(least + 20_000, int(high) - ("lt" in limits)) if high is not None else least + 99)
    top = _LARGEST if high is None else float(high)
    bottom = -_LARGEST if low is None else float(low)
    return st.floats(bottom, top, exclude_min="gt" in limits, exclude_max="lt" in limits, allow_nan=False)


def _value(annotation: Any, metadata: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Values of a type, as an annotation has it."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value(parts[0], (*parts[1:], *metadata))
    if origin in (Union, types.UnionType):
        return st.one_of([st.none() if part is type(None) else _value(part, metadata) for part in parts])
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is list:
        return st.lists(_value(parts[0]), max_size=3)
    if origin is tuple:
        limits = _limits(metadata)
        if len(parts) == 2 and parts[1] is Ellipsis:
            sizes = {"min_size": limits.get("min_length", 0), "max_size": min(3, limits.get("max_length", 3))}
            return st.lists(_value(parts[0]), **sizes).map(tuple)
        return st.tuples(*map(_value, parts))
    if origin is dict:
        return st.dictionaries(_value(parts[0]), _value(parts[1]), max_size=3)
    return _plain(annotation, _limits(metadata))


def _plain(kind: Any, limits: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if kind is bool:
        return st.booleans()
    if kind in (int, float):
        return _number(kind, limits)
    if kind is str:
        return NAMES
    if kind is Any or kind is object:
        return st.one_of(st.none(), st.booleans(), st.integers(0, 99), NAMES)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return st.deferred(lambda: values_of(kind))
    if isinstance(kind, type) and issubclass(kind, tuple):
        hints = get_type_hints(kind, include_extras=True)
        return st.tuples(*map(_value, hints.values())).map(lambda parts: kind(*parts))
    raise TypeError(f"no values for {kind!r}")


@cache
def _shipped() -> dict[type, st.SearchStrategy[Any]]:
    """Values of whole models, GPUs, trainers and answers: few others than those that ship, or are priced, hold."""
    return {
        ModelSpec: models(), HardwareSpec: st.sampled_from(HARDWARE).map(load_hardware), RuntimeSpec: runtimes(),
        TrainingSpec: jobs().map(lambda job: job.training), PricedLayout: jobs().map(lambda job: job.priced),
        Plan: jobs().map(lambda job: job.plan()), Parallelism: jobs().map(lambda job: job.layout),
        ClusterSpec: jobs().map(lambda job: job.cluster),
    }  # fmt: skip
