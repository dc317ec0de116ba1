"""The fit of a GPU's efficiency block to its measured kernels, layers and stages: `tools/calibrate kernels`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import yaml

from planner.errors import SpecError
from planner.physics.compute import issue_seconds, operator_seconds, summed, with_host
from planner.physics.kernels import PassSeconds, accumulate_s, optimizer_s, product_s
from planner.physics.layers import decoder_layer, embedding, head
from planner.physics.operators import Item, Operator, num_parameters, operators_of
from planner.profile.fitting import (
    COLD,
    TIMER,
    BenchNumbers,
    FitProblem,
    MeasuredTable,
    ProductCells,
    Residuals,
    Tables,
    attention_problem,
    cold,
    fit,
    floored,
    gemm_problem,
    hardware_with,
    log_errors,
    product_groups,
    stream_problem,
)
from planner.shape import FloatArray, Shape
from planner.specs.base import Spec
from planner.specs.hardware import AttentionEfficiency, HardwareSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.units import MICRO
from planner.trainers.load import load_runtime
from tools.calibrate.tables import measured_gpus, tables_of

MODELS = {"llama3-8b": "llama-3.1-8b", "llama2-13b": "llama-2-13b", "gpt3-175b": "gpt3-175b"}
EAGER = load_runtime("torch-eager").model_copy(update={"copies_exchanged": True})
"""The program of the measured stages, which ran alone and copied what ranks exchange."""
NUM_FOLDS = 8
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


def _eager_seconds(items: list[Operator], hardware: HardwareSpec) -> PassSeconds:
    return with_host(
        summed(operator_seconds(op, hardware, "bf16", EAGER) for op in items),
        issue_seconds(items, hardware, EAGER),
        EAGER,
    )


class ModelRows:
    """The rows of one model in `layers.csv` or `stages.csv`, with their operators."""

    def __init__(self, table: MeasuredTable, name: str, pipelined: bool) -> None:
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
        layer = _eager_seconds(self.layer, hardware)
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
            passes = _eager_seconds(part, hardware)
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


def _models(table: MeasuredTable, pipelined: bool) -> list[ModelRows]:
    return [ModelRows(table, name, pipelined) for name in np.unique(table.text("model"))]


def steps_problem(tables: Tables) -> FitProblem:
    """Layers and stages in eager torch: forward, backward, and the stages' optimizer."""
    layers = tables["layers"]
    alone = _models(layers.where(layers.number("compiled") == 0), pipelined=False)
    staged = _models(tables["stages"], pipelined=True)

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


NARROW = {"fp8": "gemm.fp8_factor", "mxfp8": "gemm.mx_factor"}
"""The number that tells products of 8 bits from those of 16, or products with a scale per block from other ones."""


def narrow_gemm_problem(tables: Tables, dtype: str = "fp8") -> FitProblem:
    """Dense products of 8 bits, forward, operands already cast."""
    table, column = tables["gemm"], f"{dtype}_forward_us"
    table = table.where(np.isfinite(table.number(column)) if column in table else np.zeros(table.num_rows, bool))
    m, n, k = (table.number(c) for c in "mnk")

    def predict(hardware: HardwareSpec, bench: BenchNumbers) -> FloatArray:
        fraction = hardware.efficiency.gemm.forward_fraction
        return floored(cold(np.asarray(product_s(hardware, dtype, fraction, 1, m, n, k)), bench), bench)

    return FitProblem(
        name=f"gemm {dtype}",
        free={NARROW[dtype]: (1.0, 0.3, 1.2), **TIMER, **COLD},
        predict=predict,
        measured_s=table.seconds(column) if table.num_rows else np.empty(0),
        groups=product_groups(table),
    )


def grouped_gemm_problem(tables: Tables) -> FitProblem:
    """Experts' bf16 products, three passes: in one launch, or a few at a time on streams."""
    table = tables["grouped_gemm"]
    count, m, n, k = (table.number(c) for c in ("count", "rows", "n", "k"))
    op = Operator(name="grouped", kind="gemm", count=count, m=m, n=n, k=k)
    streams = "streams" in table
    timed = ProductCells(table, grouped=not streams)
    launches = timed.each(count) if streams else 1.0
    return FitProblem(
        name="gemm grouped",
        free={"gemm.grouped_factor": (0.93, 0.3, 1.2), **TIMER},
        predict=lambda hardware, bench: np.maximum(timed.seconds(op, hardware), launches * bench["floor_us"] * MICRO),
        measured_s=timed.measured_s,
        groups=timed.each(table.text("source" if "source" in table else "model")),
        labels=timed.passes,
    )


PROBLEMS: tuple[tuple[str, Callable[[Tables], FitProblem]], ...] = (
    ("stream", stream_problem),
    ("gemm", gemm_problem),
    ("gemm", narrow_gemm_problem),
    ("gemm", lambda tables: narrow_gemm_problem(tables, "mxfp8")),
    ("grouped_gemm", grouped_gemm_problem),
    ("attention", lambda tables: attention_problem(tables, "cudnn")),
    ("attention", lambda tables: attention_problem(tables, "flash")),
    ("stages", steps_problem),
)
"""Tables and the problems that they give, in order: later ones build on the numbers of earlier ones."""


def problems(gpu: str) -> Sequence[FitProblem]:
    """The fit problems of a GPU's tables. A table without rows (nothing timed in 8 bits) gives none."""
    tables = tables_of(gpu)
    problems_of_gpu = (problem(tables) for table, problem in PROBLEMS if table in tables)
    return [problem for problem in problems_of_gpu if len(problem.measured_s)]


def left_out(problem: FitProblem, hardware: HardwareSpec) -> FloatArray:
    """Log errors of every row, predicted by a fit without the row's group that starts from the fit of all rows."""
    near = fit(problem, hardware)
    names = np.unique(problem.groups)
    folds = [names[i :: min(NUM_FOLDS, len(names))] for i in range(min(NUM_FOLDS, len(names)))]
    errors = np.zeros(len(problem.measured_s))
    for fold in folds:
        out = np.isin(problem.groups, fold)
        errors[out] = log_errors(problem, hardware, fit(problem, hardware, ~out, near))[out]
    return errors


def fit_all(gpu: str, hardware: HardwareSpec, leave_out: bool = True) -> HardwareSpec:
    """Fit every table in turn, later ones on the numbers of earlier ones, and print the residuals."""
    for problem in problems(gpu):
        values = fit(problem, hardware)
        _report(problem, log_errors(problem, hardware, values), left_out(problem, hardware) if leave_out else None)
        hardware = hardware_with(hardware, values)
    return hardware


def _report(problem: FitProblem, errors: FloatArray, left_out_errors: FloatArray | None) -> None:
    labels = problem.labels if problem.labels is not None else np.full(len(errors), "")
    for label in np.unique(labels):
        rows = labels == label
        print(f"{problem.name + ' ' + label:28s} {Residuals.of(errors[rows])}")
        if left_out_errors is not None:
            print(f"{'  left out':28s} {Residuals.of(left_out_errors[rows])}", flush=True)


def efficiency_block(efficiency: Spec) -> str:
    """The efficiencies as YAML with four digits, without defaults."""
    return yaml.safe_dump({"efficiency": _rounded(efficiency.model_dump(exclude_defaults=True))}, sort_keys=False)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main(arguments: Sequence[str]) -> None:
    """`kernels [GPU]`: fit the tables under data/GPU (h200) and print residuals and the block for its profile."""
    gpu = arguments[0] if arguments else "h200"
    if gpu not in measured_gpus():
        raise SpecError(f"tools.calibrate kernels: no tables of {gpu!r}", f"one of {', '.join(measured_gpus())}")
    hardware = load_hardware(gpu)
    tables = tables_of(gpu)
    timed = tables["attention"].text("backend") if "attention" in tables else ()
    start: dict[str, Any] = {"cudnn": AttentionEfficiency()} if "cudnn" in timed else {}
    if "stages" in tables:
        start |= {"sustained_fraction": 1.0, "backward_sustained_fraction": 1.0}
    efficiency = hardware.efficiency.model_copy(update=start)
    fitted = fit_all(gpu, hardware.model_copy(update={"efficiency": efficiency}))
    print(efficiency_block(fitted.efficiency))
