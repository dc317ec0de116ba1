"""Files appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.errors import SpecError
from planner.files import refuse_to_overwrite, write_text


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
