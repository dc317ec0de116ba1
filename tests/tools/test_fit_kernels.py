"""The fit of efficiencies: it recovers what it should, holds on what it did not see, and gives the shipped profile."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

from planner.profile.fitting import (
    FitProblem,
    Residuals,
    fit,
    gemm_problem,
    hardware_with,
    least_squares,
    log_errors,
    with_values,
)
from planner.shape import FloatArray
from planner.specs.hardware import AttentionEfficiency, Efficiency, HardwareSpec
from planner.specs.registry import load_hardware
from planner.trainers.load import load_runtime
from tools.calibrate.kernels import efficiency_block, fit_all, left_out, problems, steps_problem
from tools.calibrate.tables import read_table, tables_of

GPU = "h200"


@pytest.fixture(scope="module")
def unfitted() -> HardwareSpec:
    """H200's data sheet with default efficiencies."""
    return load_hardware(GPU).model_copy(update={"efficiency": Efficiency(cudnn=AttentionEfficiency())})


@pytest.fixture(scope="module")
def shipped() -> HardwareSpec:
    return load_hardware(GPU)


@pytest.fixture(scope="module")
def steps() -> FitProblem:
    return steps_problem(tables_of(GPU))


def test_least_squares_finds_the_curve_behind_outliers() -> None:
    x = np.linspace(1, 10, 200)
    y = 3.0 * x**0.5
    y[::20] *= 5

    def residuals(p: FloatArray) -> FloatArray:
        return np.asarray(p[0] + p[1] * np.log(x) - np.log(y))

    low, high = np.array([-5.0, -5.0]), np.array([5.0, 5.0])
    found = least_squares(residuals, np.zeros(2), low, high, scale=0.03)
    assert found == pytest.approx([np.log(3.0), 0.5], abs=0.01)


def test_least_squares_stays_within_bounds() -> None:
    found = least_squares(lambda p: p - 3.0, np.zeros(1), np.array([-1.0]), np.array([1.0]), scale=0.1)
    assert found == pytest.approx([1.0])


def test_with_values_replaces_numbers_at_any_depth() -> None:
    values = {"gemm.ramp_k": 77.0, "host_us": 5.0, "family_fraction.norm": 0.5}
    changed = with_values(Efficiency(), values)
    assert (changed.gemm.ramp_k, changed.host_us, changed.family_fraction) == (77.0, 5.0, {"norm": 0.5})
    assert changed.gemm.forward_fraction == Efficiency().gemm.forward_fraction


@pytest.mark.parametrize("name", ["gemm", "gemm fp8", "gemm grouped", "attention cudnn", "attention flash", "stream"])
def test_the_fit_recovers_the_numbers_that_made_a_table(name: str, unfitted: HardwareSpec) -> None:
    problem = next(p for p in problems(GPU) if p.name == name)
    truth = {path: start * 0.93 for path, (start, _, _) in problem.free.items()}
    made = problem.predict(
        hardware_with(unfitted, truth), {path.removeprefix("bench."): value for path, value in truth.items()}
    )
    found = fit(FitProblem(problem.name, problem.free, problem.predict, made, problem.groups), unfitted)
    ours = [path for path in truth if not path.startswith("bench.")]
    assert [found[path] for path in ours] == pytest.approx([truth[path] for path in ours], rel=0.02)


@pytest.mark.thorough(0)
def test_products_hold_on_shapes_left_out(unfitted: HardwareSpec) -> None:
    problem = gemm_problem(tables_of(GPU))
    seen = log_errors(problem, unfitted, fit(problem, unfitted))
    unseen = left_out(problem, unfitted)
    long = problem.measured_s > 100e-6
    assert Residuals.of(unseen[long]).median < 3.0
    assert Residuals.of(unseen[long]).median < Residuals.of(seen[long]).median + 0.5, "few numbers do not overfit"


@pytest.mark.thorough(0)
@pytest.mark.parametrize(("gpu", "count", "median"), [("a100-pcie", 183, 2.0), ("b200", 514, 3.0)])
def test_products_that_others_timed_hold_on_shapes_left_out(gpu: str, count: int, median: float) -> None:
    problem = gemm_problem(tables_of(gpu))
    unseen = left_out(problem, load_hardware(gpu))
    assert len(unseen) == count
    assert Residuals.of(unseen[problem.measured_s > 1e-3]).median < median


@pytest.mark.parametrize("gpu", ["a100-pcie", "b200"])
def test_products_of_shipped_profiles_are_what_the_fit_gives(gpu: str) -> None:
    shipped = load_hardware(gpu)
    fitted = fit_all(gpu, shipped, leave_out=False).efficiency.gemm.model_dump()
    known = shipped.efficiency.gemm.model_dump()
    # whole runs of mixtures on B200 keep the level of grouped products where `gemm_factor` makes all others quicker
    near = 0.05 if gpu == "b200" else 0.01
    assert fitted.pop("grouped_factor") == pytest.approx(known.pop("grouped_factor"), rel=near)
    assert fitted == pytest.approx(known, rel=0.01)


def test_blackwell_s_products_follow_its_power() -> None:
    """Per SM, siblings of B200 are quicker by (their limit / 1 kW)^0.9."""
    b200 = load_hardware("b200")
    for name, kilowatts in (("b300", 1.1), ("gb200", 1.2), ("gb300", 1.4)):
        sibling = load_hardware(name)
        for path in ("forward_fraction", "dgrad_fraction", "wgrad_fraction", "wave_fraction"):
            ours, theirs = (
                getattr(gpu.efficiency.gemm, path) * gpu.peak_tflops["bf16"] / gpu.num_sms for gpu in (b200, sibling)
            )
            assert theirs / ours == pytest.approx(kilowatts**0.9, rel=1e-3), (name, path)


def test_one_kind_of_sum_leaves_the_product_s_rate_to_that_of_the_other_gradient() -> None:
    both, one = gemm_problem(tables_of("b200")), gemm_problem(tables_of("a100-pcie"))
    assert not both.alike
    assert "gemm.wgrad_fraction" not in one.free
    found = fit(one, load_hardware("a100-pcie"))
    assert found["gemm.wgrad_fraction"] == found["gemm.dgrad_fraction"]
    assert "gemm.accumulate_fraction" not in gemm_problem(tables_of(GPU)).free, "nothing was added to"


def test_stages_on_h200_are_within_a_few_percent(steps: FitProblem, shipped: HardwareSpec) -> None:
    head_backward = load_runtime("torch-eager").head_backward_factor
    values = {"bench.boost": 0.0908, "bench.boost_us": 17_590.0, "bench.head_backward": head_backward}
    assert steps.labels is not None
    errors = log_errors(steps, shipped, values)
    for label, median, worst in (("forward", 1.2, 10), ("backward", 1, 4.5), ("optimizer", 2, 4)):
        of = Residuals.of(errors[steps.labels == f"stage {label}"])
        assert (of.num_rows, of.median < median, of.worst < worst) == (14, True, True), (label, of)


@pytest.mark.thorough(0)
def test_stages_of_a_model_left_out_are_within_a_few_percent(steps: FitProblem, shipped: HardwareSpec) -> None:
    assert steps.labels is not None
    errors = left_out(steps, shipped)
    for label in ("forward", "backward", "optimizer"):
        assert Residuals.of(errors[steps.labels == f"stage {label}"]).median < 2.5, label


def test_the_head_s_backward_is_what_the_fit_gives(steps: FitProblem, shipped: HardwareSpec) -> None:
    found = fit(steps, shipped)["bench.head_backward"]
    assert found == pytest.approx(load_runtime("torch-eager").head_backward_factor, rel=0.01)


def test_the_shipped_profile_is_what_the_fit_gives(shipped: HardwareSpec, capsys: pytest.CaptureFixture[str]) -> None:
    start = shipped.efficiency.model_copy(
        update={
            # no kernel with sinks was timed
            "cudnn": AttentionEfficiency(sink_row_ns=shipped.efficiency.attention.sink_row_ns),
            "sustained_fraction": 1.0,
            "backward_sustained_fraction": 1.0,
        }
    )
    fitted = fit_all(GPU, shipped.model_copy(update={"efficiency": start}), leave_out=False).efficiency
    assert "stage backward" in capsys.readouterr().out
    for part in ("gemm", "flash", "cudnn"):
        ours, theirs = getattr(fitted, part).model_dump(), getattr(shipped.efficiency, part).model_dump()
        assert ours == pytest.approx(theirs, rel=0.01), part
    numbers = ("stream_fraction", "launch_us", "host_us", "sustained_fraction", "backward_sustained_fraction")
    assert [getattr(fitted, n) for n in numbers] == pytest.approx(
        [getattr(shipped.efficiency, n) for n in numbers], rel=0.02
    )
    assert fitted.family_fraction == pytest.approx(shipped.efficiency.family_fraction, rel=0.02)


def test_the_printed_block_reads_back() -> None:
    efficiency = Efficiency(host_us=12.345678, family_fraction={"norm": 0.54321987})
    read = Efficiency.model_validate(yaml.safe_load(efficiency_block(efficiency))["efficiency"])
    assert (read.host_us, read.family_fraction["norm"]) == (12.35, 0.5432)


def test_tables_skip_comments_and_keep_gaps() -> None:
    table = read_table(GPU, "gemm")
    fp8 = table.number("fp8_forward_us")
    assert (table.num_rows, int(np.isfinite(fp8).sum())) == (503, 212)
    assert table.where(np.isfinite(fp8)).num_rows == 212
