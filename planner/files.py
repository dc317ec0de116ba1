"""Files and folders the planner writes: whole or not at all, and never over others unasked.

A file is written beside its place and then takes the name. So is a folder, and where one is there already, both change
places at once. A folder that also holds what we did not write keeps its identity, since somebody may work in it: the
files come together in a folder inside, whose last name says that all are there, and move out one by one. A writer that
is killed between two moves is finished by the next one.

Whatever is half written has a name that ends in `.part` and is locked while its writer lives. The next writer of the
same place removes what nobody holds.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from planner.errors import PlannerError, SpecError, printable
from planner.record import record

STDOUT = "-"
PART = ".part"
UNFINISHED = ".plan-unfinished"
"""The folder whose files are all there and on their way to the folder that it is in."""
PATIENCE_S = 10.0
"""Seconds that a writer of a folder waits for another one."""
_HINTS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space: the quota is used up",
    errno.EFBIG: "allow larger files (ulimit -f), or name a file on another file system",
}
_ELSEWHERE = "name a file in a folder that you may write to"
_EXCHANGE = 2
"""RENAME_EXCHANGE of Linux's renameat2: two names change places at once."""
_HERE = -100
"""AT_FDCWD: relative paths begin in the working directory."""


@record
class FolderFile:
    """One file of a folder that is written at once."""

    name: str
    """Its path in the folder."""
    data: bytes
    executable: bool = False


def require_working_folder() -> None:
    """Raise PlannerError where somebody has removed the folder that the command was started in. Relative paths mean
    nothing then, and torch does not find its own libraries."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise PlannerError("the working directory was removed", "cd to a folder that exists, and run again") from None


def refuse_to_overwrite(path: str | Path | None, force: bool = False) -> None:
    """Raise SpecError where `write_text` would refuse: a directory, a missing folder, an existing file without `force`.

    For the start of a long command; `write_text` checks again.
    """
    if path is None or str(path) == STDOUT:  # nothing is written, or nothing that could be there
        return
    if not str(path):
        raise SpecError("-o: the name of the file is empty", "name a file, or - for standard output")
    if os.path.isdir(path):
        raise SpecError(f"{path}: is a directory", "name a file in it")
    if os.path.isfile(path) and not force:
        raise _exists(path)
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise SpecError(f"{path}: there is no folder {folder}", "create it, or name another file")
    is_device = os.path.exists(path) and not os.path.isfile(path)
    if not is_device and not os.access(folder, os.W_OK):
        raise _refused(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)), _ELSEWHERE)


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
            _replace(Path(os.path.realpath(path)), data, force)
    except BrokenPipeError:
        raise
    except FileExistsError:  # made since: by another writer
        raise _exists(path) from None
    except OSError as error:
        raise _refused(path, error, _ELSEWHERE) from None


def write_folder(folder: Path, files: Sequence[FolderFile], force: bool = False) -> list[Path]:
    """Write all files into `folder`, making it where it is missing: all of them or none, and one writer at a time.

    Other files in the folder stay. Raises SpecError, before anything is written, where one of the files exists and
    `force` is not given, or a folder has its name; PlannerError where the system refuses or another writer is at work.
    """
    target = Path(os.path.realpath(folder))
    _check_folder(folder, target, files, force)
    try:
        os.makedirs(target.parent, exist_ok=True)
    except OSError as error:
        raise PlannerError(f"{folder}: cannot be made: {error.strerror}", "name a folder you may write to") from None
    try:
        with _alone(folder, target.parent):
            _finish(target)
            _check_folder(folder, target, files, force)
            if not (_may_take_the_place(target, files) and _write_beside(target, files)):
                _write_within(target, files)
    except OSError as error:
        raise _refused(folder, error, "name a folder you may write to") from None
    return [folder / file.name for file in files]


def _check_folder(folder: Path, target: Path, files: Sequence[FolderFile], force: bool) -> None:
    """Raise SpecError where the files have no place."""
    if target.exists() and not target.is_dir():
        raise SpecError(f"{folder}: is a file, not a folder", "name another folder")
    folders = [file.name for file in files if (target / file.name).is_dir()]
    if folders:
        raise SpecError(f"{folder}: {', '.join(folders)} is a folder there, not a file", "name another folder")
    existing = [file.name for file in files if os.path.lexists(target / file.name)]
    if existing and not force:
        raise SpecError(
            f"{folder}: already holds {', '.join(existing)}", "add --force to replace, or name another folder"
        )


def _may_take_the_place(target: Path, files: Sequence[FolderFile]) -> bool:
    """True if a folder with these files may stand in the place of `target`.

    It may not if that holds other things, is the working directory or above it, or cannot be moved.
    """
    if not target.exists():
        return True
    if os.path.ismount(target) or not os.access(target.parent, os.W_OK) or Path.cwd().is_relative_to(target):
        return False
    ours = {target / file.name for file in files}
    ours |= {parent for path in ours for parent in path.parents}
    entries = (Path(parent, name) for parent, folders, names in os.walk(target) for name in (*folders, *names))
    return all(path in ours and not path.is_symlink() for path in entries)


def _write_beside(target: Path, files: Sequence[FolderFile]) -> bool:
    """Fill a folder beside `target` that then takes its place; False if that cannot be done here."""
    with _part(target.parent, target.name, is_folder=True) as part:
        _fill(part, files, target)
        os.chmod(part, _mode(target, 0o777))
        try:
            os.rename(part, target)  # also over an empty folder
        except OSError:
            if not target.exists():
                raise
            if not _exchange(part, target):
                return False
            # the old folder is removed now, but for what somebody put into it meanwhile
            ours = {Path(file.name).parts[0] for file in files}
            for name in set(os.listdir(part)) - ours:
                os.rename(part / name, target / name)
    return True


def _write_within(target: Path, files: Sequence[FolderFile]) -> None:
    """Fill a folder in `target`, whose files then move out of it."""
    with _part(target, "plan", is_folder=True) as part:
        _fill(part, files, target)
        os.rename(part, target / UNFINISHED)
        try:
            _finish(target)
        except KeyboardInterrupt:
            _finish(target)
            raise


def _finish(target: Path) -> None:
    """Move the files of a folder that is all there to their places; a writer that was killed may have left some."""
    unfinished = target / UNFINISHED
    if not unfinished.is_dir():
        return
    for parent, _, names in os.walk(unfinished):
        for name in names:
            source = Path(parent, name)
            place = Path(os.path.realpath(target / source.relative_to(unfinished)))
            os.makedirs(place.parent, exist_ok=True)
            try:
                os.replace(source, place)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                _replace(place, source.read_bytes(), force=True)  # a link to another file system
    shutil.rmtree(unfinished)


def _fill(part: Path, files: Sequence[FolderFile], target: Path) -> None:
    """Write the files into a new folder, with the permissions of those in `target` that they replace."""
    for file in files:
        path = part / file.name
        os.makedirs(path.parent, exist_ok=True)
        _write_through(path, file.data)
        os.chmod(path, _mode(target / file.name) | (0o111 if file.executable else 0))


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places at once; False where the system or the file system cannot."""
    import ctypes

    call = getattr(ctypes.CDLL(None), "renameat2", None)
    return call is not None and not call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)


def _replace(path: Path, data: bytes, force: bool) -> None:
    """Write a file beside `path` that then takes its name. Raises FileExistsError if there is one without `force`."""
    with _part(path.parent, path.name) as part:
        _write_through(part, data)
        os.chmod(part, _mode(path))
        if force or not _linked(part, path):
            os.replace(part, path)


def _linked(part: Path, path: Path) -> bool:
    """Give a file a name that no file has; False where the file system has no links."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


def _write_through(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _part(folder: Path, name: str, is_folder: bool = False) -> Iterator[Path]:
    """A new, locked file or folder in `folder` for what will be called `name`. Whatever has its own name in the end is
    removed, and so is first what killed writers left."""
    _sweep(folder, name)
    path, lock = _locked_part(folder, f".{name[:50]}.", is_folder)
    try:
        yield path
    finally:  # Ctrl-C included: nothing half-written stays
        _remove(path)
        os.close(lock)


def _locked_part(folder: Path, prefix: str, is_folder: bool) -> tuple[Path, int]:
    """A new file or folder, and the open file that locks it."""
    while True:
        if is_folder:
            path = tempfile.mkdtemp(dir=folder, prefix=prefix, suffix=PART)
            try:
                lock = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
        else:
            lock, path = tempfile.mkstemp(dir=folder, prefix=prefix, suffix=PART)
        with suppress(OSError):  # a file system without locks: then nobody sweeps there either
            _lock(lock, wait=True)
        if os.path.lexists(path):
            return Path(path), lock
        os.close(lock)  # another writer found it before it was locked


def _sweep(folder: Path, name: str) -> None:
    """Remove what killed writers of the same name left: this user's, whose lock nobody holds."""
    left = re.compile(rf"\.{re.escape(name[:50])}\.[a-z0-9_]{{8}}{re.escape(PART)}")
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            if left.fullmatch(entry.name):
                with suppress(OSError):
                    _sweep_one(Path(entry.path))


def _sweep_one(path: Path) -> None:
    """Remove this user's file or folder whose lock nobody holds. Raises OSError."""
    lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if _lock(lock) and os.fstat(lock).st_uid == os.geteuid():
            _remove(path)
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)


@contextmanager
def _alone(folder: Path, parent: Path) -> Iterator[None]:
    """Keep other writers of folders in `parent` waiting. Raises PlannerError where one keeps us waiting too long."""
    lock = os.open(parent, os.O_RDONLY)
    try:
        end_s = time.monotonic() + PATIENCE_S
        with suppress(OSError):  # no locks here: the names decide
            while not _lock(lock):
                if time.monotonic() > end_s:
                    raise PlannerError(f"{folder}: another writer is at work there", "try again when it has ended")
                time.sleep(0.02)
        yield
    finally:
        os.close(lock)


def _lock(descriptor: int, wait: bool = False) -> bool:
    """Lock an open file until it is closed; False if another process holds it. Raises OSError without locks here."""
    try:
        import fcntl
    except ImportError as error:
        raise OSError(errno.ENOLCK, str(error)) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _mode(path: Path, usual: int = 0o666) -> int:
    """Permissions of what is replaced, else those of anything new (those of temporary files are private)."""
    if path.exists():
        return path.stat().st_mode & 0o777
    umask = os.umask(0)
    os.umask(umask)
    return usual & ~umask


def _exists(path: str | Path) -> SpecError:
    return SpecError(f"{path}: already exists", "add --force to replace it, or name another file")


def _refused(path: str | Path, error: OSError, hint: str) -> PlannerError:
    return PlannerError(f"{path}: cannot be written: {error.strerror}", _HINTS.get(error.errno or 0, hint))
