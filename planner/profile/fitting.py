"""Measured tables of kernels as problems to fit, and the free numbers that explain a table best.

A problem has free numbers, their bounds, and the cost model's seconds of each row. The fit is robust non-linear least
squares: Levenberg-Marquardt on log residuals, outliers weighted down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planner.physics.communication import joined_fraction, num_hops
from planner.physics.kernels import PassSeconds, attention_s, gemm_s, stream_s
from planner.physics.operators import Operator
from planner.shape import FloatArray
from planner.specs.base import Named, Spec
from planner.specs.hardware import HardwareSpec, LinkTier
from planner.specs.reading import shipped_table
from planner.specs.units import GB, MICRO

STEP = 1e-4
"""Step of the numerical derivative; the parameters are logarithms."""
MAX_ITERATIONS = 60


def least_squares(
    residuals: Callable[[FloatArray], FloatArray],
    start: FloatArray,
    low: FloatArray,
    high: FloatArray,
    scale: float,
    counts: FloatArray | float = 1.0,
    tolerance: float = 1e-7,
) -> FloatArray:
    """The x between `low` and `high` with the least Σ counts · soft-L1(residual / scale): linear above `scale`.

    soft-L1(z) = 2·(√(1 + z²) − 1), so that a few shapes for which a library chose badly do not bend the physics. Ends
    where an iteration lowers the sum by less than its share `tolerance`.
    """
    x = np.clip(start, low, high)
    damping = 1e-3
    current = residuals(x)
    for _ in range(MAX_ITERATIONS):
        weights = np.sqrt(counts) * (1 + (current / scale) ** 2) ** -0.25
        jacobian = _jacobian(residuals, x, current, high) * weights[:, None]
        gradient = jacobian.T @ (weights * current)
        hessian = jacobian.T @ jacobian
        before = soft_l1(current, scale, counts)
        for _ in range(8):
            trial = np.clip(
                x - np.linalg.solve(hessian + damping * np.diag(np.diag(hessian) + 1e-9), gradient), low, high
            )
            moved = residuals(trial)
            if soft_l1(moved, scale, counts) < before:
                damping = max(damping / 3, 1e-9)
                break
            damping *= 4
        else:
            break
        x = trial
        current = moved
        if before - soft_l1(current, scale, counts) < tolerance * before:
            break
    return x


def soft_l1(residual: FloatArray, scale: float, counts: FloatArray | float = 1.0) -> float:
    """Half of Σ counts · soft-L1(residual / scale)."""
    return float(np.sum(counts * (np.sqrt(1 + (residual / scale) ** 2) - 1)))


def _jacobian(
    residuals: Callable[[FloatArray], FloatArray], x: FloatArray, at: FloatArray, high: FloatArray
) -> FloatArray:
    columns = []
    for i in range(len(x)):
        step = -STEP if x[i] + STEP > high[i] else STEP
        moved = x.copy()
        moved[i] += step
        columns.append((residuals(moved) - at) / step)
    return np.stack(columns, axis=1)


class MeasuredTable:
    """The columns of one CSV file. Numbers become float arrays (empty cells NaN), text becomes string arrays."""

    def __init__(self, rows: list[Named]) -> None:
        self._cells = {name: np.array([row[name] for row in rows]) for name in (rows[0] if rows else ())}

    def __contains__(self, column: str) -> bool:
        return column in self._cells

    @property
    def num_rows(self) -> int:
        return len(next(iter(self._cells.values()), ()))

    def number(self, column: str) -> FloatArray:
        cells = self._cells[column]
        return np.where(cells == "", "nan", cells).astype(float)

    def text(self, column: str) -> npt.NDArray[np.str_]:
        return self._cells[column]

    def seconds(self, column: str) -> FloatArray:
        """A column of microseconds, in seconds."""
        return self.number(column) * MICRO

    def rows(self) -> list[Named]:
        """All rows as text, by column."""
        return [dict(zip(self._cells, row, strict=True)) for row in zip(*self._cells.values(), strict=True)]

    def where(self, keep: npt.NDArray[np.bool_]) -> MeasuredTable:
        """The rows for which `keep` is true."""
        table = MeasuredTable([])
        table._cells = {name: cells[keep] for name, cells in self._cells.items()}
        return table


Tables = Mapping[str, MeasuredTable]
"""Measured tables by name."""
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


_TABLES = shipped_table("profile/shapes.yaml")
PRODUCTS: dict[str, tuple[str, int]] = _TABLES["products"]
"""Columns of a table of products: which pass, and the bytes moved per weight where it is dw (sums: both ways)."""


WAYS: dict[str, Callable[[PassSeconds], Any]] = {
    "forward": lambda seconds: seconds.forward_s,
    "dgrad": lambda seconds: seconds.dgrad_s,
    "wgrad": lambda seconds: seconds.wgrad_s,
}
"""The seconds of each pass."""
LEAST_ROWS = 20
"""Number of products below which a table gives the level alone; the curves are then those of a sibling."""


class ProductCells:
    """The cells of a table of matrix products that hold a time, column after column."""

    def __init__(self, table: MeasuredTable, grouped: bool = True) -> None:
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
            seconds_of(gemm_s(op, hardware, "bf16", self.grouped, num_bytes))
            for seconds_of, num_bytes in ((WAYS[PRODUCTS[column][0]], PRODUCTS[column][1]) for column in self.columns)
        ]
        return np.asarray(np.concatenate(parts)[self.cells])


def gemm_problem(tables: Tables) -> FitProblem:
    """Dense bf16 products, three passes."""
    table = tables["gemm"]
    m, n, k = (table.number(c) for c in "mnk")
    op = Operator(name="gemm", kind="gemm", m=m, n=n, k=k)
    timed = ProductCells(table)

    def predict(hardware: HardwareSpec, bench: BenchNumbers) -> FloatArray:
        return floored(cold(timed.seconds(op, hardware), {"boost": 0.0, "boost_us": 1.0, **bench}), bench)

    if table.num_rows < LEAST_ROWS:
        return FitProblem(
            name="gemm level",
            free={"gemm.forward_fraction": SHARE, "gemm.wave_fraction": (0.9, 0.3, 1.15), **TIMER},
            predict=predict,
            measured_s=timed.measured_s,
            groups=timed.each(product_groups(table)),
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
        groups=timed.each(product_groups(table)),
        labels=timed.passes,
        alike=alike,
    )


def product_groups(table: MeasuredTable) -> npt.NDArray[np.str_]:
    """Products of one n and k, or of one source where several timed them: what is left out together."""
    return table.text("source") if "source" in table else np.char.add(table.text("n"), table.text("k"))


def attention_problem(tables: Tables, backend: str, pads: bool = False) -> FitProblem:
    """One attention backend, forward and backward. `pads`: values were padded to keys."""
    table = tables["attention"]
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


STREAMS: dict[str, tuple[str, float, int, float, int]] = _TABLES["operators"]
"""For each operator: its family, the bytes per element and the number of kernels of the forward, and both of the
backward, as in `physics.layers`."""


def stream_problem(tables: Tables) -> FitProblem:
    """Memory-bound operators, by family."""
    table = tables["stream"]
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


BENCH = "bench."
SCALE = 0.03
"""Relative error above which a row counts less: libraries choose badly for some shapes."""
GUESS_SPREAD = 0.2
"""Spread of first guesses, as a standard deviation of the logarithm."""


class Residuals(NamedTuple):
    """Errors of a table in percent: quantiles of |error|, and the signed mean."""

    num_rows: int
    bias: float
    median: float
    p90: float
    worst: float

    @classmethod
    def of(cls, log_errors: FloatArray) -> Residuals:
        size = np.abs(np.expm1(log_errors)) * 100
        return cls(
            len(size),
            float(np.mean(np.expm1(log_errors)) * 100),
            float(np.median(size)),
            float(np.percentile(size, 90)),
            float(size.max()),
        )

    def __str__(self) -> str:
        numbers = f"bias {self.bias:+5.1f}%  median {self.median:4.1f}%  p90 {self.p90:4.1f}%  worst {self.worst:5.1f}%"
        return f"n {self.num_rows:4d}  {numbers}"


def with_values(spec: Any, values: Mapping[str, float]) -> Any:
    """A copy of `spec` (or mapping) with the numbers at dotted paths replaced."""
    for path, value in values.items():
        head, _, rest = path.partition(".")
        if isinstance(spec, Spec):
            inner = getattr(spec, head)
            spec = spec.model_copy(update={head: with_values(inner, {rest: value}) if rest else value})
        else:
            spec = {**spec, path: value}
    return spec


def number_at(spec: Any, path: str) -> float:
    """The number at a dotted path of `spec` (or mapping)."""
    for name in path.split("."):
        spec = getattr(spec, name) if isinstance(spec, Spec) else spec[name]
    return float(spec)


def hardware_with(hardware: HardwareSpec, values: Mapping[str, float]) -> HardwareSpec:
    """`hardware` with the efficiencies that `values` holds."""
    efficiencies = {path: value for path, value in values.items() if not path.startswith(BENCH)}
    return hardware.model_copy(update={"efficiency": with_values(hardware.efficiency, efficiencies)})


def log_errors(problem: FitProblem, hardware: HardwareSpec, values: Mapping[str, float]) -> FloatArray:
    """log(predicted / measured) of every row."""
    bench = {path.removeprefix(BENCH): value for path, value in values.items() if path.startswith(BENCH)}
    predicted = problem.predict(hardware_with(hardware, values), bench)
    return np.asarray(np.log(predicted / problem.measured_s))


def fit(
    problem: FitProblem,
    hardware: HardwareSpec,
    keep: Any = slice(None),
    near: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """The free numbers that explain the rows `keep` best, from a few first guesses or from `near`."""
    names = list(problem.free)
    start, low, high = (np.log([problem.free[name][i] for name in names]) for i in range(3))

    def values(x: FloatArray) -> dict[str, float]:
        numbers = dict(zip(names, np.exp(x).tolist(), strict=True))
        return numbers | {path: numbers[free_path] for path, free_path in problem.alike.items()}

    def residuals(x: FloatArray) -> FloatArray:
        return np.asarray((log_errors(problem, hardware, values(x)) * problem.weights)[keep])

    moved = np.random.default_rng(0).normal(0.0, GUESS_SPREAD, (problem.num_guesses, len(start)))
    moved[0] = 0.0
    guesses = start + moved if near is None else [np.log([near[name] for name in names])]
    solutions = [least_squares(residuals, guess, low, high, SCALE) for guess in guesses]
    return values(min(solutions, key=lambda x: soft_l1(residuals(x), SCALE)))


def fitted_tier(tier: LinkTier, table: MeasuredTable, innermost: bool, rated: bool) -> tuple[LinkTier, FloatArray]:
    """The tier with the rate and latency that explain exchanges best: seconds = moved / rate + hops · latency, by
    relative least squares. Also returns the log errors.

    With `rated`, a rate below the tier's own becomes a share of it.
    """
    size, num_bytes, seconds = table.number("size"), table.number("num_bytes"), table.seconds("microseconds")
    reduces = table.text("kind") == "all_reduce"
    moved = np.where(reduces, 2.0, 1.0) * num_bytes * (1 - 1 / size) / joined_fraction(tier, size)
    tree, ring = (num_hops(kind, size, 1, size, innermost) for kind in ("all_reduce", "all_gather"))
    hops = np.where(reduces, tree, ring)
    slowness, latency_s = np.linalg.lstsq(np.stack([moved / seconds, hops / seconds], axis=1), np.ones(len(seconds)))[0]
    if latency_s < 0 or slowness <= 0:  # all of it bandwidth
        slowness, latency_s = float(np.median(seconds / moved)), 0.0
    gb_per_s = 1 / slowness / GB
    share = gb_per_s / tier.gb_per_s if rated and gb_per_s <= tier.gb_per_s else 1.0
    evidence = f"{len(seconds)} exchanges over {size.max():.0f} ranks, {num_bytes.max() / 2**20:g} MiB at most"
    changes = {
        "gb_per_s": tier.gb_per_s if share < 1 else gb_per_s,
        "efficiency_fraction": share,
        "latency_us": 1e6 * float(latency_s),
        "start_us": 0.0,
        "source": f"Measured: {evidence}",
    }
    return tier.model_copy(update=changes), np.asarray(np.log((moved * slowness + hops * latency_s) / seconds))
