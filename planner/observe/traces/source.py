"""Files of any size, read in pieces, plain or gzipped, and pickles of plain data; whatever is wrong is a SpecError that
names the file.

Memory snapshots and flight-recorder dumps are pickles of mappings, lists, text and numbers. Whatever names a class or a
function is refused before it is looked up. The memory that a load may take is bounded by the file's size, because an
index of the pickle's memo can ask for gigabytes in five bytes.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from planner.errors import SpecError
from planner.specs.reading import label, printable

Progress = Callable[[], None]
"""Called once for each MiB that has been read and inflated."""

GZIP = b"\x1f\x8b"
CHUNK_BYTES = 2**20
MAX_INFLATION = 200
"""The most bytes that a byte of gzip may become: traces reach 30, and a bomb 1,000."""
INFLATION_SLACK_BYTES = 2**24
"""Small files may inflate by more, to this size."""


class TraceFile:
    """The bytes of one file, inflated where they are gzipped."""

    def __init__(self, path: str | Path, progress: Progress | None = None) -> None:
        self.where = label(path)
        self._progress = progress
        self._num_inflated = 0
        self._size_bytes = 0
        try:
            self._raw: IO[bytes] = open(path, "rb")  # noqa: SIM115 - closed by `close`
            self._size_bytes = os.fstat(self._raw.fileno()).st_size
            zipped = self._raw.read(2) == GZIP
            self._raw.seek(0)
        except FileNotFoundError:
            raise SpecError(f"{self.where}: no such file", "check the path") from None
        except IsADirectoryError:
            raise SpecError(f"{self.where}: is a directory", "name the files in it") from None
        except PermissionError:
            raise SpecError(f"{self.where}: no permission to read it", "make it readable for this user") from None
        except (OSError, ValueError) as error:  # a pipe, a NUL in the name, a loop of links
            reason = getattr(error, "strerror", None) or error
            raise SpecError(f"{self.where}: cannot be read: {reason}", "name a file") from None
        self._stream: IO[bytes] = gzip.GzipFile(fileobj=self._raw) if zipped else self._raw  # type: ignore[assignment]

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._raw.close()

    def read(self, num_bytes: int = CHUNK_BYTES) -> bytes:
        """At most `num_bytes` more bytes; none at the end. SpecError where they cannot be inflated."""
        try:
            data = self._stream.read(num_bytes)
        except (OSError, EOFError, zlib.error) as error:
            reason = "ends in the middle" if isinstance(error, EOFError) else f"cannot be inflated: {error}"
            raise self.broken(f"gzip {reason}", "copy the file again") from None
        before = self._num_inflated
        self._num_inflated = self._num_inflated + len(data)
        if self._stream is not self._raw:
            most = max(MAX_INFLATION * self._size_bytes, INFLATION_SLACK_BYTES)
            if self._num_inflated > most:
                raise self.broken(f"its {self._size_bytes:,} bytes inflate to more than {most:,}, as no trace does")
        if self._progress:
            for _ in range(self._num_inflated // 2**20 - before // 2**20):
                self._progress()
        return data

    def read_all(self, max_bytes: int) -> bytes:
        """The whole file; SpecError above `max_bytes`."""
        parts = []
        size = 0
        while data := self.read():
            size += len(data)
            if size > max_bytes:
                raise self.broken(f"is larger than {max_bytes / 1e6:,.0f} MB, the most that is read of such a file")
            parts.append(data)
        return b"".join(parts)

    def broken(self, problem: str, hint: str = "name another file, or write this one again") -> SpecError:
        """The error that this file causes."""
        return SpecError(f"{self.where}: {printable(problem)}", hint)


MAX_PICKLE_BYTES = 300 * 10**6
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
    with TraceFile(path, progress) as source:
        data = source.read_all(MAX_PICKLE_BYTES)
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
