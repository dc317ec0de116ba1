"""A rehearsal counts what an H200 measured, and what the planner says of every kind of layer."""

from __future__ import annotations

import gc
from math import prod
from typing import Any

import pytest

from planner.answer import Plan
from planner.physics.layer.blocks import norm
from planner.schedule.orders import build_schedule
from planner.specs.model import ModelSpec
from tools.calibrate.kernels import measured_model
from tools.calibrate.tables import read_table

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from small_plans import plan_of  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from planner.probe.plan_runs import require_runnable  # noqa: E402
from planner.probe.plan_slice import ProbeOptions  # noqa: E402
from planner.probe.run import ChunkSpec, ProbeRun  # noqa: E402
from planner.probe.run_price import EAGER  # noqa: E402
from tools.counted_bytes import (  # noqa: E402
    BytesAlive,
    count_stage,
    rehearse,
)

INT64 = 8
QUICK = (10,)
"""Rows of the table that run whenever tests do: a last stage of tp 8; tools/rehearse_h200 runs all."""


def measured_run(row: int) -> tuple[ProbeRun, dict[str, int]]:
    """The run of one row of the H200's stages, with as many micro-batches as fill its pipeline, and its numbers."""
    table = read_table("h200", "stages")
    names = (
        "tp",
        "pp",
        "dp",
        "stage",
        "layers",
        "batch",
        "seq",
        "microbatches",
        "static_bytes",
        "peak_allocated_bytes",
    )
    cells = {name: int(table.number(name)[row]) for name in names}
    pp, layers = cells["pp"], cells["layers"]
    recomputed = layers if table.text("recompute")[row] == "full" else 0
    chunks = tuple(
        ChunkSpec(
            first_layer=i * layers,
            last_layer=(i + 1) * layers,
            embedding=i == 0,
            head=i == pp - 1,
            num_recomputed=recomputed,
        )
        for i in range(pp)
    )
    run = ProbeRun.of(
        build_schedule("1f1b" if pp > 1 else "none", pp, 1, pp - cells["stage"]),
        model=measured_model(str(table.text("model")[row])).model_copy(update={"num_hidden_layers": layers * pp}),
        dtype="bfloat16",
        tp=cells["tp"],
        dp=cells["dp"],
        sequence_parallel=cells["tp"] > 1,
        micro_batch_size=cells["batch"],
        seq_length=cells["seq"],
        chunks=chunks,
        balanced_routing=True,
    )
    return run, cells


@pytest.mark.parametrize("row", QUICK)
def test_a_count_is_what_an_h200_measured(row: int) -> None:
    """The peaks are within 0.1%; that program had a micro-batch's tokens before the first step, this one has all of a
    step's within it."""
    run, cells = measured_run(row)
    counted = count_stage(run, cells["stage"], "hopper")
    tokens_bytes = INT64 * cells["batch"] * cells["seq"]
    assert counted.static_bytes == pytest.approx(cells["static_bytes"] - tokens_bytes, rel=3e-5)
    # these measurements lack the workspace of products
    assert counted.peak_bytes - (64 << 20) == pytest.approx(cells["peak_allocated_bytes"], rel=1e-3)


def test_a_storage_counts_as_long_as_anything_refers_to_it() -> None:
    account = BytesAlive()
    with FakeTensorMode(), account:
        x = torch.empty(100, 10)
        view = x[5:]
        assert account.num_bytes == 4096  # 4,000 bytes in pieces of 512
        del x
        assert account.num_bytes == 4096
        account.label = "later"
        y = view + 1.0
        assert account.alive == {"": 4096, "later": 4096}
        del view, y
        gc.collect()
        assert (account.num_bytes, account.peak_bytes, account.at_peak) == (0, 8192, {"": 4096, "later": 4096})


def test_what_a_kernel_takes_for_itself_counts_at_the_peak_alone() -> None:
    account = BytesAlive({torch.ops.aten.relu.default: lambda x: 7 * x.nbytes})
    with FakeTensorMode(), account:
        x = torch.empty(128)
        y = torch.relu(x)
        assert (account.num_bytes, account.peak_bytes, account.at_peak["relu"]) == (1024, 1024 + 7 * 512, 7 * 512)
        assert y.shape == x.shape


def test_a_storage_that_is_emptied_and_filled_is_counted_anew() -> None:
    account = BytesAlive()
    with account.resized(), FakeTensorMode(), account:
        x = torch.empty(1024)
        x.untyped_storage().resize_(0)
        assert account.num_bytes == 0
        x.untyped_storage().resize_(4096)
        assert account.num_bytes == 4096


SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
MLA = {"kv_lora_rank": 256, "q_lora_rank": 384, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {"pp": 2}),
    "sequence parallel": ({}, {"tp": 2, "pp": 2}),
    "whole sequences": ({"bias": True, "norm": "layernorm", "gated_mlp": False}, {"tp": 2, "sequence_parallel": False}),
    "recomputed": ({}, {"pp": 2, "recompute": "full"}),
    "MLP recomputed": ({}, {"pp": 2, "recompute": "selective", "recompute_modules": ("mlp",)}),
    "interleaved": ({"num_hidden_layers": 4}, {"pp": 2, "vpp": 2, "schedule": "interleaved-1f1b"}),
    "split sequences": ({}, {"cp": 2, "pp": 2}),
    "mixture": ({"moe": MOE}, {"pp": 2, "dp": 4, "ep": 4}),
    "latent": ({"mla": MLA, "moe": MOE}, {"pp": 2, "dp": 2, "ep": 2}),
    "windows and sinks": (
        {"attention_sinks": True, "bias": True, "activation": "quick_gelu", "moe": MOE, "sliding_window": 128},
        {"dp": 2, "ep": 2},
    ),
    "ALiBi": ({"position_embedding": "alibi", "num_key_value_heads": 8, "norm": "layernorm"}, {"pp": 2}),
}
"""Models and layouts whose peak is planned to 1%: an architecture's fields, and a layout's."""


def small(model: dict[str, Any], layout: dict[str, Any]) -> Plan:
    spec = ModelSpec(name="small", **{**SIZES, **model})
    sizes = {"tp": 1, "cp": 1, "pp": 1, "dp": 1, "sequence_parallel": layout.get("tp", 1) > 1, **layout}
    num_gpus = prod(int(sizes[axis]) for axis in ("tp", "cp", "pp", "dp"))
    return plan_of(spec, num_gpus, 1024, 8 * int(sizes["dp"]), **sizes)


@pytest.mark.thorough(3)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_takes_the_bytes_that_it_is_priced_at(kind: str) -> None:
    plan = small(*KINDS[kind])
    require_runnable(plan, ProbeOptions(device="cuda"))
    result = rehearse(plan, "all")
    assert [(one.name, one.stage, one.error_fraction) for one in result.comparisons if one.agrees is False] == []
    layers = [one for one in result.comparisons if one.name.startswith("layer")]
    assert layers
    for one in layers:
        assert one.measured == pytest.approx(one.predicted, rel=2e-3)


def test_norms_of_several_kernels_keep_more() -> None:
    model, rows = ModelSpec(name="small", **SIZES), 1024
    fused, unfused = (
        norm("norm", 512, rows, model, EAGER.model_copy(update={"fused_norm": is_fused})) for is_fused in (True, False)
    )
    assert unfused.saved_bytes() - fused.saved_bytes() == 4 * rows * 512
