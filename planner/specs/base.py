"""The base of every spec: frozen, closed to unknown keys, and comparable by value."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

LEAST_RATE, MOST_RATE = 1e-9, 1e9
"""Real machines are far inside these limits. Beyond them steps overflow, or are no numbers."""


def _in_range(number: float) -> float:
    if not LEAST_RATE <= number <= MOST_RATE:
        raise PydanticCustomError("rate", f"is not between {LEAST_RATE:g} and {MOST_RATE:g}")
    return number


# lt and not le: a field that adds its own le would lose it to one given here
PositiveInt = Annotated[int, Field(gt=0, lt=10**15, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=10**15, strict=True)]
# strict: true is no number
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
"""A share between 0 and 1; names that end in `_fraction` are of this kind."""
Achieved = Annotated[float, Field(ge=1e-6, le=1, allow_inf_nan=False, strict=True)]
"""The share of a rate that something reaches. Seconds are divided by it, so that it is never 0."""
Rate = Annotated[PositiveFloat, AfterValidator(_in_range)]
"""A rate, a size, a price or a factor of a machine or a trainer, in the unit of its name."""
Overhead = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False, strict=True)]
"""Seconds, bytes or a count that a machine or a trainer adds to what can be computed."""
Fields = dict[str, Any]
"""Values by the names of what they are: of a spec, of an object in a file, of a change."""
Said = Mapping[str, Any]
"""The same as they are read, and not changed."""
Named = dict[str, str]
"""A text for each name."""
Texts = tuple[str, ...]
Ints = tuple[int, ...]
Width = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False, strict=True)]
"""Half-width of an interval in natural logarithms."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"has characters that cannot be printed: {text[:40]!r}")
    return text


Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]
"""A name in reports and files: one line, without escape sequences for the terminal."""


def retired(*names: str) -> Any:
    """A validator that leaves fields out which files of earlier versions carry and that nothing reads now."""

    def without(data: Any) -> Any:
        return {key: data[key] for key in data if key not in names} if isinstance(data, dict) else data

    return model_validator(mode="before")(without)


def multiple(whole: str, part: str) -> Any:
    """A validator that one number of a spec is a multiple of another, where both are given."""

    def checked(spec: Any) -> Any:
        total, each = getattr(spec, whole), getattr(spec, part)
        if None not in (total, each) and total % each:
            raise ValueError(f"{whole} ({total}) is no multiple of {part} ({each})")
        return spec

    return model_validator(mode="after")(checked)


K = TypeVar("K")
V = TypeVar("V")


def mapping(value: object) -> Fields:
    """The mapping that a file holds; an empty one where it is something else."""
    return value if isinstance(value, dict) else {}


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, keys and values in the order in which they come."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def filled(pairs: Iterable[tuple[K, V | None]]) -> dict[K, V]:
    """The keys that have a value."""
    return {key: value for key, value in pairs if value is not None}


class Spec(BaseModel):
    """A value the user gives or reads: immutable, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema, in which the docstring below a field is its description."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in descriptions(cls).items():
            field = cls.model_fields[name]
            for written in {name, field.alias, field.serialization_alias} & properties.keys():
                properties[written].setdefault("description", text)
        return schema


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """The docstring below each field of a model, those of its bases included.

    They are read from the sources, and only where a schema is asked for: pydantic's `use_attribute_docstrings` would
    read them in every command.
    """
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        found |= _documented(base.__module__).get(base.__qualname__, {})
    return {name: text for name, text in found.items() if text and name in model.model_fields}


@cache
def _documented(module: str) -> dict[str, dict[str, str]]:
    """The annotated names of each class of a module, each with the string that follows it; empty where none does."""
    import ast
    import inspect

    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # built in, or from a notebook
        return {}
    found: dict[str, dict[str, str]] = {}
    for written in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        fields = found[written.name] = {}
        for node, after in zip(written.body, [*written.body[1:], None], strict=True):
            match node, after:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(text))):
                    fields[name] = inspect.cleandoc(text)
                case ast.AnnAssign(target=ast.Name(name)), _:
                    fields[name] = ""
    return found
