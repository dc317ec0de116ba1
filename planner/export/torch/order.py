"""The order in which a plan's ranks run their actions, for the trainers that torch.distributed.pipelining drives."""

from __future__ import annotations

from planner.answer import Plan, PricedLayout
from planner.errors import SpecError
from planner.export.common.refusal import Objections
from planner.export.common.stages import VirtualStage
from planner.export.torch.schedule_csv import from_torch_csv, to_torch_csv
from planner.schedule.actions import Schedule
from planner.schedule.orders import build_schedule

ORDER_FILE = "schedule.csv"


def order_of(layout: PricedLayout) -> Schedule:
    """The plan's own order where it was made to measure, else that of its schedule; SpecError where there is none."""
    chosen = layout.parallelism
    if not layout.actions:
        return build_schedule(chosen.schedule, chosen.pp, chosen.vpp, chosen.num_microbatches)
    return from_torch_csv("\n".join(",".join(row.split()) for row in layout.actions), chosen.schedule)


def check_order(plan: Plan, stages: tuple[VirtualStage, ...], objections: Objections) -> None:
    """Object unless the plan's order exists, torch's runtime can run it, and its stages are on the plan's ranks."""
    try:
        order = order_of(plan.best)
        to_torch_csv(order)
    except SpecError as error:
        objections.when(True, "schedule", error.message)
        return
    objections.when(
        [stage.rank for stage in stages] != list(order.stage_to_rank),
        "placement",
        f"schedule {plan.parallelism.schedule} runs the stages on other ranks",
    )
