"""A run as read from a trainer's own configuration, with everything that was not understood."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from planner.errors import SpecError
from planner.export.common.published_models import published_name

_REQUIRED = {
    "model": "add --model NAME",
    "num_gpus": "add --gpus N",
    "seq_length": "add --seq-length N",
    "global_batch_size": "add --global-batch-size N",
}
"""Fields without which a run cannot be priced, and how the user adds them."""


@dataclass(slots=True)
class ImportedRun:
    """A run as `plan evaluate --runs` takes it, and the fate of every option."""

    source: str
    """The trainer whose configuration it is: megatron, torchtitan, deepspeed, …"""
    run: dict[str, Any]
    """Fields of a run; some may be missing, which only the user can say."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Options that change neither seconds nor bytes of a step."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Options that this planner does not know: they may matter."""
    notes: list[str] = field(default_factory=list)
    """Assumptions, and settings that a plan has no word for."""

    optimizer_instances: int = 1
    """Copies of the sharded optimizer; the number of GPUs says over how many ranks each is sharded."""
    microbatches_per_rank: int | None = None
    """Micro-batches of a data-parallel rank in a step, for configurations that count the batch so."""

    def complete(
        self, *, vocab_size: int | None = None, tp: int | None = None, pp: int | None = None, **given: Any
    ) -> dict[str, Any]:
        """The run with the fields that the user adds or replaces, as `plan evaluate --runs` takes it.

        Fields beside those named here are a run's own: model, hardware, num_gpus, … A number of GPUs other than the
        configuration's leaves dp to be found again, and a model with the sizes of a published one gets its name.
        Raises SpecError for a field that is still missing.
        """
        added = {name: value for name, value in given.items() if value is not None}
        run = {**self.run, **added}
        axes = {name: size for name, size in (("tp", tp), ("pp", pp)) if size is not None}
        layout = run["parallelism"] = {**run["parallelism"], **axes}
        if "num_gpus" in added and added["num_gpus"] != self.run.get("num_gpus"):
            layout.pop("dp", None)
        if isinstance(run["model"], dict):
            run["model"] = self._model(run["model"], vocab_size)
        ranks = max(1, layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1))
        if run.get("num_gpus") is not None and run["num_gpus"] % ranks and "num_gpus" not in added:
            raise SpecError(
                f"{self.source}: it starts {run['num_gpus']} GPUs, which tp·cp·pp ({ranks}) does not divide",
                f"add --gpus N, a multiple of {ranks}",
            )
        if run.get("global_batch_size") is None and run.get("num_gpus") and self.microbatches_per_rank:
            dp = layout.get("dp") or max(1, run["num_gpus"] // ranks)
            run["global_batch_size"] = layout.get("micro_batch_size", 1) * self.microbatches_per_rank * dp
        for name, hint in _REQUIRED.items():
            if run.get(name) is None:
                least = least_gpus(layout)
                multiple = f", a multiple of {least}" if name == "num_gpus" and least > 1 else ""
                raise SpecError(f"{self.source}: {name} is not in the configuration", hint + multiple)
        if self.optimizer_instances > 1:
            shards = run["num_gpus"] // (layout["tp"] * layout["pp"] * self.optimizer_instances)
            layout["fsdp"] = max(1, shards)
        return {name: value for name, value in run.items() if value is not None}

    def _model(self, sizes: dict[str, Any], vocab_size: int | None) -> dict[str, Any]:
        """The model's fields with the user's vocabulary, and the name of the published model that has them."""
        model = {**sizes, "vocab_size": vocab_size or sizes.get("vocab_size")}
        if model["vocab_size"] is None:
            raise SpecError(f"{self.source}: vocab_size is not in the configuration", "add --vocab-size N")
        return model | {"name": published_name(model) or model.get("name", "model")}


def least_gpus(layout: dict[str, Any]) -> int:
    """The fewest GPUs that a layout's ranks fill: one replica of each stage, for the experts as for the rest."""
    attention, experts = (layout.get("tp", 1) * layout.get("cp", 1), layout.get("ep", 1) * (layout.get("etp") or 1))
    stages: int = max(1, layout.get("pp", 1))
    return stages * math.lcm(max(1, attention), max(1, experts))
