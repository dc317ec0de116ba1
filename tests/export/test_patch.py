"""`plan export --patch`: a diff against the user's own file, in its style, that reads back as the plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.patch import json_text, shell_text, toml_text, yaml_text
from planner.export.patch.change import Change
from planner.export.patch.patch import patch_of
from planner.layout.evaluate import evaluate
from planner.layout.runs import parse_run

Planned = Callable[..., Plan]

SCRIPT = r"""#!/bin/bash
#SBATCH --nodes=2
TP=4   # within a node
PP=${PP:-2}
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --position-embedding-type rope --rotary-base 500000 --vocab-size 128256
    --attention-dropout 0.0 --hidden-dropout 0.0
)
TRAIN="--tensor-model-parallel-size $TP \
  --pipeline-model-parallel-size $PP --sequence-parallel \
  --micro-batch-size 2 \
  --global-batch-size 512 --seq-length 8192 --max-position-embeddings 8192 \
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
  --bf16 --use-distributed-optimizer --lr 3e-4 --save /ckpt"
echo "starting with --tensor-model-parallel-size $TP"
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py "${MODEL_ARGS[@]}" $TRAIN
"""
YAML = """ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 32
  --hidden-size: 4096   # wide
  --ffn-hidden-size: 14336
  --num-attention-heads: 32
  --group-query-attention: true
  --num-query-groups: 8
  --swiglu: true
  --normalization: RMSNorm
  --disable-bias-linear: true
  --untie-embeddings-and-output-weights: true
  --position-embedding-type: rope
  --vocab-size: 128256
  --attention-dropout: 0.0
  --hidden-dropout: 0.0
  --micro-batch-size: 4
  --global-batch-size: 512  # big
  --seq-length: 8192
  --tensor-model-parallel-size: 2
  --fp16: true
TEST_TYPE: regular
"""


@pytest.fixture
def plan(planned: Planned) -> Plan:
    return planned(
        "llama-3.1-8b", 32, tp=2, pp=4, layers_per_stage=(7, 9, 9, 7), recompute="selective", seq_length=8192
    )


@pytest.mark.parametrize(("name", "text"), [("run.sh", SCRIPT), ("model_config.yaml", YAML)])
def test_a_patched_file_reads_back_as_the_plan(plan: Plan, name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    patch = patch_of(plan, str(tmp_path / name), "megatron")
    run = parse_run({"run": patch.imported.complete(hardware="h100", num_gpus=32)})
    again = evaluate(run.model, run.cluster, run.training, run.parallelism, runtime=run.runtime)
    assert again.step.step_s == pytest.approx(plan.step.step_s, rel=1e-4)
    assert [stage.chunks for stage in again.stages] == [stage.chunks for stage in plan.stages]
    (tmp_path / name).write_text(patch.after)
    assert patch_of(plan, str(tmp_path / name), "megatron").diff() == "", "nothing is left to change"


def test_a_script_keeps_its_style(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    diff = patch_of(plan, str(tmp_path / "run.sh"), "megatron").diff()
    added = [line[1:] for line in diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert "TP=2   # within a node" in added
    assert "PP=${PP:-4}" in added
    assert "#SBATCH --nodes=4" in added
    assert "  --recompute-granularity selective \\" in added or any("granularity selective" in line for line in added)
    assert any(line.startswith("  --pipeline-model-parallel-layout Et*7|") and line.endswith("\\") for line in added)
    assert not any("--lr" in line and "3e-4" not in line for line in added)
    kept = [line for line in diff.splitlines() if line.startswith(" ")]
    assert ' echo "starting with --tensor-model-parallel-size $TP"' in kept


def test_files_that_a_plan_does_not_fit(plan: Plan, planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    with pytest.raises(SpecError, match="num_hidden_layers 32, the plan's has 80"):
        patch_of(planned("llama-3.1-70b", 32, tp=4, pp=2), str(tmp_path / "run.sh"), "megatron")
    (tmp_path / "a.yaml").write_text("distributed_type: FSDP\n")
    with pytest.raises(SpecError, match="accelerate file is not patched"):
        patch_of(plan, str(tmp_path / "a.yaml"), "megatron")


TOML = """[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 1
seq_len = 8192  # long

[parallelism]
tensor_parallel_degree = 1

[activation_checkpoint]
mode = "full"
"""


def test_a_toml_of_torchtitan(planned: Planned, tmp_path: Path) -> None:
    plan = planned("llama-3.1-8b", 32, runtime="torchtitan", tp=2, zero_stage=3, micro_batch_size=2, seq_length=8192)
    (tmp_path / "train.toml").write_text(TOML)
    patch = patch_of(plan, str(tmp_path / "train.toml"), "torchtitan")
    assert "+tensor_parallel_degree = 2" in patch.diff()
    assert '+mode = "none"' in patch.diff()
    assert "-seq_len" not in patch.diff()
    assert patch.imported.run["parallelism"]["micro_batch_size"] == 2


def test_a_configuration_of_deepspeed(planned: Planned, tmp_path: Path) -> None:
    plan = planned("llama-3.1-8b", 16, runtime="deepspeed", zero_stage=3, seq_length=8192)
    text = '{\n    "fp16": {\n        "enabled": true\n    },\n    "zero_optimization": {\n        "stage": 2,\n        "reduce_bucket_size": 2e8\n    },\n    "train_batch_size": "auto"\n}'  # noqa: E501
    (tmp_path / "ds.json").write_text(text)
    patch = patch_of(plan, str(tmp_path / "ds.json"), "deepspeed")
    data = json.loads(patch.after)
    assert (data["zero_optimization"]["stage"], data["bf16"], data["fp16"]) == (
        3,
        {"enabled": True},
        {"enabled": False},
    )
    assert data["train_batch_size"] == plan.training.global_batch_size
    assert '"reduce_bucket_size": 2e8' in patch.after, "written as it was"


@pytest.mark.parametrize(
    ("text", "change", "expected"),
    [
        ("run --a 1 --tensor-model-parallel-size 2", Change("--a", ("3",)), "run --a 3 --tensor-model-parallel-size 2"),
        ("run --a '1' \\\n  --b", Change("--a", ("3",)), "run --a '3' \\\n  --b"),
        ("run --a=1 --b", Change("--a", ("3",)), "run --a=3 --b"),
        ("N=1\nrun --a $N", Change("--a", ("3",)), "N=3\nrun --a $N"),
        ("N=1\nrun --a $N --b $N", Change("--a", ("3",)), "N=1\nrun --a 3 --b $N"),
        ("N=$(nproc)\nrun --a $N", Change("--a", ("3",)), "N=$(nproc)\nrun --a 3"),
        ("A=(\n  --a 1\n  --b\n)", Change("--a", None), "A=(\n  --b\n)"),
        ("A=(\n  --num-layers 2\n)", Change("--a", ("x|y",)), "A=(\n  --a 'x|y'\n  --num-layers 2\n)"),
        ("# --a 1\nrun --a 2", Change("--a", ("3",)), "# --a 1\nrun --a 3"),
        ("run --aa 1 --a 2", Change("--a", ("3",)), "run --aa 1 --a 3"),
    ],
)
def test_words_of_a_script(text: str, change: Change, expected: str) -> None:
    assert shell_text.changed(text, [change]) == expected


def test_words_of_other_files() -> None:
    text = "MODEL_ARGS:\n  --a: 1 # one\n  --b: true\nX: 1\n"
    changes = [Change("--a", ("2",)), Change("--b", None), Change("--c", ("x|y",)), Change("--d", ())]
    assert yaml_text.changed(text, changes) == "MODEL_ARGS:\n  --a: 2 # one\n  --c: 'x|y'\n  --d: true\nX: 1\n"
    toml = "[a]\nx = 1  # one\n\n[b]\ny = 2\n"
    changes = [Change("a.x", ("3",)), Change("a.z", ('"w"',)), Change("b.y", None), Change("c.v", ("1",))]
    assert toml_text.changed(toml, changes) == '[a]\nx = 3  # one\nz = "w"\n\n[b]\n\n[c]\nv = 1\n'
    assert json.loads(json_text.changed('{"a": {"b": 1}}', [Change("a.b", ("2",)), Change("c", ("[1]",))])) == {
        "a": {"b": 2},
        "c": [1],
    }
