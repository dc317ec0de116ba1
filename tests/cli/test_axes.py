"""Lists and ranges of a sweep's axes are read as they are meant, and refused with a hint that works."""

from __future__ import annotations

import pytest

from planner.cli.sweep_command import by_nodes, doubling, numbers


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("256", [256]),
        ("512, 256", [512, 256]),
        ("8..32", [8, 16, 32]),
        ("256..4096", [256, 512, 1024, 2048, 4096]),
        ("100..1000", [104, 128, 256, 512, 1000]),
        ("8..64:24", [8, 32, 56]),
        ("8,8..16,64", [8, 16, 64]),
        ("1k..2k,16k", [1024, 2048, 16384]),
    ],
)
def test_numbers_of_gpus(text: str, values: list[int]) -> None:
    assert numbers("--gpus", text, by_nodes(8)) == values


def test_other_ranges_double() -> None:
    assert numbers("--seq-length", "4096..40000", doubling) == [4096, 8192, 16384, 32768]
