"""The types of the memory explorer's answer: per stage, the tensors alive at its peak and its memory over the step.

`plan memory --json` prints them. Sizes are in bytes, times in seconds from the start of the step.
"""

from typing import Literal

from pydantic import AliasChoices, ConfigDict, Field

from planner.answer.layout import Count, PositiveSeconds, Seconds, StageMemory
from planner.specs.base import NonNegativeInt, Spec

MemoryItem = Literal["weights", "gradients", "optimizer", "activations", "logits", "workspace"]
"""The item of `StageMemory` that a tensor counts to; the items add up to the peak."""


class MemoryTensor(Spec):
    """A tensor that is alive at a stage's peak."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: str
    """The operator and the tensor that it keeps, or the parameter: `qkv: qkv`, `experts up: weight`."""
    item: MemoryItem
    part: str = ""
    """The part of the stage that it belongs to: `layer`, `embedding`, `head`, `mtp`, `buffers`."""
    layer: Count | None = None
    """The decoder layer; null for what belongs to none."""
    microbatch: Count | None = None
    """The micro-batch; null for what belongs to none."""
    shape: tuple[int, ...]
    """The tensor's dimensions on this rank; for a row that is a sum its bytes, and its `note` says of what."""
    dtype: str
    """Such as `bf16`, `fp32`, `int64`; `uint8` for a row that is a sum."""
    bytes: NonNegativeInt
    from_s: Seconds = Field(serialization_alias="from", validation_alias=AliasChoices("from", "from_s"))
    """The time when it is made; 0 for what is there before the step."""
    to_s: Seconds = Field(serialization_alias="to", validation_alias=AliasChoices("to", "to_s"))
    """The time when it is freed; the end of the step for what outlives it."""
    made_by: str = ""
    """The pass that makes it, such as `forward of micro-batch 3`; empty for what is there before the step."""
    freed_by: str = ""
    """The pass that frees it, such as `backward of micro-batch 3`; empty for what outlives the step."""
    remade_by: tuple[str, ...] = ()
    """Modules that would make it again in the backward, if they were recomputed; none where no module does."""
    note: str = ""
    """The reason for a row that is no tensor of its own."""

    @property
    def sizes(self) -> str:
        """Shape and dtype in words; empty for a row that is a sum."""
        is_sum = self.dtype == "uint8" and self.shape == (self.bytes,)
        return "" if is_sum else f" {list(self.shape)} {self.dtype}"


class MemoryOfStage(Spec):
    """A stage's peak, what is alive then, and its memory over the step."""

    stage: Count
    peak_bytes: Count
    """The stage's `peak_allocated_bytes`; the tensors add up to it."""
    peak_s: Seconds
    """The first time when so much is allocated."""
    capacity_bytes: Count
    """The GPU's memory."""
    chunks: tuple[tuple[int, int], ...]
    """[first layer, last layer exclusive) of each of its virtual stages."""
    memory: StageMemory
    """The plan's own items, which the tensors of each item add up to."""
    tensors: tuple[MemoryTensor, ...]
    curve: tuple[tuple[float, int], ...]
    """Time in seconds, and the bytes allocated from then on; the last entry is the end of the step."""
    curve_activations_bytes: tuple[int, ...]
    """The part of each entry of the curve that micro-batches in flight hold."""


class MemoryChange(Spec):
    """A change of the layout that would make room, with the step that it would give."""

    change: str
    """The change in words, such as `recompute mlp`."""
    modules: tuple[str, ...] = ()
    """The modules that are recomputed then; `full` for whole layers."""
    step_s: PositiveSeconds
    fits: bool
    peak_bytes: tuple[int, ...]
    """The peak of each stage."""


class MemoryAnswer(Spec):
    """The memory of a plan's stages, or of one of them."""

    schema_version: Literal[1] = 1
    model: str
    layout: str
    step_s: PositiveSeconds
    num_microbatches: Count
    """Micro-batches of the step that the curves show: the plan's, or fewer of a step too long to show."""
    stages: tuple[MemoryOfStage, ...]
    changes: tuple[MemoryChange, ...] = ()
    """Changes that free memory on the fullest stage, the shortest step first."""
