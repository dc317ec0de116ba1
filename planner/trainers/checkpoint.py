"""Rows of a trainer's file that say what its sharded checkpoints can be loaded as (`checkpoint:`), with their sources.

A row says which axes of the layout a job must keep to load the files as they are, and the way round for other layouts:
written again by a job that keeps those axes, or converted by a tool. It is no part of RuntimeSpec, since no price
depends on it.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from planner.errors import SpecError
from planner.specs.base import Name, Spec
from planner.specs.problems import checked

AXES: Final = (
    "tp", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch_size", "zero_stage", "shard_size", "schedule",
    "rank_order", "layers",
)  # fmt: skip
"""Axes of a layout that a resumed job may keep; `layers` is how many layers each virtual stage holds."""
Axis = Literal[
    "tp", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch_size", "zero_stage", "shard_size", "schedule",
    "rank_order", "layers",
]  # fmt: skip


class Rewritten(Spec):
    """The way to load a checkpoint under a layout that its files do not fit."""

    by: Literal["resave", "convert"]
    """`resave`: a job that keeps the axes loads it and saves it in another format. `convert`: a tool rewrites it."""
    says: Name
    """The option or the tool, in words that end a sentence."""
    ready: Name | Literal[""] = ""
    """The option with which a job saves in the other format from the start; empty if only the tool makes it."""
    keeps: tuple[Axis, ...] = ()
    """Axes that stay all the same."""
    source: Name


class Checkpoint(Spec):
    """A kind of checkpoint: its format, and what a job that loads it has to keep."""

    zero_stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    """The ZeRO stages whose jobs write it."""
    format: Name
    keeps: tuple[Axis, ...]
    """Axes that must be those of the job that saved."""
    rewritten: Rewritten | None = None
    """The way round what must be kept; null where there is none for optimizer states."""
    in_buckets: bool = False
    """True where states lie in the buckets in which gradients are reduced, whose size must stay too."""
    data: str = ""
    """A sentence on the data loader after dp has changed; empty where its position is a number of samples."""
    source: Name


UNKNOWN = Checkpoint(
    format="unknown",
    keeps=("tp", "ep", "etp", "pp", "vpp", "zero_stage", "layers"),
    source="nothing is known of this trainer's checkpoints; most load with more or fewer data-parallel ranks",
)
"""The checkpoint of a trainer whose file has no row."""


def read_checkpoints(where: str, given: Any) -> tuple[Checkpoint, ...]:
    """The rows of a trainer's file; SpecError naming the row and its field."""
    if not isinstance(given, list):
        raise SpecError(
            f"{where}: checkpoint: {given!r:.60} is no list", "write `checkpoint:` and rows with `- format:`"
        )
    return tuple(checked(Checkpoint, row, f"{where}: checkpoint[{number}]") for number, row in enumerate(given))
