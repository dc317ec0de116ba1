"""Plans that the probe can run here, and a probe of one of them."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from priced_plans import priced_plan

from planner.answer import Plan
from planner.specs.model import ModelSpec

pytest.importorskip("torch", reason="needs the probe extra (torch)")

from planner.probe.probe import ProbeOptions, probe
from planner.probe.result import ProbeResult

SMALL = {
    "name": "small", "num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip

TRACED: dict[str, Any] = {
    "position_embedding": "none", "layer_types": ["traced0", "traced1"], "mlp_layer_types": ["none"],
    "traced": {
        "source": "module:nowhere.py:make", "other_parameters": 100,
        "layers": [
            [
                {"name": "norm", "kind": "elementwise", "bytes": (0, 256, 0), "backward_bytes": (0, 512, 0),
                 "kernels": 1,
                 "backward_kernels": 2, "parameters": 64, "kept": [{"num_bytes": (0, 132, 0)}]},
                {"name": "scale", "kind": "elementwise", "bytes": (0, 256, 0), "backward_bytes": (0, 512, 0),
                 "kernels": 1,
                 "backward_kernels": 2, "parameters": 96},
                {"name": "qkv", "kind": "gemm", "m": (0, 1, 0), "n": (192, 0, 0), "k": (64, 0, 0), "weight": True,
                 "parameters": weights, "kept": [{"num_bytes": (0, 128, 0)}]},
                {"name": "attention", "kind": "attention", "heads": 4, "kv_heads": 4, "q_len": (0, 1, 0),
                 "kv_len": (0, 1, 0), "qk_dim": 16, "v_dim": 16, "kept": [{"num_bytes": (0, 528, 0)}]},
                {"name": "loop", "kind": "gemm", "count": (0, 0.125, 0), "m": (32, 0, 0), "n": (16, 0, 0),
                 "k": (16, 0, 0), "kept": [{"num_bytes": (0, 200, 0)}]},
                {"name": "out", "kind": "gemm", "m": (0, 1, 0), "n": (64, 0, 0), "k": (64, 0, 0), "weight": True,
                 "parameters": weights // 3, "kept": [{"num_bytes": (0, 128, 0)}]},
                {"name": "add", "kind": "elementwise", "bytes": (0, 384, 0), "backward_bytes": (0, 768, 0),
                 "kernels": 2,
                 "backward_kernels": 4},
            ]
            for weights in (192 * 65, 0)
        ],
    },
}  # fmt: skip
"""A traced model: its second kind of layer has the weights of the first."""


def plan_of(
    model: ModelSpec, num_gpus: int, seq_length: int, batch: int, runtime: str = "torch-eager", **layout: Any
) -> Plan:
    return priced_plan(model, num_gpus, seq_length, batch, runtime=runtime, **layout)


def small_plan(**layout: Any) -> Plan:
    sizes = {"tp": 1, "cp": 1, "pp": 2, "dp": 1, **layout}
    num_gpus = prod(sizes[name] for name in ("tp", "cp", "pp", "dp"))
    return plan_of(ModelSpec(**SMALL), num_gpus, 32, 8, **sizes)


def run(plan: Plan, **options: Any) -> ProbeResult:
    result = probe(plan, ProbeOptions(**{"num_steps": 1, "timeout_s": 60.0, **options}))
    assert result is not None
    return result
