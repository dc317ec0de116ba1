"""Whatever goes wrong ends in one error that names rank, stage and phase, with no process left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tables import beside

from planner.errors import ProbeError

pytest.importorskip("torch", reason="needs the probe extra (torch)")

import faulty
import launch_and_wait
import torch

from planner.probe.compare import run_checks
from planner.probe.launch.launcher import launch, log_folder, process_context
from planner.probe.launch.process import asked_bytes, kind_of
from planner.probe.rank.groups import WAITING, Identity, Progress, disagreement, hanging_rank, require_agreement

TABLES = beside(__file__)

HERE = Path(__file__).parent
PATIENCE_S = 600.0
"""After this a test has hung; a busy machine takes long, and no test fails for that."""


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every run's folder lies in the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def small(make_run: Any, **options: Any) -> Any:
    return make_run(("1f1b", 2, 1, 3), check=False, num_steps=1, **options)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (faulty.killed, r"rank 1 \(stage 1, dp 0, cp 0, tp 0\) was killed by SIGKILL: .* (rehearsal|exchanges|step 0)"),
        (faulty.raising, r"rank 1 \(stage 1, dp 0, cp 0, tp 0\) failed in step 0, at 1B1 .*: RuntimeError: boom$"),
        (faulty.ended, r"rank 1 .* failed in step 0, at 1B1 .*: RuntimeError: boom$"),
        (faulty.other_torch, r"rank 1 on .* has torch 2\.6\.0, not .* as rank 0 on"),
    ],
)
def test_a_rank_fails(fault: Any, message: str, make_run: Any) -> None:
    with pytest.raises(ProbeError, match=message):
        launch(small(make_run), fault)


def test_a_hang_ends_with_all_stacks(make_run: Any, own_tmp: Path) -> None:
    with pytest.raises(ProbeError, match=r"rank 1 .* hangs in step 0, at 1F1 \(computing\): no progress") as error:
        launch(small(make_run, timeout_s=4.0), faulty.hanging)
    stacks = sorted(own_tmp.glob("plan-probe-*/rank*.log"))
    assert str(stacks[0].parent) in error.value.hint
    assert "time.sleep(1000)" in stacks[1].read_text() or "faulty.py" in stacks[1].read_text()
    assert "pipeline.py" in stacks[0].read_text()


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("fault", "phase"), [(faulty.hanging_in_reduction, "gradients"), (faulty.hanging_in_optimizer, "optimizer")]
)
def test_a_hang_behind_the_pipeline(fault: Any, phase: str, make_run: Any) -> None:
    with pytest.raises(ProbeError, match=rf"rank 1 .* hangs in step 0, at {phase} \(computing\)"):
        launch(small(make_run, timeout_s=4.0), fault)


def test_results_are_not_lost_on_a_rank_that_does_not_end(make_run: Any, monkeypatch: Any, own_tmp: Path) -> None:
    monkeypatch.setattr("planner.probe.launch.launcher.STOPPED_S", 1.0)
    measured = launch(small(make_run), faulty.hanging_at_its_end)
    assert [rank.rank for rank in measured.ranks] == [0, 1]
    assert not (own_tmp / faulty.ENDED).exists()


def test_an_order_that_deadlocks(make_run: Any) -> None:
    run = small(make_run, timeout_s=4.0)
    crossed = (("0F0", "0B0", "0F1", "0B1", "0F2", "0B2"), ("1F0", "1F1", "1F2", "1B0", "1B1", "1B2"))
    with pytest.raises(ProbeError, match=r"waits in vain in step 0, at (0B0|1F1) \(waiting\)"):
        launch(run.model_copy(update={"ranks": crossed}))


def test_out_of_memory_is_a_result(make_run: Any, own_tmp: Path) -> None:
    measured = launch(small(make_run), faulty.out_of_memory)
    out_of_memory = measured.out_of_memory
    assert (out_of_memory.rank, out_of_memory.stage, out_of_memory.phase) == (1, 1, "step 0, at 1F1 (computing)")
    assert out_of_memory.asked_bytes == 5 * 2**29
    assert list(own_tmp.glob("plan-probe-*")) == []


def test_a_host_without_memory_says_nothing_of_the_plan(make_run: Any) -> None:
    wide = {"hidden_size": 10**6, "intermediate_size": 10**7}
    with pytest.raises(ProbeError, match=r"rank . .* failed in build: .* you tried to allocate \d+ bytes") as error:
        launch(small(make_run, model=wide))
    assert "a smaller --scale" in error.value.hint


@pytest.mark.parametrize("check", [False, True])
def test_a_loss_that_is_no_number_is_a_failed_check(check: bool, make_run: Any) -> None:
    measured = launch(small(make_run).model_copy(update={"check": check}), faulty.diverged)
    assert [step.loss for rank in measured.ranks for step in rank.steps] == [None, None]
    failed = [result for result in run_checks(measured.run, measured.ranks) if not result.passed]
    assert [result.name for result in failed] == ["loss" if check else "finite"]
    assert "not finite" in failed[0].detail
    json.dumps(measured.model_dump(mode="json"), allow_nan=False)


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("phase", "sick_rank", "expected"), TABLES["the_process_that_stopped_is_named_and_not_those_that_wait_for_it"]
)
def test_the_process_that_stopped_is_named_and_not_those_that_wait_for_it(
    phase: str, sick_rank: int, expected: str, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(small(make_run))  # so that all ranks start quickly
    monkeypatch.setattr("planner.probe.rank.groups.START_TIMEOUT_S", 6.0)
    run = small(make_run, timeout_s=6.0).model_copy(update={"check": True})
    with pytest.raises(ProbeError, match=expected) as error:
        launch(run, partial(faulty.stopped, phase=phase, sick_rank=sick_rank))
    assert "SIGSTOP" in error.value.hint


def test_ranks_that_wait_for_a_slow_one_do_not_hang() -> None:
    """Rank 0 computes the reference for a minute and moves at every micro-batch; the others stand still meanwhile."""
    now_s = time.monotonic()
    waits, still_waits = Progress("reference", WAITING, now_s - 100, now_s), {1: 70.0, 2: 65.0}

    def hanging(computes: Progress) -> int | None:
        others = {rank: waits._replace(since_s=now_s - still_s) for rank, still_s in still_waits.items()}
        return hanging_rank({0: computes, **others}, 60.0)

    assert hanging(Progress("reference", "step 0, micro-batch 7", now_s - 10, now_s)) is None
    assert hanging(Progress("reference", "step 0, micro-batch 7", now_s - 61, now_s)) == 0
    assert hanging(Progress("reference", WAITING, now_s - 61, now_s)) == 1  # all wait: the first to stand still
    assert hanging(Progress("reference", WAITING, now_s - 61, now_s - 40)) == 0  # its process has stopped
    assert hanging(Progress("done", "", now_s - 90, now_s - 90)) == 1


@pytest.mark.thorough(0)
def test_a_reference_that_moves_is_waited_for_longer_than_anything_else(make_run: Any) -> None:
    run = small(make_run, timeout_s=5.0).model_copy(update={"check": True})
    measured = launch(run, partial(faulty.slow_reference, batch_s=9.0 / (run.num_microbatches * run.num_steps)))
    assert {check.passed for rank in measured.ranks for check in rank.checks} == {True}


def test_a_folder_of_logs_stays_where_an_error_names_it(own_tmp: Path) -> None:
    with log_folder() as whole:
        assert whole.is_dir()
    with pytest.raises(ProbeError), log_folder() as failed:
        raise ProbeError("rank 0 failed")
    assert [*own_tmp.glob("plan-probe-*")] == [failed]


def test_two_ranks_on_one_gpu() -> None:
    def ranks(*places: tuple[str, str]) -> list[Identity]:
        return [Identity(host, device, "", {}) for host, device in places]

    mismatch = disagreement(ranks(("node", "GPU-a"), ("node", "GPU-b"), ("node", "GPU-a")))
    assert mismatch == "ranks 0 and 2 share one GPU (GPU-a of node)"
    assert disagreement(ranks(("node", "GPU-a"), ("other", "GPU-a"))) is None
    assert disagreement(ranks(("node", ""), ("node", ""))) is None


def test_every_rank_hears_that_they_do_not_go_together(own_tmp: Path) -> None:
    """Before NCCL meets: it fails on one GPU for two, and hangs on versions that do not speak to each other."""
    heard: list[str] = []

    def rank(number: int) -> None:
        store = torch.distributed.FileStore(str(own_tmp / "store"), 2)
        try:
            require_agreement(store, number, 2, Identity("node", "GPU-a", "", {}), 60.0)
        except ProbeError as error:
            heard.append(str(error))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert heard == ["ranks 0 and 1 share one GPU (GPU-a of node)"] * 2


def test_no_space_for_the_folder(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(ProbeError, match="folder cannot be made"):
        launch(small(make_run))


@pytest.mark.thorough(2)
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_launcher(sent: signal.Signals, make_run: Any, own_tmp: Path) -> None:
    launcher = process_context().Process(target=launch_and_wait.main, args=(small(make_run), own_tmp))
    launcher.start()
    pids = [own_tmp / f"pid{rank}" for rank in range(2)]
    until(lambda: all(pid.exists() and pid.read_text() for pid in pids))
    os.kill(launcher.pid or 0, sent)
    launcher.join(PATIENCE_S)
    assert launcher.exitcode == (-signal.SIGKILL if sent == signal.SIGKILL else 130)
    until(lambda: not any(alive(int(pid.read_text())) for pid in pids))
    assert len([*own_tmp.glob("plan-probe-*")]) == (sent == signal.SIGKILL)


def test_ctrl_c_in_a_terminal_leaves_no_traceback(make_run: Any, own_tmp: Path) -> None:
    """It reaches the whole group of processes, also those that still import torch."""
    run_file = own_tmp / "run.json"
    run_file.write_text(small(make_run).model_dump_json())
    launcher = subprocess.Popen(
        [sys.executable, str(HERE / "launch_and_wait.py"), str(run_file)],
        env={**os.environ, "TMPDIR": str(own_tmp), "PYTHONPATH": str(HERE.parent.parent)}, start_new_session=True,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(lambda: any(own_tmp.glob("plan-probe-*")))
    time.sleep(0.3)
    os.killpg(launcher.pid, signal.SIGINT)
    _, told = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 130
    assert told == ""
    assert list(own_tmp.glob("plan-probe-*")) == []


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return (
        "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if Path("/proc").exists()
        else True
    )


@pytest.mark.parametrize(("last_error", "hint"), TABLES["the_last_error_of_nccl_is_kept_with_its_hint"])
def test_the_last_error_of_nccl_is_kept_with_its_hint(last_error: str, hint: str, make_run: Any) -> None:
    with pytest.raises(ProbeError, match=rf"rank 1 .* failed in step 0, at 1F1 .*{re.escape(last_error)}") as error:
        launch(small(make_run), partial(faulty.nccl_fails, last_error=last_error))
    assert hint in error.value.hint


def test_nccl_out_of_memory_is_a_result(make_run: Any) -> None:
    last_error = "Failed to CUDA calloc async 4194304 bytes"
    out_of_memory = launch(small(make_run), partial(faulty.nccl_fails, last_error=last_error)).out_of_memory
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


@pytest.mark.parametrize(("text", "kind"), TABLES["what_cuda_and_nccl_say"])
def test_what_cuda_and_nccl_say(text: str, kind: str) -> None:
    assert kind_of(RuntimeError(text)) == kind
