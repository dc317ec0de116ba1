"""Whatever a user names as a spec, the answer is a mapping or one SpecError that names the file.

Small texts that ask for gigabytes or for hours are refused, in every language that is read, with a hint.
One grammar of numbers: a suffix means the same for every option and every field.
A validation error becomes one line a user understands: where, which field, which value, what to write.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from tables import beside

from planner.errors import SpecError
from planner.specs.hardware import HardwareSpec, LinkTier
from planner.specs.model import ModelSpec
from planner.specs.model_parts import TrainingDefaults
from planner.specs.problems import known_keys, nearest, spec_error, with_numbers
from planner.specs.reading import (
    MAX_BYTES,
    MAX_DIGITS,
    YAML,
    InputLimits,
    literal,
    load_yaml,
    parse_expression,
    parse_json,
    parse_python,
    parse_rows,
    parse_toml,
    parse_yaml,
    row_of,
)
from planner.specs.training import Parallelism, SearchLimits
from planner.specs.units import parse_number, parse_whole, unit_of

TABLES = beside(__file__)


def failure(path: Path | str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load_yaml(path)
    error = caught.value
    assert error.hint
    assert "\n" not in error.message + error.hint
    return error


def written(tmp_path: Path, text: str | bytes, name: str = "spec.yaml") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_yaml_and_json_give_the_same_mapping(tmp_path: Path) -> None:
    expected = {"name": "x", "sizes": [1, 2.5], "rate": 1e9, "on": True, "none": None}
    yaml = written(tmp_path, "name: x\nsizes: [1, 2.5]\nrate: 1e9\n'on': true\nnone: null\n")
    json = written(tmp_path, '{"name": "x", "sizes": [1, 2.5], "rate": 1e9, "on": true, "none": null}', "spec.json")
    assert load_yaml(yaml) == load_yaml(json) == expected


@pytest.mark.parametrize(
    ("content", "mapping"),
    [
        (b"{name: x, size: 3}\n", {"name": "x", "size": 3}),  # YAML, although it starts like JSON
        (b"\xef\xbb\xbfname: x\n", {"name": "x"}),  # a byte order mark is no part of the first key
        *(("\ufeffname: é\n".encode(f"utf-16-{order}"), {"name": "é"}) for order in ("le", "be")),  # PowerShell's `>`
    ],
)
def test_text_of_every_kind_is_read(content: bytes, mapping: dict[str, Any], tmp_path: Path) -> None:
    assert load_yaml(written(tmp_path, content)) == mapping


@pytest.mark.parametrize("text", ["name: x\n", '{"name": "x"}'])
def test_a_dash_is_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert load_yaml("-") == {"name": "x"}


def test_stdin_is_named_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"- a list\n")))
    assert failure("-").message == "stdin: holds a list, not a mapping"


@pytest.mark.parametrize(("name", "says"), [("nothing.yaml", "no such file"), ("", "is a directory")])
def test_what_is_no_file_says_so(tmp_path: Path, name: str, says: str) -> None:
    assert failure(tmp_path / name).message == f"{tmp_path / name}: {says}"


def test_a_file_without_permission_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "name: x\n")
    path.chmod(0)
    if os.access(path, os.R_OK):  # the superuser reads everything

        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("builtins.open", refuse)
    assert failure(path).message == f"{path}: no permission to read it"


@pytest.mark.parametrize("name", ["a" * 5000 + ".yaml", "nul\0.yaml", "file.yaml/inside.yaml"])
def test_an_impossible_name_is_no_crash(tmp_path: Path, name: str) -> None:
    written(tmp_path, "name: x\n", "file.yaml")
    failure(f"{tmp_path}/{name}")


def test_a_huge_file_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "huge.yaml"
    path.touch()
    os.truncate(path, 2**40)  # sparse: reading it would take minutes and the memory of a server
    assert "larger than 1,048,576 bytes" in failure(path).message


def test_a_stream_of_any_length_is_read_no_further_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO(b"#" * (2 * MAX_BYTES))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
    failure("-")
    assert stream.tell() == MAX_BYTES + 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\x7fELF\x00\x01", "is a binary file"),
        (b"name: caf\xe9\n", "is not UTF-8 text (byte 9)"),
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"- 1\n- 2\n", "holds a list, not a mapping"),
        (b"just words\n", "holds text, not a mapping"),
        (b"42\n", "holds an integer, not a mapping"),
        (b"name: [1, 2\nsize: 3\n", "line 2: not YAML"),
        (b"name: x\n  size: 3\n", "line 2: not YAML"),
        (b"name: !!python/object/apply:os.system ['true']\n", "line 1: not YAML"),
        (b"a: 1\n---\nb: 2\n", "line 2: not YAML"),
        (b"when: 2024-13-45\n", "not YAML"),
        (b"on: !!bool perhaps\n", "not YAML"),
        (b"at: !!timestamp soon\n", "not YAML"),
        (b"digits: " + b"9" * 5000 + b"\n", "line 1: not YAML: a number of 5,000 digits"),
        (b"deep: " + b"[" * 200_000 + b"]" * 200_000, "not YAML: nested more than 100 deep"),
        (b"- " * 200_000, "not YAML: nested more than 100 deep"),
        (b"\x1b[31mred: 1\n", "not YAML"),
    ],
)
def test_what_is_not_a_mapping_in_yaml_says_what_it_is(tmp_path: Path, content: bytes, problem: str) -> None:
    path = written(tmp_path, content)
    assert failure(path).message.startswith(f"{path}: {problem}")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        *TABLES["what_is_not_a_mapping_in_json_says_what_it_is"],
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
        ('{"a": ' + "[" * 100_000 + "}", "not JSON"),
    ],
)
def test_what_is_not_a_mapping_in_json_says_what_it_is(tmp_path: Path, content: str, problem: str) -> None:
    path = written(tmp_path, content, "config.json")
    message = failure(path).message
    assert message.startswith(f"{path}: ")
    assert problem in message


def test_a_duplicate_key_is_an_error_with_both_lines(tmp_path: Path) -> None:
    path = written(tmp_path, "name: x\nmoe:\n  num_experts: 8\n  top: 2\n  num_experts: 16\n")
    assert failure(path).message == f"{path}: line 5: num_experts: given twice, first on line 3"


def test_equal_keys_of_different_mappings_are_fine(tmp_path: Path) -> None:
    text = "a: {size: 1}\nb: {size: 1}\nc: &c {size: 1}\nd: {<<: *c, size: 2}\ne: *c\n"
    assert load_yaml(written(tmp_path, text))["d"] == {"size": 2}


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


@pytest.mark.parametrize(("text", "unit", "number"), TABLES["a_number_with_a_suffix"])
def test_a_number_with_a_suffix(text: str, unit: str, number: float) -> None:
    assert parse_number(text, unit) == pytest.approx(number)


@pytest.mark.parametrize(("text", "unit"), TABLES["what_is_no_number_is_refused"])
def test_what_is_no_number_is_refused(text: str, unit: str) -> None:
    with pytest.raises(ValueError, match="number"):
        parse_whole(text, unit)


@pytest.mark.parametrize(("name", "unit"), TABLES["the_unit_is_what_a_name_ends_in"])
def test_the_unit_is_what_a_name_ends_in(name: str, unit: str) -> None:
    assert unit_of(name) == unit


def test_fields_of_yaml_are_read_alike() -> None:
    assert with_numbers(TrainingDefaults, {"seq_length": "8k", "tokens_per_step": "16M", "source": "8k"}) == {
        "seq_length": 8192, "tokens_per_step": 16_000_000, "source": "8k",
    }  # fmt: skip
    assert with_numbers(LinkTier, {"gb_per_s": "400Gb/s"}) == {"gb_per_s": 50}


TINY: dict[str, Any] = TABLES["reading_tiny"]
GPU: dict[str, Any] = TABLES["gpu"]


def said(model: type[BaseModel], data: dict[str, Any]) -> SpecError:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(data)
    error = spec_error(caught.value, "x.yaml", model)
    assert error.message.startswith("x.yaml: ")
    assert error.hint
    assert len(error.message) < 300
    assert "\n" not in error.message + error.hint
    return error


@pytest.mark.parametrize(
    ("change", "message"),
    [*TABLES["a_wrong_model_field_is_named_with_its_value"],
        ({"vocab_size": 10**400}, "vocab_size: a huge number")],
)  # fmt: skip
def test_a_wrong_model_field_is_named_with_its_value(change: dict[str, Any], message: str) -> None:
    assert said(ModelSpec, TINY | change).message.startswith(f"x.yaml: {message}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *TABLES["a_wrong_hardware_field_is_named_with_its_place"],
        (
            {"tiers": [{**GPU["tiers"][0], "efficiency_fraction": 0}]},
            "tiers[0].efficiency_fraction: 0 must be at least",
        ),
        ({"tiers": [GPU["tiers"][0], GPU["tiers"][0]]}, "tiers: every tier but the last needs num_gpus"),
    ],
)
def test_a_wrong_hardware_field_is_named_with_its_place(change: dict[str, Any], message: str) -> None:
    assert said(HardwareSpec, GPU | change).message.startswith(f"x.yaml: {message}")


@pytest.mark.parametrize(
    ("model", "data", "field", "meant"),
    [
        (ModelSpec, {**TINY, "num_layers": 2}, "num_layers", "num_hidden_layers"),
        (ModelSpec, {**TINY, "num_expert_per_tok": 2}, "num_expert_per_tok", "num_experts_per_tok"),
        (ModelSpec, {**TINY, "mla": {"q_lora": 5}}, "mla.q_lora", "q_lora_rank"),
        (HardwareSpec, {**GPU, "memory_gb": 80}, "memory_gb", "memory_gib"),
        (HardwareSpec, {**GPU, "tiers": [{"latency": 3}]}, "tiers[0].latency", "latency_us"),
        (Parallelism, {"tensor": 8, "micro_batch": 1}, "tensor", "tp"),
    ],
)
def test_an_unknown_key_says_which_one_may_be_meant(
    model: type[BaseModel], data: dict[str, Any], field: str, meant: str
) -> None:
    error = said(model, data)
    assert error.message.startswith(f"x.yaml: {field}: unknown key")
    assert meant in error.hint


def test_the_other_problems_are_counted() -> None:
    assert said(ModelSpec, TINY | {"vocab_size": 0}).message.endswith("0 must be greater than 0")
    assert said(ModelSpec, TINY | {"vocab_size": 0, "norm": "x"}).message.endswith(" (and 1 more problem)")
    assert said(ModelSpec, {"name": "x", "num_hidden_layer": 1}).message.endswith(" more problems)")


def test_a_misspelt_key_comes_before_the_missing_one_it_explains() -> None:
    data = {key: value for key, value in TINY.items() if key != "vocab_size"} | {"vocabulary_size": 100}
    assert "vocabulary_size: unknown key" in said(ModelSpec, data).message


def test_branches_of_a_union_are_no_part_of_the_field() -> None:
    assert said(Parallelism, {"fsdp": []}).message.startswith("x.yaml: fsdp: ")
    assert said(SearchLimits, {"tp": [1, 0]}).message.startswith("x.yaml: tp[1]: 0 must be greater than 0")


def test_a_field_is_shown_as_the_file_spells_it() -> None:
    with pytest.raises(ValidationError) as caught:
        ModelSpec.model_validate(TINY | {"hidden_size": -1})
    error = spec_error(caught.value, "config.json", ModelSpec, {"hidden_size": "n_embd"})
    assert error.message.startswith("config.json: n_embd: -1")


def test_a_key_cannot_smuggle_control_characters_into_the_terminal() -> None:
    assert "\x1b" not in said(ModelSpec, TINY | {"\x1b[2Jevil\n": 1}).message


def test_a_value_nested_without_end_is_shown_briefly() -> None:
    bomb: list[Any] = []
    for _ in range(40):
        bomb = [bomb] * 10
    said(ModelSpec, TINY | {"vocab_size": bomb})
    loop: list[Any] = []
    loop.append(loop)
    said(ModelSpec, TINY | {"vocab_size": loop})


def test_sections_that_may_be_given_flat_count_as_known_keys() -> None:
    assert {"num_experts", "kv_lora_rank", "hidden_size"} <= known_keys(ModelSpec)
    assert "num_experts" not in known_keys(HardwareSpec)


def test_nearest_is_silent_when_nothing_is_near() -> None:
    assert nearest("lama-405b", ["llama-3.1-405b", "gpt2"]) == "; did you mean llama-3.1-405b?"
    assert nearest("zzzz", ["llama-3.1-405b", "gpt2"]) == ""
