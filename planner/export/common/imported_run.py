"""What could be read from a trainer's own configuration: a run, and everything that was not understood."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from planner.errors import SpecError


@dataclass(slots=True)
class Imported:
    """A run as `plan evaluate --runs` takes it, and what became of every option."""

    source: str
    """What the configuration is: megatron, torchtitan or deepspeed."""
    run: dict[str, Any]
    """Fields of a run; some may be missing, which only the user can say."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Options that change neither seconds nor bytes of a step."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Options that this planner does not know: they may matter."""
    notes: list[str] = field(default_factory=list)
    """What was assumed, and what a plan has no word for."""

    optimizer_instances: int = 1
    """Copies of the sharded optimizer; over how many ranks each is sharded, the number of GPUs says."""

    def complete(self, vocab_size: int | None = None, **given: Any) -> dict[str, Any]:
        """The run with what the user adds or replaces; SpecError for what is still missing."""
        run = {**self.run, **{key: value for key, value in given.items() if value is not None}}
        if isinstance(run["model"], dict):
            run["model"] = {**run["model"], "vocab_size": vocab_size or run["model"]["vocab_size"]}
            if run["model"]["vocab_size"] is None:
                raise SpecError(f"{self.source}: vocab_size is not in the configuration", "add --vocab-size N")
        hints = {
            "model": "add --model NAME",
            "num_gpus": "add --gpus N",
            "seq_length": "add --seq-length N",
            "global_batch_size": "add --global-batch-size N",
        }
        for name, hint in hints.items():
            if run.get(name) is None:
                raise SpecError(f"{self.source}: {name} is not in the configuration", hint)
        if self.optimizer_instances > 1:
            layout = run["parallelism"]
            shards = run["num_gpus"] // (layout["tp"] * layout["pp"] * self.optimizer_instances)
            run["parallelism"] = {**layout, "fsdp": max(1, shards)}
        return {key: value for key, value in run.items() if value is not None}


def shown(values: list[str]) -> str:
    """An option's values as one text."""
    return " ".join(values)


def names(text: str) -> frozenset[str]:
    """Options that stand in a text, apart by blanks."""
    return frozenset(text.split())
