"""The stages that a GPU check runs, most telling first: those of the shipped H200 tables, and other kinds of layers."""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.answer import Plan
from planner.layout.evaluate import evaluate
from planner.probe.plan_runs import scaled_model
from planner.probe.plan_slice import RankGrid
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.specs.units import MICRO
from tools.calibrate.kernels import MODELS, measured_model
from tools.calibrate.tables import tables_of

TABLES_OF = "h200"
"""The GPU whose measured stages and layers ship with the planner."""
SMALL_HIDDEN_SIZE, SMALL_SEQ_LENGTH = 64, 64
"""Sizes of the same stages on a CPU, where a rehearsal runs them."""


class StageCase(NamedTuple):
    """One stage as the shipped tables have it: `layers` decoder layers on one rank of the layout, peers emulated."""

    model: str
    """A name of the shipped tables (a model without biases and positions), or of a model spec."""
    layers: int
    seq: int
    tp: int = 1
    pp: int = 4
    dp: int = 8
    ep: int = 1
    cp: int = 1
    stage: int = 0
    batch: int = 1
    microbatches: int = 12
    recompute: Literal["none", "full"] = "none"
    zero: Literal[1, 3] = 1

    @property
    def name(self) -> str:
        sizes = [f"{axis} {size}" for axis, size in (("tp", self.tp), ("cp", self.cp), ("ep", self.ep)) if size > 1]
        layers = f"{self.layers} layer{'s' if self.layers > 1 else ''}"
        where = [f"stage {self.stage} of {self.pp}"] if self.pp > 1 else []
        more = [f"{self.recompute} recompute"] * (self.recompute != "none") + [f"ZeRO-{self.zero}"] * (self.zero > 1)
        return ", ".join([f"{self.model}: {layers}", f"{self.batch} × {self.seq}", *where, *sizes, *more])

    def plan(self, hardware: HardwareSpec, small: bool = False) -> Plan:
        """The plan for eager torch whose stage this is; `small`: with narrow matrices and short sequences."""
        model, seq = self.whole_model, self.seq
        if small:
            seq = SMALL_SEQ_LENGTH
            grid = RankGrid(self.pp, 1, self.cp, self.tp, self.ep)
            model = scaled_model(model, SMALL_HIDDEN_SIZE, model.num_hidden_layers, seq, grid)
        ranks = self.tp * self.cp * self.pp * self.dp
        return evaluate(
            model,
            ClusterSpec(hardware=hardware, num_gpus=ranks),
            TrainingSpec(seq_length=seq, global_batch_size=self.batch * self.dp * self.microbatches),
            Parallelism(
                tp=self.tp,
                cp=self.cp,
                pp=self.pp,
                dp=self.dp,
                ep=self.ep,
                micro_batch_size=self.batch,
                recompute=self.recompute,
                zero_stage=self.zero,
                sequence_parallel=self.tp > 1,
            ),
            runtime="torch-eager",
        )

    @property
    def whole_model(self) -> ModelSpec:
        """The model with as many layers as all stages have together."""
        model = measured_model(self.model) if self.model in MODELS else load_model(self.model)
        changes = {"num_hidden_layers": self.layers * self.pp, "num_nextn_predict_layers": 0}
        for name in ("layer_types", "mlp_layer_types"):
            listed = getattr(model, name)
            changes |= {} if listed is None else {name: listed[: self.layers * self.pp]}
        return model.model_copy(update=changes)

    def shipped(self) -> dict[str, float]:
        """This stage in the shipped tables, by quantity; empty where it is in none of them."""
        return self._shipped_stage() or self._shipped_layer()

    def _shipped_stage(self) -> dict[str, float]:
        """A stage's passes and bytes. Its optimizer did not clip gradients, as the probe's does."""
        row = self._row(
            "stages", layers=self.layers, pp=self.pp, dp=self.dp, stage=self.stage, recompute=self.recompute
        )
        if not row:
            return {}
        seconds = {name: float(row[f"{name}_us"]) * MICRO for name in ("forward", "backward")}
        bytes_of = {"static memory": "static_bytes", "peak allocated": "peak_allocated_bytes"}
        return {**seconds, **{name: float(row[column]) for name, column in bytes_of.items()}}

    def _shipped_layer(self) -> dict[str, float]:
        """A layer's forward. Its backward was timed without adding up gradients, and with tp without sequence
        parallelism."""
        alone = self.layers == 1 and self.tp == 1 and 0 < self.stage < self.pp - 1
        row = self._row("layers", compiled=0) if alone else {}
        return {"forward": float(row["forward_us"]) * MICRO} if row else {}

    def _row(self, table: str, **fields: object) -> dict[str, str]:
        """The row of a shipped table with this model, tp, batch and sequence, and these fields."""
        if self.model not in MODELS:
            return {}
        wanted = {"model": self.model, "tp": self.tp, "batch": self.batch, "seq": self.seq, **fields}
        words = {name: str(value) for name, value in wanted.items()}
        return next((row for row in tables_of(TABLES_OF)[table].rows() if words.items() <= row.items()), {})


CASES = (
    StageCase("llama3-8b", 8, 8192),
    StageCase("llama-3.1-405b", 4, 8192, tp=8, pp=8, stage=7),
    StageCase("mixtral-8x7b", 2, 4096, ep=8, stage=1),
    StageCase("deepseek-v3", 1, 4096, ep=32, pp=8, dp=32, stage=4),
    StageCase("llama3-8b", 8, 8192, stage=3),
    StageCase("gpt3-175b", 12, 2048, tp=8, pp=8, dp=16, batch=2, microbatches=24),
    StageCase("llama-3.2-1b", 16, 8192, pp=1, microbatches=4),
    StageCase("llama-3.1-70b", 10, 8192, tp=8),
    StageCase("llama3-8b", 1, 8192, stage=1),
    StageCase("llama2-13b", 20, 4096, tp=2, pp=2, dp=4, batch=2, microbatches=8),
    StageCase("qwen3-30b-a3b", 4, 4096, ep=8, stage=1),
    StageCase("deepseek-v2-lite", 4, 4096, ep=8, stage=1),
    StageCase("gpt-oss-20b", 4, 4096, ep=8, stage=1),
    StageCase("llama3-8b", 8, 8192, tp=2, stage=3),
    StageCase("gpt3-175b", 12, 2048, tp=8, pp=8, dp=16, batch=2, microbatches=24, recompute="full"),
    StageCase("gemma-3-27b", 6, 4096, tp=2, stage=1),
    StageCase("llama-3.1-8b", 4, 32768, cp=4, stage=1),
    StageCase("llama3-8b", 32, 4096, pp=1, microbatches=4),
    StageCase("llama3-8b", 8, 8192, tp=2),
    StageCase("gpt3-175b", 12, 2048, tp=8, pp=8, dp=16, stage=7, batch=2, microbatches=24),
    StageCase("llama-3.2-1b", 16, 8192, pp=1, dp=64, zero=3, microbatches=4),
    StageCase("llama2-13b", 20, 4096, tp=2, pp=2, dp=4, stage=1, batch=2, microbatches=8),
    StageCase("llama3-8b", 8, 8192, stage=1),
    StageCase("llama3-8b", 8, 8192, stage=2),
    StageCase("gpt3-175b", 1, 2048, stage=1),
    StageCase("llama2-13b", 1, 4096, stage=1),
    StageCase("llama3-8b", 32, 8192, pp=1, microbatches=4, recompute="full"),
    StageCase("llama3-8b", 16, 4096, pp=1, dp=1, microbatches=4),
)
"""All cases, in the order in which a check runs them until its time is up."""
