"""Measured layers and pipeline stages as a problem to fit: what kernels timed alone do not show."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.physics.compute import part_seconds
from planner.physics.kernels.streams import PassSeconds
from planner.physics.kernels.updates import accumulate_s, optimizer_s
from planner.physics.layers import decoder_layer, embedding, head
from planner.physics.operators import Item, Operator, num_parameters, operators_of
from planner.profile.kernel_problems import COLD, BenchNumbers, FitProblem, cold
from planner.profile.tables import Table, read_table
from planner.shape import FloatArray, Shape
from planner.specs.hardware import HardwareSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model
from planner.trainers.load import load_runtime

MODELS = {"llama3-8b": "llama-3.1-8b", "llama2-13b": "llama-2-13b", "gpt3-175b": "gpt3-175b"}
EAGER = load_runtime("torch-eager").model_copy(update={"copies_exchanged": True})
"""The program of the measured stages, which ran alone and copied what ranks exchange."""
STAGE_WEIGHT = 3.0
"""Weight of a stage's row. Training runs stages; a layer alone is measured in a loop of its own."""


class Passes(NamedTuple):
    """Forward and backward seconds of rows."""

    forward_s: FloatArray
    backward_s: FloatArray


def measured_model(name: str) -> ModelSpec:
    """The model as it was measured: without biases, position table or tied embeddings."""
    bare = {"bias": False, "position_embedding": None, "max_position_embeddings": None, "tie_word_embeddings": False}
    model = load_model(MODELS[name])
    return ModelSpec.model_validate({**model.model_dump(exclude={"training"}), **bare})


def _seconds(items: list[Operator], hardware: HardwareSpec) -> PassSeconds:
    return part_seconds(items, hardware, "bf16", EAGER)


class ModelRows:
    """The rows of one model in `layers.csv` or `stages.csv`, with their operators."""

    def __init__(self, table: Table, name: str, pipelined: bool) -> None:
        model_rows = table.where(table.text("model") == name)
        self.names = model_rows.text("model")
        self.measured = Passes(model_rows.seconds("forward_us"), model_rows.seconds("backward_us"))
        self.measured_optimizer_s = model_rows.seconds("optimizer_us") if pipelined else np.zeros(0)
        tp, batch, seq = model_rows.number("tp"), model_rows.number("batch"), model_rows.number("seq")
        model, self.pipelined = measured_model(name), pipelined
        shape = Shape(
            tp=tp,
            micro_batch_size=batch,
            seq_length=seq,
            sequence_parallel=(tp > 1).astype(float) if pipelined else 0.0,
        )
        self.layer = self._operators(decoder_layer(model, model.layers[0], shape, EAGER))
        if not pipelined:
            return
        self.num_layers, self.dp = model_rows.number("layers"), model_rows.number("dp")
        self.full = model_rows.text("recompute") == "full"
        self.first = model_rows.number("stage") == 0
        self.last = model_rows.number("stage") == model_rows.number("pp") - 1
        self.embedding = self._operators(embedding(model, shape, EAGER))
        self.head = self._operators(head(model, shape, EAGER))

    @staticmethod
    def _operators(items: tuple[Item, ...]) -> list[Operator]:
        return operators_of(items)

    def predict(self, hardware: HardwareSpec, bench: BenchNumbers) -> Passes:
        """Seconds of one micro-batch. A layer alone runs at the clocks of a short measurement."""
        layer = _seconds(self.layer, hardware)
        backward = layer.dgrad_s + layer.wgrad_s
        if not self.pipelined:
            forward_s, backward_s = np.asarray(layer.forward_s), np.asarray(backward)
            share = cold(forward_s + backward_s, bench) / (forward_s + backward_s)
            return Passes(forward_s * share, backward_s * share)
        backward = backward + accumulate_s(hardware, num_parameters(self.layer)) + self.full * layer.forward_s
        forward, backward = self.num_layers * layer.forward_s, self.num_layers * backward
        factor = bench["head_backward"]
        loss = [replace(op, backward_factor=factor if op.kind == "gemm" else 1.0) for op in self.head]
        for part, is_on_stage in ((self.embedding, self.first), (loss, self.last)):
            passes = _seconds(part, hardware)
            forward = forward + is_on_stage * passes.forward_s
            added = passes.dgrad_s + passes.wgrad_s + accumulate_s(hardware, num_parameters(part))
            backward = backward + is_on_stage * added
        return Passes(forward, backward)

    @property
    def parameters(self) -> FloatArray:
        """Parameters of the stage on one rank."""
        table, rest = (np.asarray(n, dtype=float) for n in (self._table(), num_parameters(self.head) * self.last))
        return np.asarray(self.num_layers * num_parameters(self.layer) + table + rest)

    def _table(self) -> FloatArray:
        return np.asarray(num_parameters(self.embedding) * self.first, dtype=float)

    def optimizer_s(self, hardware: HardwareSpec) -> FloatArray:
        """Optimizer seconds of the first data-parallel rank."""
        shard = self.parameters / self.dp
        return np.asarray(optimizer_s(hardware, shard, EAGER, np.minimum(self._table(), shard)))


def _groups(table: Table, pipelined: bool) -> list[ModelRows]:
    return [ModelRows(table, name, pipelined) for name in np.unique(table.text("model"))]


def steps_problem(gpu: str) -> FitProblem:
    """Layers and stages in eager torch: forward, backward, and the stages' optimizer."""
    layers = read_table(gpu, "layers")
    alone = _groups(layers.where(layers.number("compiled") == 0), pipelined=False)
    staged = _groups(read_table(gpu, "stages"), pipelined=True)

    def predict(hardware: HardwareSpec, bench: BenchNumbers) -> FloatArray:
        passes = [rows.predict(hardware, bench) for rows in (*alone, *staged)]
        optimizer = [rows.optimizer_s(hardware) for rows in staged]
        return np.concatenate([p.forward_s for p in passes] + [p.backward_s for p in passes] + optimizer)

    measured = [rows.measured for rows in (*alone, *staged)]
    kinds = ["layer"] * sum(len(rows.names) for rows in alone) + ["stage"] * sum(len(rows.names) for rows in staged)
    labels = [f"{kind} {way}" for way in ("forward", "backward") for kind in kinds]
    labels += ["stage optimizer"] * kinds.count("stage")
    names = np.concatenate([rows.names for rows in (*alone, *staged)])
    return FitProblem(
        name="steps",
        num_guesses=1,
        free={
            "sustained_fraction": (0.98, 0.7, 1.05),
            "backward_sustained_fraction": (0.96, 0.7, 1.05),
            "family_fraction.strided": (0.6, 0.2, 1.0),
            "family_fraction.optimizer": (0.7, 0.2, 1.0),
            "host_us": (25.0, 5.0, 80.0),
            "bench.boost": COLD["bench.boost"],
            "bench.boost_us": (10_000.0, 1000.0, 50_000.0),
            # RuntimeSpec.head_backward_factor of torch-eager
            "bench.head_backward": (0.8, 0.5, 1.0),
        },
        predict=predict,
        measured_s=np.concatenate(
            [m.forward_s for m in measured]
            + [m.backward_s for m in measured]
            + [rows.measured_optimizer_s for rows in staged]
        ),
        groups=np.concatenate((names, names, *(rows.names for rows in staged))),
        weights=np.where(np.char.startswith(labels, "stage"), STAGE_WEIGHT, 1.0),
        labels=np.array(labels),
    )
