"""Plans how to lay a large model out on N GPUs.

from planner import ClusterSpec, TrainingSpec, load_hardware, load_model, plan

cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=2048)
training = TrainingSpec(seq_length=8192, global_batch_size=2048)
print(plan(load_model("405b"), cluster, training).parallelism)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.plan import Plan
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.runtime import RuntimeSpec
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec

if TYPE_CHECKING:
    from planner.search.search import evaluate, plan
else:
    # Loading planner/plan.py has put that module where the function `plan` belongs; it will not be put there again.
    del plan

__version__ = "0.1.0"

__all__ = [
    "ClusterSpec",
    "ModelSpec",
    "Parallelism",
    "Plan",
    "RuntimeSpec",
    "SearchLimits",
    "TrainingSpec",
    "evaluate",
    "load_hardware",
    "load_model",
    "plan",
]


def __getattr__(name: str) -> Any:
    """Load the search and its solver when something is planned, not before."""
    if name not in ("plan", "evaluate"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from planner.search import search

    globals().update(plan=search.plan, evaluate=search.evaluate)
    return globals()[name]
