"""The step and the memory that a plan promises, in lines that a launcher prints beside the first run."""

from __future__ import annotations

from planner.answer import Plan
from planner.specs.units import GIB


def promise(plan: Plan, shown_as: str) -> tuple[str, ...]:
    """Lines with the planned step and each stage's peak; `shown_as` says where the trainer's log has them."""
    step = plan.best.step
    interval = ""
    if step.step_s_interval is not None:
        interval = f" (80% interval {step.step_s_interval[0]:.3g} to {step.step_s_interval[1]:.3g})"
    peaks = [f"{stage.memory.peak_allocated_bytes / GIB:.1f}" for stage in plan.stages]
    stages = f"stages 0 to {len(peaks) - 1}" if len(peaks) > 1 else "every rank"
    return (
        f"planned step: {step.step_s:.4g} s{interval}, {step.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, "
        f"{step.model_tflops_per_gpu:.0f} TFLOP/s/GPU",
        f"planned peak of torch.cuda.max_memory_allocated, GiB, {stages}: {' '.join(peaks)}",
        shown_as,
    )
