"""`probe()`: run a plan, or the largest slice of it that fits here, and hold what it measures against what it says."""

from __future__ import annotations

import torch

from planner.answer import Plan
from planner.errors import ProbeError
from planner.probe.launch.joined import joins_others, probe_joined
from planner.probe.plan_side.gpu_run import probe_ranks, probe_stages, require_gpu
from planner.probe.plan_side.laptop_run import probe_laptop
from planner.probe.result import ProbeResult
from planner.probe.verdict.outcome import Options
from planner.specs.training import tokens_split

__all__ = ["Options", "probe"]


def probe(plan: Plan, options: Options) -> ProbeResult | None:
    """Run what can be run of the plan's best layout, and compare; None where another rank has the result.

    Raises ProbeError naming rank, stage and phase when it cannot run; a disagreement is in the result.
    """
    layout, model = plan.parallelism, plan.model.spec
    if model.moe is not None and layout.etp > 1:
        raise ProbeError(f"the probe shards no single expert: etp {layout.etp} must be 1", "plan again with --etp 1")
    if model.moe is not None and layout.tp > 1 and not layout.sequence_parallel:
        raise ProbeError("the probe's experts need sequence parallelism beside tp", "plan with --sequence-parallel")
    require_split(plan, options)
    require_gpu(options.device)
    if options.stages is not None:
        return probe_stages(plan, options)
    if joins_others():
        return probe_joined(plan, options)
    if options.device == "cuda":
        return probe_ranks(plan, options, torch.cuda.device_count())
    return probe_laptop(plan, options)


def require_split(plan: Plan, options: Options) -> None:
    """Raise ProbeError where the probe cannot split the plan's sequences over its context-parallel ranks."""
    layout, model, seq_length = plan.parallelism, plan.model.spec, plan.training.seq_length
    if layout.cp == 1:
        return
    unit = tokens_split(layout.cp, layout.tp if layout.sequence_parallel else 1)
    if seq_length % unit:
        raise ProbeError(
            f"sequences of {seq_length} tokens do not split into two equal chunks for each of cp {layout.cp} ranks"
            + (f" and tp {layout.tp} shards" if unit > 2 * layout.cp else ""),
            f"plan with a --seq-length that is a multiple of {unit}",
        )
    chunk = model.attention_chunk_size or seq_length
    unsplit = f"chunks of {chunk} tokens" if chunk < seq_length else ""
    unsplit = "ALiBi" if model.position_embedding == "alibi" else unsplit
    if unsplit and options.device == "cuda":
        raise ProbeError(
            f"flash attention over split sequences (cp {layout.cp}) takes no {unsplit}",
            "plan with --cp 1, or prove the order and the gradients with --device cpu",
        )
