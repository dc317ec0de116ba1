"""Whatever a user names as a spec, the answer is a mapping or one SpecError that names the file."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner.errors import SpecError
from planner.specs.reading import MAX_BYTES, load_yaml


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


def test_a_flow_mapping_is_yaml_although_it_starts_like_json(tmp_path: Path) -> None:
    assert load_yaml(written(tmp_path, "{name: x, size: 3}\n")) == {"name": "x", "size": 3}


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert load_yaml(written(tmp_path, b"\xef\xbb\xbfname: x\n")) == {"name": "x"}


@pytest.mark.parametrize("order", ["le", "be"])
def test_a_file_in_utf_16_is_read_as_one_in_utf_8(order: str, tmp_path: Path) -> None:
    """PowerShell's `>` writes it."""
    assert load_yaml(written(tmp_path, "\ufeffname: é\n".encode(f"utf-16-{order}"))) == {"name": "é"}


@pytest.mark.parametrize("text", ["name: x\n", '{"name": "x"}'])
def test_a_dash_is_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert load_yaml("-") == {"name": "x"}


def test_stdin_is_named_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"- a list\n")))
    assert failure("-").message == "stdin: holds a list, not a mapping"


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "nothing.yaml"
    assert failure(path).message == f"{path}: no such file"


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    assert failure(tmp_path).message == f"{tmp_path}: is a directory"


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
        ('{"a": 1,\n "b": }', "line 2: not JSON"),
        ("[1, 2]", "holds a list, not a mapping"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
        ('{"a": ' + "[" * 100_000 + "}", "not JSON"),
        ('{"a": 1, "b": {"a": 1, "c": 2, "c": 3}}', "c: given twice"),
        ("name: x", "line 1: not JSON"),
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
