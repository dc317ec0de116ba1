"""Mutants of configurations that once ended in something else than an error: each is an error, or is read, now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planner.errors import SpecError
from planner.export.import_run import read, read_configuration

CORPUS = Path(__file__).parents[1] / "fuzzing" / "corpus"
TOML = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\n{}\n[parallelism]\npipeline_parallel_degree = 2\n'
RECIPE = """
from megatron.bridge.training.config import ConfigContainer
{}
def recipe() -> ConfigContainer:
    return ConfigContainer(model=LlamaProvider(tensor_model_parallel_size=4), train=TrainingConfig(micro_batch_size=1))
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"overrides": {"": 7}, "recipe": "run_recipe.py"}', "overrides: holds a mapping, not a list"),
        ('{"overrides": [], "recipe": 7}', "overrides no field"),
        (TOML.format("local_batch_size = inf"), "training.local_batch_size: inf is no whole number"),
        (TOML.format('seq_len = "long"'), "training.seq_len: 'long' is no whole number"),
        (TOML.format("seq_len = 0"), "training.seq_len: 0 is below 1"),
        (f"--num-layers 2 --hidden-size 8 --num-attention-heads {'x' * 999}", "--num-attention-heads: 'xxx"),
    ],
)
def test_values_that_are_no_counts(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_configuration(text)
    assert message in caught.value.message
    assert len(caught.value.lines()) < 400
    assert caught.value.hint


@pytest.mark.parametrize("digits", ["²", "٣", "9" * 5000])
def test_digits_that_are_no_number_for_python_count_nothing(digits: str) -> None:
    sizes = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 64 --micro-batch-size 1"
    script = f"NGPU={digits}\nWORLD_SIZE={digits}\npretrain_gpt.py {sizes} --nnodes {digits}"
    assert read_configuration(script).run["num_gpus"] is None


@pytest.mark.parametrize("targets", ["7", "true", "{a: 1}", "[q_proj, 7]"])
def test_targets_of_adapters_that_are_no_names(targets: str) -> None:
    text = f"base_model: meta-llama/Llama-3.1-8B\nadapter: lora\nmicro_batch_size: 1\nlora_target_modules: {targets}\n"
    imported = read_configuration(text + f"target_parameters: {targets}\n")
    assert imported.run["adapters"]["targets"] == (["q_proj"] if "q_proj" in targets else ["all-linear"])
    assert imported.unknown["target_modules"]


def test_a_rank_without_end_is_no_rank() -> None:
    with pytest.raises(SpecError, match=r"r: inf is no number"):
        read_configuration("base_model: x\nadapter: lora\nmicro_batch_size: 1\nlora_r: .inf\n")


def test_a_model_without_a_vocabulary_is_asked_for_one() -> None:
    lines = (CORPUS / "torch" / "plan.torch.yaml").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith(("#", "  vocab_size:")))
    with pytest.raises(SpecError, match="vocab_size is not in the configuration"):
        read_configuration(text).complete(hardware="h100")


def test_a_micro_batch_of_none_is_no_division() -> None:
    text = TOML.format("local_batch_size = 8") + "pipeline_parallel_microbatch_size = 0\n"
    with pytest.raises(SpecError, match="micro-batch: 0 is below 1"):
        read_configuration(text)


@pytest.mark.parametrize("statement", ["raise ValueError", "break", "return 1"])
def test_a_recipe_is_read_to_where_its_file_ends_itself(statement: str) -> None:
    """What stands behind it is no part of the file that a run would see."""
    with pytest.raises(SpecError, match="no function of the file returns a recipe"):
        read_configuration(RECIPE.format(statement))
    assert read_configuration(RECIPE.format("")).run["parallelism"]["tp"] == 4


def test_an_import_from_above_all_folders_is_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE.format(f"from {'.' * 30} import common"))
    assert read(tmp_path / "recipe.py").run["parallelism"]["tp"] == 4


def test_stages_on_ranks_below_0_are_refused() -> None:
    text = (CORPUS / "torch" / "plan.torch.yaml").read_text()
    negative = re.sub(r"stage_to_rank:.*?\n(?=\w)", "stage_to_rank: [-1, -3]\n", text, flags=re.DOTALL)
    assert negative != text
    with pytest.raises(SpecError, match="names no rank"):
        read_configuration(negative)
