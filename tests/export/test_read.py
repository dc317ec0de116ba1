"""`read` reads files as its docstring shows, and refuses what is no trainer's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from samples import BASE, SCRIPT, example_of

from planner.errors import SpecError
from planner.export.import_run import read, read_configuration
from planner.layout.runs import parse_run


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
        (f"p.py {BASE} --num-experts 4 --moe-layer-freq '([1]*31+many)'", "is no list of layers"),
        ("from torchtitan.config import ParallelismConfig\nParallelismConfig(", "not Python: line"),
        ("[parallelism]\ntensor = = 8", "not TOML"),
        ('{"zero_optimization": ', "not JSON"),
        ('{"overrides": ["a"], ' + '{"a":' * 50_000, "not JSON"),
        ("model:\n  a: " + "[" * 5_000 + "\ntrain:\n  global_batch_size: 8\n", "not YAML"),
        ("trainer:\n  devices: " + "[" * 5_000 + "\nmodel:\n  a: 1\n", "not YAML"),
        ('{"zero_optimization": {}, "train_batch_size": "many"}', "'many' is no positive number"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("(", r"\(").replace("[", r"\[").replace("+", r"\+")):
        read_configuration(text)


def test_a_broken_file_beside_the_configuration_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text('{"min_num_params": ')
    launch = tmp_path / "run.sh"
    launch.write_text("torchrun run_clm.py --per_device_train_batch_size 1 --fsdp full_shard --fsdp_config fsdp.json")
    with pytest.raises(SpecError, match="not JSON"):
        read(launch)


def test_a_recipe_of_a_file_without_functions_is_an_error() -> None:
    with pytest.raises(SpecError, match="--recipe: 'llama3_405b': the file has no functions"):
        read_configuration(SCRIPT, recipe="llama3_405b")


def test_the_example_of_the_docstring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pretrain.sh").write_text(SCRIPT)
    names: dict[str, Any] = {}
    exec(example_of(read), names)
    assert capsys.readouterr().out.startswith("megatron {'tp': 4,")
    run = parse_run({"run": names["run"]})
    assert (run.model.name, run.cluster.num_gpus, run.parallelism.tp) == ("llama-3.1-70b", 64, 4)


def test_the_trainer_may_be_named() -> None:
    script = "torchrun -m torchtitan.train --parallelism.tensor_parallel_degree 2"
    assert read_configuration(script).source == "torchtitan"
    assert read_configuration(script, "torchtitan").source == "torchtitan"
    with pytest.raises(SpecError, match="passes no Megatron-LM arguments"):
        read_configuration(script, "megatron")
    with pytest.raises(SpecError, match="'pax' is unknown") as caught:
        read_configuration(script, "pax")
    assert (
        caught.value.hint
        == "one of megatron, primus, bridge, nemo, torchtitan, torch, hf, torchtune, accelerate, huggingface, deepspeed"
    )


def test_added_fields_replace_those_that_were_read() -> None:
    imported = read_configuration('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}')
    given = {"model": "llama-2-13b", "hardware": "h100", "seq_length": 4096}
    assert imported.complete(num_gpus=32, tp=2, **given)["parallelism"]["tp"] == 2
    assert "dp" not in imported.complete(num_gpus=32, **given)["parallelism"], "16 in the file, found again for 32 GPUs"
    assert imported.run["parallelism"]["dp"] == 16
