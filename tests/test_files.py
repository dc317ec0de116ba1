"""Files appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from planner.errors import PlannerError, SpecError
from planner.files import refuse_to_overwrite, write_text


def test_writes_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "text")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "text")]


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


def test_a_directory_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is a directory"):
        write_text(tmp_path, "text", force=True)
    with pytest.raises(SpecError, match="there is no folder"):
        write_text(tmp_path / "no" / "a", "text")


def test_a_device_is_written_to_and_stays_a_device() -> None:
    write_text(os.devnull, "text")
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def fail(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((PlannerError, KeyboardInterrupt)) as caught:
        write_text(path, "new", force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert path.read_text() == "old"
    if isinstance(caught.value, PlannerError):
        assert "No space left on device" in caught.value.message
        assert caught.value.exit_code == 1
