"""Every answer is one screen: at most 38 lines of 80 columns, with a command to type at its end, saved or not."""

from __future__ import annotations

import pytest

from planner.cli import main
from planner.report.terminal import COLUMNS, LINES

JOBS = """
-m 405b -g 2048 --tokens 15T
-m deepseek-v3 -g 2048 --dtype fp8
-m deepseek-v3 -g 256 --time-limit 1
-m 70b -g 64
-m 70b -g 128 -s 32768
-m 70b -g 64 --hardware mi300x
-m 8b -g 8
-m 8b -g 64 --days 30
-m 8b -g 64 --runtime torchtitan
-m mixtral-8x7b -g 64 --hardware a100
-m qwen3-30b-a3b -g 64
-m gpt-oss-20b -g 32 --usd 100k
-m 1b -g 1 --lora
-m 8b -g 1 --qlora --hardware 4090
-m 8b -g 2 --lora --hardware 4090
-m 8b -g 8 --lora --objective dpo
-m 1b -g 8 --finetune --runtime hf --examples 50k
-m 70b -g 64 --pp 16 --fastest
evaluate -m 405b -g 2048 --tp 8 --pp 16 --dp 16
evaluate -m 70b -g 8 --tp 8
"""


@pytest.mark.thorough(4)
@pytest.mark.parametrize("job", JOBS.strip().splitlines())
def test_the_answer_is_one_screen(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    assert main([*job.split(), "--no-history"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert sum(line == "" for line in lines) < 8
    assert lines[-1].startswith("next  ")


@pytest.mark.parametrize(
    ("job", "command"),
    [
        ("-m deepseek-v4-flash -g 64 --hardware b200", "plan report"),
        ("-m 8b -g 8 --runtime nanotron", "plan report"),
        ("-m 8b -g 8 --hardware mi355x", "--to primus"),
    ],
)
def test_the_next_command_exports_only_what_a_target_takes(
    job: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*job.split(), "--no-history"]) == 0
    assert command in capsys.readouterr().out.splitlines()[-1]
