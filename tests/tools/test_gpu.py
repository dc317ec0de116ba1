"""The check of a GPU as tests, on a real one: stages in memory and seconds, two stages that share it, and attention.

`tools/gpu_check` runs the same stages, and more, in a bounded time, and writes what it finds.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from planner.probe.model.attention import (  # noqa: E402
    Visibility,
    flash_backward,
    flash_forward,
    masked_attention,
)
from planner.profile.measurements import Machine, known_profile  # noqa: E402
from planner.specs.hardware import HardwareSpec  # noqa: E402
from tools.gpu_check import parts  # noqa: E402
from tools.gpu_check.cases import CASES, StageCase  # noqa: E402
from tools.gpu_check.report import BYTES, SECONDS, WORST_BYTES, WORST_SECONDS  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def machine() -> Machine:
    return parts.machine_here("cuda")


@pytest.fixture(scope="module")
def hardware(machine: Machine) -> HardwareSpec:
    known = known_profile(machine)
    if known is None:
        pytest.skip(f"no profile ships for {machine.name}")
    return known


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_stage_is_as_predicted(case: StageCase, machine: Machine, hardware: HardwareSpec) -> None:
    """Seconds to 6% and bytes to 1%, against the shipped profile; the probe's own exit code is 0."""
    reason = parts.refusal(case, hardware, "cuda", machine.memory_bytes, small=False)
    if reason:
        pytest.skip(reason)
    result = parts.stage_result(case, hardware, "cuda", small=False)
    part = parts.stage_part(case, result, {"shipped": hardware}, None, small=False)
    limits = dict.fromkeys(SECONDS, WORST_SECONDS) | dict.fromkeys(BYTES, WORST_BYTES)
    off = {
        each.name: error
        for each in part.quantities
        if each.is_judged and (error := each.error_fraction("shipped")) is not None and each.name in limits
        if abs(error) > limits[each.name]
    }
    assert (part.exit_code, off) == (0, {}), part.detail


def test_two_stages_run_a_pipeline(machine: Machine, hardware: HardwareSpec) -> None:
    part = parts.pipeline_part(hardware, "shipped", "cuda", machine.num_devices)
    assert part.exit_code == 0, part.detail


@pytest.mark.parametrize(
    ("v_dim", "window", "has_sinks"), [(64, 0, False), (48, 0, False), (64, 100, False), (64, 100, True)]
)
def test_flash_attention_of_a_chunk_is_the_formula(v_dim: int, window: int, has_sinks: bool) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(rows, 2, heads, dim, device="cuda", dtype=torch.bfloat16)
        for rows, heads, dim in ((128, 4, 64), (512, 2, 64), (512, 2, v_dim), (128, 4, v_dim))
    )
    distance = torch.arange(512, device="cuda")[:, None] - torch.arange(512, device="cuda")
    seen = (distance >= 0) & (distance < (window or 512))
    mask = torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, float("-inf"))
    sinks = torch.linspace(-1, 5, 4, device="cuda") if has_sinks else None
    flash, plain = Visibility(None, window, sinks), Visibility(mask, window, sinks)
    found, *kept = flash_forward(q, k, v, flash)
    leaves = [x.requires_grad_() for x in (q, k, v, *([sinks] if has_sinks else []))]
    expected = masked_attention(*(x.float() for x in (q, k, v)), plain)
    expected_grads = torch.autograd.grad(expected, leaves, grad.float())
    with torch.no_grad():
        grads = flash_backward(grad, q, found.contiguous(), k, v, flash, kept)
    assert (grads[-1] is None) == (not has_sinks)
    own = (found, *(each for each in grads if each is not None))
    for one, other in zip(own, (expected, *expected_grads), strict=True):
        torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2, check_dtype=False)
