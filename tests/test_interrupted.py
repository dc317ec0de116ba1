"""A writer that is killed, refused or interrupted at any of its steps leaves the old files or the new ones.

Every call to the system that a writer makes is a step. A forked writer ends at the n-th step, as by kill -9, for every
n; so nothing here depends on the clock.
Files appear whole or not at all.
"""

import errno
import functools
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from planner import files
from planner.errors import PlannerError, SpecError
from planner.files import PART, UNFINISHED, FolderFile, refuse_to_overwrite, write_folder, write_text

CALLS = ("open", "replace", "rename", "link", "unlink", "mkdir", "rmdir", "chmod", "fsync")
"""Functions of `os` that a writer calls; each call is a step, and so is half of what is written to a file."""
KILLED = 9
OLD = {"sub/run.sh": "old script", "manifest.json": "old manifest"}
NEW = {"sub/run.sh": "new script", "manifest.json": "new manifest"}
MINE = {"log.txt": "somebody's", "sub/mine": "somebody's"}


class Steps:
    """Counts the steps of a writer, and does something at one of them."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, act: Callable[[], None]) -> None:
        self.count, self.at, self.act = 0, at, act
        patch.setattr(os, "fsync", lambda _: None)  # a step, though not a wait for the disk
        for name in CALLS:
            patch.setattr(os, name, self._counted(getattr(os, name)))
        patch.setattr(files, "_exchange", self._counted(files._exchange))
        write = files._write_through

        def in_halves(path: Path, data: bytes) -> None:
            path.write_bytes(data[: len(data) // 2])
            self.step()
            write(path, data)

        patch.setattr(files, "_write_through", in_halves)

    def step(self) -> None:
        self.count += 1
        if self.count == self.at:
            self.act()

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.step()
            return call(*arguments, **named)

        return counted


def folder_files(texts: dict[str, str]) -> list[FolderFile]:
    return [FolderFile(name, text.encode(), name.endswith(".sh")) for name, text in texts.items()]


def on_disk(folder: Path) -> dict[str, str]:
    """All files with their texts, but for what is half written."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(part.endswith(PART) or part == UNFINISHED for part in path.parts)
    }


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.endswith(PART) or path.name == UNFINISHED]


def spawned(work: Callable[[], None]) -> int:
    """A process that does the work; it ends with 0, or with 1 if that raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the tests' own threads do not write
        child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def forked(work: Callable[[], None]) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(spawned(work), 0)[1])


def fill(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


SITUATIONS = {
    "new": None, "empty": {}, "of ours alone": OLD, "of others too": OLD | MINE, "a working directory": OLD,
    "without an exchange": OLD, "beside nothing writable": OLD,
}  # fmt: skip


@pytest.fixture
def situation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes the folder as it is before the writer, and what the system cannot do."""
    texts = SITUATIONS[request.param]

    def make(folder: Path) -> None:
        if texts is not None:
            folder.mkdir(parents=True)
            fill(folder, texts)
        if request.param == "a working directory":
            monkeypatch.chdir(folder)

    if request.param == "without an exchange":
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    if request.param == "beside nothing writable":
        monkeypatch.setattr(os, "access", lambda *_: False)
    return make


def check(folder: Path, before: dict[str, str] | None) -> None:
    """Old or new, and somebody's own files in any case. Half of the moves may lie before a writer that was killed among
    them; then the folder of the others is there, and the next writer moves them."""
    now = on_disk(folder) if folder.exists() else None
    others = {name: text for name, text in (before or {}).items() if name not in NEW}
    if (folder / UNFINISHED).is_dir():
        files._finish(folder)
        now = on_disk(folder)
        assert now == NEW | others
    assert now in (before, NEW | others)


def every_step(
    tmp_path: Path, make: Callable[[Path], None], write: Callable[[Path], None], stride: int = 1
) -> Iterator[Path]:
    """A folder for each step at which a forked writer was killed, until one reaches its end."""
    for at in range(1, 300, stride):
        folder = tmp_path / str(at) / "run"
        folder.parent.mkdir()
        make(folder)

        def work(folder: Path = folder, at: int = at) -> None:
            Steps(pytest.MonkeyPatch(), at, lambda: os._exit(KILLED))
            write(folder)

        code = forked(work)
        yield folder
        if code == 0:
            return
        assert code == KILLED
    raise AssertionError("the writer never reached its end")


@pytest.mark.thorough(2)
@pytest.mark.parametrize("situation", SITUATIONS, indirect=True)
def test_a_folder_is_old_or_new_wherever_its_writer_is_killed(
    situation: Callable[[Path], None], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    before = SITUATIONS[request.node.callspec.params["situation"]]
    seen = set()
    stride = 1 if request.node.callspec.params["situation"] in ("new", "of ours alone", "of others too") else 4
    write = functools.partial(write_folder, files=folder_files(NEW), force=True)
    for folder in every_step(tmp_path, situation, write, stride):
        seen.add((folder / "sub/run.sh").read_text() if (folder / "sub/run.sh").exists() else None)
        check(folder, before)
        write_folder(folder, folder_files(NEW), force=True)
        assert not leftovers(folder.parent), "the next writer clears up"
        assert on_disk(folder) == NEW | {name: text for name, text in (before or {}).items() if name not in NEW}
        assert (folder / "sub/run.sh").stat().st_mode & 0o111
    assert seen == {(before or {}).get("sub/run.sh"), "new script"}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("situation", ["new", "of ours alone", "of others too"], indirect=True)
def test_a_folder_is_old_or_new_wherever_the_system_refuses(
    situation: Callable[[Path], None], request: pytest.FixtureRequest, tmp_path: Path, error: BaseException
) -> None:
    before = SITUATIONS[request.node.callspec.params["situation"]]

    def refuse() -> None:
        raise error

    for at in range(1, 300):
        folder = tmp_path / str(at) / "run"
        folder.parent.mkdir()
        situation(folder)
        with pytest.MonkeyPatch.context() as patch:
            steps = Steps(patch, at, refuse)
            with suppress(PlannerError, KeyboardInterrupt):
                write_folder(folder, folder_files(NEW), force=True)
        check(folder, before)
        write_folder(folder, folder_files(NEW), force=True)
        assert not leftovers(folder.parent)
        if steps.count < at:
            return
    raise AssertionError("the writer never reached its end")


@pytest.mark.parametrize("before", [None, "old"])
def test_a_file_is_old_or_new_wherever_its_writer_is_killed(tmp_path: Path, before: str | None) -> None:
    def make(path: Path) -> None:
        if before is not None:
            path.write_text(before)

    seen = set()
    for path in every_step(tmp_path, make, lambda path: write_text(path, "new", before is not None)):
        seen.add(path.read_text() if path.exists() else None)
        write_text(path, "newer", force=True)
        assert [entry.name for entry in path.parent.iterdir()] == [path.name], "the next writer clears up"
    assert seen == {before, "new"}


def paused(write: Callable[[], None], at: int, meanwhile: Callable[[], None]) -> int:
    """Exit code of a writer that stops before its n-th step until `meanwhile` is done."""
    reached, go = os.pipe(), os.pipe()

    def wait() -> None:
        os.write(reached[1], b"x")
        os.read(go[0], 1)

    def work() -> None:
        Steps(pytest.MonkeyPatch(), at, wait)
        try:
            write()
        finally:
            os.write(reached[1], b"x")

    child = spawned(work)
    os.read(reached[0], 1)
    try:
        meanwhile()
    finally:
        os.write(go[1], b"x")
        status = os.waitpid(child, 0)[1]
        for end in (*reached, *go):
            os.close(end)
    return os.waitstatus_to_exitcode(status)


OTHER = {name: text.replace("new", "other") for name, text in NEW.items()}


@pytest.mark.parametrize("before", [OLD, OLD | MINE], ids=["of ours alone", "of others too"])
def test_of_two_writers_of_a_folder_one_wins_whole(tmp_path: Path, monkeypatch: Any, before: dict[str, str]) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", -1.0)
    refused: list[str] = []
    for at in range(1, 40, 3):
        folder = tmp_path / str(at) / "run"
        folder.parent.mkdir()
        fill(folder, before)

        def meanwhile(folder: Path = folder) -> None:
            try:
                write_folder(folder, folder_files(OTHER), force=True)
            except PlannerError as error:
                refused.append(error.message.removeprefix(f"{folder}: "))

        assert paused(lambda folder=folder: write_folder(folder, folder_files(NEW), True), at, meanwhile) == 0
        texts = {name: text for name, text in on_disk(folder).items() if name in NEW}
        assert texts in (NEW, OTHER)
        assert not leftovers(folder.parent)
    assert len(refused) > 5
    assert set(refused) == {"another writer is at work there"}


@pytest.mark.parametrize("force", [False, True])
def test_of_two_writers_of_a_file_one_wins_whole(tmp_path: Path, force: bool) -> None:
    """Without --force the second one is refused, although there was no file when it began."""
    codes = set()
    for at in range(1, 12):
        path = tmp_path / str(at)
        code = paused(
            lambda path=path: write_text(path, "one", force), at, lambda path=path: write_text(path, "two", True)
        )
        codes.add(code)
        assert path.read_text() in ("one", "two")
        if code:
            assert path.read_text() == "two"
        assert not leftovers(tmp_path)
    assert codes == ({0} if force else {0, 1})


def test_what_a_living_writer_holds_is_not_swept(tmp_path: Path) -> None:
    with files._part(tmp_path, "plan.json") as part:
        code = forked(lambda: write_text(tmp_path / "plan.json", "{}"))
        assert code == 0
        assert part.exists()
    assert os.listdir(tmp_path) == ["plan.json"]


def test_what_only_looks_like_ours_stays(tmp_path: Path) -> None:
    names = [".plan.json.notes.part", ".plan.json.part", "plan.json.abcdefgh.part", ".other.json.abcdefgh.part"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".plan.json.abcdefgh.part").write_text("left by a writer that was killed")
    (tmp_path / ".plan.json.abcdefg2.part").mkdir()
    write_text(tmp_path / "plan.json", "{}")
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "plan.json"])


def test_what_somebody_adds_while_folders_change_places_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, exchange = tmp_path / "run", files._exchange
    fill(folder, OLD)

    def add_and_exchange(one: Path, other: Path) -> bool:
        (folder / "log.txt").write_text("somebody's")
        return exchange(one, other)

    monkeypatch.setattr(files, "_exchange", add_and_exchange)
    write_folder(folder, folder_files(NEW), force=True)
    assert on_disk(folder) == NEW | {"log.txt": "somebody's"}


def test_a_folder_that_others_work_in_stays_the_same_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fill(folder, OLD | MINE)
    number = folder.stat().st_ino
    write_folder(folder, folder_files(NEW), force=True)
    assert folder.stat().st_ino == number


def test_links_in_a_folder_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fill(folder, OLD)
    (folder / "sub/run.sh").unlink()
    (folder / "sub/run.sh").symlink_to(tmp_path / "elsewhere.sh")
    write_folder(folder, folder_files(NEW), force=True)
    assert (folder / "sub/run.sh").is_symlink()
    assert (tmp_path / "elsewhere.sh").read_text() == "new script"


def test_permissions_stay(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fill(folder, OLD)
    folder.chmod(0o750)
    (folder / "manifest.json").chmod(0o640)
    write_folder(folder, folder_files(NEW), force=True)
    assert folder.stat().st_mode & 0o777 == 0o750
    assert (folder / "manifest.json").stat().st_mode & 0o777 == 0o640
    write_folder(tmp_path / "new", folder_files(NEW))
    (tmp_path / "made").mkdir()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "made").stat().st_mode


def test_a_full_device_is_named() -> None:
    with pytest.raises(PlannerError, match="/dev/full: cannot be written: No space left") as caught:
        write_text("/dev/full", "text" * 10_000, force=True)
    assert caught.value.hint == "free some space"
    assert not isinstance(caught.value, SpecError)


@pytest.mark.parametrize("writes_folder", [False, True])
def test_files_too_large_for_the_limit_are_named(tmp_path: Path, writes_folder: bool) -> None:
    place, large = tmp_path / "place", "x" * 100_000

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does at its start
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            write_folder(place, folder_files({"large": large})) if writes_folder else write_text(place, large)
        except PlannerError as error:
            os._exit(7 if "File too large" in error.message and "ulimit -f" in error.hint else 8)

    assert forked(work) == 7
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_folder_that_may_not_be_written_to_is_named(tmp_path: Path, monkeypatch: Any, number: int) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(PlannerError, match=f"run: cannot be written: {os.strerror(number)}") as caught:
        write_folder(tmp_path / "run", folder_files(NEW))
    assert caught.value.hint
    assert not os.listdir(tmp_path)
    # root may write everywhere, so that the system is asked for its answer alone
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PlannerError, match="a: cannot be written: Permission denied"):
        refuse_to_overwrite(tmp_path / "a")
    refuse_to_overwrite(os.devnull)


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "")
    (tmp_path / "b").write_text("")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_an_existing_file_is_replaced_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o640)
    for refuse in (refuse_to_overwrite, lambda p: write_text(p, "new")):
        with pytest.raises(SpecError, match="already exists"):
            refuse(path)
    assert path.read_text() == "old"
    write_text(path, "new", force=True)
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_link_is_followed_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_text(tmp_path / "link", "new", force=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_device_is_written_to_and_stays_a_device() -> None:
    write_text(os.devnull, "text")
    assert not Path(os.devnull).is_file()
