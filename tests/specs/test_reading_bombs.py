"""Small texts that ask for gigabytes or for hours are refused, in every language that is read, with a hint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from planner.errors import SpecError
from planner.specs.reading import (
    MAX_DIGITS,
    YAML,
    InputLimits,
    literal,
    parse_expression,
    parse_json,
    parse_python,
    parse_rows,
    parse_toml,
    parse_yaml,
    row_of,
)

Parse = Callable[[str], Any]


def in_yaml(text: str) -> Any:
    return parse_yaml(text, "file")


def in_json(text: str) -> Any:
    return parse_json(text, "file")


def in_toml(text: str) -> Any:
    return parse_toml(text, "file", "mend it")


def in_python(text: str) -> Any:
    return parse_python(text, "file", "mend it")


def in_csv(text: str) -> Any:
    return list(parse_rows(text, "file", "mend it"))


def levels(inner: str) -> str:
    """Twelve values, each of ten of the one before."""
    lines = [f"l{i}: &l{i} {inner.format(', '.join([f'*l{i - 1}'] * 10))}" for i in range(1, 12)]
    return "\n".join(["l0: &l0 {a: 1}", *lines])


@pytest.mark.parametrize(
    ("parse", "text", "problem"),
    [
        (in_yaml, levels("[{}]"), "its aliases make more than 50,000 values"),
        (in_yaml, levels("{{<<: [{}]}}"), "its aliases make more than 50,000 values"),
        (in_yaml, "a: &a [*a]", "line 1: not YAML: a value holds itself"),
        (in_yaml, "[" + "1," * 60_000 + "]", "more than 50,000 values"),
        (in_yaml, "{" * 200_000, "nested more than 100 deep"),
        (in_yaml, "\n".join(" " * depth + "a:" for depth in range(200)), "nested more than 100 deep"),
        (in_yaml, "a: 1" + ":1" * 50_000, "line 1: not YAML: a number of 100,001 digits"),
        (in_yaml, 'a: !!int "1' + " :1" * 50_000 + '"', "a number of 150,001 digits"),
        (in_yaml, "".join(f"%TAG !a{number}! x\n" for number in range(100)) + "--- 1", "more than 16 %TAG lines"),
        (in_yaml, "#" * (YAML.num_bytes + 1), "1,048,577 characters, where 1,048,576 are the most"),
        (in_yaml, "a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        (in_yaml, 'a: !!int "_"', "not YAML"),
        (in_json, "[" * 101 + "]" * 101, "nested more than 100 deep"),
        (in_json, '{"a":' * 100_000, "not JSON"),
        (in_json, "[" + "9" * 5000 + "]", "a number of 5,000 digits"),
        (in_json, '{"a": 1, "b": 2, "a": 3}', "a: given twice"),
        (in_toml, "a." * 20_000 + "a = 1", "not TOML"),
        (in_toml, "a . " * 60 + "a = 1", "a key of more than 50 parts"),
        (in_toml, "a = " + "[" * 10_000, "nested more than 100 deep"),
        (in_toml, "a = " + "[" * 101 + "]" * 101, "nested more than 100 deep"),
        (in_toml, "a = " + "9" * 5000, "not TOML"),
        (in_toml, "a = [" + "1," * 20_001 + "]", "more than 20,000 values"),
        (in_python, "-" * 90_000 + "1", "nested too deeply"),
        (in_python, "a\n" * 100_001, "more than 100,000 words and signs"),
        (in_python, "x = " + "9" * 5000, "not Python"),
        (in_python, "x = 1\0", "not Python"),
        (in_csv, "," * 2_000_000, "more than 1,048,576 values"),
        (in_csv, '"' + "a" * 200_000, "field larger than field limit"),
    ],
)
def test_a_bomb_is_refused(parse: Parse, text: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert problem in caught.value.message
    assert caught.value.hint
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("text", ["9" * 5000, "-" * 30_000 + "1", "{[]: 1}", "[" * 300, "a" * 50_000, "1 if 1 else 2"])
def test_what_is_no_literal_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"literal|expression|characters"):
        literal(text)


def test_a_file_may_be_as_large_as_the_limits_say() -> None:
    small = InputLimits(20, 8, 3)
    for text in ("[1,2,3,4,5,6,7]", "[[[1]]]", "[" + "1" * 18 + "]"):
        assert parse_yaml(text, "", limits=small) == parse_json(text, "", limits=small)
    for text in ("[1,2,3,4,5,6,7,8,9]", "[[[[]]]]", "[" + "1" * 20 + "]"):
        with pytest.raises(SpecError):
            parse_yaml(text, "", limits=small)
        with pytest.raises(SpecError):
            parse_json(text, "", limits=small)
    assert in_yaml("[" * 100 + "1" + "]" * 100) == in_json("[" * 100 + "1" + "]" * 100)
    assert in_toml("a = " + "[" * 99 + "1" + "]" * 99)["a"]
    assert in_json("9" * MAX_DIGITS) == float("9" * MAX_DIGITS)
    assert in_yaml("a: &a {b: 1}\nc: *a\nd: {<<: *a, e: 2}")["d"] == {"b": 1, "e": 2}


def test_the_last_of_two_equal_keys_counts_where_a_trainer_would_take_it() -> None:
    assert parse_yaml("a: 1\na: 2", "", keeps_last=True) == parse_json('{"a": 1, "a": 2}', "", keeps_last=True)


def test_a_warning_about_a_file_is_not_printed(recwarn: pytest.WarningsRecorder) -> None:
    parse_python('x = "\\d"\nif x is 1: pass\n', "file", "")
    parse_expression('"\\d"')
    assert not recwarn.list


def test_a_line_that_is_no_row_has_no_cells() -> None:
    assert row_of('a,"b c",d', ",") == ["a", "b c", "d"]
    assert row_of("a" * 200_000, ",") == []
