"""How exported files name their plan."""

from __future__ import annotations

import pytest

from planner.export.trainer_files import comment, slug


def test_comments_stay_comments() -> None:
    text = comment("a\nb\r\x1b[2Jrm -rf\u2028x")
    assert text == "# a\n# b??[2Jrm -rf?x\n"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Llama 3.1/405B", "llama-3-1-405b"), ("--", "plan"), ("é" * 3, "plan"), ("a" * 99, "a" * 40)],
)
def test_slug(name: str, expected: str) -> None:
    assert slug(name) == expected
