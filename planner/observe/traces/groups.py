"""Process groups: the axis of the grid that a trace's group is of, from what Megatron, torch and DeepSpeed call it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

TRUNCATED_AFTER = 30
"""Kineto writes at most this many entries of a list, and `...` behind them: such a list says no group."""

AXES = (
    # dispatch of tokens over experts and the tensor ranks inside them
    ("ep", r"expert_tensor_and_model"),
    ("etp", r"expert_tensor|\betp\b|mesh_etp"),
    ("edp", r"expert_data|data_modulo_expert|\befsdp\b|mesh_(efsdp|edp|ep_dp|dp_shard_mod_ep)"),
    ("ep", r"expert_model|expert_parallel|\bep(_group)?\b|_ep\b|deep_?ep|hybrid_?ep"),
    ("embedding", r"embedding_group|embd"),
    ("pp", r"pipeline|\bpp\b|_pp\b"),
    ("cp", r"^(hierarchical_)?context_parallel|^cp$|mesh_cp\b|ulysses|\bsp\b|sequence_parallel"),
    ("tp", r"^tensor_model_parallel|^tensor_parallel|^tp$|mesh_tp\b|^tensor_and_context|^tp_cp"),
    ("dp", r"data_parallel|\bdp\b|mesh_(dp|fsdp|hsdp|dp_\w+)|fsdp|zero|intra_distributed|inter_distributed|\bddp\b"),
    ("model", r"^model_parallel|^mp$"),
    ("world", r"default_pg|^world"),
)
"""(axis, pattern) of a group's description, in lower case; the first that matches wins."""

_PATTERNS = tuple((axis, re.compile(pattern)) for axis, pattern in AXES)
GRID_ORDER = ("tp", "cp", "dp", "pp")
"""From ranks beside each other to ranks far apart, as Megatron and torchtitan lay them out."""
UNKNOWN = "unknown"
POINT_TO_POINT = "point to point"
PLANNED = {
    "tp": "tp", "cp": "cp", "ep": "ep", "etp": "ep", "dp": "dp", "edp": "dp", "pp": "pp", POINT_TO_POINT: "pp",
}  # fmt: skip
"""The group of a plan's step that a group of a trace counts to: a plan has expert tensor parallelism with ep."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as a trace says it: ranks are unknown where the list was truncated and no stride is said."""

    name: str
    description: str = ""
    ranks: tuple[int, ...] = ()
    size: int | None = None

    @property
    def stride(self) -> int | None:
        """The distance of neighbours, where it is one number."""
        steps = {b - a for a, b in pairwise(self.ranks)}
        return steps.pop() if len(steps) == 1 else None

    @property
    def label(self) -> str:
        """The group in a report: its axis, or its size and stride."""
        axis = axis_of_description(self.description)
        if axis:
            return axis
        size = f"{self.size} ranks" if self.size else "ranks unknown"
        return f"group {self.name or '?'} ({size}{f', stride {self.stride}' if self.stride else ''})"


def axis_of_description(description: str) -> str | None:
    """The axis that a description names, or None."""
    lowered = description.strip().lower()
    return next((axis for axis, pattern in _PATTERNS if pattern.search(lowered)), None)


def axis_of(group: Group, grid: Mapping[str, int] | None = None) -> str:
    """The axis of a group: as described, else as its size and stride are in `grid` (sizes of tp, cp, dp and pp)."""
    described = axis_of_description(group.description)
    if described and described != "world":
        return described
    stride = 1
    for axis in GRID_ORDER if grid else ():
        size = (grid or {}).get(axis, 1)
        if size > 1 and group.size == size and group.stride == stride:
            return axis
        stride *= size
    return group.label


def ranks_of(text: object) -> tuple[int, ...]:
    """The ranks in a list, or in text such as `[0, 1]`; none where it was truncated or is something else."""
    if isinstance(text, str):
        if "..." in text or not re.fullmatch(r"\[[\d,\s]*\]", text) or len(text) > 10**6:
            return ()
        entries: Sequence[object] = [int(word) for word in re.findall(r"\d{1,9}", text)]
    else:
        entries = text if isinstance(text, list) else []
    good = all(isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < 10**7 for entry in entries)
    return tuple(entries) if good else ()  # type: ignore[arg-type]


def ranks_by_stride(start: object, stride: object, size: object) -> tuple[int, ...]:
    """The ranks of `Global rank start`, `Global rank stride` and `Group size`."""
    if not all(isinstance(number, int) and 0 <= number < 10**7 for number in (start, stride, size)):
        return ()
    assert isinstance(start, int)
    assert isinstance(stride, int)
    assert isinstance(size, int)
    return tuple(start + stride * index for index in range(min(size, 10**6))) if stride > 0 else ()
