"""What trainers refuse by their own checks is told, and what an export cannot express is refused, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.import_run import read_configuration
from planner.export.keyed_settings import table as dialects
from planner.export.megatron.option_rows import broken_rows, options_of, table
from planner.export.megatron.script_reading import named_refusals, refusals
from planner.export.refusal import Inexpressible
from planner.export.targets import TRAINERS

PLANS = [
    (target, *row)
    for target, rows in yaml.safe_load(Path(__file__).with_name("refused_plans.yaml").read_text()).items()
    for row in rows
]
SCRIPTS = Path(__file__).parents[2] / "scripts"
_MODEL = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16"
CASES: dict[str, str] = {
    "layers_per_stage": "--num-layers 46 --pipeline-model-parallel-size 4",
    "layers_per_virtual_stage": f"{_MODEL} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 4",
    "layers_of_virtual_stage": f"{_MODEL} --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4",
    "empty_end": f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 0",
    "middle_layers": f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 4",
    "virtual_stages_of_ends": f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3 "
    "--num-virtual-stages-per-pipeline-rank 2",
    "virtual_stages_of_middle": f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6 "
    "--decoder-last-pipeline-num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
    "positions_below_sequence": "--max-position-embeddings 2048 --seq-length 4096",
    "group_sizes": f"{_MODEL} --group-query-attention --num-query-groups 3",
    "heads_without_channels": "--hidden-size 2048 --num-attention-heads 24",
}  # fmt: skip


LOST = {
    "ends_without_pipeline": "--num-layers 20 --decoder-first-pipeline-num-layers 1",
    "no_middle": f"{_MODEL} --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 "
    "--decoder-last-pipeline-num-layers 3",
}
"""Options that build fewer layers than the model has."""


def broken(text: str) -> set[str]:
    around = {"CUDA_DEVICE_MAX_CONNECTIONS": ["1"]}
    return {name for name, _ in named_refusals({**options_of(text.split()), **around})}


OPTIONS = {
    name if name[0] == "-" else "--" + name.rpartition(".")[2].replace("_", "-")
    for name in json.loads((SCRIPTS / "known_trainers.json").read_text())["megatron"]["options"]
} | {"--fp8-format", "--fp4-format", "--disable-bias-linear", "--recompute-layer-ids", "CUDA_DEVICE_MAX_CONNECTIONS"}
"""Options of the trainer's own source; three are fields by another name, and one is Primus'."""
TABLES = {name: row["refused"] for name, row in dialects().items() if "refused" in row}
ROWS = [(name, rows[name]) for rows in (table()["refused"], *TABLES.values()) for name in rows]


@pytest.mark.parametrize("name", CASES)
def test_sizes_that_do_not_divide_are_told(name: str) -> None:
    assert name in broken(CASES[name])


def met(*clauses: str) -> dict[str, list[str]]:
    """Options that clauses hold of."""
    options: dict[str, list[str]] = {}
    for clause in clauses:
        name, *said = clause.replace("> 1", "2").replace("> 0", "1").split()
        options.setdefault(name, []).extend(word.split("|")[0] for word in said)
    return options


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_a_condition_is_told_by_its_row(name: str, row: dict[str, list[str]]) -> None:
    for given in row["given"]:
        clauses = (*row.get("beside", ()), given)
        assert (name in dict(broken_rows({name: row}, met(*clauses)))) is ("needs" in row)
        for other in row.get("excludes", ()):
            assert name in dict(broken_rows({name: row}, met(other, *clauses)))
        for other in row.get("needs", ()):
            assert name not in dict(broken_rows({name: row}, met(other, *clauses)))


def test_rows_name_options_that_megatron_has() -> None:
    clauses = [
        clause
        for row in table()["refused"].values()
        for part in row.values()
        if not isinstance(part, str)
        for clause in part
    ]
    names = {clause.split()[0] for clause in clauses}
    assert {name for name in names if name not in OPTIONS and name.replace("--no-", "--") not in OPTIONS} == set()


@pytest.mark.parametrize(
    "text",
    [
        f"{_MODEL} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3 --bf16",
        f"{_MODEL} --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 5 "
        "--decoder-last-pipeline-num-layers 5",
        f"{_MODEL} --recompute-granularity full --recompute-method block --recompute-num-layers 2",
        "--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer --fp8-format hybrid --bf16",
    ],
)
def test_what_starts_is_not_refused(text: str) -> None:
    assert broken(text) == set()


@pytest.mark.parametrize("name", LOST)
def test_fewer_layers_than_the_model_has_are_no_price(name: str) -> None:
    with pytest.raises(SpecError, match=r"builds 1 of 20 layers|18 layers are left for 0 middle stages"):
        refusals(options_of(LOST[name].split()))


def test_a_model_of_the_users_is_held_against_the_stages() -> None:
    text = "megatron sft --load X --pipeline_model_parallel_size 4 --max_length 4096"
    imported = read_configuration(text)
    imported.complete(hardware="h100", num_gpus=64, model="glm-4.5-air")
    assert imported.refused == ["46 layers are no multiple of the 4 pipeline stages"]


def test_what_the_parser_alone_refuses_is_none_of_bridges() -> None:
    options = options_of(["--tp-comm-overlap", "--tensor-model-parallel-size", "1"])
    assert [*named_refusals(options, parsers=())] == []
    assert [name for name, _ in named_refusals(options)] == ["overlap_without_sequence_parallel"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("base_model: meta-llama/Llama-3.1-8B\nsequence_len: 4096\nadapter: qlora\n", "load_in_4bit"),
        ("base_model: meta-llama/Llama-3.1-8B\nsequence_len: 4096\nload_in_8bit: true\n", "needs adapter"),
        ("model_name_or_path: Qwen/Qwen3-8B\nfinetuning_type: full\ncutoff_len: 8\nquantization_bit: 4\n", "lora|oft"),
        ("swift sft --model Qwen/Qwen3-8B --tuner_type lora --packing true --max_length 4096", "attn_impl flash_attn"),
        ('{"bf16": {"enabled": true}, "fp16": {"enabled": true}, "train_micro_batch_size_per_gpu": 1}', "fp16.enabled"),
        ('{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}}', "multiple of 4"),
        ("distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 1\nparallelism_config:\n"
         "  parallelism_config_tp_size: 2\n", "fsdp_version 2"),
        ("python -m verl.trainer.main_ppo data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=256 "
         "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.model.path=Qwen/Qwen3-8B", "below"),
        ("model.seq_length=8192 dataset.seq_length=4096 model.tensor_model_parallel_size=2", "equal"),
    ],
)  # fmt: skip
def test_files_of_other_trainers_are_held_against_their_tables(text: str, says: str) -> None:
    source = "bridge" if text.startswith("model.") else None
    assert any(says in reason for reason in read_configuration(text, source).refused)


@pytest.mark.parametrize(("target", "options", "reasons"), PLANS)
def test_a_plan_that_a_target_cannot_express_is_refused_by_name(
    planned: Callable[..., Plan], target: str, options: dict[str, Any], reasons: list[str]
) -> None:
    with pytest.raises(Inexpressible) as caught:
        TRAINERS[target].write(planned(**options))
    assert caught.value.exit_code == 2
    assert set(reasons) <= {reason.name for reason in caught.value.reasons}
