"""`plan compare` reads what the other commands save, and says by name what it cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cli import main

JOB = ["--model", "8b", "--gpus", "16", "--hardware", "h200", "--tp", "2", "--pp", "4", "--dp", "2", "-q"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    for name, more in (("a", []), ("b", ["--recompute", "full"])):
        assert main(["evaluate", *JOB, *more, "-o", str(folder / f"{name}.json")]) == 0
    return folder


def test_a_plan_beside_an_imported_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, saved = folder / "pretrain.sh", folder / "mine.json"
    script.write_text(
        "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
        "--ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu "
        "--seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --tensor-model-parallel-size 4 --bf16 "
        "--vocab-size 128256 --untie-embeddings-and-output-weights --normalization RMSNorm --disable-bias-linear "
        "--position-embedding-type rope --max-position-embeddings 4096\n"
    )
    arguments = ["import", str(script), "--hardware", "h200", "--no-search", "-q"]
    assert main([*arguments, "-o", str(saved)]) == 0
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    (folder / "answer.json").write_text(capsys.readouterr().out)
    answers = []
    for name in ("mine.json", "answer.json"):
        assert main(["compare", str(folder / "a.json"), str(folder / name), "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
        assert answers[-1]["differences"]["tp"] == [2, 4]
        assert answers[-1]["sides"][1]["kind"] == "run"
    assert answers[0]["waterfall"] == answers[1]["waterfall"]
