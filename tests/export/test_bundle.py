"""An export reaches the disk whole, is listed with its hashes, names its plan, and replaces nothing unasked."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.answer import Plan
from planner.errors import PlannerError, SpecError
from planner.export.export import MANIFEST, bundle_of, write_bundle
from planner.export.trainer_files import comment, plan_sha256, slug

Planned = Callable[..., Plan]


def test_manifest_lists_what_is_there(planned: Planned, tmp_path: Path) -> None:
    plan = planned("llama-3.1-8b", 16, tp=2, pp=2)
    paths = write_bundle(bundle_of(plan, ["megatron"]), tmp_path / "new" / "folder")
    manifest = json.loads(paths[-1].read_text())
    assert paths[-1].name == MANIFEST
    assert manifest["plan_sha256"] == plan_sha256(plan)
    assert manifest["inputs_sha256"] == plan.inputs_sha256
    assert manifest["world_size"] == 16
    assert manifest["written_for"] == ["Megatron-LM core 0.20.0"]
    assert set(manifest["files"]) == {path.name for path in paths[:-1]}
    for path in paths[:-1]:
        assert manifest["files"][path.name] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert path.stat().st_mode & 0o100 == (0o100 if path.name.startswith("launch") else 0)


def test_the_same_plan_gives_the_same_bytes(planned: Planned) -> None:
    first, second = (planned("llama-3.1-8b", 16, tp=2, pp=2) for _ in range(2))
    assert bundle_of(first, ["megatron"]) == bundle_of(second, ["megatron"])
    assert plan_sha256(first) != plan_sha256(planned("llama-3.1-8b", 16, tp=2, pp=4))


def test_existing_files_stay(planned: Planned, tmp_path: Path) -> None:
    bundle = bundle_of(planned("llama-3.1-8b", 16, tp=2), ["megatron"])
    (tmp_path / "launch.sbatch").write_text("mine")
    with pytest.raises(SpecError, match=r"already holds launch\.sbatch"):
        write_bundle(bundle, tmp_path)
    assert os.listdir(tmp_path) == ["launch.sbatch"]
    write_bundle(bundle, tmp_path, force=True)
    assert "mine" not in (tmp_path / "launch.sbatch").read_text()


def test_a_dangling_link_is_an_existing_file(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "launch.sh").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SpecError, match=r"launch\.sh"):
        write_bundle(bundle_of(planned("llama-3.1-8b", 16), ["megatron"]), tmp_path)


def test_a_failure_leaves_the_folder_as_it_was(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the disk is full when the last file is written, the manifest."""
    (tmp_path / "mine").write_text("")
    synced: list[int] = []

    def full(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == len(bundle.with_manifest()):
            raise OSError(errno.ENOSPC, "No space left on device")

    bundle = bundle_of(planned("llama-3.1-8b", 16), ["megatron"])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlannerError, match="No space left on device"):
        write_bundle(bundle, tmp_path)
    assert os.listdir(tmp_path) == ["mine"]


def test_a_folder_in_a_file_s_place(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(SpecError, match=r"manifest\.json is a folder there"):
        write_bundle(bundle_of(planned("llama-3.1-8b", 16), ["megatron"]), tmp_path, force=True)
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]


def test_a_folder_that_cannot_be_made(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlannerError, match="cannot be made"):
        write_bundle(bundle_of(planned("llama-3.1-8b", 16), ["megatron"]), tmp_path / "file" / "folder")


def test_comments_stay_comments() -> None:
    text = comment("a\nb\r\x1b[2Jrm -rf\u2028x")
    assert text == "# a\n# b??[2Jrm -rf?x\n"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Llama 3.1/405B", "llama-3-1-405b"), ("--", "plan"), ("é" * 3, "plan"), ("a" * 99, "a" * 40)],
)
def test_slug(name: str, expected: str) -> None:
    assert slug(name) == expected
