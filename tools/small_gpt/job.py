"""A run of the small GPT: its processes, its work, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Layout:
    """The processes and the work of one of them."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    num_microbatches: int = 4
    micro_batch_size: int = 4
    seq_length: int = 64
    layers_per_stage: int = 2

    @property
    def num_ranks(self) -> int:
        """Processes of the job."""
        return self.tp * self.dp * self.pp

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "dp": self.dp, "pp": self.pp}
        return " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) + f" m{self.num_microbatches}"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that makes a run slow; seconds are of one step."""

    kind: str = "healthy"
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0
    every: int = 1
    """Steps from one occurrence to the next."""
    leaked_bytes: int = 0
    axis: str = ""
    """The group whose sockets are slow."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run and where it writes."""

    folder: Path
    layout: Layout
    fault: Fault = Fault()
    num_steps: int = 40
    log: str = "megatron"
    """`megatron`, or `csv`."""
    timers: str = "minmax"
    """`minmax` or `all` ranks as Megatron-LM prints them, or `none`."""
    seed: int = 0
    num_profiled: int = 4
    """The last steps, of which the profiler makes the traces."""
