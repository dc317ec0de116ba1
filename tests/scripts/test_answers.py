"""What scripts/answers holds of an answer, and what it calls a difference."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import yaml

from planner.trainers.load import RUNTIMES

ROOT = Path(__file__).parents[2]
JOBS = [line for lines in yaml.safe_load((ROOT / "scripts" / "answers.yaml").read_text()).values() for line in lines]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"step_s": 1.0, "recipe": {"a": True}}, {"step_s": 1.0 + 1e-12, "recipe": {"a": True}}, False),
        ({"step_s": 1.0}, {"step_s": 1.0 + 1e-8}, True),
        ({"split": [[0, 4], [4, 8]]}, {"split": [[0, 4]]}, True),
        ({"outcome": "proven"}, {"outcome": None}, True),
        ({"gap": 0.1}, {}, True),
    ],
)
def test_answers_differ_by_more_than_rounding(
    old: object, new: object, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    assert runpy.run_path(str(ROOT / "scripts" / "answers"))["differs"](old, new) is expected


def test_every_trainer_is_searched_by_a_job() -> None:
    searched = " ".join(line for line in JOBS if not line.startswith("evaluate"))
    assert [name for name in RUNTIMES if name != "megatron" and f"--runtime {name}" not in searched] == []


def test_no_job_stands_twice() -> None:
    assert len(JOBS) == len(set(JOBS)) >= 60
