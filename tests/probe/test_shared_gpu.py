"""Ranks that share a GPU: how NCCL takes them, and messages that pass through the host's memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from fake_gpus import H200, Neighbours, fake_gpu, fake_group  # noqa: E402
from small_plans import small_plan  # noqa: E402

from planner.errors import ProbeError  # noqa: E402
from planner.probe.launch.launcher import launch  # noqa: E402
from planner.probe.launch.process import rank_process  # noqa: E402
from planner.probe.probe import ProbeOptions, probe  # noqa: E402
from planner.probe.rank import worker as worker_module  # noqa: E402
from planner.probe.rank.pipeline import HostWires  # noqa: E402
from planner.probe.rank.status import RESULT_FILE, RUN_FILE  # noqa: E402
from planner.probe.rank.worker import Worker  # noqa: E402
from planner.probe.result import RankResult  # noqa: E402
from planner.probe.torch_build import torch_release  # noqa: E402


def through_host(folder: Path, rank: int, local_rank: int) -> None:
    """A rank whose messages pass through the host's memory."""
    worker_module.GroupWires = HostWires  # type: ignore[misc]
    rank_process(folder, rank, local_rank)


def test_messages_through_the_host_are_the_same(make_run: Any) -> None:
    """The gradients of two ranks with interleaved stages are those of one process."""
    measured = launch(make_run(("interleaved-1f1b", 2, 2, 4), num_steps=1), through_host)
    checks = [check for rank in measured.ranks for check in rank.checks]
    assert checks
    assert all(check.passed for check in checks), checks


@pytest.mark.skipif(torch_release() < (2, 9), reason="this torch has no fake exchanges")
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_two_stages_share_a_gpu(backend: Any, make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the handshake to the report; NCCL takes each rank for one of another host."""
    run = make_run(("1f1b", 2, 1, 4), check=False, num_steps=1)
    changes = {"device": "cuda", "dtype": "bfloat16", "ranks_per_gpu": 2, "backend": backend}
    (tmp_path / RUN_FILE).write_text(run.model_copy(update=changes).model_dump_json())
    worker, store = Worker(tmp_path, 1, 1, local=True), Neighbours()
    store.values = {"rank 0": "[]", "verdict": "agreed"}
    monkeypatch.setattr(worker, "meet", lambda: store)
    for name in ("NCCL_HOSTID", "NCCL_NET", "NCCL_NVLS_ENABLE", "NCCL_MULTI_RANK_GPU_ENABLE"):
        monkeypatch.setenv(name, "")  # put back afterwards
    with fake_gpu(H200, monkeypatch), fake_group(monkeypatch) as backends:
        worker.main()
        assert (worker.device_id(), worker.device) == ("GPU-0, share 1 of 2", "cuda:0")
        assert os.environ["NCCL_HOSTID"] == "plan-probe-1"
    rank = RankResult.model_validate_json((tmp_path / RESULT_FILE.format(1)).read_text())
    assert backends == [backend]
    assert (rank.stage, rank.device_name) == (1, "NVIDIA H200")


def test_gloo_connects_stages_of_gpus_only() -> None:
    with pytest.raises(ProbeError, match="gloo connects stages of GPUs"):
        probe(small_plan(dp=2), ProbeOptions(device="cuda", backend="gloo", ranks_per_gpu=2))
