"""How far the factors that were fitted to a probe's passes are to be believed.

A pass is the forward or the backward of one virtual stage that ran. Passes of one kind have the same price: stages that
hold the same layers. Factors are judged by the passes that they were not fitted to: each kind is left out in turn, and
all forwards, and all backwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from planner.profile.fitting import SCALE, FitProblem, log_errors
from planner.profile.probed.plausible import MOST_SPREAD, TAKEN, Opinion
from planner.shape import FloatArray
from planner.specs.hardware import HardwareSpec

REPEATS = 0.01
"""Errors, in natural logarithms, below which there is nothing to correct: a figure of a probe is measured until its
standard error is 1%."""
LEAST_EXPLAINED = 0.5
"""Least share of the squared errors that a correction has to take away from passes that it was not fitted to."""
LEAST_SENSITIVE = 0.5
"""Least change of the passes' seconds, by a change of all kernels', for the passes to tell something about kernels."""
TRANSFER_WIDTH = 0.07
"""Half-width of a step where a probe told the speed of kernels to the digit: another layout, trainer and day. In the
median of 48 sets of published runs (`plan validate`: one source, one kind of GPU, dense models), four in five runs are
within 7.3% of the prediction times the set's own factor, which is as much as a calibration could tell."""
USUAL_ERROR, USUAL_PASSES = 0.05, 1
"""Error of a kind of pass that was left out, before anything is known of a probe, and the kinds that this counts for:
stages of an H200 left out of the fit are within 2.7% (forward) and 4.6% (backward) in nine of ten cases, and 9.4% off
at worst (docs/PROBE.md)."""
NORMAL_80 = 1.2816
"""Standard deviations from the middle to the ends of an 80% interval."""
STEP = 1e-3
"""Step of the numerical derivatives, in natural logarithms."""


class Doubt(NamedTuple):
    """The evidence of a probe's passes for factors on the seconds of kernels. Errors are root mean squares of natural
    logarithms."""

    num_passes: int
    num_kinds: int
    before: float
    """Error of the profile alone."""
    left_out: float
    """Error of the corrected profile on passes left out."""
    noise: float
    """Standard error of the measurements themselves."""
    sensitivity: float
    """Change of the passes' seconds by a change of all kernels' seconds, in natural logarithms. It is small where the
    host or the links hold passes up."""
    ranges: Mapping[str, tuple[float, float]]
    """Least and largest value of each factor, over the passes left out."""

    @property
    def explained_fraction(self) -> float:
        """Share of the squared errors that the factors take away from passes that they were not fitted to."""
        return 1 - (self.left_out / self.before) ** 2

    @property
    def tells_of_kernels(self) -> bool:
        """True unless the host or the links decide how long passes take."""
        return self.sensitivity >= LEAST_SENSITIVE

    @property
    def opinion(self) -> Opinion:
        """The verdict on the factors, and the reason why the profile's own stay, if they do."""
        if not self.tells_of_kernels:
            reason = (
                f"kernels twice as slow make passes {2**self.sensitivity - 1:.0%} longer: host and links hold them up"
            )
            return {"verdict": "refused", "reason": reason}
        if self.noise > MOST_SPREAD:
            return {"verdict": "refused", "reason": f"the seconds of passes are known to {self.noise:.0%} only"}
        if self.before <= (repeats := max(REPEATS, NORMAL_80 * self.noise)):
            reason = f"the profile is {self.before:.1%} off, and seconds are known to {repeats:.1%}"
            return {"verdict": "confirmed", "reason": reason}
        if self.explained_fraction < LEAST_EXPLAINED:
            reason = f"it explains little: passes that it was not fitted to are {self.left_out:.1%} off with it"
            return {"verdict": "refused", "reason": f"{reason}, {self.before:.1%} without"}
        return TAKEN

    @property
    def step_width(self) -> float | None:
        """Half-width of a dense model's step, by the errors that the probe leaves; None where its passes tell nothing
        about kernels."""
        if not self.tells_of_kernels:
            return None
        return step_width(self.left_out if self.opinion == TAKEN else self.before, self.num_kinds)


def step_width(error: float, num_kinds: int) -> float:
    """Half-width of a dense model's step where `num_kinds` kinds of pass are off by `error`: their 80% interval beside
    all that they cannot tell.

    The prior counts as USUAL_PASSES of them, and the quantile is that of Student's t with as many degrees of freedom
    (Cornish and Fisher's first term).
    """
    count = USUAL_PASSES + num_kinds
    variance = (USUAL_PASSES * USUAL_ERROR**2 + num_kinds * error**2) / count
    return math.hypot(TRANSFER_WIDTH, (NORMAL_80 + (NORMAL_80**3 + NORMAL_80) / (4 * count)) * math.sqrt(variance))


def doubt(
    problem: FitProblem,
    hardware: HardwareSpec,
    fitted: Mapping[str, float],
    partitions: Sequence[Sequence[str]],
    noise: float,
) -> Doubt:
    """The doubt about numbers `fitted` to a problem whose first rows are passes; its last rows hold the numbers
    together.

    The first partition names the kind of each pass. Of several, the one that leaves the largest errors counts.
    """
    start = {path: bounds[0] for path, bounds in problem.free.items()}
    num_passes = len(partitions[0])
    before = log_errors(problem, hardware, start)[:num_passes]
    errors, slopes = _linear(problem, hardware, fitted)
    weights = problem.weights**2 / np.sqrt(1 + (errors * problem.weights / SCALE) ** 2)
    room = [np.log([bounds[side] / fitted[path] for path, bounds in problem.free.items()]) for side in (1, 2)]
    left_out, moves = [], [np.zeros(len(start))]
    for partition in partitions:
        errors_out = np.zeros(num_passes)
        for part in sorted(set(partition)):
            out = np.array([*(name == part for name in partition), *(False,) * (len(errors) - num_passes)])
            moves.append(np.clip(_solved(slopes[~out], errors[~out], weights[~out]), *room))
            errors_out[out[:num_passes]] = errors[out] + slopes[out] @ moves[-1]
        left_out.append(_rms(errors_out))
    factors = np.array([fitted[path] / value for path, value in start.items()]) * np.exp(np.array(moves))
    return Doubt(
        num_passes,
        len(set(partitions[0])),
        _rms(before),
        max(left_out),
        noise,
        float(slopes[:num_passes].sum(axis=1).mean()),
        {path: (float(factors[:, i].min()), float(factors[:, i].max())) for i, path in enumerate(start)},
    )


def _linear(problem: FitProblem, hardware: HardwareSpec, fitted: Mapping[str, float]) -> tuple[FloatArray, FloatArray]:
    """The log errors at a fit, and their derivatives by the logarithm of each number."""
    errors = log_errors(problem, hardware, fitted)
    moved = [
        log_errors(problem, hardware, {**fitted, path: fitted[path] * math.exp(STEP)}) - errors for path in problem.free
    ]
    return errors, np.stack(moved, axis=1) / STEP


def _solved(slopes: FloatArray, errors: FloatArray, weights: FloatArray) -> FloatArray:
    """The move of the numbers with the least Σ weights · (errors + slopes · move)²."""
    root = np.sqrt(weights)
    return np.asarray(np.linalg.lstsq(slopes * root[:, None], -errors * root, rcond=None)[0])


def _rms(errors: FloatArray) -> float:
    return float(np.sqrt(np.mean(errors**2)))
