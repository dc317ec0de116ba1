"""Words of shell scripts, which are read and never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.export.common.shell import read_shell


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run 'a b' c\\ d", ["run", "a b", "c d"]),
        ("A=1\nrun $A ${A} ${B:-2} ${B}x", ["run", "1", "1", "2", "x"]),
        ('A=(x "y z")\nrun "${A[@]}" ${A[@]}', ["run", "x", "y z", "x", "y", "z"]),
        ("A='--a 1'\nA+=' --b'\nrun $A", ["run", "--a", "1", "--b"]),
        ("N=$((2 * (3 + 1)))\nrun $N", ["run", "8"]),
        ("export A=4 B=5; run $A$B", ["export", "run", "45"]),
        ("run $(rm -rf /) `whoami` x # comment", ["run", "x"]),
        ("run --a \\\n  --b", ["run", "--a", "--b"]),
        (
            "bash -c \"torchrun --nnodes 2 x.py --a 'b c'\"",
            ["bash", "-c", "torchrun", "--nnodes", "2", "x.py", "--a", "b c"],
        ),
        ("run ${A", ["run"]),
        ("run 'never closed", ["run", "never closed"]),
        ("N=$((1/0)); run ${N}", ["run"]),
    ],
)
def test_words_of_a_script(text: str, words: list[str]) -> None:
    assert read_shell(text).words == words


def test_nothing_is_run(tmp_path: Path) -> None:
    read_shell(f"touch {tmp_path}/a; A=$(touch {tmp_path}/b); $((__import__('os').mkdir('{tmp_path}/c')))")
    assert not list(tmp_path.iterdir())
