"""Bytes of stages and of whole runs against what allocators showed."""

from __future__ import annotations

from typing import Any

import pytest

from planner.layout.evaluate import evaluate
from planner.layout.runs import parse_run
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware
from planner.specs.training import Parallelism, TrainingSpec
from planner.validate.rows import PublishedRun, load_rows
from planner.validate.score import evaluate_rows
from tools.calibrate.kernels import measured_model
from tools.calibrate.tables import read_table

B200 = [row for row in load_rows() if row.family == "simumax-b200"]


@pytest.mark.parametrize("row", B200[::3], ids=lambda row: row.id)
def test_allocated_memory_of_megatron_on_b200(row: PublishedRun) -> None:
    """SimuMax's published runs, release v1.2: max_memory_allocated of the worst rank."""
    (scored,) = evaluate_rows([row])
    assert scored.memory_error == pytest.approx(0.0, abs=0.02)


def test_allocated_memory_is_right_on_average() -> None:
    errors = [abs(one.memory_error) for one in evaluate_rows(B200) if one.memory_error is not None]
    assert sum(errors) / len(errors) < 0.01


@pytest.mark.parametrize(
    ("layout", "gib"),
    [({"tp": 1, "pp": 4, "vpp": 8, "micro_batch_size": 1}, 56.55), ({"tp": 4, "pp": 1, "micro_batch_size": 2}, 53.22)],
)
def test_allocated_memory_of_megatron_on_h100(layout: dict[str, Any], gib: float) -> None:
    """Its own tests gpt3_7b_tp1_pp4_memory_speed and gpt3_7b_tp4_pp1_memory_speed: mem-max-allocated-bytes of the last
    rank on DGX H100 (golden_values_dev_dgx_h100.json). Unfused loss, dropout, no sequence parallelism."""
    model = {
        "name": "gpt3-7b", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 16384,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 131_073, "gated_mlp": False,
        "norm": "layernorm", "bias": True, "position_embedding": "learned", "max_position_embeddings": 8192,
    }  # fmt: skip
    features = {
        "overlap_grad_reduce": True, "overlap_param_gather": True, "cross_entropy_fusion": False, "dropout": True,
        "flash_attention": True,
    }  # fmt: skip
    run = {"model": model, "hardware": "h100", "num_gpus": 8, "runtime": "megatron", "seq_length": 8192}
    run |= {"global_batch_size": 8, "dtype": "bf16", "features": features}
    run["parallelism"] = {"zero_stage": 1, "sequence_parallel": False, **layout}
    last = parse_run({"run": run}).evaluate().stages[-1]
    assert last.memory.peak_allocated_bytes / 2**30 == pytest.approx(gib, rel=0.015)


BLOOM = [row for row in load_rows() if row.family == "bloom-prequel" and row.measured.peak_memory_gib]
"""nvidia-smi of one node after one iteration, to the GB."""


@pytest.mark.parametrize("recipe", ["fp16", None])
def test_memory_of_megatron_deepspeed(recipe: str | None) -> None:
    """fp16 gradients are summed in fp16; bf16 ones in fp32 and kept beside (4 more bytes a parameter)."""
    rows = [row for row in BLOOM if row.run.get("precision_recipe") == recipe]
    errors = sorted(abs(one.memory_error or 0.0) for one in evaluate_rows(rows))
    assert len(errors) >= 10
    assert sum(errors) / len(errors) < 0.06
    assert errors[int(0.9 * len(errors))] < 0.12


def test_the_loss_of_torchtitan_was_not_compiled_in_2024() -> None:
    """Llama 3 8B on H100, compiled: reserved memory within 3%, most of it logits in fp32."""
    rows = [row for row in load_rows() if row.id.startswith("torchtitan-8b-h100") and "compile" in row.id]
    assert len(rows) == 4
    for one in evaluate_rows(rows):
        assert one.memory_error == pytest.approx(0.0, abs=0.03), one.row.id


def h200_stages() -> list[dict[str, str]]:
    table = read_table("h200", "stages")
    names = ("model", "tp", "pp", "dp", "stage", "layers", "batch", "seq", "recompute", "microbatches")
    columns = {name: table.text(name) for name in (*names, "static_bytes", "peak_allocated_bytes")}
    return [{name: str(column[row]) for name, column in columns.items()} for row in range(table.num_rows)]


@pytest.mark.parametrize("row", h200_stages(), ids=lambda row: "-".join(row.values()))
def test_allocated_memory_of_a_stage_on_h200(row: dict[str, str]) -> None:
    """Eager torch: before the first forward to a ten-thousandth, at the step's worst moment within 1%."""
    tp, pp, dp, batch = (int(row[name]) for name in ("tp", "pp", "dp", "batch"))
    model = measured_model(row["model"])
    model = model.model_copy(update={"num_hidden_layers": int(row["layers"]) * pp})
    recompute: Any = row["recompute"]
    plan = evaluate(
        model,
        ClusterSpec(hardware=load_hardware("h200"), num_gpus=tp * pp * dp),
        TrainingSpec(seq_length=int(row["seq"]), global_batch_size=batch * dp * int(row["microbatches"])),
        Parallelism(tp=tp, pp=pp, dp=dp, micro_batch_size=batch, recompute=recompute, sequence_parallel=tp > 1),
        runtime="torch-eager",
    )
    memory = plan.stages[int(row["stage"])].memory
    static = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert static == pytest.approx(int(row["static_bytes"]), rel=1e-4)
    assert memory.peak_allocated_bytes == pytest.approx(int(row["peak_allocated_bytes"]), rel=0.01)
