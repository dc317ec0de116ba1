"""The exchanges inside passes add up to the prices of their stage, one after the other, in the order of the layers."""

from __future__ import annotations

from typing import Any

import pytest
from pinned_numbers import LAYOUTS

from planner.layout.candidate import Candidate
from planner.layout.evaluate import evaluate
from planner.layout.price import reprice
from planner.layout.step import KINDS, LATE, PassExchange, exchanges_of_passes
from planner.physics.passes import COMM_GROUPS
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware
from planner.specs.training import Parallelism, TrainingSpec

EXCHANGING = [layout for layout in LAYOUTS if {"tp", "cp", "ep"} & layout[4].keys()]


def candidate_of(model: str, num_gpus: int, trainer: str, dtype: str, sizes: dict[str, Any]) -> Candidate:
    hardware = load_hardware("mi355x" if trainer.startswith("primus") else "h100")
    training = TrainingSpec(seq_length=4096, global_batch_size=64, dtype=dtype)  # type: ignore[arg-type]
    cluster = ClusterSpec(hardware=hardware, num_gpus=num_gpus)
    plan = evaluate(model, cluster, training, Parallelism(**sizes), runtime=trainer)
    return reprice(plan, plan.best)


def exposed_s(exchanges: tuple[PassExchange, ...], group: str) -> float:
    return sum(exchange.exposed_s for exchange in exchanges if exchange.group == group)


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("model", "num_gpus", "trainer", "dtype", "sizes"), EXCHANGING)
def test_they_add_up_to_the_prices_of_every_stage(
    model: str, num_gpus: int, trainer: str, dtype: str, sizes: dict[str, Any]
) -> None:
    candidate = candidate_of(model, num_gpus, trainer, dtype, sizes)
    each, by_part, by_pass = (exchanges_of_passes(candidate, together) for together in ("", "part", "pass"))
    for stage, cost in enumerate(candidate.costs):
        lengths_s = {"F": cost.forward_total_s, "B": cost.backward_total_s, "I": cost.input_grad_total_s}
        for kind in KINDS:
            way = "forward" if kind == "F" else "backward"
            for group in COMM_GROUPS:
                priced_s = float(getattr(cost, f"{group}_{way}_s"))
                for passes in (each, by_part, by_pass):
                    assert exposed_s(passes[stage, kind], group) == pytest.approx(priced_s, rel=1e-9, abs=1e-15)
            ends_s = 0.0
            for exchange in each[stage, kind]:
                assert exchange.start_s >= ends_s * (1 - 1e-12)
                assert min(exchange.exposed_s, exchange.hidden_s) >= 0
                ends_s = exchange.start_s + exchange.exposed_s
            assert ends_s <= float(lengths_s[kind]) * (1 + 1e-9)
            assert len(by_pass[stage, kind]) <= len(by_part[stage, kind]) <= len(each[stage, kind])


def test_layers_follow_each_other_and_come_back_in_reverse() -> None:
    candidate = candidate_of("llama-3.1-8b", 16, "megatron", "bf16", {"tp": 2, "cp": 4, "pp": 2})
    passes = exchanges_of_passes(candidate)
    parts = list(dict.fromkeys(exchange.part for exchange in passes[0, "F"]))
    assert parts == ["embedding", *(f"layer {layer}" for layer in range(16))]
    assert list(dict.fromkeys(exchange.part for exchange in passes[0, "B"])) == parts[::-1]
    layer = [exchange for exchange in passes[0, "F"] if exchange.part == "layer 3"]
    named = [(exchange.group, exchange.name) for exchange in layer if exchange.name not in LATE.values()]
    assert named == [
        ("tp", "qkv gather"),
        ("cp", "cp keys and values"),
        ("tp", "attention output scatter"),
        ("tp", "mlp up gather"),
        ("tp", "mlp down scatter"),
    ]
    leads = {exchange.name: exchange.leads for exchange in layer}
    assert leads["mlp up gather"]
    assert not leads["mlp down scatter"]


def test_a_recomputed_layer_repeats_its_exchanges_before_its_gradients() -> None:
    sizes = {"tp": 8, "pp": 4, "vpp": 2, "recompute": "full"}
    candidate = candidate_of("gpt3-175b", 64, "megatron-2021", "bf16", sizes)
    backward = exchanges_of_passes(candidate)[1, "B"]
    layer = [exchange.name for exchange in backward if exchange.part == backward[0].part]
    forward = [exchange.name for exchange in exchanges_of_passes(candidate)[1, "F"]][: len(layer) // 2]
    assert layer[: len(forward) - 1] == forward[:-1]


def test_a_slow_rank_takes_longer_for_them_too() -> None:
    candidate = candidate_of("llama-3.1-8b", 16, "megatron", "bf16", {"tp": 2, "pp": 2})
    slow = Candidate(candidate.pricing, candidate.table, candidate.split, candidate.schedule, rank_factors=(1.0, 1.5))
    even, slowed = exchanges_of_passes(candidate), exchanges_of_passes(slow)
    assert slowed[0, "F"] == even[0, "F"]
    assert exposed_s(slowed[1, "B"], "tp") == pytest.approx(1.5 * exposed_s(even[1, "B"], "tp"))
