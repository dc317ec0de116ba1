"""The fit of numbers that single GPUs do not show to published runs: `tools/calibrate runs`.

There are a few coefficients, each with a meaning, bounds and a first guess. The first guess counts as much as one row,
so that thin evidence moves nothing. Errors are reported in sample and with each family left out of the fit that
predicts it, beside the share of rows that lie within their 80% intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from planner.errors import SpecError, Unsupported
from planner.layout.runs import Run, parse_run
from planner.profile.fitting import least_squares
from planner.shape import FloatArray
from planner.specs.base import Spec
from planner.trainers.load import load_runtime
from planner.validate.rows import HELD_OUT, PublishedRun, load_rows
from planner.validate.score import weighted_quantile

A100 = ("a100-sxm-80gb", "a100-sxm-40gb", "a800-sxm-80gb")
A100_PCIE = ("a100-pcie-80gb", "a100-pcie-only-80gb")
H100_500W = ("h100-sxm-96gb",)
H100 = ("h100-sxm-80gb", "h200-sxm-141gb", "h800-sxm-80gb", "gh200-96gb")
"""GPUs with the same silicon and the same power limit."""
B200 = ("b200-sxm-180gb", "b300-sxm-270gb")
GB200 = ("gb200-nvl72",)
GB300 = ("gb300-nvl72",)
BLACKWELL = (*B200, *GB200, *GB300)
SINCE_HOPPER = (*H100, *H100_500W, "h20-sxm-96gb", *BLACKWELL)
ULTRA = (B200[1], *GB300)
"""Blackwell Ultra: half as many FLOP/s again in 4 bits, and twice as many exponentials."""
DEEPSPEED = ("megatron-deepspeed",)
MEGATRON = ("megatron",)
TORCHTITAN = ("torchtitan", "torchtitan-2024", "torchtitan-2025")
NANOTRON = ("nanotron",)
NCCL_TRAINERS = (*MEGATRON, *TORCHTITAN, *NANOTRON, "torch-eager", "torch-fsdp")


@dataclass(frozen=True, slots=True)
class Coefficient:
    """One number of a hardware profile or of a runtime. The field at `path` says what it means."""

    name: str
    of: Literal["hardware", "runtime"]
    names: tuple[str, ...]
    """Profiles or runtimes that share it."""
    path: str
    start: float
    """First guess, from a data sheet, a benchmark of one GPU, or a sibling."""
    low: float
    high: float
    spread: float
    """Uncertainty of the first guess, as a standard deviation of its logarithm."""
    unit: str = ""
    feature: str | None = None
    """The feature that a run must have switched on for the coefficient to apply."""


COEFFICIENTS = (
    Coefficient("A100 products", "hardware", A100, "efficiency.gemm_factor", 0.93, 0.7, 1.3, 0.03),
    # timed alone (SimuMax), but at the limit of 300 W that it has in a step
    Coefficient("A100 PCIe products", "hardware", A100_PCIE, "efficiency.gemm_factor", 1.0, 0.7, 1.3, 0.05),
    Coefficient("A100 NVLink", "hardware", A100, "tiers.0.efficiency_fraction", 0.78, 0.4, 0.95, 0.1),
    Coefficient("A100 network", "hardware", A100, "tiers.1.efficiency_fraction", 0.8, 0.3, 0.95, 0.15),
    Coefficient("DeepSpeed waits per exchange", "runtime", DEEPSPEED, "collective_sync_us", 200, 1, 2000, 1.0, "µs"),
    Coefficient("DeepSpeed late ranks", "runtime", DEEPSPEED, "tp_jitter_fraction", 0.02, 0.0005, 0.2, 1.0),
    Coefficient("DeepSpeed host per kernel", "runtime", DEEPSPEED, "host_factor", 0.5, 0.1, 2, 0.5),
    Coefficient("nanotron host per kernel", "runtime", NANOTRON, "host_factor", 1.3, 0.5, 4, 0.5),
    # timed alone on B200 (SimuMax), they are quicker than in a step; rates of its siblings follow from their power
    Coefficient("Blackwell products", "hardware", BLACKWELL, "efficiency.gemm_factor", 1.05, 0.8, 1.3, 0.05),
    # GB200's recipes of 2025 are slower in 8 bits than those of 2026, and B200's are not; GB300's are of 2026
    Coefficient("Blackwell 8-bit", "hardware", (*B200, *GB300), "efficiency.gemm.fp8_factor", 1.2, 0.8, 1.6, 0.1),
    Coefficient("GB200 8-bit products", "hardware", GB200, "efficiency.gemm.fp8_factor", 1.1, 0.8, 1.6, 0.1),
    Coefficient("Blackwell block scales", "hardware", BLACKWELL, "efficiency.gemm.mx_factor", 0.96, 0.7, 1.1, 0.05),
    # nobody has timed products of 4 bits by themselves
    Coefficient("GB200 4-bit products", "hardware", GB200, "efficiency.gemm.fp4_factor", 0.93, 0.6, 1.4, 0.25),
    Coefficient("Blackwell Ultra 4-bit", "hardware", ULTRA, "efficiency.gemm.fp4_factor", 0.93, 0.6, 1.4, 0.25),
    # timed alone on H200, they are quicker than in a step
    Coefficient(
        "Hopper 8-bit in steps", "hardware", H100, "efficiency.narrow_sustained_fraction", 0.934, 0.73, 1, 0.03
    ),
    # gpt-oss in mxfp8 with whole iterations in graphs, where nothing but the GPU counts; nobody has timed it by itself
    Coefficient("attention with sinks", "hardware", SINCE_HOPPER, "efficiency.cudnn.sink_row_ns", 4.4, 1, 20, 0.3),
    # SimuMax's timings on B200, keys of 192
    Coefficient("Blackwell wide attention", "hardware", BLACKWELL, "efficiency.cudnn.wide_factor", 0.8, 0.6, 1.1, 0.1),
    Coefficient("Blackwell Ultra attention", "hardware", ULTRA, "efficiency.attention_factor", 0.85, 0.5, 1.1, 0.1),
    # as other kernels that turn tensors round (H200): nobody has timed these
    Coefficient("8-bit casts", "hardware", SINCE_HOPPER, "efficiency.family_fraction.cast", 0.6, 0.2, 1, 0.3),
    Coefficient("waits per exchange", "runtime", NCCL_TRAINERS, "collective_sync_us", 40, 1, 2000, 0.5, "µs"),
    # Qwen3 30B on B200, a sequence at a time; SimuMax's timings of GroupedLinear
    Coefficient("Megatron host per MoE layer", "runtime", MEGATRON, "moe_kernels", 70, 1, 300, 0.3),
    Coefficient("Megatron host per expert", "runtime", MEGATRON, "expert_kernels", 0.9, 0.2, 20, 0.3),
    Coefficient("Megatron host of 8 bits", "runtime", MEGATRON, "narrow_host_factor", 1.2, 1, 3, 0.2),
    # the pull request that let graphs replay parts of it (Megatron-LM 2168) says that it is more, not how much
    Coefficient("Megatron host of EP overlap", "runtime", MEGATRON, "ep_overlap_host_factor", 1.3, 1, 3, 0.2),
    # 8B on 32 B200 in one CUDA graph: 188 ms, of which 6 stay unexplained
    Coefficient("Megatron host per step", "runtime", MEGATRON, "step_overhead_s", 0.01, 0.0005, 0.1, 0.7, "s"),
    Coefficient("Megatron TP overlap", "runtime", MEGATRON, "tp_overlap_fraction", 0.5, 0.05, 0.95, 0.3),
    # kernels of NCCL take a sixth of the SMs, and memory bandwidth, from what runs beside them
    Coefficient("contention of exchanges", "runtime", NCCL_TRAINERS, "contention_fraction", 0.2, 0.01, 0.7, 0.5),
    Coefficient("Megatron EP rows", "runtime", MEGATRON, "ep_row_bytes", 8192, 100, 30000, 0.5, "B"),
    # clocks go with the power's cube root to its square root: 500 W against 700
    Coefficient("H100 500 W products", "hardware", H100_500W, "efficiency.gemm_factor", 1.15, 0.8, 1.4, 0.05),
    Coefficient("asynchronous TP", "runtime", TORCHTITAN, "tp_overlap_fraction", 0.75, 0.1, 0.95, 0.3, "", "async_tp"),
)
"""Few enough to be read one by one."""


SCALE = 0.05
"""Relative error above which a row counts less: single iterations and nodes of a bad day."""
TOLERANCE = 1e-4
"""Share of the sum of errors: a fit ends when an iteration gains less."""
ALL = slice(None)
FAMILY_WEIGHT = 12.0
"""Largest weight of a family in the fit: its rows share one cluster, so that more rows are no more evidence."""
INFERRED = 0.5
"""Weight of a row in which one field was inferred (trust B)."""


def replaced(spec: Any, path: str, value: float) -> Any:
    """A copy of `spec` (a Spec, a tuple or a mapping) with the number at a dotted path replaced."""
    head, _, rest = path.partition(".")
    if isinstance(spec, tuple):
        index = int(head)
        return (*spec[:index], replaced(spec[index], rest, value), *spec[index + 1 :])
    inner = replaced(getattr(spec, head) if isinstance(spec, Spec) else spec[head], rest, value) if rest else value
    return spec.model_copy(update={head: inner}) if isinstance(spec, Spec) else {**spec, head: inner}


@dataclass(slots=True)
class Priced:
    """A published run with its layout, which is priced again and again with other coefficients."""

    row: PublishedRun
    run: Run
    known: dict[tuple[float, ...], float]
    width: float = 0.0
    """Half the 80% interval of the logarithm of the step's seconds."""

    @classmethod
    def of(cls, row: PublishedRun) -> Priced:
        return cls(row, parse_run({"id": row.id, "run": row.run}), {})

    @classmethod
    def all_of(cls, rows: Sequence[PublishedRun]) -> list[Priced]:
        """One priced run for each row. Rows that publish the same run share it."""
        runs: dict[str, Priced] = {}
        return [runs.setdefault(row.run_key, cls.of(row)) for row in rows]

    def applies(self, coefficient: Coefficient) -> bool:
        """True if the run has the hardware or the runtime that the coefficient belongs to."""
        if coefficient.of == "hardware":
            return self.run.cluster.hardware.name in coefficient.names
        runtime = self.run.runtime
        if runtime.name not in coefficient.names:
            return False
        if coefficient.feature is not None:
            return bool(self.row.run.get("features", {}).get(coefficient.feature))
        # not where a feature of the run says what it is
        return bool(getattr(runtime, coefficient.path) == getattr(load_runtime(runtime.name), coefficient.path))

    def step_s(self, values: Mapping[Coefficient, float]) -> float:
        """Seconds of the step with these coefficients."""
        applicable = {c: value for c, value in values.items() if self.applies(c)}
        key = tuple(applicable.values())
        if key not in self.known:
            self.known[key] = self._step_s(applicable)
        return self.known[key]

    def _step_s(self, values: Mapping[Coefficient, float]) -> float:
        run = self.run
        hardware, runtime = run.cluster.hardware, run.runtime
        for coefficient, value in values.items():
            if coefficient.of == "runtime":
                runtime = replaced(runtime, coefficient.path, value)
            else:
                hardware = replaced(hardware, coefficient.path, value)
        cluster = type(run.cluster)(**{**dict(run.cluster), "hardware": hardware})
        step = replace(run, cluster=cluster, runtime=runtime, says_switches=True).evaluate().step
        assert step.step_s_interval is not None
        self.width = float(np.log(step.step_s_interval[1] / step.step_s))
        return step.step_s


def is_supported(row: PublishedRun) -> bool:
    """True if the planner models everything that the run used."""
    try:
        Priced.of(row)
    except Unsupported:
        return False
    return True


class Fit:
    """Published runs and the free coefficients that explain them."""

    def __init__(self, rows: Sequence[PublishedRun], coefficients: Sequence[Coefficient]) -> None:
        self.priced = Priced.all_of(rows)
        self.coefficients = tuple(coefficients)
        self.measured = np.log([row.measured.step_s for row in rows])
        self.weights = np.array([row.weight for row in rows])
        self.families = np.array([row.family for row in rows])
        trusted = [INFERRED if row.trust == "B" else 1.0 for row in rows]
        pulls = self.weights * trusted * [not row.held_out for row in rows]
        totals = {family: pulls[self.families == family].sum() for family in set(self.families.tolist())}
        self.pulls = pulls * [FAMILY_WEIGHT / max(FAMILY_WEIGHT, totals[f]) for f in self.families.tolist()]
        self.start, self.low, self.high = (
            np.log([getattr(c, name) for c in self.coefficients]) for name in ("start", "low", "high")
        )

    def log_errors(self, x: FloatArray, rows: FloatArray | slice = ALL) -> FloatArray:
        """log(predicted / measured) of every row, or of the chosen rows; `x` holds the logarithms of the
        coefficients."""
        values = dict(zip(self.coefficients, np.exp(x).tolist(), strict=True))
        return np.log([priced_run.step_s(values) for priced_run in np.array(self.priced)[rows]]) - self.measured[rows]

    def solve(self, left_out: str | None = None, near: FloatArray | None = None) -> FloatArray:
        """Logarithms of the coefficients that explain the rows best, without the family `left_out`."""
        pulling = (self.families != left_out) & (self.pulls > 0)
        spread = np.array([c.spread for c in self.coefficients])

        def residuals(x: FloatArray) -> FloatArray:
            return np.concatenate((self.log_errors(x, pulling), SCALE * (x - self.start) / spread))

        both = np.concatenate((self.pulls[pulling], np.ones(len(self.start))))
        return least_squares(
            residuals, self.start if near is None else near, self.low, self.high, SCALE, both, TOLERANCE
        )


def _line(name: str, errors: FloatArray, weights: FloatArray, widths: FloatArray) -> str:
    size = np.abs(np.expm1(errors)) * 100
    median, p90 = (weighted_quantile(size, weights, q) for q in (0.5, 0.9))
    mean, bias = np.average(size, weights=weights), np.average(np.expm1(errors) * 100, weights=weights)
    share_in_interval = np.average(np.abs(errors) <= widths, weights=weights)
    return (
        f"{name:24s} n {len(size):4d}  median {median:5.1f}%  p90 {p90:5.1f}%  mean {mean:5.1f}%  bias {bias:+5.1f}%  "
        f"worst {size.max():5.1f}%  in 80% {share_in_interval:4.0%}"
    )


def left_out_errors(fit: Fit, best: FloatArray) -> FloatArray:
    """log(predicted / measured) of every row by the fit without its family, each started at `best`."""
    errors = fit.log_errors(best)
    for family in dict.fromkeys(fit.families.tolist()):
        if family in HELD_OUT:
            continue
        rows = fit.families == family
        errors[rows] = fit.log_errors(fit.solve(family, best), rows)
    return errors


def report(fit: Fit, leave_out: bool = True) -> FloatArray:
    """Fit, print the coefficients and the errors in sample and left out, and return the coefficients."""
    best = fit.solve()
    for coefficient, value in zip(fit.coefficients, np.exp(best).tolist(), strict=True):
        at = " (at its bound)" if value in (coefficient.low, coefficient.high) else ""
        print(f"{coefficient.name:34s} {value:9.4g} {coefficient.unit:4s} from {coefficient.start:g}{at}", flush=True)
    tables = {"": fit.log_errors(best)}
    widths = np.array([one.width for one in fit.priced])
    if leave_out:
        tables["  left out"] = left_out_errors(fit, best)
    for family in (*dict.fromkeys(fit.families.tolist()), "all"):
        rows = (fit.families == family) | (family == "all")
        for name, errors in tables.items():
            print(_line(name or family, errors[rows], fit.weights[rows], widths[rows]))
    return best


def main(arguments: Sequence[str]) -> None:
    """`runs [FAMILY …]`: fit the coefficients to the published runs (of some families) and print what is left over."""
    counted = [row for row in load_rows() if row.counts]
    families = list(dict.fromkeys(row.family for row in counted))
    unknown = [name for name in arguments if name not in families]
    if unknown:
        raise SpecError(f"tools.calibrate runs: {unknown[0]!r} is unknown", f"one of {', '.join(families)}")
    rows = [row for row in counted if not arguments or row.family in arguments]
    rows = [row for row in rows if is_supported(row)]
    priced = Priced.all_of(rows)
    free = [c for c in COEFFICIENTS if any(run.applies(c) for run in priced)]
    report(Fit(rows, free))
