"""What scripts/trainer_drift says of a trainer's tree that differs from the known one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OLD = """
parser.add_argument("--batch", type=int, default=1)
class Config:
    length: int = 8
    class Inner:
        width: int = 2
def check(args):
    assert args.batch > 0, "positive"
"""
NEW = """
parser.add_argument("--batch", type=int, default=2)
class Config:
    class Inner:
        width: int = field(default=4, metadata={"help": "Wide."})
def check(args):
    if args.batch > 8:
        raise ValueError("too many")
"""


def drift(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = tree.parent / "trainer_drift"
    command = [sys.executable, str(script), "--trainer", "transformers", "--tree", str(tree), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_appeared_went_and_changed(tmp_path: Path) -> None:
    (tmp_path / "trainer_drift").write_text((ROOT / "scripts" / "trainer_drift").read_text())
    file = tmp_path / "tree" / "transformers" / "training_args.py"
    file.parent.mkdir(parents=True)
    file.write_text(OLD)
    assert drift(tmp_path / "tree", "--rev", "1.0", "--record").returncode == 1
    assert drift(tmp_path / "tree").stdout == ""
    file.write_text(NEW)
    found = drift(tmp_path / "tree", "--rev", "1.1")
    assert found.stdout.splitlines() == [
        "~ --batch = 1 → 2",
        "~ Config.Inner.width = 2 → field(default=4)",
        "- Config.length = 8",
        "- condition: args.batch > 0",
        "+ condition: not args.batch > 8",
    ]
    assert "1.0 to 1.1: 1 appeared, 2 went, 2 changed" in found.stderr
    file.unlink()
    assert drift(tmp_path / "tree").returncode == 2


def test_the_known_versions_are_recorded() -> None:
    known = json.loads((ROOT / "scripts" / "known_trainers.json").read_text())
    assert known.keys() > {"megatron", "bridge", "torchtitan", "deepspeed", "trl", "transformers", "axolotl", "verl"}
    assert known["primus"]["options"]["megatron/trainer_base.bf16"] == "True"
    assert known["nemo"]["options"]["MegatronStrategy.tensor_model_parallel_size"] == "1"
    assert known["megatron"]["options"]["ModelParallelConfig.tensor_model_parallel_size"] == "1"
    assert all(row["commit"] and len(row["conditions"]) > 10 for row in known.values())
