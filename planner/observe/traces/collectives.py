"""Exchanges of one rank: how many, how large, how long, and at what rate of the ring.

Bus rate = bytes × factor ÷ seconds, with factor 2(n − 1)/n for an all-reduce of n ranks, (n − 1)/n for gather, scatter
and all-to-all on the full size, and 1 for broadcasts and transfers, as nccl-tests define it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from planner.observe.traces.breakdown import NS, Sorted
from planner.observe.traces.gloo import SEND
from planner.observe.traces.results import CollectiveTime

DTYPE_BYTES = {
    "float": 4, "float32": 4, "int": 4, "bfloat16": 2, "half": 2, "float16": 2, "short": 2, "byte": 1, "char": 1,
    "bool": 1, "long": 8, "double": 8, "int64": 8, "float64": 8, "int32": 4, "int8": 1, "uint8": 1,
}  # fmt: skip
"""Bytes of an element, by the names that Kineto writes, in lower case; `float8…` are 1."""

KINDS = (
    ("all_reduce", r"all_?reduce"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_gather", r"all_?gather"),
    ("all_to_all", r"all_?to_?all"),
    ("send_recv", r"send|recv"),
    ("broadcast", r"broadcast"),
    ("reduce", r"reduce"),
    ("barrier", r"barrier"),
)
"""(kind, pattern) of collectives and of the kernels that run them."""
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in KINDS)
OTHER_KIND = "other"


def kind_of(name: str) -> str:
    """The kind of collective that a name speaks of."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), OTHER_KIND)


def bus_factor(kind: str, size: int) -> float:
    """The part of the bytes that crosses each rank's link, times the rounds."""
    if kind == "all_reduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if kind in ("reduce_scatter", "all_gather", "all_to_all") else 1.0


def element_bytes(dtype: str) -> int | None:
    """Bytes of one element, None for a name that is not known."""
    lowered = dtype.lower()
    return 1 if lowered.startswith("float8") else DTYPE_BYTES.get(lowered)


def collective_times(
    events: Sorted, transfer_ns: Mapping[int, int] | None = None, wait_ns: Mapping[int, int] | None = None
) -> tuple[CollectiveTime, ...]:
    """Every kind of exchange of one rank, the longest in total first.

    `transfer_ns` and `wait_ns`, of an event's index, are what peers' traces separate.
    """
    transfers, waits = transfer_ns or {}, wait_ns or {}
    trace = events.trace
    indices = defaultdict(list)
    for index in np.flatnonzero(events.group >= 0).tolist():
        indices[_form(events, index)].append(index)
    lengths: NDArray[np.int64] = trace.gpu.end_ns - trace.gpu.start_ns
    times = []
    for (label, kind, num_bytes, size), chosen in indices.items():
        waited = [waits[index] for index in chosen if index in waits]
        separated = [transfers[index] for index in chosen if index in transfers]
        median_s = float(np.median(lengths[chosen])) * NS
        transfer_s = float(np.median(separated)) * NS if separated else None
        seconds = transfer_s or median_s
        rate = (
            num_bytes * bus_factor(kind, size) / seconds / 1e9 if num_bytes and size and size > 1 and seconds else None
        )
        times.append(
            CollectiveTime(
                group=label,
                collective=kind,
                num_bytes=num_bytes,
                group_size=size,
                count=len(chosen),
                median_s=median_s,
                transfer_s=transfer_s,
                wait_s=float(np.mean(waited)) * NS if waited else None,
                bus_gb_per_s=rate,
                at_least=transfer_s is None,
            )
        )
    return tuple(sorted(times, key=lambda row: -row.median_s * row.count))


def _form(events: Sorted, index: int) -> tuple[str, str, int | None, int | None]:
    """(group, kind, bytes, ranks) of one exchange, as far as the trace says them."""
    trace = events.trace
    label, name, call = events.labels[events.group[index]], trace.names[trace.gpu.name[index]], trace.gpu.call[index]
    if call < 0:
        return label, kind_of(name), None, None
    said = trace.calls[call]
    width = element_bytes(said.dtype)
    group = trace.groups.get(said.group)
    kind = kind_of(said.collective)
    kind = kind if kind != OTHER_KIND else kind_of(name)
    kind = "send" if name == SEND else kind  # of gloo: it may end before its bytes arrive
    return (
        label,
        kind,
        said.num_elements * width if width and said.num_elements else None,
        group.size if group else None,
    )
