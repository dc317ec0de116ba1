"""Switches typed by someone: what is understood, and which line says what is not.

Features of a run change fields that a trainer has, to values they may have.
The `likely:` entries of a trainer's file: read with their source, refused by name, and near what runs say.
Each trainer says what its checkpoints can be loaded as, and where that was read.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from tables import beside

from planner.errors import SpecError, Unsupported
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import TrainingSpec
from planner.trainers import load
from planner.trainers.load import RUNTIMES, UNKNOWN, checkpoint_of, likely_of, load_runtime, read_likely, switches_of
from planner.trainers.rules.recipe import Setting
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import check_together, consents, stated_consents, stated_switches, switched
from planner.trainers.switches import SWITCHES, written

TABLES = beside(__file__)

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
    with refused(message, hint):
        stated_switches(text, MEGATRON)


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
    with refused(message):
        stated_consents(text, MEGATRON, load_hardware("a100"))


def setting(model: str = "deepseek-v3", hardware: str = "h100", **recipe: Any) -> Setting:
    runtime, unknown = MEGATRON.with_features(recipe)
    assert unknown == ()
    cluster = ClusterSpec(hardware=hardware, num_gpus=64)
    return Setting(load_model(model), cluster, TrainingSpec(seq_length=4096, global_batch_size=64), runtime)


@pytest.mark.parametrize(("model", "recipe", "message", "hint"), TABLES["contradictions"])
def test_a_contradiction_is_named_with_what_mends_it(
    model: str, recipe: dict[str, Any], message: str, hint: str
) -> None:
    with refused(message, hint):
        check_together(setting(model, **recipe), recipe)


def test_what_nobody_stated_is_no_ones_contradiction() -> None:
    check_together(setting(ep_overlap=True, shared_expert_overlap=True), {})
    check_together(setting(ep_overlap=True), {"ep_overlap": True})


def test_every_row_that_a_search_chooses_says_what_it_does() -> None:
    assert all(row.says and row.values for row in SWITCHES.values() if not row.is_described)


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", [True, False, "full_iteration", "a2a", 1.25])
def test_every_effect_is_on_fields_of_a_runtime(name: str, value: Any) -> None:
    update = SWITCHES[name].fields_of(value) or {}
    assert update.keys() <= RuntimeSpec.model_fields.keys()
    RuntimeSpec.model_validate(load_runtime("megatron").model_dump() | update)


def test_what_is_unknown_is_named_and_changes_nothing() -> None:
    runtime = load_runtime("megatron")
    changed, unknown = runtime.with_features({"warp_drive": True, "cuda_graph": False})
    assert (changed, unknown) == (runtime, ("warp_drive",))


@pytest.mark.parametrize(("name", "value"), TABLES["a_value_that_a_feature_has_not_is_named_and_changes_nothing"])
def test_a_value_that_a_feature_has_not_is_named_and_changes_nothing(name: str, value: Any) -> None:
    runtime = load_runtime("megatron")
    assert runtime.with_features({name: value}) == (runtime, (f"{name}: {value!r}",))


def test_checkpoints_that_enter_autograd_again_run_all_of_a_layer_again() -> None:
    runtime = load_runtime("torch-fsdp")
    assert not runtime.stops_recompute_early
    assert runtime.with_features({"reentrant_checkpoint": False})[0].stops_recompute_early


def test_what_is_not_modelled_is_refused_unless_it_is_off() -> None:
    runtime = load_runtime("megatron")
    assert runtime.with_features({"cpu_offload": False}) == (runtime, ())
    with pytest.raises(Unsupported, match="cpu_offload: tensors kept in host memory"):
        runtime.with_features({"cpu_offload": True})


def test_graphs_of_the_routing_take_back_what_overlap_costs_the_host() -> None:
    runtime = load_runtime("megatron")
    eager, _ = runtime.with_features({"ep_overlap": True})
    replayed, _ = runtime.with_features({"ep_overlap": True, "cuda_graph": "transformer_engine[moe_router]"})
    assert eager.ep_overlap_fraction == replayed.ep_overlap_fraction > 0
    assert not eager.graphed_modules
    assert "moe_router" in replayed.graphed_modules


def test_the_more_of_a_mixture_graphs_replay_the_less_is_left_to_the_host() -> None:
    runtime = load_runtime("megatron")
    scopes = ("transformer_engine[attn,moe_router,moe_preprocess]", "transformer_engine[moe_router]", False)
    both, routing, none = (runtime.with_features({"cuda_graph": scope})[0].launched_fraction for scope in scopes)
    assert 0 < both < routing < none == 1


@pytest.mark.parametrize("order", [("cuda_graph", "ep_overlap"), ("ep_overlap", "cuda_graph")])
def test_what_is_said_of_a_thing_itself_counts(order: tuple[str, str]) -> None:
    said = {"cuda_graph": "full_iteration", "ep_overlap": False}
    changed, _ = load_runtime("megatron").with_features({name: said[name] for name in order})
    assert changed.cuda_graphs
    assert changed.ep_overlap_fraction == 0.0


def test_dropping_tokens_is_one_switch_under_two_names() -> None:
    """The feature of published runs and the switch of the search change the host's time alike."""
    runtime = switched(load_runtime("megatron"), {"dispatcher": "alltoall"})
    dropping, stated = switched(runtime, {"token_drop": True}), runtime.with_features({"moe_token_drop": True})[0]
    assert dropping == stated
    assert SWITCHES["token_drop"].value_of(dropping) is True
    assert switched(dropping, {"token_drop": False}) == runtime


ENTRY = {"switches": {"ep_overlap": True}, "value": 0.3, "source": "counted"}


@pytest.mark.parametrize(("given", "says"), TABLES["a_broken_entry_is_refused_by_name"])
def test_a_broken_entry_is_refused_by_name(given: Any, says: str) -> None:
    with pytest.raises(SpecError) as error:
        read_likely("mine.yaml", given)
    assert error.value.message.startswith("mine.yaml: likely")
    assert says in error.value.message


def test_shares_of_values_that_exclude_each_other_leave_some_for_the_own_value() -> None:
    for name in RUNTIMES:
        for architecture in ("ampere", "hopper", "blackwell", "cdna3"):
            shares = defaultdict[str, float](float)
            for entry in likely_of(load_runtime(name), architecture):
                shares[entry.switch] += entry.value
            assert all(share < 0.9 for share in shares.values())


def test_a_kind_of_trainer_has_what_its_base_has_and_ones_own_trainer_nothing(tmp_path: Path) -> None:
    megatron = likely_of(load_runtime("megatron"), "blackwell")
    assert megatron
    assert likely_of(load_runtime("bridge"), "blackwell") == megatron
    assert likely_of(load_runtime("megatron-2021"), "ampere") == ()
    own = tmp_path / "own.yaml"
    own.write_text("source: mine\nbase: megatron\n")
    assert likely_of(load_runtime(own), "blackwell") == ()


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


@pytest.mark.parametrize(("row", "said"), TABLES["a_wrong_row_is_named"])
def test_a_wrong_row_is_named(row: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TRAINER + row)
    with refused(said):
        load_runtime(path)
