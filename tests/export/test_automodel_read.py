"""Recipes of NeMo AutoModel and NeMo RL, and commands of OpenRLHF, as the runs that they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import SpecError
from planner.export.import_run import read, read_configuration

SAMPLES = yaml.safe_load(Path(__file__).with_name("law_samples.yaml").read_text())
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "pipeline of a mixture": ("automodel", "  cp_size: 2>  cp_size: 1\n  pp_size: 4", {"pp": 4, "zero_stage": 1}),
    "sharded layer by layer": ("automodel", "", {"ep": 8, "cp": 2, "zero_stage": 3, "recompute": "full"}),
    "under Megatron core": ("nemo-rl", "", {"tp": 4, "pp": 2, "recompute": "full", "micro_batch_size": 2}),
    "no recomputation": ("nemo-rl", "activation_checkpointing: true>activation_checkpointing: false", {"tp": 4}),
    "under AutoModel": ("nemo-rl-dtensor", "", {"tp": 2, "zero_stage": 3, "micro_batch_size": 2}),
    "DeepSpeed": ("openrlhf", "", {"zero_stage": 3, "micro_batch_size": 2, "recompute": "full"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layout_is_read(name: str) -> None:
    sample, edit, layout = CASES[name]
    old, _, new = edit.partition(">")
    found = read_configuration(SAMPLES[sample]["text"].replace(old, new) if edit else SAMPLES[sample]["text"])
    assert found.run["parallelism"].items() >= layout.items()
    assert ("recompute" in found.run["parallelism"]) is (name != "no recomputation")


def test_weights_stay_gathered_where_a_step_has_several_microbatches() -> None:
    text = SAMPLES["automodel"]["text"].replace("torch_dtype: bfloat16", "backend: {enable_fsdp_optimizations: true}")
    stages = {}
    for gpus in (16, 64):
        stages[gpus] = read_configuration(text).complete(hardware="h100", num_gpus=gpus)["parallelism"]["zero_stage"]
    assert stages == {16: 1, 64: 3}


def test_overrides_stand_over_the_files_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(SAMPLES["nemo-rl"]["text"])
    (tmp_path / "sft.yaml").write_text("defaults: base.yaml\npolicy:\n  train_micro_batch_size: 1\n")
    script = tmp_path / "run.sh"
    script.write_text("uv run run_sft.py --config=sft.yaml ++policy.megatron_cfg.tensor_model_parallel_size=8\n")
    run = read(script).run
    assert (run["parallelism"]["tp"], run["parallelism"]["pp"], run["parallelism"]["micro_batch_size"]) == (8, 2, 1)
    assert (run["num_gpus"], run["global_batch_size"], run["seq_length"]) == (32, 128, 4096)


def test_what_has_no_default_is_asked_for() -> None:
    text = SAMPLES["automodel"]["text"].replace("  local_batch_size: 2\n", "")
    with pytest.raises(SpecError, match="local_batch_size is not in the file"):
        read_configuration(text)


def test_a_trainer_without_a_reader_is_named() -> None:
    with pytest.raises(SpecError, match="MaxText, which is not read"):
        read_configuration("python3 -m MaxText.train MaxText/configs/base.yml per_device_batch_size=4")
