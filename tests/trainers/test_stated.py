"""Switches typed by someone: what is understood, and which line says what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import SpecError
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import TrainingSpec
from planner.trainers import load
from planner.trainers.load import RUNTIMES, load_runtime, switches_of
from planner.trainers.rules.recipe import Setting
from planner.trainers.stated import check_together, consents, stated_consents, stated_switches
from planner.trainers.switches import SWITCHES, written

TABLES = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())

MEGATRON, TITAN = load_runtime("megatron"), load_runtime("torchtitan")


@pytest.mark.parametrize("name", RUNTIMES)
def test_every_value_of_every_trainer_is_read_back(name: str) -> None:
    runtime = load_runtime(name)
    for switch, values in switches_of(runtime).items():
        for value in values:
            found = stated_switches(f"{switch}={written(value)}", runtime)
            assert found == {switch: value}
            assert type(found[switch]) is type(value)  # type: ignore[index]


def test_several_switches_hyphens_and_shares_in_between() -> None:
    text = "ep-overlap=delayed, cuda_graph=moe_router,optimizer_offload=0.25"
    stated = {"ep_overlap": "delayed", "cuda_graph": "moe_router", "optimizer_offload": 0.25}
    assert stated_switches(text, MEGATRON) == stated
    assert stated_switches("default", MEGATRON) == "default"


def test_a_described_run_has_features_that_no_search_chooses() -> None:
    assert stated_switches("flash_attention=false,loss_metrics=2", MEGATRON, describes=True) == {
        "flash_attention": False,
        "loss_metrics": 2,
    }
    with pytest.raises(SpecError, match="flash_attention"):
        stated_switches("flash_attention=false", MEGATRON)


@pytest.mark.parametrize(("text", "message", "hint"), TABLES["wrong_switches"])
def test_what_is_unknown_is_named_with_what_is_known(text: str, message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        stated_switches(text, MEGATRON)
    assert caught.value.message.startswith(message)
    assert hint in caught.value.hint


def test_a_trainer_without_switches_says_so() -> None:
    with pytest.raises(SpecError, match="torch-eager has no switches"):
        stated_switches("ep_overlap=true", load_runtime("torch-eager"))


def test_a_version_that_lacks_a_switch_says_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    file = load._shipped_file("torchtitan")._replace(
        versions=("1", "2"), since={"async_tp": "2"}, switches={"async_tp": (False, True), "compile": (False, True)}
    )
    monkeypatch.setattr(load, "_shipped_file", lambda name: file)
    before = TITAN.model_copy(update={"version": "1"})
    load._shipped_switches.cache_clear()
    with pytest.raises(SpecError) as caught:
        stated_switches("async_tp=true", before)
    load._shipped_switches.cache_clear()
    assert caught.value.message == "--switch: torchtitan 1 has no switch async_tp, which came with 2"


def test_consent_names_switches_that_change_numerics_and_dtypes_of_the_gpu() -> None:
    h100, a100 = load_hardware("h100"), load_hardware("a100")
    assert {"bf16_gradients", "bf16_moments", "nan_checks", "token_drop", "fp8"} <= set(consents(MEGATRON, h100))
    assert "nvfp4" not in consents(MEGATRON, h100)
    assert "fp8" not in consents(MEGATRON, a100)
    assert stated_consents("bf16-gradients,fp8", MEGATRON, h100) == ("bf16_gradients", "fp8")


@pytest.mark.parametrize(("text", "message"), TABLES["wrong_consents"])
def test_consent_to_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        stated_consents(text, MEGATRON, load_hardware("a100"))
    assert caught.value.message.startswith(message)
    assert caught.value.hint


def setting(model: str = "deepseek-v3", hardware: str = "h100", **recipe: Any) -> Setting:
    runtime, unknown = MEGATRON.with_features(recipe)
    assert unknown == ()
    cluster = ClusterSpec(hardware=hardware, num_gpus=64)
    return Setting(load_model(model), cluster, TrainingSpec(seq_length=4096, global_batch_size=64), runtime)


@pytest.mark.parametrize(("recipe", "message", "hint"), TABLES["contradictions"])
def test_switches_that_exclude_each_other_are_both_named(recipe: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_together(setting(**recipe), recipe)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_one_that_needs_another_that_was_left_unsaid_says_what_to_add() -> None:
    recipe = {"token_drop": True}
    with pytest.raises(SpecError) as caught:
        check_together(setting("qwen3-30b", **recipe), recipe)
    assert caught.value.message == "--switch: token_drop=true: token_drop needs dispatcher=alltoall"
    assert caught.value.hint == "add dispatcher=alltoall"


def test_a_switch_that_no_other_mends_is_to_be_left_out() -> None:
    with pytest.raises(SpecError) as caught:
        check_together(setting("8b", ep_overlap=True), {"ep_overlap": True})
    assert caught.value.message == "--switch: ep_overlap=true: ep_overlap needs experts"
    assert caught.value.hint == "leave ep_overlap out"


def test_what_nobody_stated_is_no_ones_contradiction() -> None:
    check_together(setting(ep_overlap=True, shared_expert_overlap=True), {})
    check_together(setting(ep_overlap=True), {"ep_overlap": True})


def test_every_row_that_a_search_chooses_says_what_it_does() -> None:
    assert all(row.says and row.values for row in SWITCHES.values() if not row.is_described)
