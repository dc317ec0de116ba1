"""Plans how to lay a large model out on N GPUs.

    from planner import ClusterSpec, TrainingSpec, load_hardware, load_model, plan

    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=2048)
    training = TrainingSpec(seq_length=8192, global_batch_size=2048)
    print(plan(load_model("405b"), cluster, training).parallelism)

Names are loaded when they are first asked for, so that importing the package costs nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.answer import Plan
    from planner.layout.evaluate import evaluate
    from planner.search.search import plan
    from planner.specs.cluster import ClusterSpec
    from planner.specs.model import ModelSpec
    from planner.specs.registry import load_hardware, load_model
    from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
    from planner.trainers.spec import RuntimeSpec

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

_HOMES = {
    "ClusterSpec": "planner.specs.cluster",
    "ModelSpec": "planner.specs.model",
    "Parallelism": "planner.specs.training",
    "Plan": "planner.answer",
    "RuntimeSpec": "planner.trainers.spec",
    "SearchLimits": "planner.specs.training",
    "TrainingSpec": "planner.specs.training",
    "evaluate": "planner.layout.evaluate",
    "load_hardware": "planner.specs.registry",
    "load_model": "planner.specs.registry",
    "plan": "planner.search.search",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


class _Package(ModuleType):
    """This package, where `plan` is the function although a module has the same name.

    Loading planner/plan.py sets it as the package's attribute `plan`; a property takes that and keeps to the function.
    """

    @property
    def plan(self) -> Any:
        return __getattr__("plan")

    @plan.setter
    def plan(self, module: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Package
