"""Each trainer says what its checkpoints can be loaded as, and where that was read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from planner.errors import SpecError
from planner.trainers.load import RUNTIMES, UNKNOWN, checkpoint_of, load_runtime
from planner.trainers.spec import RuntimeSpec

TABLES = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())

TRAINER = "source: mine\nbase: shared/nccl\n"


@pytest.mark.parametrize("name", RUNTIMES)
def test_every_trainer_has_a_row_for_each_of_its_zero_stages(name: str) -> None:
    runtime = load_runtime(name)
    for stage in runtime.zero_stages:
        row = checkpoint_of(runtime, stage)
        assert row is not UNKNOWN
        assert stage in row.zero_stages
        assert row.rewritten is None or set(row.rewritten.keeps) <= set(row.keeps)


@pytest.mark.parametrize(("name", "zero_stage", "keeps", "by"), TABLES["checkpoints"])
def test_what_must_stay(name: str, zero_stage: int, keeps: list[str], by: str | None) -> None:
    row = checkpoint_of(load_runtime(name), zero_stage)
    assert set(row.keeps) == set(keeps)
    assert (row.rewritten and row.rewritten.by) == by


def test_universal_checkpoints_of_zero_3_free_data_parallelism_alone() -> None:
    row = checkpoint_of(load_runtime("deepspeed"), 3)
    assert row.rewritten is not None
    assert set(row.rewritten.keeps) == {"tp", "ep", "pp", "layers"}


def test_a_trainer_of_ones_own_is_that_of_its_name_or_unknown() -> None:
    mine = RuntimeSpec(name="mine", trainer="megatron")
    assert checkpoint_of(mine, 1) == checkpoint_of(load_runtime("megatron"), 1)
    stranger = checkpoint_of(RuntimeSpec(name="stranger"), 1)
    assert stranger is UNKNOWN
    assert "dp" not in stranger.keeps


def test_a_row_is_no_input_of_prices() -> None:
    assert not {"checkpoint", "checkpoints", "keeps"} & set(RuntimeSpec.model_fields)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("checkpoint: DCP\n", "checkpoint: 'DCP' is no list"),
        ("checkpoint: [{format: DCP, keeps: [tp]}]\n", "checkpoint[0]: source"),
        ("checkpoint: [{format: DCP, keeps: [rows], source: read}]\n", "checkpoint[0]: keeps[0]"),
    ],
)
def test_a_wrong_row_is_named(row: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TRAINER + row)
    with pytest.raises(SpecError) as caught:
        load_runtime(path)
    assert said in caught.value.message
