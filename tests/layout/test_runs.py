"""A line of JSON becomes the arguments of evaluate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import SpecError
from planner.layout.evaluate import pricing_of
from planner.layout.given import fill_dp
from planner.layout.runs import evaluate_lines, network_gb_per_s, parse_run
from planner.specs.training import Parallelism
from planner.trainers.generations import NATURAL_IMBALANCE
from planner.trainers.switches import EP_OVERLAP

TABLES = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())

RUN: dict[str, Any] = {
    "model": "405b", "hardware": "h100", "num_gpus": 16384, "gpus_per_node": 8, "runtime": "megatron",
    "seq_length": 8192, "global_batch_size": 2048, "dtype": "bf16", "parallelism": {"tp": 8, "pp": 16, "dp": 128},
}  # fmt: skip


def parsed(**changes: Any) -> Any:
    return parse_run({"id": "x", "run": {**RUN, **changes}}, "line 1")


@pytest.mark.parametrize(("description", "expected"), TABLES["network_rates"])
def test_network_rates_in_words(description: str | None, expected: float | None) -> None:
    assert network_gb_per_s(description, 8) == expected


def test_a_rate_in_inter_node_replaces_the_profiles() -> None:
    assert parsed(inter_node="8x200 Gb/s per node").cluster.network_gb_per_s == 25.0
    assert parsed(inter_node="fast").cluster.network_gb_per_s is None
    assert parsed(intra_node="NVLink", precision_recipe="fp16").cluster.network_gb_per_s is None


def test_inline_models_take_flat_fields() -> None:
    model = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    }  # fmt: skip
    assert parsed(model=model).model.moe.num_experts == 4


def test_features_change_the_runtime_and_unknown_ones_are_named() -> None:
    run = parsed(features={"cuda_graph": "full", "warp_drive": True})
    assert run.runtime.cuda_graphs
    assert run.unknown_features == ("warp_drive",)


def test_dp_fills_the_cluster_where_none_is_given() -> None:
    assert fill_dp(Parallelism(tp=8, pp=16), 2048, 2048).dp == 16
    assert fill_dp(Parallelism(tp=8, pp=16, dp=3), 2048, 2048).dp == 3
    with pytest.raises(SpecError):
        fill_dp(Parallelism(tp=8), 4, 2048)


@pytest.mark.parametrize(
    ("layout", "batch", "dp", "spare"),
    [
        ({"tp": 8, "pp": 3}, 85, 85, 8),
        ({"tp": 8, "pp": 3}, 2048, 64, 512),
        ({"tp": 8, "pp": 3, "micro_batch_size": 64}, 2048, 32, 1280),
        ({"tp": 4, "pp": 3, "ep": 8}, 170, 170, 8),
        ({"pp": 3, "ep": 4}, 12, 12, 2012),
        ({"pp": 3, "ep": 4}, 34, 1, 2045),
    ],
)
def test_the_dp_to_give_is_the_largest_that_batch_and_experts_allow(
    layout: dict[str, int], batch: int, dp: int, spare: int
) -> None:
    ranks = layout.get("tp", 1) * layout["pp"]
    with pytest.raises(SpecError, match=rf"tp·cp·pp \({ranks}\) does not divide 2,048") as caught:
        fill_dp(Parallelism.model_validate(layout), 2048, batch)
    assert caught.value.hint == f"give dp {dp} to leave {spare:,} GPUs spare"


@pytest.mark.parametrize(("line", "message"), TABLES["wrong_lines"])
def test_a_wrong_line_is_an_error_object(line: str, message: str) -> None:
    (answer,) = evaluate_lines([line])
    error = answer.to_json()["error"]
    json.dumps(answer.to_json(), allow_nan=False)
    assert error["type"] == "SpecError"
    assert error["message"].startswith(message)
    assert error["hint"]


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    (answer,) = evaluate_lines(['{"run": ' + "[" * 200_000])
    assert "line 1: not JSON" in answer.to_json()["error"]["message"]


def test_answers_come_before_the_next_line_is_read() -> None:
    def lines() -> Any:
        yield "{"
        raise AssertionError("read ahead")

    assert next(evaluate_lines(lines())).error is not None


def test_blank_lines_are_skipped() -> None:
    assert list(evaluate_lines(["\n", "  \n"])) == []


def test_a_whole_iteration_in_a_graph_overlaps_expert_exchange_unless_said_otherwise() -> None:
    of_mixture = parsed(model="deepseek-v3", features={"cuda_graph": "full_iteration"})
    assert of_mixture.runtime.ep_overlap_fraction == EP_OVERLAP
    assert of_mixture.runtime.fuses_experts
    dense = parsed(features={"cuda_graph": "full_iteration"})
    assert (dense.runtime.ep_overlap_fraction, dense.runtime.fuses_experts) == (0.0, False)
    assert parsed(features={"ep_overlap": False, "cuda_graph": "full_iteration"}).runtime.ep_overlap_fraction == 0.0
    plain = parsed().runtime.ep_overlap_fraction
    assert parsed(features={"cuda_graph": True}).runtime.ep_overlap_fraction == plain


def test_fp16_in_the_recipe_is_the_dtype() -> None:
    assert parsed(precision_recipe="fp16").training.dtype == "fp16"
    assert parsed(precision_recipe="fp16", dtype="fp8").training.dtype == "fp8"
    assert parsed().training.dtype == "bf16"


@pytest.mark.parametrize(("recipe", "factor"), [("fp8-tensorwise", 1.0), ("fp8-rowwise", 1.45), (None, 1.45)])
def test_scales_by_rows_cost_torchtitan_speed_and_are_what_it_has_today(recipe: str | None, factor: float) -> None:
    run = parsed(runtime="torchtitan", dtype="fp8", hardware="b200", precision_recipe=recipe)
    assert run.runtime.narrow_factor == factor
    dated = parsed(runtime="torchtitan", dtype="fp8", hardware="h100", precision_recipe=recipe).runtime
    assert dated.narrow_factor == (factor if recipe else 1.0)
    assert parsed(dtype="fp8").runtime.narrow_factor == 1.0


def test_bf16_in_the_recipe_means_wide_gradients() -> None:
    assert parsed(runtime="megatron-2021", hardware="a100", precision_recipe="bf16").runtime.gradient_bytes == 4
    assert parsed(runtime="megatron-2021", hardware="a100").runtime.gradient_bytes == 2


OSS: dict[str, Any] = {
    "name": "GPT-OSS-120B", "num_hidden_layers": 36, "hidden_size": 2880, "intermediate_size": None,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "sliding_window": 128,
    "num_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2880,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "pattern", "sinks"),
    [({}, 2, True), ({"name": "mine"}, None, False), ({"num_hidden_layers": 4}, None, False),
     ({"sliding_window_pattern": 6}, 6, True), ({"attention_sinks": False}, 2, False)],
)  # fmt: skip
def test_a_known_models_design_fills_what_its_description_leaves_out(
    changes: dict[str, Any], pattern: int | None, sinks: bool
) -> None:
    model = parsed(model={**OSS, **changes}, parallelism={"dp": 8}, num_gpus=8).model
    assert (model.sliding_window_pattern, model.attention_sinks) == (pattern, sinks)
    full = [layer.attention for layer in model.layers].count("full")
    assert full == (0 if pattern is None else model.num_hidden_layers // pattern)


def test_a_defect_costs_one_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise IndexError("7")

    run = '{"model": "8b", "hardware": "h100", "num_gpus": 8, "seq_length": 4096, "global_batch_size": 8}'
    monkeypatch.setattr("planner.layout.runs.price_given", broken)
    first, second = evaluate_lines([f'{{"id": "a", "run": {run}}}', '{"id": "b", "run": {}}'])
    assert first.error is not None
    assert first.error.message.startswith("internal: IndexError: 7 (test_runs.py:")
    assert second.id == "b"


def test_a_line_takes_no_model_from_where_lines_come_from() -> None:
    line = '{"run": {"model": "-", "hardware": "h100", "num_gpus": 8, "seq_length": 4096, "global_batch_size": 8}}'
    (answer,) = evaluate_lines([line])
    assert answer.error is not None
    assert "model: '-' is standard input" in answer.error.message


def test_natural_routing_fills_one_rank_more_unless_biases_balance_experts() -> None:
    """Qwen3 has an auxiliary loss alone, DeepSeek-V3 a bias for each expert."""
    asked = {"hardware": "h100", "num_gpus": 256, "seq_length": 4096, "global_batch_size": 256}
    natural = {"features": {"natural_routing": True}}
    qwen, deepseek = asked | {"model": "qwen3-235b-a22b"}, asked | {"model": "deepseek-v3"}
    assert parse_run({"run": qwen}).training.moe_imbalance == 1.0
    assert parse_run({"run": qwen | natural}).training.moe_imbalance == NATURAL_IMBALANCE > 1.0
    assert parse_run({"run": deepseek | natural}).training.moe_imbalance == 1.0
    forced = {"adapters": {"rank": 8}, "features": {"natural_routing": False}}
    assert parse_run({"run": qwen | forced}).training.moe_spread == 0


def test_fine_tuning_fills_the_fullest_of_many_ranks_with_few_experts_most() -> None:
    """As Blom's expected largest of so many normal means: 1.42 deviations of eight ranks, 1.03 of four."""
    asked = {"hardware": "h100", "num_gpus": 8, "seq_length": 4096, "global_batch_size": 256}
    run = parse_run({"run": asked | {"model": "qwen3-30b", "adapters": {"rank": 8}}})
    pricing = pricing_of(run.model, run.cluster, run.training, run.runtime)
    assert [round(float(pricing.imbalance(ep)), 2) for ep in (1, 4, 8)] == [1.0, 1.37, 1.72]
    assert parse_run({"run": asked | {"model": "moonlight", "adapters": {"rank": 8}}}).training.moe_spread == 0.01
