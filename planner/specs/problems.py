"""Errors of pydantic in plain words: file, field, value, and what to write instead; and specs made of values."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from planner.errors import SpecError
from planner.specs.base import LEAST_RATE, MOST_RATE, Spec
from planner.specs.hardware import SLOW_FAMILIES
from planner.specs.reading import kind_of, printable
from planner.specs.units import parse_number, parse_whole, unit_of


def closest(name: str, known: Iterable[str]) -> list[str]:
    """Up to three known names: the shortest that end in the word, such as sizes, else those spelt most like it.

    Names that begin with the word, such as those of a family, come before others.
    """
    word, names = name.lower(), sorted(known, key=lambda other: (len(other), other))
    ending = [other for other in names if word and word in other.split("-")[1:]][:3]
    of_family = [other for other in names if word and other.startswith(word)]
    return ending or difflib.get_close_matches(word, of_family or names, n=3, cutoff=0.0 if of_family else 0.5)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the closest known names, or nothing."""
    close = closest(name, known)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def among(known: Collection[str], name: str) -> str:
    """`one of a, b, c; did you mean …?`, in the order that is given."""
    return f"one of {', '.join(known)}{nearest(name, known)}"


MOST_NAMES = 40
"""The most known names that a hint lists."""


def one_of(known: Iterable[str]) -> str:
    """`one of a, b, c`, where there are not too many of them to read."""
    names = sorted(known)
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"one of {', '.join(names[:MOST_NAMES])}{more}"


def check_names(where: str, key: str, names: Iterable[str], known: Collection[str], problem: str = "") -> None:
    """Raise SpecError for the first of `names` that is not known, with those nearest to it."""
    for name in names:
        if name not in known:
            close = nearest(name, known).removeprefix("; ") or one_of(known)
            raise SpecError(f"{where}: {key}: {problem or f'unknown {name[:60]!r}'}", close)


def spec_error(
    exc: ValidationError, where: str, model: type[BaseModel], spelling: Mapping[str, str] | None = None
) -> SpecError:
    """The first problem of `exc` as a SpecError, with a count of the others.

    `where` names the file or option, `model` is the class that was validated, and `spelling` maps this project's field
    names to the ones in the file where they differ (a Hugging Face config).
    """
    errors = exc.errors(include_url=False)
    # a list whose entries are wrong is too short only without them
    within = {error["loc"][:length] for error in errors for length in range(len(error["loc"]))}
    errors = [error for error in errors if error["type"] != "too_short" or error["loc"] not in within]
    # a misspelt key explains the missing one
    first = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    lacks = [error for error in errors if error["type"] == "missing" == first["type"]]
    others = len(errors) - max(len(lacks), 1)
    paths = [_path(error) for error in lacks or [first]]
    field = ", ".join((spelling or {}).get(path, path) for path in paths)
    problem, hint = _in_words(first, model)
    if len(lacks) > 1:
        problem, hint = "are missing", f"add {', '.join(f'`{path}:`' for path in paths)}"
    parts = [where, field, problem] if field else [where, problem]
    more = f" (and {others} more problem{'s' if others > 1 else ''})" if others else ""
    return SpecError(": ".join(parts) + more, hint)


def _path(error: ErrorDetails) -> str:
    """`tiers[0].gb_per_s` from a pydantic location, without the names of union branches."""
    path = ""
    for part in error["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not ("[" in part or part in {"int", "str", "float", "bool"}):
            path += f".{printable(part, 60)}" if path else printable(part, 60)
    return path


def _in_words(error: ErrorDetails, model: type[BaseModel]) -> tuple[str, str]:
    """(what is wrong, what to do) of one pydantic error."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    shown = _show(value)
    if kind == "extra_forbidden":
        known = known_keys(model, error["loc"][:-1])
        close = nearest(str(error["loc"][-1]), known)
        return "unknown key", close.removeprefix("; ") or one_of(known)
    if kind == "missing":
        return "is missing", f"add `{error['loc'][-1]}:`"
    if "hint" in context:
        return error["msg"], context["hint"]
    if kind == "value_error":
        return error["msg"].removeprefix("Value error, "), "change one of them"
    if kind in _LIMITS:
        word, key = _LIMITS[kind]
        # 5 where a share is asked for was meant as 5%
        is_share = context[key] == 1 and isinstance(value, int | float) and 1 < value < 100
        hint = f"write {value / 100:g}" if is_share else f"give one that is {word} {context[key]:,}"
        return f"{shown} must be {word} {context[key]:,}", hint
    if kind == "literal_error":
        return f"{shown} is none of {context['expected']}", "use one of them"
    if kind == "finite_number":
        return f"{shown} is not a finite number", "mend the number"
    if kind in _WANTED:
        return f"{shown} is {kind_of(value)}, expected {_WANTED[kind]}", f"give {_WANTED[kind]}"
    return f"{shown}: {error['msg']}", "mend the value"


_LIMITS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_WANTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of reasonable size",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "too_short": "a list with at least one entry",
    "string_too_short": "some text",
    "string_too_long": "shorter text",
    "invalid_key": "a key that is text",
    "rate": f"one from {LEAST_RATE:g} to {MOST_RATE:g}",
    "family": f"one of {', '.join(SLOW_FAMILIES)}",
    "shard_group": "a number of ranks, all or none",
    "count": "a count such as 1048576, 16M or 15T",
    "string_pattern_mismatch": "a name of letters, digits, dots, dashes and underscores",
}
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60
_REPR.maxlevel = _REPR.maxdict = _REPR.maxlist = 2


def _show(value: object) -> str:
    """A value, short whatever it is: integers of a thousand digits and nested aliases included."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return "a huge number"
    return _REPR.repr(value)


def known_keys(model: type[BaseModel], path: tuple[str | int, ...] = ()) -> set[str]:
    """Keys that `model` accepts at `path`; fields of its flat sections count at the top too."""
    at = model
    for part in path:
        if isinstance(part, str) and part in at.model_fields:
            nested = _nested(at.model_fields[part].annotation)
            at = nested or at
    keys = {field.alias or name for name, field in at.model_fields.items()}
    for section in getattr(at, "flat_sections", ()):
        keys |= set((_nested(at.model_fields[section].annotation) or at).model_fields)
    return keys


def _nested(annotation: Any) -> type[BaseModel] | None:
    """The spec inside an annotation such as `MoESpec | None` or `tuple[LinkTier, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((spec for spec in map(_nested, get_args(annotation)) if spec), None)


S = TypeVar("S", bound=Spec)


def checked(model: type[S], values: Mapping[str, Any], where: str = "", spelling: Mapping[str, str] | None = None) -> S:
    """The `model` that `values` make; SpecError naming `where`, the field and the value.

    Numbers may be written as `planner.specs.units` has it. `spelling` maps field paths to what the user wrote
    (`num_gpus` to `--gpus`).
    """
    try:
        return model.model_validate(with_numbers(model, values))
    except ValidationError as exc:
        error = spec_error(exc, where, model, spelling)
        raise SpecError(error.message.removeprefix(": "), error.hint) from None


def with_fields(before: S, fields: Mapping[str, Any], where: str = "", spelling: Mapping[str, str] | None = None) -> S:
    """The spec with these fields instead, which are read as `checked` reads them."""
    return checked(type(before), {**before.model_dump(), **fields}, where, spelling)


def with_numbers(model: type[BaseModel], values: Any) -> Any:
    """The values with texts such as `8k` or `400Gb/s` as the numbers that they are, in the unit that the field ends in.

    A text that is no number stays, and is refused by the field; so does what is no mapping.
    """
    if not isinstance(values, Mapping):
        return values
    numeric, nested = _kinds(model)
    read = dict(values)
    for name, value in values.items():
        if name in numeric and isinstance(value, str | float):
            read[name] = _number(name, value, numeric[name])
        elif isinstance(value, dict) and name in nested:
            read[name] = with_numbers(nested[name], value)
        elif isinstance(value, list) and name in nested:
            read[name] = [with_numbers(nested[name], item) if isinstance(item, dict) else item for item in value]
    return read


def _number(name: str, value: str | float, whole: bool) -> Any:
    if isinstance(value, float):
        return int(value) if whole and value.is_integer() else value
    try:
        return parse_whole(value, unit_of(name)) if whole else parse_number(value, unit_of(name))
    except (ValueError, OverflowError):
        return value


@cache
def _kinds(model: type[BaseModel]) -> tuple[dict[str, bool], dict[str, type[BaseModel]]]:
    """The fields of a spec and its flat sections that are numbers, true for whole ones; and those that are specs."""
    numeric, nested = dict[str, bool](), dict[str, type[BaseModel]]()
    for name, field in model.model_fields.items():
        types = set(_types(field.annotation))
        spec = _nested(field.annotation)
        if spec is not None:
            nested[field.alias or name] = spec
        elif types & {int, float} and str not in types:
            numeric[field.alias or name] = float not in types
    for section in getattr(model, "flat_sections", ()):
        numeric |= _kinds(nested[section])[0]
    return numeric, nested


def _types(annotation: Any) -> Iterator[Any]:
    yield annotation
    for inner in get_args(annotation):
        yield from _types(inner)
