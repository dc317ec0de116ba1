"""One grammar of numbers: a suffix means the same for every option and every field."""

from __future__ import annotations

import pytest

from planner.specs.hardware import LinkTier
from planner.specs.model_parts import TrainingDefaults
from planner.specs.problems import with_numbers
from planner.specs.units import parse_number, parse_whole, unit_of


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [
        ("8k", "size", 8192), ("2k", "size", 2048), ("8192", "size", 8192), ("16M", "count", 16e6),
        ("15T", "count", 15e12), ("2.5e12", "count", 2.5e12), ("1,048,576", "count", 2**20), ("1_000", "size", 1000),
        ("400Gb/s", "gb_per_s", 50), ("400gbps", "gb_per_s", 50), ("50GB/s", "gb_per_s", 50), ("50", "gb_per_s", 50),
        ("3.2Tb/s", "gb_per_s", 400), ("80GiB", "gib", 80), ("64GB", "gib", 64e9 / 2**30), ("$5M", "usd", 5e6),
        ("10%", "fraction", 0.1), ("30d", "days", 30), ("6w", "days", 42), ("12h", "days", 0.5), ("5min", "s", 300),
        ("5ms", "us", 5000),
    ],
)  # fmt: skip
def test_a_number_with_a_suffix(text: str, unit: str, number: float) -> None:
    assert parse_number(text, unit) == pytest.approx(number)


@pytest.mark.parametrize(
    ("text", "unit"),
    [("", "size"), ("nan", "size"), ("8kk", "size"), ("1,0", "size"), ("400G", "gb_per_s"), ("1.5", "size"),
     ("15X", "count"), ("²", "size")],
)  # fmt: skip
def test_what_is_no_number_is_refused(text: str, unit: str) -> None:
    with pytest.raises(ValueError, match="number"):
        parse_whole(text, unit)


@pytest.mark.parametrize(
    ("name", "unit"),
    [("seq_length", "size"), ("num_gpus", "size"), ("tokens_per_step", "count"), ("network_gb_per_s", "gb_per_s"),
     ("memory_gib", "gib"), ("latency_us", "us"), ("time_limit_s", "s"), ("straggler_fraction", "fraction")],
)  # fmt: skip
def test_the_unit_is_what_a_name_ends_in(name: str, unit: str) -> None:
    assert unit_of(name) == unit


def test_fields_of_yaml_are_read_alike() -> None:
    assert with_numbers(TrainingDefaults, {"seq_length": "8k", "tokens_per_step": "16M", "source": "8k"}) == {
        "seq_length": 8192, "tokens_per_step": 16_000_000, "source": "8k",
    }  # fmt: skip
    assert with_numbers(LinkTier, {"gb_per_s": "400Gb/s"}) == {"gb_per_s": 50}
