"""Measured tables of kernels as problems to fit: free numbers, their bounds, and the cost model's seconds of a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.physics.kernels.attention import attention_s
from planner.physics.kernels.products import gemm_s, product_s
from planner.physics.kernels.streams import stream_s
from planner.physics.operators import BF16, FP32, Operator
from planner.profile.tables import Table, TableSource, read_table
from planner.shape import FloatArray
from planner.specs.hardware import HardwareSpec
from planner.specs.units import MICRO

Bounds = tuple[float, float, float]
"""First guess, least and largest value."""
BenchNumbers = Mapping[str, float]
"""Numbers that describe the measurement and not the GPU, by name."""
TIMER: dict[str, Bounds] = {"bench.floor_us": (18.0, 5.0, 200.0)}
"""A kernel timed alone takes at least the host's time to issue it between two events."""
COLD: dict[str, Bounds] = {"bench.boost": (0.1, 0.001, 0.5), "bench.boost_us": (400.0, 50.0, 3000.0)}
"""Short kernels timed alone stay below the power limit on average: rates are higher by boost · exp(-t / boost_us)."""
SHARE: Bounds = (0.7, 0.01, 1.1)


@dataclass(frozen=True, slots=True)
class FitProblem:
    """Free numbers (paths inside `Efficiency`; `bench.*` belong to the measurement) that explain one measured table."""

    name: str
    free: dict[str, Bounds]
    predict: Callable[[HardwareSpec, BenchNumbers], FloatArray]
    measured_s: FloatArray
    groups: npt.NDArray[np.str_]
    """Rows with the same name are left out together."""
    weights: FloatArray | float = 1.0
    labels: npt.NDArray[np.str_] | None = None
    """Parts of the table that the report tells apart."""
    alike: Mapping[str, str] = field(default_factory=dict)
    """Numbers that the table cannot tell apart from others, and the free number that each is set equal to."""
    num_guesses: int = 6
    """Number of first guesses. Tiles, waves and a boost explain much the same, so that one fit may miss the best. Whole
    stages are slow to price and have no such numbers."""


def cold(seconds: FloatArray, bench: BenchNumbers) -> FloatArray:
    """Seconds of work that is timed alone, and is too short to reach the power limit."""
    return seconds / (1 + bench["boost"] * np.exp(-seconds / (bench["boost_us"] * MICRO)))


def floored(seconds: FloatArray, bench: BenchNumbers) -> FloatArray:
    """Seconds that a stop-watch around one call shows."""
    return np.maximum(seconds, bench["floor_us"] * MICRO)


PRODUCTS: dict[str, tuple[str, int]] = {
    "forward_us": ("forward", BF16),
    "dgrad_us": ("dgrad", BF16),
    "wgrad_us": ("wgrad", BF16),
    "wgrad_bf16_sum_us": ("wgrad", 2 * BF16),
    "wgrad_fp32_sum_us": ("wgrad", 2 * FP32),
}
"""Columns of a table of products: which pass, and the bytes moved per weight where it is dw (sums: both ways)."""


LEAST_ROWS = 20
"""Number of products below which a table gives the level alone; the curves are then those of a sibling."""


class ProductCells:
    """The cells of a table of matrix products that hold a time, column after column."""

    def __init__(self, table: Table, grouped: bool = True) -> None:
        self.columns = [column for column in PRODUCTS if column in table]
        seconds = np.concatenate([table.seconds(column) for column in self.columns])
        self.cells = np.isfinite(seconds)
        self.measured_s = seconds[self.cells]
        self.passes = self.each(np.repeat([PRODUCTS[column][0] for column in self.columns], table.num_rows))
        self.wgrads = {column for column in self.columns if PRODUCTS[column][0] == "wgrad"}
        self.grouped = grouped

    def each(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The values of cells that hold a time, from one value per cell or per row."""
        return np.asarray(np.resize(values, len(self.cells))[self.cells])

    def seconds(self, op: Operator, hardware: HardwareSpec) -> FloatArray:
        """The cost model's seconds of every cell."""
        parts = [
            getattr(gemm_s(op, hardware, "bf16", self.grouped, num_bytes), f"{name}_s")
            for name, num_bytes in (PRODUCTS[column] for column in self.columns)
        ]
        return np.asarray(np.concatenate(parts)[self.cells])


def gemm_problem(tables: TableSource) -> FitProblem:
    """Dense bf16 products, three passes."""
    table = read_table(tables, "gemm")
    m, n, k = (table.number(c) for c in "mnk")
    op, timed = Operator(name="gemm", kind="gemm", m=m, n=n, k=k), ProductCells(table)

    def predict(hardware: HardwareSpec, bench: BenchNumbers) -> FloatArray:
        return floored(cold(timed.seconds(op, hardware), {"boost": 0.0, "boost_us": 1.0, **bench}), bench)

    if table.num_rows < LEAST_ROWS:
        return FitProblem(
            name="gemm level",
            free={"gemm.forward_fraction": SHARE, "gemm.wave_fraction": (0.9, 0.3, 1.15), **TIMER},
            predict=predict,
            measured_s=timed.measured_s,
            groups=timed.each(_groups(table)),
            alike={f"gemm.{gradient}_fraction": "gemm.forward_fraction" for gradient in ("dgrad", "wgrad")},
        )
    # one kind of sum does not tell what it costs from how fast its product is
    alike = {"gemm.wgrad_fraction": "gemm.dgrad_fraction"} if timed.wgrads == {"wgrad_fp32_sum_us"} else {}
    return FitProblem(
        name="gemm",
        free={
            "gemm.forward_fraction": SHARE,
            "gemm.dgrad_fraction": SHARE,
            **({} if alike else {"gemm.wgrad_fraction": SHARE}),
            "gemm.wave_fraction": (0.9, 0.5, 1.15),
            "gemm.ramp_k": (150.0, 10.0, 1000.0),
            "gemm.tile_overhead": (12.0, 1.0, 60.0),
            **({"gemm.accumulate_fraction": (0.7, 0.01, 1.0)} if "wgrad_fp32_sum_us" in timed.wgrads else {}),
            **TIMER,
            **COLD,
        },
        predict=predict,
        measured_s=timed.measured_s,
        groups=timed.each(_groups(table)),
        labels=timed.passes,
        alike=alike,
    )


def _groups(table: Table) -> npt.NDArray[np.str_]:
    """Products of one n and k, or of one source where several timed them: what is left out together."""
    return table.text("source") if "source" in table else np.char.add(table.text("n"), table.text("k"))


NARROW = {"fp8": "gemm.fp8_factor", "mxfp8": "gemm.mx_factor"}
"""The number that tells products of 8 bits from those of 16, or products with a scale per block from other ones."""


def narrow_gemm_problem(tables: TableSource, dtype: str = "fp8") -> FitProblem:
    """Dense products of 8 bits, forward, operands already cast."""
    table, column = read_table(tables, "gemm"), f"{dtype}_forward_us"
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
        groups=_groups(table),
    )


def grouped_gemm_problem(tables: TableSource) -> FitProblem:
    """Experts' bf16 products, three passes: in one launch, or a few at a time on streams."""
    table = read_table(tables, "grouped_gemm")
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


def attention_problem(tables: TableSource, backend: str, pads: bool = False) -> FitProblem:
    """One attention backend, forward and backward. `pads`: values were padded to keys."""
    table = read_table(tables, "attention")
    table = table.where(table.text("backend") == backend)
    batch, heads, kv_heads, seq, qk, v = (
        table.number(c) for c in ("batch", "heads", "kv_heads", "seq", "qk_dim", "v_dim")
    )
    op = Operator(
        name=backend, kind="attention", batch=batch, heads=heads, kv_heads=kv_heads, q_len=seq, kv_len=seq, qk_dim=qk,
        v_dim=qk if pads else v,
    )  # fmt: skip

    def predict(hardware: HardwareSpec, bench: BenchNumbers) -> FloatArray:
        forward_s, backward_s = attention_s(op, hardware, backend)
        return np.concatenate((forward_s + bench["issue_us"] * MICRO, backward_s + bench["autograd_us"] * MICRO))

    return FitProblem(
        name=f"attention {backend}",
        free={
            f"{backend}.forward_fraction": SHARE,
            f"{backend}.backward_fraction": SHARE,
            f"{backend}.forward_ramp_keys": (250.0, 10.0, 2000.0),
            f"{backend}.backward_ramp_keys": (450.0, 10.0, 4000.0),
            f"{backend}.tail_fraction": (0.4, 0.01, 2.0),
            **({f"{backend}.half_head_dim": (50.0, 1.0, 300.0)} if len(np.unique(qk)) > 1 else {}),
            **({f"{backend}.wide_factor": (0.9, 0.3, 1.2)} if backend == "cudnn" or (qk > 128).any() else {}),
            "bench.issue_us": (10.0, 0.1, 200.0),
            "bench.autograd_us": (50.0, 0.1, 200.0),
        },
        predict=predict,
        measured_s=np.concatenate((table.seconds("forward_us"), table.seconds("backward_us"))),
        groups=np.tile(np.char.add(heads.astype(str), qk.astype(str)), 2),
        labels=np.repeat(["forward", "backward"], table.num_rows),
    )


STREAMS: dict[str, tuple[str, float, int, float, int]] = {
    "copy": ("copy", 4, 1, 0, 0),
    "add": ("copy", 6, 1, 0, 0),
    "swiglu": ("copy", 10, 2, 18, 3),
    "rms_norm": ("norm", 4, 1, 10, 2),
    "layer_norm": ("norm", 4, 1, 10, 2),
    "cross_entropy_fp32": ("loss", 22, 3, 22, 3),
    "adamw_fused_fp32": ("optimizer", 28, 1, 0, 0),
    "accumulate_bf16_into_fp32": ("accumulate", 10, 1, 0, 0),
    "add_fp32": ("copy", 12, 1, 0, 0),
    "add_fp32_bf16": ("copy", 10, 1, 0, 0),
    "gelu": ("copy", 4, 1, 6, 1),
    "layer_norm_fp32": ("norm", 8, 1, 20, 2),
    "strided_copy": ("strided", 4, 1, 0, 0),
    "moe_permute_top2": ("permute", 6, 1, 0, 0),
    "moe_permute_top8": ("permute", 18, 1, 0, 0),
}
"""For each operator: its family, the bytes per element and the number of kernels of the forward, and both of the
backward, as in `physics.layers`."""


def stream_problem(tables: TableSource) -> FitProblem:
    """Memory-bound operators, by family."""
    table = read_table(tables, "stream")
    table = table.where(np.isin(table.text("operator"), list(STREAMS)))
    has_backward = np.isfinite(table.number("backward_us"))
    names = np.concatenate((table.text("operator"), table.text("operator")[has_backward]))
    in_backward = np.arange(len(names)) >= table.num_rows
    elements = table.number("rows") * table.number("columns")
    elements = np.concatenate((elements, elements[has_backward]))
    operators = [STREAMS[name] for name in names]
    num_bytes = elements * [r[3 if b else 1] for r, b in zip(operators, in_backward, strict=True)]
    kernels = np.array([r[4 if b else 2] for r, b in zip(operators, in_backward, strict=True)])
    families = np.array([r[0] for r in operators])

    def predict(hardware: HardwareSpec, bench: BenchNumbers) -> FloatArray:
        seconds = np.zeros(len(names))
        for family in np.unique(families):
            of_family = families == family
            seconds[of_family] = stream_s(hardware, num_bytes[of_family], kernels[of_family], str(family))
        floor_us = np.where(in_backward, bench.get("autograd_us", 0.0), bench.get("floor_us", 0.0))
        return np.maximum(seconds, floor_us * MICRO)

    short = {"launch_us": (3.0, 0.5, 10.0), **TIMER, "bench.autograd_us": (90.0, 1.0, 200.0)}
    fitted = sorted(set(families.tolist()) - {"copy"})
    return FitProblem(
        name="stream",
        free={
            "stream_fraction": SHARE,
            **{f"family_fraction.{family}": SHARE for family in fitted},
            **(short if table.num_rows >= LEAST_ROWS else {}),
        },
        predict=predict,
        measured_s=np.concatenate((table.seconds("forward_us"), table.seconds("backward_us")[has_backward])),
        groups=names,
        labels=families,
    )
