"""A small job taken through every command: what an installed planner must do, wherever it is started.

`scripts/matrix` runs the lines with each Python and each version of what we depend on; tests/test_packaging.py runs
them where no socket may leave the machine.
"""

from __future__ import annotations

import json
from pathlib import Path

JOB = "--model llama-3.2-1b --gpus 8 --micro-batch-size 1"
RUN = {
    "id": "small",
    "run": {
        "model": "llama-3.1-8b",
        "hardware": "h100-sxm-80gb",
        "num_gpus": 16,
        "seq_length": 8192,
        "global_batch_size": 128,
        "parallelism": {"tp": 2, "pp": 2, "micro_batch_size": 1},
    },
}
STEP = (
    " iteration {step:8d}/      80 | consumed samples: {samples:12d} | elapsed time per iteration (ms): 9000.0 | "
    "learning rate: 1.000000E-05 | global batch size:   128 | lm loss: 2.000000E+00 | loss scale: 1.0 | "
    "grad norm: 1.000 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
LINES = (
    "--version",
    f"{JOB} -o plan.json",
    f"{JOB} --json",
    "evaluate --runs runs.jsonl",
    "evaluate --model 8b --gpus 16 --tp 2 --pp 2 -b 128 --json",
    "export plan.json --to megatron -o megatron",
    "import megatron --gpus 8 --no-search -o imported.jsonl",
    "evaluate --runs imported.jsonl --json",
    f"{JOB} --runtime torchtitan -o titan.json",
    "export titan.json --to torchtitan -o torchtitan",
    "compare plan.json titan.json",
    "report plan.json -o report.html",
    "trace plan.json -o trace.json",
    f"explain {JOB}",
    "schedule 1f1b --pp 4 --micro-batches 8 --svg schedule.svg",
    "schedule zb-v --pp 4 --micro-batches 8",
    "models",
    "hardware",
    "models --json",
    "observe train.log --json",
    "observe --follow train.log",
)
"""Arguments of `plan`, each line in the same folder, after `prepare`; every one of them exits with 0."""
FIRST = tuple(
    line
    for number, line in enumerate(LINES)
    if line.split()[0] not in {"--version", "compare", "explain", "hardware"}
    and line.split()[0] not in {other.split()[0] for other in LINES[:number]}
)
"""A line of each command, without those that do what another does."""
WRITTEN = (
    "plan.json",
    "report.html",
    "trace.json",
    "megatron/launch.sh",
    "torchtitan",
    "schedule.svg",
    "imported.jsonl",
)
"""What the lines leave behind."""


def prepare(folder: Path) -> None:
    """Write what the lines read."""
    (folder / "runs.jsonl").write_text(json.dumps(RUN) + "\n")
    steps = (STEP.format(step=step, samples=128 * step) for step in range(1, 81))
    (folder / "train.log").write_text("".join(steps))
