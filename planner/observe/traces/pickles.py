"""Pickles of plain data, read so that nothing in them can run and nothing small can fill the memory.

Memory snapshots and flight-recorder dumps hold mappings, lists, text and numbers. Whatever names a class or a function
is refused before it is looked up. The memory that a load may take is bounded by the file's size, because an index of
the pickle's memo can ask for gigabytes in five bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planner.observe.traces.source import Progress, Source

MAX_BYTES = 300 * 10**6
"""The largest pickle that is read; `record_memory_history(max_entries=100_000)` leaves 50 to 250 MB."""
BYTES_PER_BYTE = 16
"""Memory for each byte of a file: a snapshot's events take 12."""
SLACK_BYTES = 2**28


class _Forbidden(Exception):
    """Raised for a global that a pickle names."""


class _PlainUnpickler(pickle.Unpickler):
    """Knows no class and no function, so that REDUCE, BUILD, INST and OBJ have nothing to work on."""

    def find_class(self, module: str, name: str) -> Any:
        raise _Forbidden(f"names {module}.{name}, which would run code")

    def persistent_load(self, pid: Any) -> Any:
        raise _Forbidden("refers to objects outside it")


def load_plain(path: str | Path, progress: Progress | None = None) -> tuple[Any, int]:
    """The data of a pickle and the file's bytes; SpecError for anything that is more than plain data."""
    with Source(path, progress) as source:
        data = source.read_all(MAX_BYTES)
    hint = "name a file that torch wrote; pickles that run code are not read"
    try:
        with _bounded(BYTES_PER_BYTE * len(data) + SLACK_BYTES):
            return _PlainUnpickler(io.BytesIO(data)).load(), len(data)
    except _Forbidden as error:
        raise source.broken(f"this pickle {error}", hint) from None
    except MemoryError:
        raise source.broken(f"its {len(data):,} bytes ask for more memory than such a file can need", hint) from None
    except RecursionError:
        raise source.broken("nested too deeply", hint) from None
    except EOFError:
        raise source.broken("the pickle ends in the middle", "copy the file again") from None
    # whatever a broken stream makes the machine do: pop from nothing, index what is no list, hash what has no hash …
    except (
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        IndexError,
        OverflowError,
    ) as error:
        reason = str(error).partition("\n")[0][:100]
        end = "truncated" in reason or "ran out" in reason
        problem = "the pickle ends in the middle" if end else f"no pickle: {reason}"
        raise source.broken(problem, "copy the file again" if end else hint) from None


@contextmanager
def _bounded(extra_bytes: int) -> Iterator[None]:
    """Let the process take at most `extra_bytes` more address space, where the system can bound it (Linux)."""
    try:
        import resource

        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [in_use + extra_bytes, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
