"""How far what a probe measured is to be believed: numbers that it may ask for, and the doubt about factors.

Beyond those numbers it measured something else than the hardware that the profile is of. A pass is the forward or the
backward of one virtual stage that ran. Passes of one kind have the same price: stages that hold the same layers.
Factors are judged by the passes that they were not fitted to: each kind is left out in turn, and all forwards, and all
backwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypedDict

import numpy as np

from planner.profile.fitting import SCALE, FitProblem, log_errors
from planner.shape import FloatArray
from planner.specs.hardware import Efficiency, HardwareSpec, Verdict
from planner.specs.units import GIB
from planner.trainers.calibration import Quantity, Share


class Opinion(TypedDict):
    """The verdict on a measured number, and the reason why it is not taken."""

    verdict: Verdict
    reason: str


TAKEN: Opinion = {"verdict": "corrected", "reason": ""}
MOST_FACTOR = 2.0
"""Largest factor on the seconds of kernels, either way. A power limit of 500 W instead of 700 is worth 1.4 on products
(h100-sxm-96gb beside h100-sxm-80gb); the worst prediction from a data sheet alone was off by 1.5 (MI325X in published
runs). A factor of 2 is beyond both."""
MOST_SHARE = 1.1
"""Largest share of the data sheet's peak, or of its memory bandwidth, that kernels reach. No shipped profile has more
than 0.9 of either; boost clocks above the nominal one are worth a tenth."""
LEAST_LINK_SHARE, MOST_LINK_SHARE = 0.1, 1.2
"""Shares of a link's data-sheet rate: shipped tiers reach 0.65 to 1, and all-reduces that NVSwitch sums 476 GB/s of 450
(NVIDIA/nccl-tests issue 290). An exchange that took another way, through host memory instead of NVLink or through
sockets instead of InfiniBand, is slower by more than the least."""
LINK_NOISE = 0.02
"""Difference from the profile's share below which it stays."""
MOST_SPREAD = 0.1
"""Relative standard error of seconds above which they say nothing about a link or a kernel."""
LEAST_CONTEXT_GIB, MOST_CONTEXT_GIB = 0.2, 6.0
"""Memory in use outside the allocator. A CUDA context with cuBLAS and cuDNN takes 0.5 to 1 GiB, one of ROCm 2.5; NCCL's
buffers are counted apart. Above, another process is on the GPU."""
MOST_FRAGMENTATION = 0.3
"""Memory that the allocator holds beyond what is allocated, as a share of it: 0.03 to 0.06 in shipped profiles. Above,
it holds blocks of something that came before the steps."""
MOST_HOST_S = 0.02
"""Seconds of the host per micro-batch: 46 to 57 µs a kernel and some hundred kernels of messages and loops around the
layers are a few milliseconds. Above, the host was busy with something else."""


def kernel_objection(path: str, factor: float, hardware: HardwareSpec) -> str:
    """The reason why a factor on the seconds of a kind of kernel cannot be; empty where it can.

    Products that reach all of the peak are no products of this GPU. Other kinds may be drawn there by products.
    """
    if hardware.architecture == "cpu":  # one profile stands for all CPUs
        return ""
    if not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
        return f"× {factor:.2f} (between {1 / MOST_FACTOR:g} and {MOST_FACTOR:g} is plausible)"
    at_peak = path == "gemm_factor" and factor <= 1.001 * least_factor(path, hardware)
    return f"× {factor:.2f} or less (the data sheet's peak allows no more)" if at_peak else ""


def least_factor(path: str, hardware: HardwareSpec) -> float:
    """The least factor on the seconds of a kind of kernel: with it, the kind reaches all that its data sheet has."""
    return min(1.0, _share(path, hardware.efficiency) / MOST_SHARE)


def _share(name: str, own: Efficiency) -> float:
    """The largest share of its data sheet's rate that the profile has a kind of kernel reach."""
    if name == "gemm_factor":
        return own.gemm.forward_fraction * own.sustained_fraction / own.gemm_factor
    if name == "stream_factor":
        return own.stream_fraction / own.stream_factor
    kernel = getattr(own, name.partition(".")[0])
    return float(kernel.forward_fraction * own.sustained_fraction / (own.attention_factor * kernel.seconds_factor))


def opinion_of_link(share: float, own: float, spread: float) -> Opinion:
    """The opinion of a measured share of a link's rate, whose seconds have a relative standard error of `spread`."""
    if share > MOST_LINK_SHARE:
        return _refused(f"{share:.0%} of the data sheet's rate is more than the link has: check --hardware")
    if share < LEAST_LINK_SHARE:
        return _refused("less than a tenth of the data sheet's rate: NCCL_DEBUG=INFO says which way it took")
    if spread > MOST_SPREAD:
        return _refused(f"its seconds are known to {spread:.0%} only")
    if abs(share / own - 1) <= (repeats := max(LINK_NOISE, spread)):
        return {"verdict": "confirmed", "reason": f"the profile's is as near as seconds repeat ({repeats:.0%})"}
    return TAKEN


def context_of(outside_bytes: Sequence[float], source: str) -> Quantity:
    """Memory in use outside the allocator, by what it is on each rank."""
    context_gib, opinion = median(outside_bytes) / GIB, TAKEN
    if context_gib > MOST_CONTEXT_GIB:
        opinion = _refused(f"more than {MOST_CONTEXT_GIB:g} GiB: other processes are on the GPUs")
    elif context_gib < LEAST_CONTEXT_GIB:
        opinion = _refused(f"less than {LEAST_CONTEXT_GIB:g} GiB: the driver does not count all memory of the ranks")
    return Quantity(value=max(0.0, context_gib), source=source, **opinion)


def fragmentation_of(held: Iterable[tuple[int, int]], source: str) -> Share:
    """The share of memory that the allocator holds beside what is allocated, by the bytes of both on each rank."""
    fraction, opinion = median(reserved / allocated - 1 for reserved, allocated in held), TAKEN
    if fraction > MOST_FRAGMENTATION:
        reason = f"more than {MOST_FRAGMENTATION:.0%}: the allocator keeps blocks that the steps do not use"
        opinion = _refused(reason)
    return Share(value=min(1.0, max(0.0, fraction)), source=source, **opinion)


def host_of(seconds: float, source: str) -> Quantity:
    """The host's seconds per micro-batch."""
    reason = f"more than {1e3 * MOST_HOST_S:g} ms: the host was busy with other work"
    return Quantity(value=seconds, source=source, **(_refused(reason) if seconds > MOST_HOST_S else TAKEN))


def _refused(reason: str) -> Opinion:
    return {"verdict": "refused", "reason": reason}


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
            return _refused(reason)
        if self.noise > MOST_SPREAD:
            return _refused(f"the seconds of passes are known to {self.noise:.0%} only")
        if self.before <= (repeats := max(REPEATS, NORMAL_80 * self.noise)):
            reason = f"the profile is {self.before:.1%} off, and seconds are known to {repeats:.1%}"
            return {"verdict": "confirmed", "reason": reason}
        if self.explained_fraction < LEAST_EXPLAINED:
            reason = f"it explains little: passes that it was not fitted to are {self.left_out:.1%} off with it"
            return _refused(f"{reason}, {self.before:.1%} without")
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
    left_out = []
    moves = [np.zeros(len(start))]
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
