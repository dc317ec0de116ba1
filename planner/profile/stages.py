"""Measured layers and pipeline stages against the operator lists: what kernels timed alone do not show."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.physics.compute import PassSeconds, accumulate_s, optimizer_s, part_seconds
from planner.physics.layers import decoder_layer, embedding, head
from planner.physics.operators import Item, Operator, num_parameters, operators_of
from planner.physics.shape import FloatArray, Shape
from planner.profile.kernels import COLD, Bench, Problem, cold
from planner.profile.tables import Table, read_table
from planner.specs.cluster import HardwareSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model
from planner.specs.runtime import load_runtime

MODELS = {"llama3-8b": "llama-3.1-8b", "llama2-13b": "llama-2-13b", "gpt3-175b": "gpt3-175b"}
EAGER = load_runtime("torch-eager")
STAGE_WEIGHT = 3.0
"""A stage is what training runs; a layer alone is measured in a loop of its own."""


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


class Rows:
    """The rows of one model in `layers.csv` or `stages.csv`, with their operators."""

    def __init__(self, table: Table, name: str, pipelined: bool) -> None:
        of = table.where(table.text("model") == name)
        self.rows = np.flatnonzero(table.text("model") == name)
        self.measured = Passes(of.seconds("forward_us"), of.seconds("backward_us"))
        tp, batch, seq = of.number("tp"), of.number("batch"), of.number("seq")
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
        self.num_layers, self.dp = of.number("layers"), of.number("dp")
        self.full = of.text("recompute") == "full"
        self.first, self.last = of.number("stage") == 0, of.number("stage") == of.number("pp") - 1
        self.embedding = self._operators(embedding(model, shape, EAGER))
        self.head = self._operators(head(model, shape, EAGER))
        self.optimizer_s = of.seconds("optimizer_us")
        self.parameters = of.number("parameters")

    @staticmethod
    def _operators(items: tuple[Item, ...]) -> list[Operator]:
        return operators_of(items)

    def predict(self, hardware: HardwareSpec, bench: Bench) -> Passes:
        """Seconds of one micro-batch; a layer alone runs at the clocks of a short measurement."""
        layer = _seconds(self.layer, hardware)
        backward = layer.dgrad_s + layer.wgrad_s
        if not self.pipelined:
            share = cold(layer.forward_s + backward, bench) / (layer.forward_s + backward)
            return Passes(layer.forward_s * share, backward * share)
        backward = backward + accumulate_s(hardware, num_parameters(self.layer)) + self.full * layer.forward_s
        forward, backward = self.num_layers * layer.forward_s, self.num_layers * backward
        for part, held in ((self.embedding, self.first), (self.head, self.last)):
            passes = _seconds(part, hardware)
            forward = forward + held * passes.forward_s
            added = passes.dgrad_s + passes.wgrad_s + accumulate_s(hardware, num_parameters(part))
            backward = backward + held * added
        return Passes(forward, backward)

    def predicted_parameters(self) -> FloatArray:
        parts = (
            (self.layer, self.num_layers), (self.embedding, self.first), (self.head, self.last)
        )  # fmt: skip
        total: FloatArray = np.asarray(sum(num_parameters(items) * times for items, times in parts))
        return total


def steps(gpu: str) -> Problem:
    """Layers and stages in eager torch, forward and backward."""
    layers, stages = read_table(gpu, "layers"), read_table(gpu, "stages")
    layers = layers.where(layers.number("compiled") == 0)
    groups = [Rows(layers, name, False) for name in np.unique(layers.text("model"))]
    groups += [Rows(stages, name, True) for name in np.unique(stages.text("model"))]
    sizes = [len(group.rows) for group in groups]
    names = np.concatenate((np.unique(layers.text("model")), np.unique(stages.text("model"))))

    def predict(hardware: HardwareSpec, bench: Bench) -> FloatArray:
        passes = [group.predict(hardware, bench) for group in groups]
        return np.concatenate([p.forward_s for p in passes] + [p.backward_s for p in passes])

    kinds = np.repeat(np.where([group.pipelined for group in groups], "stage", "layer"), sizes)
    labels: npt.NDArray[np.str_] = np.concatenate((np.char.add(kinds, " forward"), np.char.add(kinds, " backward")))
    measured = [group.measured.forward_s for group in groups] + [group.measured.backward_s for group in groups]
    return Problem(
        name="layers and stages",
        free={
            "sustained_fraction": (0.98, 0.7, 1.05),
            "backward_sustained_fraction": (0.96, 0.7, 1.05),
            "family_fraction.strided": (0.6, 0.2, 1.0),
            "host_us": (25.0, 5.0, 80.0),
            "bench.boost": COLD["bench.boost"],
            "bench.boost_us": (10_000.0, 1000.0, 50_000.0),
        },
        predict=predict,
        measured_s=np.concatenate(measured),
        groups=np.tile(np.repeat(names, sizes), 2),
        weights=np.where(np.char.startswith(labels, "stage"), STAGE_WEIGHT, 1.0),
        labels=labels,
    )


def optimizer_errors(gpu: str, hardware: HardwareSpec) -> FloatArray:
    """log(predicted / measured) of the optimizer seconds of all stages."""
    table = read_table(gpu, "stages")
    predicted = optimizer_s(hardware, table.number("parameters") / table.number("dp"), EAGER)
    return np.asarray(np.log(predicted / table.seconds("optimizer_us")))
