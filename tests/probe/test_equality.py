"""Ranks of every layout together are one process: loss, gradients and their norm, over two optimizer steps, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import GPT, MLA, MOE

from planner.schedule.actions import Action, ActionList, Schedule
from planner.schedule.orders import in_flight_chunks

pytest.importorskip("torch", reason="needs the probe extra (torch)")

from planner.probe.launch.launcher import launch

GEMMA = {"qk_norm": True, "post_norms": True, "sliding_window": 4, "sliding_window_pattern": 2}
LLAMA4 = {"attention_chunk_size": 4, "sliding_window_pattern": 2, "moe": MOE}
GPT_OSS = {"attention_sinks": True, "sliding_window": 4, "sliding_window_pattern": 2, "bias": True, "moe": MOE}
TP2 = {"tp": 2, "sequence_parallel": True}
CP2 = {"cp": 2, "seq_length": 4}
"""Of 8 tokens."""

RUNS: dict[
    str, tuple[tuple[str, int, int, int], dict[str, Any]],
] = {
    "pp4": (("1f1b", 4, 1, 6), {}), "pp3-uneven": (("1f1b", 3, 1, 4), {"layers": 5}),
    "interleaved": (("interleaved-1f1b", 2, 2, 4), {}), "zb-h1": (("zb-h1", 2, 1, 4), {"model": {"moe": MOE}}),
    "zb-h1-recomputed": (("zb-h1", 2, 1, 2), {"num_recomputed": 1, "model": {"moe": MOE}}),
    "zb-v": (("zb-v", 2, 2, 5), {"model": {"tie_word_embeddings": True}}), "zb-v-tp": (("zb-v", 2, 2, 4), TP2),
    "dualpipe-v": (("dualpipe-v", 2, 2, 4), {}), "dualpipe": (("dualpipe", 2, 1, 4), {}),
    "chimera-tied": (("chimera", 2, 1, 4), {"model": {"tie_word_embeddings": True}}),
    "tp2": (("1f1b", 2, 1, 3), {**TP2, "model": {"qk_norm": True}}),
    "tp2-without-sequence-parallelism": (("1f1b", 2, 1, 3), {"tp": 2, "model": GPT}),
    "dp2-tied": (("1f1b", 2, 1, 3), {"dp": 2, "model": {"tie_word_embeddings": True}}),
    "dp3-without-zero": (("none", 1, 1, 2), {"dp": 3, "zero": False}),
    "fsdp2": (("none", 1, 1, 2), {"dp": 2, "fully_sharded": True, "layers": 3}),
    "fsdp3-tied-recomputed": (
        ("none", 1, 1, 2),
        {"dp": 3, "fully_sharded": True, "num_recomputed": 1, "model": {"tie_word_embeddings": True}},
    ),
    "fsdp2-tp2": (("none", 1, 1, 2), {**TP2, "dp": 2, "fully_sharded": True, "model": {"qk_norm": True}}),
    "fsdp2-pp2": (("1f1b", 2, 1, 3), {"dp": 2, "fully_sharded": True, "model": {"mla": MLA}}),
    "fsdp2-interleaved": (("interleaved-1f1b", 2, 2, 4), {"dp": 2, "fully_sharded": True}),
    "fsdp2-ep2": (("none", 1, 1, 2), {"dp": 2, "ep": 2, "fully_sharded": True, "model": {"moe": MOE}}),
    "fsdp4-ep2-mtp": (
        ("none", 1, 1, 2),
        {"dp": 4, "ep": 2, "fully_sharded": True, "model": {"moe": MOE, "num_nextn_predict_layers": 1}},
    ),
    "dp2-ep2": (
        ("1f1b", 2, 1, 2),
        {"dp": 2, "ep": 2, "model": {"moe": {**MOE, "shared_expert_intermediate_size": 16}}},
    ),
    "dp2-outermost-ep2": (("1f1b", 2, 1, 2), {"dp": 2, "ep": 2, "dp_outermost": True, "model": {"moe": MOE}}),
    "dp2-tp2-ep4": (("none", 1, 1, 2), {**TP2, "dp": 2, "ep": 4, "model": {"moe": MOE}}),
    "gpt-recomputed": (("1f1b", 2, 1, 3), {**TP2, "num_recomputed": 1, "model": GPT}),
    "gemma-selective": (("1f1b", 2, 1, 3), {**TP2, "recompute_modules": ("core_attn", "mlp"), "model": GEMMA}),
    "gpt-oss": (("1f1b", 2, 1, 3), {**TP2, "model": GPT_OSS}),
    "llama4": (("1f1b", 2, 1, 3), {**TP2, "model": LLAMA4}),
    "alibi": (("none", 1, 1, 2), {**TP2, "model": {"position_embedding": "alibi", "embedding_norm": True}}),
    "mla": (("1f1b", 2, 1, 3), {**TP2, "model": {"mla": MLA}}),
    "mtp": (("1f1b", 2, 1, 3), {**TP2, "model": {"mla": MLA, "num_nextn_predict_layers": 2}}),
    "cp2": (("1f1b", 2, 1, 3), CP2), "cp2-tp2": (("none", 1, 1, 2), {**CP2, **TP2, "model": {"qk_norm": True}}),
    "cp4-gpt": (("none", 1, 1, 2), {"cp": 4, "seq_length": 2, "num_recomputed": 1, "model": GPT}),
    "cp2-mla-mtp": (("zb-h1", 2, 1, 2), {**CP2, "model": {"mla": MLA, "num_nextn_predict_layers": 2}}),
    "cp2-dp2-ep4-gpt-oss": (
        ("none", 1, 1, 2),
        {**CP2, "dp": 2, "ep": 4, "layers": 2, "recompute_modules": ("core_attn",), "model": GPT_OSS},
    ),
    "cp2-fsdp-alibi": (
        ("none", 1, 1, 2),
        {**CP2, "fully_sharded": True, "model": {"position_embedding": "alibi", "embedding_norm": True}},
    ),
}  # fmt: skip


@pytest.mark.thorough(4)
@pytest.mark.parametrize("name", RUNS)
def test_equals_one_process(name: str, make_run: Any) -> None:
    order, options = RUNS[name]
    measured = launch(make_run(order, **options))
    checks = [check for rank in measured.ranks for check in rank.checks]
    assert {check.name for check in checks} == {"gradients", "loss", "gradient norm"}
    assert [check for check in checks if not check.passed] == []


def test_fully_sharded_ranks_gather_their_weights(make_run: Any) -> None:
    once_a_step = {"gradient all-reduce", "weight all-gather"}
    for sharded, names in ((True, {"weight all-gather"}), (False, once_a_step)):
        measured = launch(make_run(("none", 1, 1, 2), dp=2, fully_sharded=sharded, check=False, num_steps=1))
        assert {exchange.name for rank in measured.ranks for exchange in rank.exchanges} == names


def test_ranks_that_split_sequences_hold_half_of_what_they_send_and_gather_keys(make_run: Any) -> None:
    measured = launch(make_run(("1f1b", 2, 1, 4), **CP2, check=False, num_steps=1))
    assert [(rank.stage, rank.cp) for rank in measured.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rank.peak_in_flight_chunks for rank in measured.ranks] == [2, 2, 1, 1]
    found = {
        (exchange.name, exchange.size, exchange.num_bytes) for rank in measured.ranks for exchange in rank.exchanges
    }
    assert ("cp all-gather", 2, 8 * 2 * 8 * 8) in found  # tokens, key-value heads, their dimension, fp64


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_in_flight_as_planned(name: str, make_run: Any) -> None:
    vpp = 1 if name == "1f1b" else 2
    measured = launch(make_run((name, 2, vpp, 6), check=False, num_steps=1))
    assert [rank.peak_in_flight_chunks for rank in measured.ranks] == in_flight_chunks(name, 2, vpp, 6)


def test_a_hand_written_order(make_run: Any) -> None:
    ranks = (["0F0", "0F1", "0B0", "0F2", "0B2", "0B1"], ["1F0", "1B0", "1F1", "1F2", "1I2", "1B1", "1W2"])
    order = Schedule("mine", tuple(ActionList.of(map(Action.parse, actions)) for actions in ranks), (0, 1), 3)
    measured = launch(make_run(order))
    assert all(check.passed for rank in measured.ranks for check in rank.checks)
    assert [[timed.action for timed in rank.actions] for rank in measured.ranks] == [list(actions) for actions in ranks]
