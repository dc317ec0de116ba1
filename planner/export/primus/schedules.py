"""Primus' own pipeline schedules, which its unified pipeline runs by tables: their keys and what they need.

Names and conditions were judged by running its schedulers (commit fd1eeab, August 2026).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from planner.answer import Plan
from planner.export.common.refusal import Reason
from planner.export.common.stages import VirtualStage, is_even
from planner.export.primus.keys import Keys


class _Schedule(NamedTuple):
    algorithm: str
    """The value of `pp_algorithm`."""
    least_microbatches: Callable[[int], int]
    """The fewest micro-batches, by pp, for which its table is whole."""
    held: Callable[[int], int] | None = None
    """Micro-batches that the fullest rank holds (`pp_max_mem`), by pp, where the algorithm asks for them."""


_SCHEDULES = {
    "zb-h1": _Schedule("zero-bubble", lambda pp: pp),
    "zb-h2": _Schedule("zero-bubble-heuristic", lambda pp: 2 * pp, lambda pp: 2 * pp - 1),
    "zb-v": _Schedule("zbv-formatted", lambda pp: 2 * pp - 1),
    "v-half": _Schedule("v-half", lambda pp: 1),
    "v-min": _Schedule("v-min", lambda pp: 1),
}
OWN_SCHEDULES = tuple(_SCHEDULES)
"""Schedules that Megatron-LM does not have; its own it runs itself, without a key."""
ALGORITHMS = {"1f1b": "1f1b", "1f1b-interleaved": "interleaved-1f1b"} | {
    schedule.algorithm: name for name, schedule in _SCHEDULES.items()
}
"""Values of `pp_algorithm`, and the schedules that they are."""
_WITH_TABLES: Keys = {
    "patch_primus_pipeline": True,
    "no_persist_layer_norm": True,
    "create_attention_mask_in_dataloader": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "eval_iters": 0,
}
"""Arguments that go with schedules from tables, which reduce and gather after the last backward, as they are priced
(`overlaps_split_backwards`), and have no forward alone."""


def schedule_keys(plan: Plan) -> Keys:
    """The keys of a schedule that Megatron-LM does not have; none for the others."""
    layout = plan.parallelism
    schedule = _SCHEDULES.get(layout.schedule)
    if schedule is None:
        return {}
    held = {} if schedule.held is None else {"pp_max_mem": schedule.held(layout.pp)}
    return {**_WITH_TABLES, "pp_algorithm": schedule.algorithm, **held}


def objections_to_schedule(plan: Plan, stages: tuple[VirtualStage, ...]) -> list[Reason]:
    """The reasons why a schedule from a table cannot run the plan."""
    layout, runtime = plan.parallelism, plan.runtime_spec
    schedule = _SCHEDULES.get(layout.schedule)
    if schedule is None:
        return []
    least, name = schedule.least_microbatches(layout.pp), layout.schedule
    wrong = {
        "num_microbatches": (
            layout.num_microbatches < least,
            f"{name} at pp {layout.pp} needs {least}, not {layout.num_microbatches}",
        ),
        "uneven_stages": (not is_even(stages), f"{name} takes stages of equally many layers"),
        "recompute": (layout.recompute != "none", f"{name} splits backwards, which keep the inputs of every layer"),
        "fused_grad_accumulation": (not runtime.fused_grad_accumulation, f"{name} needs it"),
    }
    return [Reason(name, message) for name, (is_wrong, message) in wrong.items() if is_wrong]
