"""The types of the answer: a plan, and the layouts in it with their stages, their time and their memory.

The JSON of these types is the interface contract: fields are added, never renamed. Times are in seconds, memory is in
bytes, and an interval is meant to hold the true value in 80% of all cases.
"""

from planner.answer.layout import (
    AS_PLANNED,
    DecidingFact,
    Evidence,
    Layout,
    NarrowScaling,
    Offer,
    Placement,
    PricedLayout,
    RecipeGain,
    RecipeRefusal,
    Recommendation,
    RobustStep,
    StageMemory,
    StagePlan,
    StepBreakdown,
    StepTime,
    UnsaidSwitch,
)
from planner.answer.plan import (
    SCHEMA_VERSION,
    BatchOffer,
    ModelSummary,
    Plan,
    RiskOffer,
    Searched,
    SearchReport,
)
from planner.answer.quantities import Interval
from planner.answer.run import SIGMAS_TO_END, Goodput, RunCost, Sustained, half_width
from planner.answer.small import Change, LargestModel, LongestSequence, Method, Room

__all__ = [
    "AS_PLANNED",
    "SCHEMA_VERSION",
    "SIGMAS_TO_END",
    "BatchOffer",
    "Change",
    "DecidingFact",
    "Evidence",
    "Goodput",
    "Interval",
    "LargestModel",
    "Layout",
    "LongestSequence",
    "Method",
    "ModelSummary",
    "NarrowScaling",
    "Offer",
    "Placement",
    "Plan",
    "PricedLayout",
    "RecipeGain",
    "RecipeRefusal",
    "Recommendation",
    "RiskOffer",
    "RobustStep",
    "Room",
    "RunCost",
    "SearchReport",
    "Searched",
    "StageMemory",
    "StagePlan",
    "StepBreakdown",
    "StepTime",
    "Sustained",
    "UnsaidSwitch",
    "half_width",
]
