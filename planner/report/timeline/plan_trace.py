"""One step of a plan as a trace: its passes with the exchanges inside them, what runs beside, memory and capacity."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from planner.answer import Plan, PricedLayout
from planner.layout.candidate import Candidate
from planner.layout.memory_curve import memory_curves
from planner.layout.replan import reprice
from planner.layout.step.beside import beside_pipeline
from planner.layout.step.inside import Passes, Together, exchanges_of_passes
from planner.report.labels import sizes
from planner.report.timeline.trace import COMPUTE, Inner, InnerSlice, TraceCounter, TraceSlice, trace_events
from planner.schedule.replay import replay
from planner.schedule.timeline import Timeline

GROUPS = {"tp": "tensor-parallel", "cp": "context-parallel", "ep": "expert-parallel"}
"""The threads of the exchanges inside passes."""
BESIDE = "data-parallel exchange"
"""The thread of what runs beside and behind the pipeline."""
SHOWN: dict[Together, str] = {
    "": "each by itself",
    "part": "those of a layer together",
    "pass": "those of a pass together",
}
"""How exchanges are shown, in the order in which it is tried."""
MAX_ACTIONS = 100_000
"""Actions of one step; a trace of so many has about 160 MB. 405B on 2,048 GPUs has 65,536."""
MAX_SLICES = 300_000
"""Exchanges of a step, each drawn twice; where there are more, those of a layer are one, and then those of a pass. So
many take 90 MB."""


def trace_text(plan: Plan, layout: PricedLayout) -> str:
    """`plan_trace` as the text of a file."""
    return json.dumps(plan_trace(plan, layout), separators=(",", ":"))


def plan_trace(plan: Plan, layout: PricedLayout) -> dict[str, Any]:
    """The trace of one step of `layout`: one of the plan's, or such a one with fewer micro-batches."""
    priced = reprice(plan, layout)
    timeline = replay(priced.order, priced.durations)
    together, passes = _few_enough(priced)
    ranks = range(priced.order.pp)
    beside = [TraceSlice(rank, BESIDE, *span) for rank in ranks for span in beside_pipeline(priced, timeline, rank)]
    return trace_events(
        timeline,
        extra=beside,
        rank_names=[f"stage {rank}" for rank in ranks],
        inner=_inner(priced, passes),
        counters=_counters(priced, timeline),
        about={
            "command": plan.command,
            "model": plan.model.name,
            "gpus": f"{plan.cluster.num_gpus:,} × {plan.cluster.hardware.name}",
            "trainer": layout.runtime_spec.name if layout.runtime_spec else plan.runtime,
            "layout": sizes(layout.parallelism),
            "schedule": layout.parallelism.schedule,
            "step_s": priced.step_s,
            "exchanges": SHOWN[together],
            "planner_version": plan.planner_version,
        },
    )


def _few_enough(priced: Candidate) -> tuple[Together, Passes]:
    """The exchanges of all passes, and what of them is shown as one."""
    times = Counter((action.stage, action.kind) for actions in priced.order.ranks for action in actions)
    stages = priced.order.num_model_stages
    for together in SHOWN:
        passes = exchanges_of_passes(priced, together)
        shown = sum(count * len(passes.get((stage % stages, kind), ())) for (stage, kind), count in times.items())
        if shown <= MAX_SLICES:
            break
    return together, passes


def _inner(priced: Candidate, passes: Passes) -> Inner:
    """Each exchange twice: on its group's thread with what hides of it, and inside the pass as far as it shows."""
    durations = priced.durations
    backward_s = [sum(both) for both in zip(durations.input_grad_s, durations.weight_grad_s, strict=True)]
    length_s = {"F": durations.forward_s, "I": durations.input_grad_s, "B": backward_s}
    inner = {}
    for (stage, kind), exchanges in passes.items():
        slices: list[InnerSlice] = []
        free_s = dict.fromkeys(GROUPS, 0.0)
        for one in exchanges:
            args = {"part": one.part, "exposed_s": round(one.exposed_s, 9), "hidden_s": round(one.hidden_s, 9)}
            shown_s = one.start_s, one.start_s + one.exposed_s
            slices.append(InnerSlice(COMPUTE, f"{GROUPS[one.group]}: {one.name}", *shown_s, {"part": one.part}))
            hidden_s = (0.0, one.hidden_s) if one.leads else (one.hidden_s, 0.0)
            # what hides beside another micro-batch is longer than there is room beside this one
            begin_s = max(free_s[one.group], shown_s[0] - hidden_s[0])
            end_s = max(begin_s, min(shown_s[1] + hidden_s[1], length_s[kind][stage]))
            free_s[one.group] = end_s
            slices.append(InnerSlice(GROUPS[one.group], one.name, begin_s, end_s, args))
        inner[stage, kind] = slices
    return inner


def _counters(priced: Candidate, timeline: Timeline) -> Iterator[TraceCounter]:
    """Memory of each rank: tensors, the reserve beside them, and the GPU's capacity."""
    capacity = priced.pricing.cluster.hardware.memory_bytes
    for curve in memory_curves(priced, timeline):
        times_s, allocated = curve.times_s.tolist(), curve.allocated_bytes.tolist()
        reserved = [curve.reserved_bytes] * len(times_s)
        yield TraceCounter(curve.rank, "memory", times_s, {"allocated bytes": allocated, "reserved bytes": reserved})
        yield TraceCounter(curve.rank, "memory capacity", [0.0, times_s[-1]], {"bytes": [capacity] * 2})
