"""The words for a layout, its seconds, its bytes and its evidence: every report calls them the same."""

from __future__ import annotations

from collections.abc import Sequence

from planner.answer import Layout, PricedLayout
from planner.report.format import percent
from planner.specs.hardware import By, Correction
from planner.trainers.switches import written

BREAKDOWN = {
    "compute_s": "compute",
    "bubble_s": "pipeline bubble",
    "tp_comm_s": "tensor-parallel exchanges",
    "cp_comm_s": "context-parallel exchanges",
    "ep_comm_s": "expert-parallel exchanges",
    "pp_comm_s": "pipeline sends",
    "exposed_dp_s": "data-parallel exchanges",
    "optimizer_s": "optimizer",
    "overhead_s": "host and other overhead",
}
"""The items of a step's seconds."""
MEMORY = {
    "weights_bytes": "weights",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activations_bytes": "activations",
    "logits_bytes": "logits",
    "workspace_bytes": "workspace",
    "reserved_bytes": "reserved",
    "total_bytes": "total",
}
"""The items of a stage's memory, and their sum."""
ACTIONS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
"""The kinds of a pipeline's actions."""
EVIDENCE = {
    "spec_sheet": "spec sheet: peaks and typical efficiencies, nothing measured on this kind of GPU",
    "calibrated": "calibrated on measurements of this GPU, or of others of its silicon",
    "probed": "probed: corrected or confirmed by a real run on this kind of GPU",
}
CORRECTIONS: dict[By, str] = {
    "probe": "What a probe corrected",
    "run": "What a run corrected",
    "history": "What your runs corrected",
}
"""The titles of the numbers of the hardware that were measured."""
CORRECTED: dict[By, str] = {"probe": "probed", "run": "by a run"}
"""The words before the names of numbers in one line; runs that are kept are named with their folder instead."""
NINE_OF_TEN_LOSE = 0.02
"""In nine of ten published jobs the layout ranked first took at most this much longer than the fastest, as a fraction
(`plan validate --regret`)."""
RANKED_FIRST = (
    f"in 9 of 10 published jobs the one ranked first took at most {NINE_OF_TEN_LOSE:.0%} longer than the fastest"
)
LEAST_SHARE = 0.0005
"""A smaller share of a step is not shown: it would read 0.0%."""


def corrections_title(corrections: Sequence[Correction]) -> str:
    """The title of the numbers that were measured."""
    return CORRECTIONS[corrections[-1].by if corrections else "probe"]


def corrected(corrections: Sequence[Correction]) -> tuple[str, ...]:
    """The measured numbers in brief, the first after the words for the measurement; empty without any."""
    briefs = [correction.brief for correction in corrections]
    if not corrections:
        return ()
    last = corrections[-1]
    if last.by == "history":
        return f"corrected by {last.source}", *briefs
    return f"{CORRECTED[last.by]}: {briefs[0]}", *briefs[1:]


def sizes(layout: Layout) -> str:
    """The sizes of a layout in few letters, to stand beside figures: `TP 8 PP 16 DP 16 · mb 1 × 128`."""
    return f"{' '.join(layout.axes)} · mb {layout.micro_batch_size} × {layout.num_microbatches}"


def manner(layout: Layout) -> tuple[str, ...]:
    """The ways in which a layout is run, beside its sizes: schedule, ZeRO, recompute and the like."""
    zero = f"ZeRO-{layout.zero_stage}"
    if layout.zero_stage and layout.shard_size < layout.dp * layout.cp:
        zero += f" over {layout.shard_size:,}"
    recompute = "no recompute" if layout.recompute == "none" else f"{layout.recompute} recompute"
    if layout.recompute == "selective" and layout.recompute_modules:
        recompute += f" ({', '.join(layout.recompute_modules)})"
    parts = [layout.schedule if layout.pp > 1 else "no pipeline", zero, recompute]
    if layout.tp > 1:
        parts.append("sequence parallel" if layout.sequence_parallel else "no sequence parallel")
    if layout.ep > 1:
        parts.append(f"expert TP {layout.etp}")
    if layout.dp_outermost:
        parts.append(f"ranks {layout.rank_order}")
    if layout.num_gpus_spare:
        parts.append(f"{layout.num_gpus_spare:,} of {layout.num_gpus_used + layout.num_gpus_spare:,} GPUs idle")
    return tuple(parts)


def says_unsaid(layout: PricedLayout) -> str:
    """`ep_overlap; true would be 12% faster (dispatcher and cuda_graph too)`; empty where every switch is said."""
    if not layout.unsaid:
        return ""
    most, step_s = layout.unsaid[0], layout.step.step_s
    faster = most.other_step_s < step_s
    effect = percent(abs(most.other_step_s / step_s - 1), 0)
    says = f"{most.switch}; {written(most.other)} would be {effect} {'faster' if faster else 'slower'}"
    others = [name for name in dict.fromkeys(one.switch for one in layout.unsaid) if name != most.switch]
    return f"{says}; nor {', '.join(others)}" if others else says
