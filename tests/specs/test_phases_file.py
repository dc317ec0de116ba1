"""Files of phases: what they may say, and what is wrong with those that say something else.

Layouts as they are written down, and what sequences split into.
"""

from __future__ import annotations

import math
import re
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from planner.errors import SpecError
from planner.specs.phases import LogNormal, of_percentiles, read_phases
from planner.specs.problems import checked
from planner.specs.training import DocumentLength, Parallelism, TrainingSpec, tokens_split

TABLES = yaml.safe_load((Path(__file__).parent / "wrong_phases.yaml").read_text())

RECIPES = Path(__file__).parents[2] / "docs" / "phases"


@pytest.mark.parametrize(("text", "says", "hint"), TABLES["wrong"])
def test_what_is_wrong_is_said(tmp_path: Path, text: str, says: str, hint: str) -> None:
    path = tmp_path / "phases.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_phases(str(path))
    assert str(path) in caught.value.message
    assert says in caught.value.message
    assert ("more problem" in caught.value.message) == ("form:" in text)
    assert hint in caught.value.hint


def test_published_recipes_have_the_published_tokens() -> None:
    llama = read_phases(str(RECIPES / "llama-3-405b.yaml")).phases
    assert sum(phase.tokens or 0 for phase in llama) == pytest.approx(15.6e12, rel=1e-3)
    assert sum(phase.tokens or 0 for phase in llama if phase.name.startswith("long")) == pytest.approx(800e9, rel=1e-3)
    assert [phase.batch_tokens for phase in llama[:3]] == ["4M", "8M", "16M"]
    pre, middle, last = read_phases(str(RECIPES / "deepseek-v3.yaml")).phases
    assert (pre.tokens, pre.global_batch_size) == (14_800_000_000_000, 15360)
    assert pre.rampup is not None
    assert (pre.rampup.start, pre.rampup.tokens, list(pre.rampup.batches(15360))[-1]) == (3072, 469_000_000_000, 13824)
    assert [(phase.steps, phase.seq_length, phase.global_batch_size) for phase in (middle, last)] == [
        (1000, 32768, 1920), (1000, 131072, 480),
    ]  # fmt: skip


def moments(lengths: tuple[DocumentLength, ...]) -> tuple[float, float]:
    """Mean of the lengths, and mean of their squares."""
    shares = sum(entry.share for entry in lengths)
    return (
        sum(entry.share * entry.length for entry in lengths) / shares,
        sum(entry.share * entry.length**2 for entry in lengths) / shares,
    )


@given(st.floats(50, 20_000), st.floats(0.1, 1.5))
def test_a_lognormal_has_its_mean_and_its_longest_documents(mean: float, sigma: float) -> None:
    first, second = moments(LogNormal(mean=mean, sigma=sigma).lengths())
    assert first == pytest.approx(mean, rel=0.01)
    assert second == pytest.approx(mean**2 * math.exp(sigma**2), rel=0.03)


def test_percentiles_are_met() -> None:
    lengths = sorted(of_percentiles({10: 200, 50: 700, 90: 3000, 99: 20_000}), key=lambda entry: entry.length)
    for percent, length in ((10, 200), (50, 700), (90, 3000), (99, 20_000)):
        below = sum(entry.share for entry in lengths if entry.length < length)
        upto = sum(entry.share for entry in lengths if entry.length <= length)
        assert below <= percent / 100 + 0.006
        assert upto >= percent / 100 - 0.006
    assert (lengths[0].length, lengths[-1].length) == (200, 20_000)


def test_the_file_that_the_document_shows_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (RECIPES.parent / "PHASES.md").read_text(), re.DOTALL)
    path = tmp_path / "phases.yaml"
    path.write_text(text)
    (phase,) = read_phases(str(path)).phases
    unset = {"steps", "batch_tokens"}
    assert {name for name in type(phase).model_fields if getattr(phase, name) is None} == unset


def test_two_chunks_for_each_rank_of_cp_of_whole_shards_for_tp() -> None:
    cps, shards = (axis.ravel() for axis in np.meshgrid([1, 2, 3, 8], [1, 2, 3, 4, 7]))
    expected = [cp * lcm(2, tp) if cp > 1 else tp for cp, tp in zip(cps.tolist(), shards.tolist(), strict=True)]
    assert tokens_split(cps, shards).tolist() == expected
    assert [tokens_split(cp, tp) for cp, tp in zip(cps.tolist(), shards.tolist(), strict=True)] == expected


@pytest.mark.parametrize(("stated", "kept", "ranks"), TABLES["fully_sharded_or_not"])
def test_fully_sharded_or_not(stated: Any, kept: Any, ranks: int | None) -> None:
    layout = Parallelism.model_validate({"fsdp": stated})
    assert (layout.fsdp, layout.fsdp_shard_size) == (kept, ranks)


@pytest.mark.parametrize("stated", [0, "0", -4])
def test_no_ranks_to_shard_over(stated: Any) -> None:
    with pytest.raises(ValidationError, match="give at least 1"):
        Parallelism.model_validate({"fsdp": stated})


@pytest.mark.parametrize("stated", ["bogus", "3.5", "ZeRO-1", "nothing at all"])
def test_words_that_say_no_group_are_refused(stated: str) -> None:
    with pytest.raises(SpecError) as caught:
        checked(Parallelism, {"fsdp": stated})
    assert f"fsdp: {stated!r} is text" in caught.value.message
    for hint in ("8", "all", "none"):
        Parallelism.model_validate({"fsdp": hint})
    assert caught.value.hint == "give a number of ranks, all or none"


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        ({"recompute_num_layers": 2}, "recompute_num_layers 2 goes with recompute full, not none"),
        ({"recompute": "selective", "recompute_num_layers": 2}, "full, not selective"),
        ({"recompute": "full", "recompute_modules": ("mlp", "moe")}, "mlp,moe go with recompute selective, not full"),
    ],
)
def test_ways_to_recompute_that_exclude_each_other_are_refused(stated: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        checked(Parallelism, stated)


def test_a_histogram_of_imbalances_has_a_mean_and_a_tail() -> None:
    training = TrainingSpec(seq_length=1, global_batch_size=1, moe_imbalance="2.5:1,1.2:8,1:1")  # type: ignore[arg-type]
    assert training.moe_imbalance == pytest.approx(1.31)
    assert training.moe_peak_imbalance == 2.5
    with pytest.raises(ValueError, match="histogram"):
        TrainingSpec(seq_length=1, global_batch_size=1, moe_imbalance="1.2:x")  # type: ignore[arg-type]
