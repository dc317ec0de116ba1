"""Lists of layers are short, and hold every layer."""

from __future__ import annotations

import pytest

from planner.report.page import chunks


@pytest.mark.parametrize(
    ("ranges", "says"),
    [
        ([(0, 7)], "0–6"),
        ([(3, 4), (7, 7), (19, 21)], "3, 19–20"),
        ([(3, 4), (19, 20), (35, 36)], "3, 19, 35"),
        ([(first, first + 1) for first in range(3, 126, 16)], "3, then every 16 on to 115"),
        ([(first, first + 2) for first in range(0, 64, 16)], "0–1, then every 16 on to 48–49"),
        ([(0, 2), (16, 17), (32, 33), (48, 49)], "0–1, 16, 32, 48"),
        ([(0, 1), (16, 17), (33, 34), (48, 49)], "0, 16, 33, 48"),
        ([], ""),
    ],
)
def test_layers_in_words(ranges: list[tuple[int, int]], says: str) -> None:
    assert chunks(ranges) == says
