"""`plan` in a process of its own: what it answers, and what it costs."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VARIABLE = re.compile(r"[A-Z_]+=")
DEEP = {
    "name": "deep", "num_hidden_layers": 10_000, "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
"""A model of 10,000 layers, which the jobs name deep.yaml."""


if sys.platform == "linux":
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become our children


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit code, stdout, and what it took (CPU seconds are user and system)."""

    code: int
    out: bytes
    cpu_s: float
    wall_s: float
    peak_mb: float

    @property
    def data(self) -> dict[str, Any]:
        """The answer as JSON; empty where there is none."""
        try:
            found: dict[str, Any] = json.loads(self.out)
        except ValueError:
            return {}
        return found


def environment(tree: Path, by_cpu: bool = False) -> dict[str, str]:
    """Of a Python that imports the planner of a tree; by_cpu, its time limits are CPU seconds."""
    clock = [str(ROOT / "scripts" / "cpu_clock")] if by_cpu else []
    return os.environ | {"PYTHONPATH": os.pathsep.join([*clock, str(tree)])}


def _ended(words: list[str], tree: Path, folder: Path, by_cpu: bool) -> Ended:
    """`plan WORDS` of a tree in a folder; words before the first that hold a = are variables."""
    variables = dict(word.split("=", 1) for word in takewhile(VARIABLE.match, words))
    arguments = [sys.executable, "-m", "planner.cli", *words[len(variables) :]]
    with tempfile.TemporaryFile() as out:
        start, env = time.perf_counter(), environment(tree, by_cpu) | variables
        process = subprocess.Popen(arguments, stdout=out, stderr=subprocess.DEVNULL, cwd=folder, env=env)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s, usages = time.perf_counter() - start, [usage, *_orphans()]
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        cpu_s = sum(one.ru_utime + one.ru_stime for one in usages)
        return Ended(process.returncode, out.read(), cpu_s, wall_s, max(one.ru_maxrss for one in usages) / 1024)


def _orphans() -> Iterator[resource.struct_rusage]:
    """What the processes took that a command left behind, which those of a sweep are."""
    while True:
        try:
            yield os.wait4(-1, 0)[2]
        except ChildProcessError:
            return


def plan(line: str, tree: Path, folder: Path, by_cpu: bool = False) -> Ended:
    """`plan LINE`, of several joined by && the last."""
    for part in line.split(" && "):
        ended = _ended(shlex.split(part.format(root=ROOT)), tree, folder, by_cpu)
        if ended.code:
            break
    return ended


def fresh_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for the files of a job, with the model deep.yaml."""
    folder = tempfile.TemporaryDirectory()
    (Path(folder.name) / "deep.yaml").write_text(json.dumps(DEEP))
    return folder
