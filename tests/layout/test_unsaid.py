"""Switches that a run does not say: the interval of its step covers their likely values, and the worst one is named."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest

from planner.answer import PricedLayout
from planner.layout.confidence import (
    DEVIATIONS,
    TAIL,
    TUNED_WIDTH,
    WIDE,
    Choice,
    memory_width,
    mixture_interval,
    width_terms,
)  # fmt: skip
from planner.layout.evaluate import evaluate
from planner.layout.runs import evaluate_lines, parse_run
from planner.physics.pricing import Pricing
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.load import load_runtime

MIXTURE = {
    "model": "qwen3-30b-a3b", "hardware": "b200", "num_gpus": 8, "seq_length": 4096, "global_batch_size": 128,
    "dtype": "mxfp8", "parallelism": {"dp": 8, "ep": 8, "micro_batch_size": 4},
}  # fmt: skip
SHARDED = {
    "model": "8b", "hardware": "h100", "num_gpus": 8, "seq_length": 8192, "global_batch_size": 64,
    "runtime": "torch-fsdp", "parallelism": {"dp": 8, "fsdp": "full_shard", "micro_batch_size": 1},
}  # fmt: skip


def _priced(run: dict[str, Any], **more: Any) -> PricedLayout:
    return parse_run({"run": {**run, **more}}).evaluate()


def _ends(layout: PricedLayout) -> tuple[float, float]:
    low_s, high_s = layout.step.step_s_interval or (0.0, 0.0)
    return math.log(low_s / layout.step.step_s), math.log(high_s / layout.step.step_s)


@pytest.mark.parametrize("run", [MIXTURE, SHARDED])
def test_a_run_that_says_nothing_is_wider_and_no_slower(run: dict[str, Any]) -> None:
    bare, said = _priced(run), _priced(run, features={"p2p_overlap": True, "natural_routing": False})
    assert bare.step.step_s == said.step.step_s
    assert said.unsaid == ()
    low, high = _ends(said)
    assert low == pytest.approx(-high)
    assert _ends(bare)[0] <= low * (1 - 1e-9)
    assert _ends(bare)[1] - _ends(bare)[0] > 1.1 * (high - low)
    # an empty list of features is none
    assert _priced(run, features={}).step.step_s_interval == bare.step.step_s_interval


@pytest.mark.parametrize("run", [MIXTURE, SHARDED])
def test_the_switch_named_first_moves_the_step_most(run: dict[str, Any]) -> None:
    bare = _priced(run)
    effects = [abs(math.log(one.other_step_s / bare.step.step_s)) for one in bare.unsaid]
    assert effects == sorted(effects, reverse=True)
    assert min(effects) > 0.0198
    for one in bare.unsaid:
        # the step of a run that says it, which may say no more than that
        stated = _priced(run, features={one.switch: one.other})
        if one.switch != "overlap_grad_reduce":
            assert stated.step.step_s == pytest.approx(one.other_step_s, rel=1e-6)
        assert one.value != one.other


def test_only_what_goes_with_the_run_is_likely() -> None:
    def named(**more: Any) -> set[str]:
        return {one.switch for one in _priced(MIXTURE, **more).unsaid}

    assert {"cuda_graph", "dispatcher"} <= named()
    # graphs of the whole step fuse experts in 8 bits with scaled blocks, and run on Blackwell
    assert "cuda_graph" not in named(dtype="bf16")
    assert "cuda_graph" not in named(hardware="h100", dtype="fp8")
    # overlapped exchanges recompute no whole layer
    assert "ep_overlap" not in named(parallelism={**MIXTURE["parallelism"], "recompute": "full"})  # type: ignore[dict-item]
    # FlashAttention 1 has no kernels for Blackwell
    assert "attention_kernel" in {one.switch for one in _priced(SHARDED).unsaid}
    assert "attention_kernel" not in {one.switch for one in _priced(SHARDED, hardware="b200").unsaid}
    # a trainer of the past, of whose runs nothing else is known
    gpt = {**SHARDED, "model": "gpt3-175b", "hardware": "a100", "runtime": "megatron", "num_gpus": 64}
    assert _priced(gpt, parallelism={"tp": 8, "pp": 8, "dp": 1}).unsaid == ()


def test_a_saved_or_explicit_trainer_says_all() -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    training = TrainingSpec(seq_length=4096, global_batch_size=32)
    said = evaluate("8b", cluster, training, Parallelism(fsdp="full_shard"), runtime=load_runtime("torch-fsdp"))
    bare = evaluate("8b", cluster, training, Parallelism(fsdp="full_shard"), runtime="torch-fsdp", says_switches=False)
    assert said.best.unsaid == ()
    assert bare.best.unsaid[0].switch == "attention_kernel"
    assert bare.to_json()["best"]["unsaid"][0]["other"] == "flash1"


def test_what_is_named_is_said_and_no_more() -> None:
    cluster = ClusterSpec(hardware=load_hardware("a800"), num_gpus=16)
    layout = Parallelism(pp=2, ep=8, recompute="full")

    def priced(batch: int, says: Collection[str]) -> PricedLayout:
        training = TrainingSpec(seq_length=8192, global_batch_size=batch)
        return evaluate("qwen3-30b-a3b", cluster, training, layout, says_switches=says).best

    few, some, many = priced(16, ()), priced(16, ("dispatcher",)), priced(1024, ())
    assert {one.switch for one in few.unsaid} - {one.switch for one in some.unsaid} == {"dispatcher"}
    # few tokens a step are likely a fine-tuning, whose texts go to experts as they like, and fragment memory
    shares = [
        {one.switch: one.other_fraction for one in layout.unsaid}["natural_routing"] for layout in (few, some, many)
    ]
    assert shares == [0.8, 0.2, 0.2]
    low, high = few.worst_stage.memory.total_bytes_interval or (0.0, 0.0)
    assert high / few.worst_stage.memory.total_bytes > 1.3 * few.worst_stage.memory.total_bytes / low
    assert _ends(few)[1] > 1.3 * _ends(many)[1]


def test_lines_of_runs_name_it() -> None:
    (answer,) = evaluate_lines([json.dumps({"id": "bare", "run": SHARDED})])
    unsaid = answer.to_json()["unsaid"]
    assert unsaid[0].keys() == {"switch", "value", "other", "other_fraction", "other_step_s"}


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"a": [(0.4, 0.5, 0.0)]},
        {"a": [(-0.5, 0.4, 0.0)], "b": [(0.2, 0.6, 0.0)], "c": [(0.05, 0.3, 0.01), (-0.1, 0.2, 0.0)]},
        {"a": [(0.3, 0.05, 0.0)]},
    ],
)
def test_the_ends_are_quantiles_of_the_mixture(choices: dict[str, list[Choice]]) -> None:
    """As a million draws have them: a value for each switch, and an error of the rest."""
    width, rng, num = 0.12, np.random.default_rng(0), 1_000_000
    draws = rng.normal(0.0, width / DEVIATIONS, num)
    for others in choices.values():
        columns = np.array([(0.0, 1 - sum(p for _, p, _ in others), 0.0), *others]).T
        drawn = rng.choice(len(others) + 1, num, p=columns[1])
        draws += columns[0][drawn] + rng.normal(0.0, np.sqrt(columns[2][drawn]) / DEVIATIONS)
    low, high = np.quantile(draws, [TAIL, 1 - TAIL])
    # never narrower than where all is said
    assert mixture_interval(width, choices) == pytest.approx((min(low, -width), max(high, width)), abs=2e-3)


PACKED = {
    "model": "qwen3-8b", "hardware": "h100", "num_gpus": 4, "seq_length": 2048, "global_batch_size": 32,
    "runtime": "bridge", "parallelism": {"tp": 4, "micro_batch_size": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "widens"),
    [
        ({}, True),
        ({"features": {"tp_comm_overlap": False}}, True),
        ({"features": {"packed_documents": False}}, False),
        # as many tokens as pre-training has
        ({"global_batch_size": 512}, False),
        # rotated by one kernel
        ({"runtime": "megatron"}, False),
        # fine-tuning for certain
        ({"adapters": {"rank": 8}}, False),
    ],
)
def test_small_steps_of_bridge_may_be_packed_texts(more: dict[str, Any], widens: bool) -> None:
    priced = _priced(PACKED, **more)
    found = [one for one in priced.unsaid if one.switch == "packed_documents"]
    assert bool(found) == widens
    if widens:
        # the card of Qwen3-8B measured 7.42 s
        assert found[0].other_step_s == pytest.approx(7.4, rel=0.12)
        assert _ends(priced)[1] > math.log(1.5)


@pytest.mark.parametrize(
    ("run", "option"),
    [
        (PACKED, "--switch packed_documents=…"),
        (PACKED | {"global_batch_size": 512}, None),
        ({**MIXTURE, "model": "gpt-oss-20b", "dtype": "bf16", "adapters": {"rank": 8}}, "--moe-imbalance"),
    ],
)
def test_a_wide_interval_names_the_fact_that_narrows_it_most(run: dict[str, Any], option: str | None) -> None:
    priced = _priced(run, features={"dispatcher": "deepep"} if "adapters" in run else {"tp_comm_overlap": False})
    low, high = _ends(priced)
    fact = priced.deciding_fact
    assert (fact.option if fact else None) == option
    assert ((high - low) / 2 > WIDE) == (fact is not None)
    if fact is not None:
        assert fact.known_half_width < 0.75 * fact.half_width == pytest.approx(0.75 * (high - low) / 2)


@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_a_fine_tuned_mixture_is_wider_and_its_allocator_loses_more(spread: float) -> None:
    training = {"seq_length": 4096, "global_batch_size": 256, "moe_spread": spread}
    pricing = Pricing(
        model=load_model("qwen3-30b"),
        training=TrainingSpec(**training),
        cluster=ClusterSpec(hardware=load_hardware("h100"), num_gpus=8),
        runtime=load_runtime("megatron"),
    )
    best = _priced(MIXTURE, hardware="h100", dtype="bf16")
    assert width_terms(pricing, best, 0.0)["routing"] == (TUNED_WIDTH if spread else 0.0)
    assert memory_width(pricing) == pytest.approx(0.287 if spread else 0.085, abs=0.002)
    assert pricing.lost_fraction == pytest.approx(0.15 if spread else 0.03)


def test_gradients_that_show_show_in_every_micro_batch_of_zero_2() -> None:
    """Multi-node rates collapsed with it (GPT-NeoX issue 965)."""
    cluster = ClusterSpec(hardware=load_hardware("a100"), num_gpus=16)
    training = TrainingSpec(seq_length=2048, global_batch_size=512, dtype="fp16")
    one, two = (
        evaluate(
            "megatron-7.5b", cluster, training, Parallelism(zero_stage=stage, fsdp="all", micro_batch_size=4),
            runtime="megatron-deepspeed",
        ).best.step.breakdown.exposed_dp_s
        for stage in (1, 2)
    )  # fmt: skip
    assert two > 3 * one
