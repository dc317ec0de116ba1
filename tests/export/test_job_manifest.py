"""Manifests of clusters as the scripts that they start, by small ones of each kind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from samples import BASE
from tables import beside

from planner.errors import SpecError
from planner.export.import_run import read, read_configuration

TABLES = beside(__file__)

MANIFESTS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("manifests.yaml").read_text())


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_the_script_that_it_starts(name: str) -> None:
    row = MANIFESTS[name]
    run = read_configuration(row["text"]).run
    layout = run["parallelism"]
    found = {"tp": layout.get("tp"), "zero_stage": layout.get("zero_stage"), **run}
    assert {key: found[key] for key in row["says"]} == row["says"]


@pytest.mark.parametrize(("name", "key"), TABLES["a_key_that_is_not_read_is_named"])
def test_a_key_that_is_not_read_is_named(name: str, key: str) -> None:
    """The whole manifest has none; one that is renamed is unknown, or what it gives is asked for."""
    assert not read_configuration(MANIFESTS[name]["text"]).unknown
    renamed = re.sub(rf"\b{re.escape(key)}:", f"{key}_x:", MANIFESTS[name]["text"])
    try:
        told = [*read_configuration(renamed).unknown]
    except SpecError as refused:
        told = [f"{key}_x"] if "--set" in (refused.hint or "") else []
    assert any(each.endswith(f"{key}_x") for each in told)


def test_a_part_of_a_manifest_that_is_one_word_is_named_whole() -> None:
    run = f"torchrun --nproc_per_node 8 pretrain_gpt.py {BASE}"
    assert read_configuration(f"resources: H100:8\nrun: |\n  {run}\n").unknown == {"resources": "H100:8"}


def test_a_launch_reads_the_files_and_programs_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "8B_lora.yaml").write_text(
        "model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj], lora_rank: 8}\n"
        "tokenizer: {max_seq_len: 2048}\nbatch_size: 2\n"
    )
    tune = tmp_path / "tune.sh"
    tune.write_text("tune run --nproc_per_node 4 lora_finetune_distributed --config 8B_lora.yaml model.lora_rank=64\n")
    run = read(tune).run
    assert (run["num_gpus"], run["adapters"]["rank"], run["parallelism"]["micro_batch_size"]) == (4, 64, 2)
    tune.write_text("tune run lora_finetune_single_device --config llama3/8B_lora\n")
    with pytest.raises(SpecError) as caught:
        read(tune)
    assert "tune cp llama3/8B_lora 8B_lora.yaml" in (caught.value.hint or "")
    (tmp_path / "sft.yaml").write_text("model_name_or_path: Qwen/Qwen3-8B\ncutoff_len: 2048\nfinetuning_type: lora\n")
    (tmp_path / "lf.sh").write_text("llamafactory-cli train sft.yaml cutoff_len=8192\n")
    assert read(tmp_path / "lf.sh").run["seq_length"] == 8192, "words of a launch come before its file"
    (tmp_path / "am.yaml").write_text(
        "step_scheduler: {global_batch_size: 64, local_batch_size: 8}\npacked_sequence: {packed_sequence_size: 4096}\n"
        "model: {pretrained_model_name_or_path: meta-llama/Llama-3.2-1B}\n"
    )
    (tmp_path / "am.sh").write_text("automodel finetune llm -c am.yaml --step_scheduler.local_batch_size 2\n")
    run = read(tmp_path / "am.sh").run
    assert (run["model"], run["parallelism"]["micro_batch_size"]) == ("llama-3.2-1b", 2)
    (tmp_path / "train.py").write_text("args = SFTConfig(per_device_train_batch_size=3, max_length=1024, bf16=True)")
    (tmp_path / "go.sh").write_text("accelerate launch --num_processes 2 train.py --model_id Qwen/Qwen3-8B\n")
    run = read(tmp_path / "go.sh").run
    assert (run["model"], run["seq_length"], run["parallelism"]["micro_batch_size"]) == ("qwen3-8b", 1024, 3)
