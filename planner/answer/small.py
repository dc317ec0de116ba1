"""The answers that a small job asks for beside its layout: how much room there is, and what to change first."""

from __future__ import annotations

from typing import Literal

from planner.answer.quantities import Count, Difference, PositiveSeconds
from planner.specs.base import Spec
from planner.specs.training import TrainingSpec
from planner.trainers.spec import RuntimeSpec

Method = Literal["lora", "qlora", "full"]
MOST_GPUS = 8
"""The most GPUs of a small job."""


def is_small(num_gpus: int, training: TrainingSpec, runtime: RuntimeSpec) -> bool:
    """True for a job of a few GPUs that trains adapters, or whose trainer knows no model parallelism."""
    return num_gpus <= MOST_GPUS and (training.adapters is not None or not runtime.has_model_parallel)


class Change(Spec):
    """One change of the job, with the bytes and seconds that it saves or takes, all else as it is."""

    kind: str
    """The kind of change: bits, checkpointing, micro-batch, sequence, sharding, adapters, switch or trained."""
    change: str
    """The change in words."""
    options: tuple[str, ...] = ()
    """Words of the command line that make it."""
    bytes: int
    """Change of the fullest rank's peak; negative where it saves."""
    seconds: Difference
    """Change of the seconds that a step's tokens take; negative where it gains. Another length of sequences is counted
    for as many tokens."""
    step_s: PositiveSeconds
    """Seconds of a step after it."""
    total_bytes: Count
    """Peak of the fullest rank after it."""
    fits: bool
    """True if it fits with the risk that was asked for."""
    changes: str = ""
    """The thing that it changes beside bytes and seconds: numerics, the data, what is trained; empty if none."""


class LongestSequence(Spec):
    """The longest sequences that fit one at a time on each GPU."""

    seq_length: Count
    """A multiple of 128 tokens; 0 where not even 128 fit."""
    checkpointed_seq_length: Count
    """The same with all layers recomputed."""
    most: Count | None = None
    """The positions that the model has, beyond which nothing was tried; null where the model does not say."""


class LargestModel(Spec):
    """The largest model of the catalogue that fits these GPUs when it is trained in one way."""

    method: Method
    name: str | None
    """Null where none fits."""
    num_parameters: Count = 0


class Room(Spec):
    """The largest batch, sequence and model that fit with the risk that was asked for, each with all else as it is."""

    micro_batch_size: Count
    """The largest micro-batch at this length, recomputing what the plan recomputes; 0 where not even one fits."""
    checkpointed_micro_batch_size: Count
    """The same with all layers recomputed."""
    sequence: LongestSequence
    models: tuple[LargestModel, ...] = ()
