"""Recipes in Python, of Megatron-Bridge, NeMo and torchtitan, are followed and never run."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import TEXTS, layout_of

from planner.errors import SpecError
from planner.export.import_run import read, read_configuration

COMMON = TEXTS["bridge common"]
BRIDGE = TEXTS["bridge recipes"]


def test_a_recipe_of_bridge(tmp_path: Path) -> None:
    (tmp_path / "common.py").write_text(COMMON)
    (tmp_path / "llama3.py").write_text(BRIDGE + "\n# megatron.bridge\n")
    with pytest.raises(SpecError, match="the file holds 2 recipes") as caught:
        read(tmp_path / "llama3.py")
    assert "llama3_70b_pretrain_64gpu_h100_fp8_config, llama3_70b_sft_config" in str(caught.value.hint)
    imported = read(tmp_path / "llama3.py", recipe="llama3_70b_pretrain_64gpu_h100_fp8_config")
    run, layout = imported.run, layout_of(imported)
    assert (imported.source, run["runtime"], run["model"], run["num_gpus"]) == ("bridge", "bridge", "llama-3.1-70b", 64)
    assert (layout["tp"], layout["pp"], layout["vpp"], layout["sequence_parallel"]) == (4, 4, 5, True)
    assert (layout["recompute"], layout["recompute_modules"], layout["zero_stage"]) == ("selective", ["mlp"], 1)
    assert (run["seq_length"], run["global_batch_size"], run["dtype"]) == (8192, 256, "fp8")
    assert (run["precision_recipe"], run["hardware"]) == ("fp8-tensorwise", "h100")
    assert imported.unknown == {"model.cpu_offloading": "True"}
    other = read(tmp_path / "llama3.py", recipe="llama3_70b_sft_config")
    assert (layout_of(other)["tp"], other.run["dtype"]) == (1, "bf16"), "nothing of the other recipe"
    with pytest.raises(SpecError, match="has no function 'llama3_7b_sft_config'"):
        read(tmp_path / "llama3.py", recipe="llama3_7b_sft_config")


TITAN = TEXTS["torchtitan registry"]


def test_a_registry_of_torchtitan() -> None:
    with pytest.raises(SpecError, match="holds 2 recipes"):
        read_configuration(TITAN)
    imported = read_configuration(TITAN, recipe="llama3_405b")
    run, layout = imported.run, layout_of(imported)
    assert (run["model"], run["dtype"], run["precision_recipe"]) == ("llama-3.1-405b", "fp8", "fp8-rowwise")
    assert (layout["recompute"], layout["tp"], layout["pp"], layout["micro_batch_size"]) == ("full", 8, 4, 2)
    assert layout["layers_per_stage"] == [31, 32, 32, 31], "embedding and head count as a layer each"
    assert layout_of(read_configuration(TITAN, recipe="base"))["pp"] == 1


def test_an_older_toml() -> None:
    imported = read_configuration(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nbatch_size = 2\nseq_len = 8192\n'
        "tensor_parallel_degree = 2\ndata_parallel_degree = 4\n[experimental]\npipeline_parallel_degree = 2\n"
        '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "2"\n'
        "[float8]\nenable_float8_linear = true\n"
    )
    layout = layout_of(imported)
    assert (layout["tp"], layout["pp"], layout["dp"], imported.run["num_gpus"]) == (2, 2, 4, 16)
    assert (imported.run["dtype"], layout["recompute"], layout["recompute_layers"][:2]) == ("fp8", "full", [1, 3])


NEMO = TEXTS["nemo recipe"]


def test_a_recipe_of_nemo() -> None:
    imported = read_configuration(NEMO)
    run, layout = imported.run, layout_of(imported)
    assert (imported.source, run["model"], run["num_gpus"]) == ("nemo", "llama-3.1-70b", 32)
    assert (layout["tp"], layout["cp"], layout["zero_stage"]) == (4, 2, 1)
    assert (run["seq_length"], run["global_batch_size"], run["dtype"]) == (8192, 512, "bf16")
    assert run["features"]["tp_comm_overlap"] is True
    assert read_configuration(NEMO, recipe="finetune_recipe").run["num_gpus"] == 8


def test_nemos_first_version() -> None:
    text = TEXTS["nemo first version"]
    imported = read_configuration(text)
    run, layout, model = imported.run, layout_of(imported), imported.run["model"]
    assert (run["num_gpus"], run["seq_length"], run["global_batch_size"], run["dtype"]) == (16, 4096, 128, "bf16")
    assert (layout["tp"], layout["micro_batch_size"], layout["recompute"], layout["zero_stage"]) == (4, 2, "full", 1)
    assert (model["intermediate_size"], model["gated_mlp"], model["norm"], model["bias"]) == (
        20480,
        True,
        "rmsnorm",
        False,
    )
    with pytest.raises(SpecError, match="this is t5"):
        read_configuration(text.replace("megatron_gpt", "megatron_t5"))


@pytest.mark.parametrize(
    "text",
    [
        "def f_config():\n    return f_config()\n# megatron.bridge\n",
        "x = [0] * 9**9**9\ndef f() -> 'ConfigContainer':\n    cfg = C()\n    while True: pass\n# megatron.bridge\n",
        "def f(:\n# megatron.bridge\n",
        "def f():\n    return [f'{i}' for i in range(10**9)]\n# megatron.bridge\n",
        "from . import x\nfrom .. import y\ndef f():\n    return x.y.z(**y)\n# megatron.bridge\n",
    ],
)
def test_recipes_that_lead_nowhere(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(text)
    with pytest.raises(SpecError):
        read(tmp_path / "recipe.py")
