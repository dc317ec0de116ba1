"""Files of any size, read in pieces, plain or gzipped; whatever is wrong with one is a SpecError that names it."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

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


class Source:
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

    def __enter__(self) -> Source:
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
        before, self._num_inflated = self._num_inflated, self._num_inflated + len(data)
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
        parts, size = [], 0
        while data := self.read():
            size += len(data)
            if size > max_bytes:
                raise self.broken(f"is larger than {max_bytes / 1e6:,.0f} MB, the most that is read of such a file")
            parts.append(data)
        return b"".join(parts)

    def broken(self, problem: str, hint: str = "name another file, or write this one again") -> SpecError:
        """The error that this file causes."""
        return SpecError(f"{self.where}: {printable(problem)}", hint)
