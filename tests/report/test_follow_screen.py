"""The screen of a followed run in 80 columns, and its one line."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from planner.observe.follow.state import Standing
from planner.observe.observation import Cause
from planner.report.observe.live import line_of, render_standing, sparkline, until

FULL = Standing(
    source="train.log", step=1240, total_steps=5000, num_steps=1300, step_s=5.4, window_steps=100, window_step_s=5.31,
    recent_s=(5.3,) * 59 + (5.4,), band_s=(5.05, 5.61), band_source="plan.json", predicted_step_s=5.32, place="above",
    out_steps=12, allowed_steps=20, drift_fraction=0.013, tokens_per_s=2.41e6, predicted_tokens_per_s=2.45e6, mfu=0.412,
    predicted_mfu=0.42, peak_memory_bytes=71 * 2**30, peak_memory_kind="allocated", predicted_memory_bytes=70 * 2**30,
    memory_bytes_per_step=1e6, memory_full_step=9000, num_alloc_retries=4, num_ooms=1, predicted_bubble_fraction=0.08,
    predicted_computing_fraction=0.7, computing_fraction=0.68, waits_fraction=0.1, data_fraction=0.002,
    checkpoint_step=1200, evaluation_step=1000, num_restarts=1, lost_steps=60, pace_s=5.35, eta_s=20_116.0,
    silent_s=300.0, says="above the band of 5.05 to 5.61 s (plan.json) for 12 steps",
    causes=(Cause(name="straggler", likelihood=0.8, evidence="rank 3 is slow " * 20, where="rank 3"),),
)  # fmt: skip


def shown(found: Standing) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False, markup=False)
    console.print(render_standing(found))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_everything_that_is_known_is_on_one_screen() -> None:
    text = shown(FULL)
    for part in (
        "step 1,240 of 5,000", "Above the band", "20 ring the alarm", "5.31 s", "5.32 s expected", "+1.3%", "2.41M",
        "41.2%", "71.0 GiB", "full at step 9,000", "allocator retries", "predicted; 70.0% computing", "by timers",
        "step 1,200", "60 steps made again", "5.6 h", "straggler, rank 3 (80%)", "5.0 min", "waiting for data",
    ):  # fmt: skip
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 32


def test_what_is_not_known_takes_no_room() -> None:
    text = shown(Standing(source="train.log", says="no line of a step yet"))
    assert len(text.splitlines()) == 2
    bare = Standing(
        source="a.log", step=3, step_s=1.0, window_steps=3, window_step_s=1.0, recent_s=(1.0,), says="learning"
    )
    assert "add --tokens" in shown(bare)
    assert "MFU" not in shown(bare)


def test_text_of_a_file_steers_no_terminal() -> None:
    cause = Cause(name="straggler", likelihood=0.5, evidence="\x1b[2J", where="\x1b]0;x\x07")
    text = shown(FULL.model_copy(update={"source": "\x1b[31m.log", "causes": (cause,)}))
    assert "\x1b" not in text


def test_one_line() -> None:
    line = line_of(FULL)
    assert line.startswith("step 1,240 of 5,000  5.310 s a step  above 5.050–5.610 s, 12 of 20 steps  MFU 41.2%")
    assert "likely straggler" in line
    assert line_of(Standing(source="a.log", says="no line of a step yet")) == "no line of a step yet"


@pytest.mark.parametrize(
    ("values", "blocks"),
    [([], ""), ([1.0, 1.0], "▁▁"), ([1.0, 2.0], "▁█"), ([1.0, 1.01], "▁▂"), ([0.0, 0.0], "▁▁")],
)
def test_sparklines(values: list[float], blocks: str) -> None:
    assert sparkline(values) == blocks


def test_times_until_the_end() -> None:
    assert [until(seconds) for seconds in (90, 7200, 200_000, 1e7)] == ["1.5 min", "2.0 h", "2.3 d", "115.7 d"]
