"""The same question has the same answer in every process, under every hash seed, in every Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KNOWN = Path(__file__).parent / "same_answers.json"


@pytest.mark.thorough(2)
@pytest.mark.parametrize("hash_seed", ["0", "4321"])
def test_answers_are_those_of_every_other_process(hash_seed: str, tmp_path: Path) -> None:
    """Held against committed digests, which another Python or another release of a dependency must meet too.

    `scripts/answers tests/laws/same_answers.json --only law --digests` writes them anew after a change that means to
    move a price; without --digests it writes the answers themselves, whose difference says which number moved.
    """
    out = tmp_path / "digests.json"
    command = [sys.executable, str(ROOT / "scripts" / "answers"), str(out), "--only", "law", "--digests"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": hash_seed}, cwd=tmp_path)
    assert json.loads(out.read_text()) == json.loads(KNOWN.read_text())
