"""The temporary folder of a run: made and locked while the run lives, and removed; what killed runs left is swept.

A run that was killed cannot remove its folder. The next run finds that nobody holds the folder's lock and does it. A
folder whose stacks and logs an error has named has no lock file any more, and nobody removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from planner.errors import PlannerError, ProbeError
from planner.files import write_text
from planner.probe.run import ProbeRun
from planner.probe.worker.files import RUN_FILE

PREFIX = "plan-probe-"
LOCK_FILE = "lock"


@contextmanager
def run_folder(keeps_after_error: bool) -> Iterator[Path]:
    """A folder for the files of one run. Raises ProbeError where none can be made.

    It is removed at the end; where `keeps_after_error`, not after a ProbeError, whose hint names it.
    """
    sweep()
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = _lock(folder)
    except OSError as error:
        raise ProbeError(
            f"the probe's folder cannot be made in {tempfile.gettempdir()}: {error.strerror}",
            "set TMPDIR to a folder with space that you may write to",
        ) from None
    try:
        yield folder
    except ProbeError:
        if not keeps_after_error:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            (folder / LOCK_FILE).unlink()
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def write_run(folder: Path, run: ProbeRun) -> None:
    """Write the run that every rank reads. Raises ProbeError where the folder has no space."""
    try:
        write_text(folder / RUN_FILE, run.model_dump_json(), force=True)
    except PlannerError as error:
        raise ProbeError(error.message, "set TMPDIR to a folder with space that you may write to") from None


def sweep() -> None:
    """Remove folders of this user's runs that were killed: those whose lock nobody holds."""
    with suppress(OSError):
        for lock_file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK_FILE}"):
            if _is_abandoned(lock_file):
                shutil.rmtree(lock_file.parent, ignore_errors=True)


def _lock(folder: Path) -> int:
    """Lock the folder; the lock file gets its name once it is locked, so that no other run finds it without a lock."""
    unnamed = folder / f".{LOCK_FILE}"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(OSError):  # a file system without locks: then nobody sweeps there either
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(folder / LOCK_FILE)
    return lock


def _is_abandoned(lock_file: Path) -> bool:
    try:
        if lock_file.stat().st_uid != os.geteuid():
            return False
        lock = os.open(lock_file, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
