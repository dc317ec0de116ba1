"""The `likely:` entries of a trainer's file: read with their source, refused by name, and near what runs say."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from planner.errors import SpecError
from planner.trainers.load import RUNTIMES, likely_of, load_runtime, read_likely

ENTRY = {"switches": {"ep_overlap": True}, "value": 0.3, "source": "counted"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (ENTRY, "is no list"),
        ([ENTRY, {**ENTRY, "switches": {"ep_overlapp": True}}], "likely: 2: switches: unknown 'ep_overlapp'"),
        ([{**ENTRY, "switches": {"dispatcher": "pigeon"}}], "dispatcher: 'pigeon'"),
        ([{**ENTRY, "switches": {}}], "switches: none"),
        ([{**ENTRY, "value": 1.5}], "likely: 1: value"),
        ([{"switches": {"ep_overlap": True}, "value": 0.3}], "likely: 1: source"),
        ([{**ENTRY, "likelihood": 1}], "likelihood"),
    ],
)
def test_a_broken_entry_is_refused_by_name(given: Any, says: str) -> None:
    with pytest.raises(SpecError) as error:
        read_likely("mine.yaml", given)
    assert error.value.message.startswith("mine.yaml: likely")
    assert says in error.value.message


def test_shares_of_values_that_exclude_each_other_leave_some_for_the_own_value() -> None:
    for name in RUNTIMES:
        for architecture in ("ampere", "hopper", "blackwell", "cdna3"):
            shares = defaultdict[str, float](float)
            for entry in likely_of(load_runtime(name), architecture):
                shares[entry.switch] += entry.value
            assert all(share < 0.9 for share in shares.values())


def test_a_kind_of_trainer_has_what_its_base_has_and_ones_own_trainer_nothing(tmp_path: Path) -> None:
    megatron = likely_of(load_runtime("megatron"), "blackwell")
    assert megatron
    assert likely_of(load_runtime("bridge"), "blackwell") == megatron
    assert likely_of(load_runtime("megatron-2021"), "ampere") == ()
    own = tmp_path / "own.yaml"
    own.write_text("source: mine\nbase: megatron\n")
    assert likely_of(load_runtime(own), "blackwell") == ()
