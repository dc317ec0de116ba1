"""What users already have becomes the run it is: scripts, lists, YAML, recipes, TOML, DeepSpeed's JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.answer import Plan
from planner.cli import main
from planner.errors import SpecError
from planner.export.common.imported_run import Imported
from planner.export.common.shell import read_script
from planner.export.megatron.read import options_of
from planner.export.read import read_configuration
from planner.export.targets import export
from planner.layout.evaluate import evaluate
from planner.layout.runs import parse_run

Planned = Callable[..., Plan]

SCRIPT = r"""
#!/bin/bash
#SBATCH --nodes=16   # of them
#SBATCH --gpus-per-node=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8; NUM_NODES=${NUM_NODES:-16}
WORLD_SIZE=$(($GPUS_PER_NODE * NUM_NODES))
CHECKPOINT=$1
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes "$NUM_NODES" --node_rank "$NODE_RANK")
MODEL_ARGS=(
    --num-layers 80 --hidden-size 8192     # Llama
    --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type rope
    "--vocab-size 128256"
)
if [[ -n "$FP8" ]]; then
  MODEL_ARGS+=(--fp8-format hybrid)
fi
PARALLEL="--tensor-model-parallel-size 4 --sequence-parallel \
  --pipeline-model-parallel-size 4"
PARALLEL="$PARALLEL --pipeline-model-parallel-layout 'Et*19|(t*20|)*2t*21L'"
srun --label bash -c "torchrun ${DISTRIBUTED_ARGS[*]} pretrain_gpt.py \
    ${MODEL_ARGS[*]} $PARALLEL --micro-batch-size 1 --global-batch-size 512 --seq-length 4096 \
    --use-distributed-optimizer --bf16 --recompute-granularity full --recompute-method block \
    --recompute-num-layers 3 --save $CHECKPOINT --brand-new-switch 7 --lr 1e-4"
"""


def layout_of(imported: Imported) -> dict[str, Any]:
    parallelism: dict[str, Any] = imported.run["parallelism"]
    return parallelism


def test_a_launch_script() -> None:
    imported = read_configuration(SCRIPT)
    run, layout = imported.run, layout_of(imported)
    assert imported.source == "megatron"
    assert run["num_gpus"] == 128
    assert (run["seq_length"], run["global_batch_size"], run["dtype"]) == (4096, 512, "fp8")
    assert run["model"]["vocab_size"] == 128256
    assert run["model"]["num_key_value_heads"] == 8
    assert (layout["tp"], layout["pp"], layout["vpp"]) == (4, 4, 1)
    assert layout["layout"] == "Et*19|(t*20|)*2t*21L"
    assert (layout["recompute"], layout["recompute_num_layers"]) == ("full", 3)
    assert layout["zero_stage"] == 1
    assert imported.unknown == {"--brand-new-switch": "7"}
    assert {"--save", "--lr"} <= imported.ignored.keys()


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
    assert read_script(text).words == words


def test_nothing_is_run(tmp_path: Path) -> None:
    read_script(f"touch {tmp_path}/a; A=$(touch {tmp_path}/b); $((__import__('os').mkdir('{tmp_path}/c')))")
    assert not list(tmp_path.iterdir())


def test_the_last_of_equal_options_wins() -> None:
    assert options_of(["x", "--a", "1", "--a=2", "--nproc_per_node", "8"]) == {"--a": ["2"], "--nproc-per-node": ["8"]}


BASE = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 50304 --seq-length 2048 " \
    "--max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64"  # fmt: skip


def read(options: str, gpus: int = 32) -> Imported:
    return read_configuration(f"torchrun --nnodes {gpus // 8} --nproc-per-node 8 pretrain_gpt.py {BASE} {options}")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2", {"vpp": 4}),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2", {"vpp": 2}),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 7 "
            "--decoder-last-pipeline-num-layers 5",
            {"layers_per_stage": [7, 10, 10, 5]},
        ),
        (
            "--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            {"layers_per_stage": [16, 16]},
        ),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", {"zero_stage": 3}),
        ("--use-torch-fsdp2", {"zero_stage": 3}),
        ("", {"zero_stage": 0, "vpp": 1, "sequence_parallel": False}),
        ("--sequence-parallel", {"sequence_parallel": False}),
        ("--tensor-model-parallel-size 2 --sequence-parallel", {"sequence_parallel": True, "tp": 2}),
        ("--recompute-activations", {"recompute": "selective"}),
        (
            "--recompute-granularity selective --recompute-modules [moe_act mlp]",
            {"recompute_modules": ["moe_act", "mlp"]},
        ),
        ("--num-experts 8 --tensor-model-parallel-size 4", {"etp": 4}),
    ],
)
def test_parallelism(options: str, expected: dict[str, Any]) -> None:
    layout = layout_of(read(options))
    assert {key: layout.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {"intermediate_size": 16384, "norm": "layernorm", "activation": "gelu", "tie_word_embeddings": True}),
        ("--swiglu", {"intermediate_size": 10880, "gated_mlp": True, "activation": "silu"}),
        ("--squared-relu --disable-bias-linear --add-qkv-bias", {"activation": "relu2", "attention_bias": "qkv"}),
        ("--use-rotary-position-embeddings --no-position-embedding", {"position_embedding": "rope"}),
        ("--position-embedding-type rope", {"rope_theta": 10000}),
        ("--position-embedding-type rope --rotary-base 500000", {"rope_theta": 500000}),
        ("--position-embedding-type rope --rotary-base $UNSET", {"rope_theta": None}),
        ("--position-embedding-type rope --rotary-percent 0.5", {"partial_rotary_factor": 0.5}),
        ("--position-embedding-type none", {"position_embedding": "none"}),
        ("--window-size 127,0 --window-attn-skip-freq 2", {"sliding_window": 128, "sliding_window_pattern": 2}),
        ("--num-experts 8 --moe-ffn-hidden-size 1024", {"intermediate_size": None}),
    ],
)
def test_models(options: str, expected: dict[str, Any]) -> None:
    model = read(options).run["model"]
    assert {key: model.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("options", "drops"),
    [("", True), ("--hidden-dropout 0.1", True), ("--hidden-dropout 0.0", False), ("--hidden-dropout 0", False)],
)
def test_megatron_drops_a_tenth_unless_told_otherwise(options: str, drops: bool) -> None:
    assert read(options).run["features"]["dropout"] is drops


def test_weight_gradients_that_are_not_added_by_their_product() -> None:
    imported = read("--no-gradient-accumulation-fusion")
    assert imported.run["features"]["gradient_accumulation_fusion"] is False
    assert imported.unknown == {}


@pytest.mark.parametrize(
    ("options", "width"),
    [("", 16384), ("--swiglu", 10880), ("--ffn-hidden-size 512", 512), ("--moe-ffn-hidden-size 1024", 1024)],
)
def test_experts_are_as_wide_as_a_dense_mlp_unless_told(options: str, width: int) -> None:
    assert read(f"--num-experts 8 {options}").run["model"]["moe"]["moe_intermediate_size"] == width


@pytest.mark.parametrize(
    ("pattern", "dense", "every"),
    [
        ("([0]*3+[1]*29)", 3, 1),
        ("+".join(["([0]*1", *["[1]*1", "[0]*1"] * 15, "[1]*1)"]), 0, 2),
        ("+".join(["([0]*5", *["[1]*1", "[0]*2"] * 8, "[1]*1", "[0]*2)"]), 3, 3),
        ("([0]*32)", 32, 1),
    ],
)
def test_layers_with_experts(pattern: str, dense: int, every: int) -> None:
    """Dense layers in front, then every n-th has experts: what an export writes for each model spec comes back."""
    options = f"--num-experts 8 --ffn-hidden-size 4096 --moe-ffn-hidden-size 1024 --moe-layer-freq '{pattern}'"
    moe = read(options).run["model"]["moe"]
    assert (moe["first_k_dense_replace"], moe["moe_layer_freq"]) == (dense, every)


def test_a_batch_size_left_out_is_one_micro_batch_a_rank() -> None:
    text = BASE.replace(" --global-batch-size 64", "")
    imported = read_configuration(f"torchrun --nproc-per-node 8 pretrain_gpt.py {text} --tensor-model-parallel-size 2")
    assert imported.run["global_batch_size"] == 8
    assert "as Megatron does" in imported.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello", "passes no Megatron-LM arguments"),
        (
            "pretrain_gpt.py --num-layers $LAYERS --hidden-size 4096 --num-attention-heads 32",
            "--num-layers: is missing",
        ),
        ("pretrain_gpt.py --num-layers many --hidden-size 4096 --num-attention-heads 32", "'many' is no whole number"),
        (f"p.py {BASE} --tensor-model-parallel-size x", "'x' is no number"),
        (f"p.py {BASE} --num-experts 4 --moe-layer-freq ([1]*31+[0])", "has no counterpart"),
        ("from torchtitan.config import ParallelismConfig\nParallelismConfig(", "not Python: line"),
        ("[parallelism]\ntensor = = 8", "not TOML"),
        ('{"zero_optimization": ', "not JSON"),
        ('{"zero_optimization": {}, "train_batch_size": "many"}', "'many' is no positive number"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("(", r"\(").replace("[", r"\[").replace("+", r"\+")):
        read_configuration(text)


@pytest.mark.parametrize("form", ["megatron.yaml", "launch.sh", "launch.sbatch"])
@pytest.mark.parametrize(
    ("model", "gpus", "options"),
    [
        ("llama-3.1-405b", 2048, {"tp": 8, "pp": 16, "vpp": 4, "layers_per_stage": (1, *[2] * 62, 1)}),
        ("gpt3-175b", 64, {"tp": 8, "pp": 8, "recompute": "full", "recompute_num_layers": 4}),
        ("qwen3-30b-a3b", 64, {"tp": 2, "pp": 2, "ep": 8, "cp": 2, "recompute": "selective"}),
        ("deepseek-v3", 1024, {"pp": 16, "vpp": 2, "ep": 64, "layout": "Et*3|(tt|)*29m|L"}),
        ("llama-3.1-8b", 16, {"zero_stage": 3}),
        ("llama-3.1-8b", 16, {"tp": 2, "dtype": "fp8"}),
        ("gpt-oss-20b", 16, {"ep": 8, "pp": 2}),
        ("llama-3.1-8b", 64, {"tp": 2, "fsdp": 8}),
        ("llama-3.1-8b", 16, {"features": {"flash_attention": False}}),
    ],
)
def test_our_own_exports_come_back(planned: Planned, form: str, model: str, gpus: int, options: dict[str, Any]) -> None:
    """Export, import, price again: the same layout, parameters and seconds."""
    features = {"ep_overlap": options.get("vpp", 1) > 1, **options.get("features", {})}
    plan = planned(model, gpus, **{**options, "features": features})
    text = next(file.text for file in export(plan, ["megatron"]).files if file.name == form)
    imported = read_configuration(text)
    assert imported.unknown == {}
    run = parse_run({"run": imported.complete(hardware="h100", num_gpus=gpus)})
    again = evaluate(run.model, run.cluster, run.training, run.parallelism, runtime=run.runtime)
    assert [stage.chunks for stage in again.stages] == [stage.chunks for stage in plan.stages]
    assert [stage.num_parameters for stage in again.stages] == [stage.num_parameters for stage in plan.stages]
    assert again.step.step_s == pytest.approx(plan.step.step_s, rel=1e-9)
    for axis in (
        "tp",
        "cp",
        "ep",
        "pp",
        "vpp",
        "dp",
        "micro_batch_size",
        "num_microbatches",
        "zero_stage",
        "shard_size",
    ):
        assert getattr(again.parallelism, axis) == getattr(plan.parallelism, axis), axis


def test_our_own_recipe_comes_back(planned: Planned) -> None:
    counts = (1, 5, 4, 4, 4, 5, 5, 4)
    plan = planned("llama-3.1-8b", 64, runtime="torchtitan", tp=2, pp=4, vpp=2, layers_per_stage=counts)
    imported = read_configuration(export(plan, ["torchtitan"]).files[0].text)
    layout = layout_of(imported)
    assert imported.unknown == {}
    assert layout["layers_per_stage"] == list(counts)
    assert (layout["tp"], layout["pp"], layout["vpp"], layout["dp"]) == (2, 4, 2, 8)
    assert imported.run["global_batch_size"] == plan.training.global_batch_size
    assert imported.run["num_gpus"] == 64
    run = parse_run({"run": imported.complete(hardware="h100", model="llama-3.1-8b")})
    again = evaluate(run.model, run.cluster, run.training, run.parallelism, runtime=run.runtime)
    assert again.step.step_s == pytest.approx(plan.step.step_s, rel=1e-9)


@pytest.mark.parametrize(("zero_stage", "expected"), [(0, 0), (2, 2), (3, 3)])
def test_sharding_of_our_own_recipes_comes_back(planned: Planned, zero_stage: int, expected: int) -> None:
    plan = planned("llama-3.1-8b", 64, runtime="torchtitan", zero_stage=zero_stage)
    assert layout_of(read_configuration(export(plan, ["torchtitan"]).files[0].text))["zero_stage"] == expected


def test_what_a_recipe_compiles(planned: Planned) -> None:
    features = {}
    for schedule in ("1f1b", "zb-h1"):
        plan = planned("llama-3.1-8b", 64, runtime="torchtitan", pp=4, num_microbatches=8, schedule=schedule)
        features[schedule] = read_configuration(export(plan, ["torchtitan"]).files[0].text).run["features"]
    today = {"async_tp": False, "cross_entropy_fusion": True, "flex_attention": True}
    assert features["1f1b"] == {"compile": True, **today}
    assert features["zb-h1"] == {"compile": False, **today}


def test_layers_recomputed_by_name_are_noted(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 64, runtime="torchtitan", pp=4, recompute="full", recompute_num_layers=3)
    imported = read_configuration(export(plan, ["torchtitan"]).files[0].text)
    assert any("some layers by name" in note for note in imported.notes)


TOML = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 8
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 16
tensor_parallel_degree = 8
surprising_degree = 3
[activation_checkpoint]
mode = "full"
"""


def test_torchtitan_toml() -> None:
    imported = read_configuration(TOML)
    assert imported.source == "torchtitan"
    assert imported.run["model"] == "llama-3.1-70b"
    assert imported.run["num_gpus"] == 256
    assert imported.run["global_batch_size"] == 8 * 32
    assert layout_of(imported)["fsdp"] == 16
    assert layout_of(imported)["recompute"] == "full"
    assert imported.unknown == {"parallelism.surprising_degree": "3"}
    assert "job.dump_folder" in imported.ignored


def test_torchtitan_overrides() -> None:
    imported = read_configuration(
        "NGPU=64 torchrun -m torchtitan.train --module llama3 --config llama3_405b "
        "--parallelism.pipeline_parallel_degree 8 --parallelism.tensor-parallel-degree=8 "
        "--parallelism.pipeline_parallel_schedule ZBVZeroBubble --parallelism.no-enable_sequence_parallel "
        "--training.max_context_length 4096 --training.num_tokens_per_microbatch_per_dp_rank 8192 "
        "--training.num_tokens_per_train_step 1048576 --compile.enable"
    )
    layout = layout_of(imported)
    assert imported.run["model"] == "llama-3.1-405b"
    assert imported.run["num_gpus"] == 64
    assert (layout["pp"], layout["tp"], layout["vpp"], layout["schedule"]) == (8, 8, 2, "zb-v")
    assert layout["sequence_parallel"] is False
    assert (layout["micro_batch_size"], imported.run["global_batch_size"]) == (2, 256)


def test_a_recipe_with_values_that_only_a_run_knows() -> None:
    imported = read_configuration(
        "from torchtitan.config import ParallelismConfig\n"
        "from torchtitan.models.llama3 import model_registry\n"
        "config.model_spec = model_registry('8B')\n"
        "config.parallelism = ParallelismConfig(tensor_parallel_degree=2 * 2, expert_parallel_degree=pick())\n"
        "config.training.seq_len = 8192\n"
    )
    assert layout_of(imported)["tp"] == 4
    assert imported.run["model"] == "llama-3.1-8b"
    assert imported.run["seq_length"] == 8192
    assert imported.unknown == {"parallelism.expert_parallel_degree": "pick()"}


def test_deepspeed() -> None:
    config = {
        "train_batch_size": 512,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "zero_hpz_partition_size": 8},
        "optimizer": {"type": "AdamW"},
        "curriculum_learning": {"enabled": True},
    }
    imported = read_configuration(json.dumps(config))
    assert imported.source == "deepspeed"
    assert layout_of(imported)["dp"] == 64
    assert layout_of(imported)["fsdp"] == 8
    assert imported.run["dtype"] == "fp16"
    assert set(imported.unknown) == {"zero_optimization.offload_param", "curriculum_learning"}
    with pytest.raises(SpecError, match="model is not in the configuration"):
        imported.complete()


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "run.sh").write_text(SCRIPT)
    return str(tmp_path / "run.sh")


def test_the_command_prices_and_compares(script: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = str(tmp_path / "run.jsonl")
    assert main(["import", script, "--json", "-o", saved]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["unknown"] == {"--brand-new-switch": "7"}
    assert "warning: not understood: --brand-new-switch 7" in captured.err
    assert answer["evaluated"]["model"]["name"] == "llama-3.1-70b", "known by its sizes"
    assert [stage["num_layers"] for stage in answer["evaluated"]["best"]["stages"]] == [19, 20, 20, 21]
    assert answer["own"]["step"]["step_s"] <= answer["evaluated"]["best"]["step"]["step_s"]
    assert answer["why"]
    assert main(["evaluate", "--runs", saved, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["step"]["step_s"] == answer["evaluated"]["best"]["step"]["step_s"]


def test_the_command_for_eyes(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", script, "--no-search"]) == 0
    out = capsys.readouterr().out
    assert "TP 4 × PP 4 × DP 8" in out
    assert "Not understood" in out
    assert "--brand-new-switch 7" in out


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary").write_bytes(b"\0\1")
    assert main(["import", str(tmp_path / "binary")]) == 2
    assert main(["import", str(tmp_path / "missing")]) == 2
    err = capsys.readouterr().err
    assert "is no configuration" in err
    assert "No such file" in err
