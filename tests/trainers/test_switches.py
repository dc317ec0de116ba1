"""Features of a run change fields that a trainer has, to values they may have."""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import Unsupported
from planner.trainers.load import load_runtime
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import switched
from planner.trainers.switches import SWITCHES


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


@pytest.mark.parametrize(
    ("name", "value"),
    [("attention_kernel", "flash9"), ("cp_comm_type", True), ("dispatcher", "pigeon"), ("loss_metrics", -1)],
)
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
