"""The texts by which CUDA and NCCL say what went wrong: each is kept, has a kind, and a hint that fits."""

from __future__ import annotations

import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ProbeError

pytest.importorskip("torch", reason="needs the probe extra (torch)")

import faulty

from planner.probe.launch.launcher import launch
from planner.probe.launch.process import asked_bytes, failure_of


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every run's folder lies in the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def small(make_run: Any) -> Any:
    return make_run(("1f1b", 2, 1, 3), check=False, num_steps=1)


@pytest.mark.parametrize(
    ("last_error", "hint"),
    [
        ("Error while creating shared memory segment /dev/shm/nccl-LeXlEJ (size 9637888)", "--shm-size"),
        ("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 7000", "one rank per GPU"),
        ("socketStartConnect: Connect to 10.0.0.2<52822> failed : No route to host", "NCCL_SOCKET_IFNAME"),
        ("Cuda failure 999 'unknown error'", "dmesg"),
    ],
)
def test_the_last_error_of_nccl_is_kept_with_its_hint(last_error: str, hint: str, make_run: Any) -> None:
    with pytest.raises(ProbeError, match=rf"rank 1 .* failed in step 0, at 1F1 .*{re.escape(last_error)}") as error:
        launch(small(make_run), partial(faulty.nccl_fails, last_error=last_error))
    assert hint in error.value.hint


def test_nccl_out_of_memory_is_a_result(make_run: Any) -> None:
    last_error = "Failed to CUDA calloc async 4194304 bytes"
    out_of_memory = launch(small(make_run), partial(faulty.nccl_fails, last_error=last_error)).out_of_memory
    assert out_of_memory is not None
    assert (out_of_memory.rank, out_of_memory.asked_bytes) == (1, 4194304)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("Tried to allocate 20.00 MiB. GPU 0", 20 * 2**20),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes", 4096),
        ("Tried to allocate 512 bytes. GPU 0", 512),
        ("no number here", None),
    ],
)
def test_how_much_was_asked_for(text: str, num_bytes: int | None) -> None:
    assert asked_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out_of_memory"),
        ("CUDA error: out of memory\nCUDA kernel errors might be", "out_of_memory"),
        ("NCCL error: remote process exited or there was a network error, NCCL version 2.28", "lost_peer"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes", "host_memory"),
        ("CUDA error: an illegal memory access was encountered", "error"),
        ("NCCL error in: x, unhandled system error, NCCL version 2.21.5\nncclSystemError: …\nLast error:\n", "error"),
        ("CUDA error: uncorrectable ECC error encountered", "device"),
        ("Failed to CUDA host alloc 8388608 bytes", "host_memory"),
        ("Last error:\nsocketProgress: Connection closed by remote peer n1<1>", "lost_peer"),
        ("Last error:\nNET/IB : n1:1 async fatal event: port error", "network"),
    ],
)
def test_what_cuda_and_nccl_say(text: str, kind: str) -> None:
    assert failure_of(RuntimeError(text), 0, None, "build").kind == kind
