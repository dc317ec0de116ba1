"""Allocations by what they hold, told from the stack frames that the allocator recorded with each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """A category, the pattern of one of its frames (`file:function`), and whether a forward pass must be below it."""

    category: str
    pattern: str
    in_forward: bool = False


UNATTRIBUTED = "unattributed"
"""Allocations without frames, such as those made before recording began."""
OTHER = "other"
"""Allocations with frames that no row knows."""
ROUNDING = "allocator rounding"
"""The allocator hands out multiples of 512 bytes."""

_FORWARD = r":(forward\w*|__call__|_call_impl|_wrapped_call_impl|call_\w*|.*::forward)$"
ROWS = (
    Row("optimizer", r"(distrib\w*_)?optimizer\w*\.py:|/optim/|fused_adam|/muon|adamw?\.py:|emerging_optimizers"),
    Row("gradients", r"param_and_grad_buffer|accumulate_?grad|AccumulateGrad|grad_buffer|main_grad|foreach_reduce"),
    Row("gathered parameters", r"foreach_all_gather|_fsdp_param\w*\.py:(init_)?all_gather|unshard|fully_shard_param"),
    Row("communication", r"nccl|c10d|deep_ep|fused_a2a|nvshmem|symm_mem"),
    Row("activations: loss and logits", r"cross_entropy|vocab_parallel|nll_loss|lm_head|output_layer|logits", True),
    Row("activations: MoE", r"moe|experts?[_.:/]|router|token_dispatch", True),
    Row("activations: attention", r"attention|attn|scaled_dot_product|rotary|rope|sdpa", True),
    Row("activations: MLP", r"mlp|feed_?forward|ffn|swiglu|silu", True),
    Row("activations: norm", r"norm", True),
    Row("activations: embedding", r"embedding", True),
    Row("activations: other modules", r".", True),
    Row("parameters", r":(__init__|_apply|reset_parameters|load_state_dict|to_empty|get_model|build_model|to)$"),
    Row("backward", r"Engine::|autograd|backward|::apply"),
    Row("data", r"data_?loader|get_batch|dataset"),
)
_PATTERNS = tuple(re.compile(row.pattern, re.IGNORECASE) for row in ROWS)
_IS_FORWARD = re.compile(_FORWARD)
_FORWARD_BIT = 1 << len(ROWS)
CATEGORIES = (*(row.category for row in ROWS), OTHER, UNATTRIBUTED)


class Categories:
    """The category of a stack, remembered by frame: a snapshot's stacks share their frames."""

    def __init__(self) -> None:
        self._bits: dict[tuple[str, str], int] = {}
        self._of_stack: dict[int, tuple[int, object]] = {}
        self.num_frames = 0

    def of(self, frames: Any) -> int:
        """The index in CATEGORIES of a stack; whatever is no list of frames counts as no stack."""
        if not isinstance(frames, (list, tuple)) or not frames:
            return len(ROWS) + 1
        known = self._of_stack.get(id(frames))
        if known is None:
            self.num_frames += len(frames)
            # the list is kept, so that no other one can have its number
            known = self._of_stack[id(frames)] = (self._category(frames), frames)
        return known[0]

    def _category(self, frames: Sequence[Any]) -> int:
        bits = 0
        for frame in frames:
            if isinstance(frame, dict):
                bits |= self._of_frame(str(frame.get("filename", ""))[-200:], str(frame.get("name", ""))[:200])
        forward = bool(bits & _FORWARD_BIT)
        for index, row in enumerate(ROWS):
            if bits & (1 << index) and (forward or not row.in_forward):
                return index
        return len(ROWS)

    def _of_frame(self, filename: str, function: str) -> int:
        bits = self._bits.get((filename, function))
        if bits is None:
            text = f"{filename}:{function}"
            bits = sum(1 << index for index, pattern in enumerate(_PATTERNS) if pattern.search(text))
            bits |= _FORWARD_BIT if _IS_FORWARD.search(text) else 0
            self._bits[filename, function] = bits
        return bits
