"""The kind of a file, by its first bytes."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

from planner.observe.traces.source import Source

SQLITE = b"SQLite format 3\0"
_START_BYTES = 2**16
_TRACE = re.compile(rb'"traceEvents"|"deviceProperties"|"schemaVersion"\s*:\s*\d|"ph"\s*:\s*"[A-Za-z]"')
_FLIGHT = re.compile(rb'"pg_config"|"pg_status"|"comm_lib_version"|"nccl_version"')


_OPERATORS = re.compile(rb'"cat"\s*:\s*"(forward|backward)-(compute|send|recv)"')


class Kind(StrEnum):
    """Files that are no text log."""

    KINETO = "torch profiler trace"
    SNAPSHOT = "memory snapshot"
    FLIGHT_RECORDER = "flight-recorder dump"
    NSYS = "Nsight Systems export"
    OP_TIMELINE = "operator timeline"


def kind_of(path: str | Path) -> Kind | None:
    """The kind of a file, or None if it is none of these, such as a text log. Nothing in it is trusted yet."""
    with Source(path) as source:
        start = source.read(_START_BYTES)
    if start.startswith(SQLITE):
        return Kind.NSYS
    if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05":  # a pickle's protocol
        flight = any(word in start for word in (b"pg_config", b"pg_status", b"comm_lib_version", b"collective_seq_id"))
        return Kind.FLIGHT_RECORDER if flight else Kind.SNAPSHOT
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] not in (b"{", b"["):
        return None
    if _FLIGHT.search(text) and b'"traceEvents"' not in text and b'"schemaVersion"' not in text:
        return Kind.FLIGHT_RECORDER
    if _OPERATORS.search(text):
        return Kind.OP_TIMELINE
    return Kind.KINETO if _TRACE.search(text) else None
