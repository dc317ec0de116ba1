"""A probe's factors are believed as far as they predict passes that they were not fitted to."""

import math
from statistics import mean

import numpy as np
import pytest

from planner.layout.confidence import STEP_WIDTH
from planner.profile.fitting import BenchNumbers, FitProblem, fit, number_at
from planner.profile.probe_calibration import NEAR, TOGETHER
from planner.profile.probed import NORMAL_80, TRANSFER_WIDTH, Doubt, doubt
from planner.shape import FloatArray
from planner.specs.hardware import HardwareSpec
from planner.specs.registry import load_hardware

PATHS = ("gemm_factor", "cudnn.seconds_factor", "stream_factor")
H200 = load_hardware("h200")


def problem_of(shares: FloatArray, measured_s: FloatArray, host_s: float = 0.0) -> FitProblem:
    """Passes that spend `shares` of a second in each kind of kernel, or as long as the host takes."""

    def predict(hardware: HardwareSpec, bench: BenchNumbers) -> FloatArray:
        factors = np.array([number_at(hardware.efficiency, path) for path in PATHS])
        common = math.exp(np.log(factors).mean())
        return np.array([*np.maximum(shares @ factors, host_s), *(factors / common), common])

    return FitProblem(
        name="passes", free=dict.fromkeys(PATHS, (1.0, 0.1, 10.0)), predict=predict,
        measured_s=np.array([*measured_s, 1.0, 1.0, 1.0, 1.0]), groups=np.array([]),
        weights=np.array([1.0] * len(shares) + [TOGETHER] * 3 + [NEAR]), num_guesses=1,
    )  # fmt: skip


def weighed(
    shares: FloatArray,
    measured_s: FloatArray,
    kinds: list[str],
    *partitions: list[str],
    noise: float = 0.0,
    host_s: float = 0.0,
) -> tuple[dict[str, float], Doubt]:
    problem = problem_of(shares, measured_s, host_s)
    fitted = fit(problem, H200)
    return fitted, doubt(problem, H200, fitted, (kinds, *partitions), noise)


def random_shares(random: np.random.Generator, num_kinds: int) -> FloatArray:
    """Products take most of a pass, and much or little of the rest is attention."""
    parts = np.array([0.6, 0.15, 0.25]) * np.exp(random.normal(0, 0.4, (num_kinds, 3)))
    return np.asarray(parts / parts.sum(axis=1, keepdims=True))


def test_four_of_five_steps_lie_in_the_interval() -> None:
    """Factors, a misfit of each kind of pass, noise of each pass, and all that no probe can tell are random."""
    random, inside = np.random.default_rng(0), []
    for _ in range(150):
        sigma = random.choice([0.01, 0.04, 0.1])
        num_kinds = int(random.integers(2, 9))
        kinds = [str(kind) for kind in range(num_kinds) for _ in range(random.integers(1, 4))]
        rows = np.array([int(kind) for kind in kinds])
        shares = random_shares(random, num_kinds)
        truth = np.exp(random.normal(0.1, 0.15) + random.normal(0, 0.05, 3))
        misfits = np.exp(random.normal(0, sigma, num_kinds))
        measured = (shares @ truth * misfits)[rows] * np.exp(random.normal(0, 0.005, len(rows)))
        fitted, found = weighed(shares[rows], measured, kinds)
        verdict, width = found.opinion["verdict"], found.step_width or 0.0
        plan = random_shares(random, 1)[0]
        step_s = plan @ truth * math.exp(random.normal(0, sigma) + random.normal(0, TRANSFER_WIDTH / NORMAL_80))
        predicted_s = plan @ np.array(list(fitted.values())) if verdict == "corrected" else 1.0
        width = max(width, STEP_WIDTH["measured"]) if verdict == "refused" else width
        inside.append(abs(math.log(step_s / predicted_s)) <= width)
    assert 0.7 <= mean(inside) <= 0.9


def test_what_factors_explain_is_corrected_with_a_narrow_interval() -> None:
    shares = random_shares(np.random.default_rng(0), 6)
    fitted, found = weighed(shares, shares @ np.array([1.4, 1.2, 1.1]), list("abcdef"))
    assert found.opinion["verdict"] == "corrected"
    assert fitted["gemm_factor"] == pytest.approx(1.4, rel=0.07)
    low, high = found.ranges["gemm_factor"]
    assert low <= fitted["gemm_factor"] <= high < 1.1 * low
    assert TRANSFER_WIDTH < (found.step_width or 0.0) < TRANSFER_WIDTH + 0.01


def test_what_they_leave_unexplained_widens_it() -> None:
    shares = random_shares(np.random.default_rng(0), 6)
    widths = []
    for misfit in (0.0, 0.1, 0.3):
        wrong = np.exp(misfit * np.array([1, -1, 1, -1, 1, -1]))
        _, found = weighed(shares, 1.8 * shares.sum(axis=1) * wrong, list("abcdef"))
        assert found.opinion["verdict"] == "corrected"
        widths.append(found.step_width or 0.0)
        assert widths[-1] >= misfit
    assert widths == sorted(widths)


def test_what_explains_little_is_refused_and_the_profiles_own_errors_say_how_wide() -> None:
    shares = random_shares(np.random.default_rng(0), 6)
    wrong = np.exp(0.3 * np.array([1, -1, 1, -1, 1, -1]))
    _, found = weighed(shares, shares.sum(axis=1) * wrong, list("abcdef"))
    assert found.opinion["verdict"] == "refused"
    assert "it explains little" in found.opinion["reason"]
    assert (found.step_width or 0.0) > 0.3


def test_one_slow_gpu_of_many_corrects_no_profile() -> None:
    shares = np.repeat(random_shares(np.random.default_rng(0), 1), 8, axis=0)
    slow = np.array([1.0] * 7 + [1.3])
    fitted, found = weighed(shares, slow, ["a"] * 8)
    assert found.opinion["verdict"] == "refused"
    assert fitted["gemm_factor"] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("noise", "verdict"), [(0.0, "corrected"), (0.05, "confirmed"), (0.2, "refused")])
def test_what_is_less_than_noise_is_no_correction(noise: float, verdict: str) -> None:
    shares = random_shares(np.random.default_rng(0), 6)
    _, found = weighed(shares, 1.04 * shares.sum(axis=1), list("abcdef"), noise=noise)
    assert found.opinion["verdict"] == verdict


def test_passes_that_the_host_holds_up_say_nothing_about_kernels() -> None:
    shares = random_shares(np.random.default_rng(0), 6)
    fitted, found = weighed(shares, np.full(6, 2.1), list("abcdef"), host_s=2.0)
    assert fitted == pytest.approx(dict.fromkeys(PATHS, 1.0), rel=0.05)
    assert found.opinion["verdict"] == "refused"
    assert "host and links hold them up" in found.opinion["reason"]
    assert found.step_width is None


def test_a_stage_measured_eight_times_is_one_kind_of_pass() -> None:
    """Its siblings do not vouch for it: left out together, they are predicted by the rest."""
    shares = random_shares(np.random.default_rng(0), 3)
    rows = np.array([0, 1, 2, 2, 2, 2, 2, 2])
    measured = np.array([1.0, 1.0, *[1.5] * 6])
    _, alike = weighed(shares[rows], measured, list("abcccccc"))
    _, apart = weighed(shares[rows], measured, list("abcdefgh"))
    assert alike.left_out > 2 * apart.left_out


def test_a_backward_slower_than_the_forward_is_left_unexplained() -> None:
    """Families of kernels have other shares in it, and far-fetched factors of theirs would explain it."""
    forward, backward = np.array([0.6, 0.15, 0.25]), np.array([0.66, 0.16, 0.18])
    shares, measured = np.array([forward] * 4 + [backward] * 4), np.array([1.15] * 4 + [1.27] * 4)
    ways = ["forward"] * 4 + ["backward"] * 4
    fitted, found = weighed(shares, measured, list("aabcddef"), ways)
    assert max(fitted.values()) < 1.2 * min(fitted.values())
    assert found.opinion["verdict"] == "corrected"
    assert (found.step_width or 0.0) > math.log(1.27 / 1.15)
