"""Nothing that decides is dropped silently: the law over every importer, by samples of what people give it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.errors import SpecError
from planner.export.import_run import read_configuration
from planner.export.imported_run import ImportedRun


class Sample(NamedTuple):
    """A configuration, and how its keys are found in it."""

    source: str
    text: str
    key: str
    """A regular expression whose first group is a key."""


SAMPLES = {
    name: Sample(**row)
    for name, row in yaml.safe_load(Path(__file__).with_name("law_samples.yaml").read_text()).items()
}
_HARMLESS = {
    "nproc",
    "nnodes",
    "template",
    "max-position-embeddings",
    "recompute-method",
    "recompute_method",
    "target_modules",
    "stage",
}
"""Keys without which nothing is another price, or the model or the number of GPUs is asked for."""


_USERS = {"model": "8b", "num_gpus": 64, "seq_length": 2048, "global_batch_size": 256}
"""What users add where a configuration leaves it to them."""


def keys_of(sample: Sample) -> list[tuple[int, int]]:
    """The places of a sample's keys."""
    found = list(re.finditer(sample.key, sample.text))
    return [next(match.span(group + 1) for group in range(match.re.groups) if match[group + 1]) for match in found]


def read(text: str) -> ImportedRun | SpecError:
    """The run of a text with what users add, or why there is none."""
    try:
        imported = read_configuration(text)
        given: dict[str, Any] = {name: value for name, value in _USERS.items() if imported.run.get(name) is None}
        imported.complete(hardware="h100", **given)
    except SpecError as error:
        return error
    return imported


def says(found: ImportedRun | SpecError, key: str) -> bool:
    """The key is named, as unknown or in an error."""
    if isinstance(found, SpecError):
        return True
    told = [*found.unknown, *found.ignored, *found.unknown.values(), *found.notes]
    return any(key.replace("-", "_") in text.replace("-", "_") for text in told)


def is_asked_for(found: ImportedRun | SpecError, whole: ImportedRun | SpecError) -> bool:
    """What a user adds is missing in a changed text, and was there before."""
    assert isinstance(found, ImportedRun)
    assert isinstance(whole, ImportedRun)
    return any(found.run.get(name) is None is not whole.run.get(name) for name in _USERS)


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_samples_are_read_whole(sample: Sample) -> None:
    imported = read(sample.text)
    assert isinstance(imported, ImportedRun)
    assert imported.source == sample.source
    assert not imported.unknown
    assert not imported.refused


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_a_renamed_key_is_named(sample: Sample, data: st.DataObject) -> None:
    start, end = data.draw(st.sampled_from(keys_of(sample)))
    key = sample.text[start:end]
    suffix = data.draw(st.sampled_from(["x", "_new", "2"]))
    found = read(sample.text[:end] + suffix + sample.text[end:])
    last = re.split(r"[.]", key)[-1] + suffix
    assert says(found, last) or key in _HARMLESS or is_asked_for(found, read(sample.text)), key


def without(text: str, start: int, end: int) -> str:
    """A text without a key and its value: its line, or its words on a command line."""
    if "\n" in text:
        return text[: text.rindex("\n", 0, start) + 1] + text[text.index("\n", end) + 1 :]
    begin = text.rindex(" ", 0, start)
    behind = re.search(r" (?=--|\+?\w+[\w.]*=)|$", text[end:])
    assert behind is not None
    return text[:begin] + text[end + behind.start() :]


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_a_key_left_out_is_assumed_or_asked_for(sample: Sample) -> None:
    whole = read(sample.text)
    assert isinstance(whole, ImportedRun)
    silent = []
    for start, end in keys_of(sample):
        found = read(
            without(
                "\n" * ("\n" in sample.text) + sample.text, start + ("\n" in sample.text), end + ("\n" in sample.text)
            )
        )
        if isinstance(found, SpecError) or found.run == whole.run or found.refused:
            continue
        if is_asked_for(found, whole):
            continue
        last = re.split(r"[.]", sample.text[start:end])[-1].replace("-", "_")
        named = " ".join([*found.assumed, *found.unknown, *found.notes]).replace("-", "_")
        if last not in named and found.run["model"] is not None:
            silent.append(last)
    assert not set(silent) - _HARMLESS
