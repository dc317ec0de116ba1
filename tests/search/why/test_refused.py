"""Where no shape is legal, the rule that left nothing over is named, counted, and answered with a hint that helps."""

from __future__ import annotations

from typing import Any

import pytest
from toys import solved, toy_cluster, toy_model, toy_problem, toy_training

from planner.errors import Infeasible

PATIENT_S = 600.0
"""More than any search here takes, also on a machine that does much else."""


def refusal(**changes: Any) -> Infeasible:
    with pytest.raises(Infeasible) as caught:
        solved(toy_problem(**{"time_limit_s": PATIENT_S} | changes))
    return caught.value


_LEARNED = toy_model(6, gated_mlp=False, max_position_embeddings=1024)
_SINKS = toy_model(6, attention_sinks=True, sliding_window=512)
_FEW = {"runtime": "torchtitan", "pp": (4,), "training": toy_training(4), "micro_batch_size": (1,)}


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("changes", "hint", "then"),
    [
        ({"model": _LEARNED}, "shorten the sequence", {"training": toy_training(8, 1024)}),
        ({"model": _SINKS, "cp": (2,)}, "cp 1, or another --runtime (torchtitan", {"runtime": "torchtitan"}),
        ({"model": _SINKS, "cp": (2,)}, "cp 1, or another --runtime (torchtitan", {"cp": (1,)}),
        ({"cp": (2,), "runtime": "megatron-2022"}, "use cp 1", {"cp": (1,)}),
        ({**_FEW, "dp": (2,)}, "pin a smaller pp, dp", {"dp": (1,)}),
        ({"tp": (8,)}, "add --tp-across-nodes", {"tp_across_nodes": True}),
        ({"tp": (8,), "cp": (2,)}, "more GPUs", {"cluster": toy_cluster(16), "tp_across_nodes": True}),
        ({"zero_stage": (3,), "runtime": "nanotron"}, "free zero-stage", {"zero_stage": None}),
    ],
)
def test_the_hint_is_of_the_rule_and_following_it_helps(changes: Any, hint: str, then: dict[str, Any]) -> None:
    assert hint in (refusal(**changes).hint or "")
    assert solved(toy_problem(**changes | then, top=1)).fits


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": (3,)}, "heads_not_divisible_by_tp"),
        ({"tp": (8,)}, "tp_across_domains"),
        ({"pp": (8,), "tp": (1,)}, "more_stages_than_layers"),
        ({"micro_batch_size": (3,)}, "global_batch_not_divisible"),
        ({"pp": (2,), "vpp": (9,), "schedule": ("interleaved-1f1b",)}, "no_schedule"),
        ({"cluster": toy_cluster(4, memory_gib=0.2), "tp": (1,), "pp": (1,)}, "does_not_fit"),
    ],
)
def test_one_reason_alone_is_the_only_one_counted(changes: dict[str, Any], reason: str) -> None:
    error = refusal(**({"cp": (1,)} | changes))
    assert set(error.rejections) == {reason}
    assert " × " not in error.message.replace(" × toy-gpu", "")
