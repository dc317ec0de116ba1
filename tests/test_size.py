"""Very large things are answered, or refused by the limit that they exceed, within 500 MB; `scripts/size` has more."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import Unsupported
from planner.layout.runs import evaluate_lines, parse_run

TABLES = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())

MOST_MIB = 500
RUN: dict[str, Any] = TABLES["run_of_size"]
DEEP = TABLES["deep"]
MEASURED = TABLES["measured"]
"""The peak of `getrusage` is no less than that of the process which started this one."""


def run(parallelism: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {"id": "it", "run": {**RUN, **changes, "parallelism": {**RUN["parallelism"], **(parallelism or {})}}}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_runs_are_answered_or_refused_in_bounded_memory(tmp_path: Path) -> None:
    lines = [
        run(global_batch_size=2**31), run({"vpp": 4}, global_batch_size=10**7),
        run(num_gpus=1_000_000, global_batch_size=250_000, parallelism={"dp": 250_000}),
        run({"pp": 4, "vpp": 2, "dp": 1}, model=DEEP),
        run({"tp": 1, "pp": 1000, "dp": 1}, model=DEEP, num_gpus=1000, global_batch_size=10**7),
        run({"tp": 1, "pp": 10_000, "dp": 1}, model=DEEP, num_gpus=10_000),
        run(
            model={
                **DEEP, "num_hidden_layers": 32,
                "moe": {"num_experts": 10_000, "num_experts_per_tok": 8, "moe_intermediate_size": 64},
            },
        ),
        run(),
    ]  # fmt: skip
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, "evaluate", "--runs", str(path), "--json"],
        capture_output=True, text=True, check=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    says = [answer["error"]["message"] if "error" in answer else "answered" for answer in answers]
    assert says == TABLES["large_runs_are_answered_or_refused_in_bounded_memory"]
    assert float(done.stderr.rpartition("peak ")[2]) < MOST_MIB


def test_the_first_answer_comes_before_the_second_line_is_read() -> None:
    read = []

    def lines() -> Iterator[str]:
        for number, line in enumerate((json.dumps(run()), "{broken", json.dumps(run()))):
            read.append(number)
            yield line

    answers = evaluate_lines(lines())
    assert (next(answers).error, read) == (None, [0])
    bad = next(answers)
    assert "line 2: not JSON" in (bad.error.message if bad.error else "")
    assert (next(answers).error, read) == (None, [0, 1, 2])


def test_a_pipeline_with_more_actions_than_are_replayed_is_refused_where_fewer_are_priced() -> None:
    deep = {**DEEP, "num_hidden_layers": 128}
    fits = run({"tp": 1, "pp": 128, "dp": 1}, model=deep, num_gpus=128, global_batch_size=10**7)
    assert parse_run(fits).evaluate().step.step_s > 0
    with pytest.raises(Unsupported, match="actions would have to be replayed"):
        parse_run(run({"tp": 1, "pp": 1024, "dp": 1}, model=DEEP, num_gpus=1024, global_batch_size=10**7)).evaluate()
