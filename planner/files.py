"""Files the planner writes: whole or not at all, and never over another one unasked."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from pathlib import Path

from planner.errors import PlannerError, SpecError, printable

STDOUT = "-"


def require_working_folder() -> None:
    """Raise PlannerError where somebody has removed the folder that the command was started in. Relative paths mean
    nothing then, and torch does not find its own libraries."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise PlannerError("the working directory was removed", "cd to a folder that exists, and run again") from None


def refuse_to_overwrite(path: str | Path, force: bool = False) -> None:
    """Raise SpecError where `write_text` would refuse: a directory, a missing folder, an existing file without `force`.

    For the start of a long command; `write_text` checks again.
    """
    if str(path) == STDOUT:
        return
    if not str(path):
        raise SpecError("-o: the name of the file is empty", "name a file, or - for standard output")
    if os.path.isdir(path):
        raise SpecError(f"{path}: is a directory", "name a file in it")
    if os.path.isfile(path) and not force:
        raise SpecError(f"{path}: already exists", "add --force to replace it, or name another file")
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise SpecError(f"{path}: there is no folder {folder}", "create it, or name another file")


def write_text(path: str | Path, text: str, force: bool = False) -> None:
    """`write_bytes` of a text in UTF-8; `-` is stdout."""
    if str(path) == STDOUT:
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        return
    write_bytes(path, text.encode(), force)


def write_bytes(path: str | Path, data: bytes, force: bool = False) -> None:
    """Write `data` to a file that appears complete or not at all.

    A temporary file in the same folder takes the data and then the name. Pipes and devices are written to directly.
    Raises SpecError as `refuse_to_overwrite` does, and PlannerError where the system refuses (no space, no permission).
    """
    refuse_to_overwrite(path, force)
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            Path(path).write_bytes(data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except BrokenPipeError:
        raise
    except OSError as error:
        hint = "free some space" if error.errno == errno.ENOSPC else "name a file in a folder that you may write to"
        raise PlannerError(f"{path}: cannot be written: {error.strerror}", hint) from None


def _replace(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:50]}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode(path))
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C included: nothing half-written stays
        os.unlink(temporary)
        raise


def _mode(path: Path) -> int:
    """Permissions of the file that is replaced, else those of any new file (mkstemp's are private)."""
    if path.exists():
        return path.stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
