"""Ways to break a `plan probe` that runs on this machine's CPU, and the end of the command (for scripts/faults)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), str(ROOT / "tests" / "probe")]
LONGEST_S = 400.0
TIMEOUT_S = 5
RANKS = (
    "import os, sys; from functools import partial; import faulty, faulty_joined; import planner.probe.probe as probe; "
    "from planner.cli import main; {}; sys.exit(main(sys.argv[1:]))"
)
"""A command in which something happens first."""


class Ended(NamedTuple):
    """The end of a command: seconds after the fault, the exit code, and what it told."""

    seconds: float
    code: int
    told: str


class Command:
    """`plan probe` of a plan of two stages, in a folder of its own; `first` happens to it first."""

    def __init__(self, folder: Path, *options: str, first: str = "0", **variables: str) -> None:
        self.folder, self.mark = folder, folder / f"mark{variables.get('RANK', '')}"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        arguments = [
            "probe",
            str(written_plan(folder)),
            "--device",
            "cpu",
            "--timeout",
            str(TIMEOUT_S),
            "--steps",
            "1",
            *options,
        ]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "TMPDIR": str(self.temporary),
            "PLAN_FAULT_MARK": str(self.mark), "OMP_NUM_THREADS": "1", "COLUMNS": "400", **variables,
        }  # fmt: skip
        work = folder / "work"
        work.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANKS.format(first), *arguments],
            env=environment, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.broken_s: float | None = None

    def broken(self) -> None:
        """The fault happens now."""
        self.broken_s = time.time()

    def computing(self) -> list[int]:
        """The processes of both ranks, once they compute."""
        deadline = time.time() + LONGEST_S
        while time.time() < deadline and self.process.poll() is None:
            pids = [path.read_text() for path in self.temporary.glob("pid*")]
            if len(pids) == 2 and all(pids):
                break
            time.sleep(0.02)
        return list(map(int, pids))

    def end(self) -> Ended:
        started_s = self.broken_s or time.time()
        try:
            out, err = self.process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            return Ended(LONGEST_S, -1, "never ends")
        ended_s = time.time()
        if self.mark.exists():
            started_s = float(self.mark.read_text())
        return Ended(ended_s - started_s, self.process.returncode, out + err)


def of_ranks(child: str, *options: str) -> Callable[[Path], Ended]:
    """Ranks that this command starts, which run `child`."""
    first = f"probe.launch = partial(probe.launch, child={child})"
    return lambda folder: Command(folder, *options, first=first).end()


def leaves_pids(hangs: bool = True) -> str:
    return f"probe.launch = partial(probe.launch, child=partial(faulty.leaving_its_pid, hangs={hangs}))"


def from_outside(act: Callable[[Command], None], *options: str, hangs: bool = True) -> Callable[[Path], Ended]:
    """A command to which something happens once its ranks compute, one of which hangs then or not."""

    def run(folder: Path) -> Ended:
        command = Command(folder, *options, first=leaves_pids(hangs))
        command.computing()
        command.broken()
        act(command)
        return command.end()

    return run


def joined(first: tuple[str, ...], *options: str, told_by: int = 0, missing: int = 0) -> Callable[[Path], Ended]:
    """Two ranks that a launcher without --kill-on-bad-exit started; `first` happens to each. The end of one is told."""

    def run(folder: Path) -> Ended:
        port, commands = free_port(), []
        for rank in range(2 - missing):
            (own := folder / f"rank{rank}").mkdir()
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            commands.append(Command(own, *options, first=first[rank], MASTER_PORT=str(port), **variables))
            commands[-1].broken()
        told = commands[told_by].end()
        for command in commands:
            if command.mark.exists() and command is not commands[told_by]:
                told = told._replace(seconds=time.time() - float(command.mark.read_text()))
            with suppress(ProcessLookupError):
                os.killpg(command.process.pid, signal.SIGKILL)
        return told

    return run


def taken_port(folder: Path) -> Ended:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        command = Command(folder, MASTER_PORT=str(taken.getsockname()[1]), **variables)
        command.broken()
        return command.end()


def on_small_disk(kib: int) -> Callable[[Path], Ended]:
    """TMPDIR is a file system of a few KiB."""

    def run(folder: Path) -> Ended:
        with mounted(folder / "tmp", f"size={kib}k"):
            command = Command(folder)
            command.broken()
            return command.end()

    return run


def read_only_disk(folder: Path) -> Ended:
    with mounted(folder / "tmp", "ro"):
        command = Command(folder)
        command.broken()
        return command.end()


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def killed_launcher(folder: Path) -> Ended:
    """Told is when the ranks have ended after kill -9 of their launcher."""
    command = Command(folder, first=leaves_pids())
    pids = command.computing()
    command.broken()
    command.process.kill()
    killed = command.end()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.02)
    seconds = time.time() - (command.broken_s or 0.0)
    return killed._replace(seconds=seconds, told="(all ranks end)")


def torchrun_ends(folder: Path) -> Ended:
    """Under torchrun a rank is killed, and torchrun ends the other."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "TMPDIR": str(folder)}
    first = "import os; faulty.at('1F1', lambda: os.kill(os.getpid(), 9)) if os.environ['RANK'] == '1' else 0"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
        "--no-python", sys.executable, "-c", RANKS.format(first), "probe", str(written_plan(folder)), "--device", "cpu",
    ]  # fmt: skip
    mark = folder / "mark"
    done = subprocess.run(
        command,
        env={**environment, "PLAN_FAULT_MARK": str(mark)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return Ended(time.time() - float(mark.read_text()), done.returncode, error_line(done.stderr))


def remove(path: Callable[[Command], Path]) -> Callable[[Command], None]:
    return lambda command: shutil.rmtree(path(command), ignore_errors=True)


def send(number: signal.Signals) -> Callable[[Command], None]:
    return lambda command: os.killpg(command.process.pid, number)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def terminate(command: Command) -> None:
    command.process.terminate()


def nccl(text: str) -> Callable[[Path], Ended]:
    return of_ranks(f"partial(faulty.nccl_fails, last_error={text!r})")


def stopped(phase: str, rank: int) -> Callable[[Path], Ended]:
    return of_ranks(f"partial(faulty.stopped, phase={phase!r}, sick_rank={rank})")


def error_line(told: str) -> str:
    """The lines of an error, or the last line told."""
    lines = [line for line in told.splitlines() if line.strip()]
    errors = [line.strip(" ·").partition(";")[0] for line in lines if " asked for " in line]
    errors = errors or [line for line in lines if line.startswith(("error: ", "hint: "))]
    return " ".join(dict.fromkeys(errors)) or (lines[-1] if lines else "(nothing)")


def written_plan(folder: Path) -> Path:
    path = folder / "plan.json"
    path.write_text(plan_text())
    return path


def deadlock(folder: Path) -> Ended:
    """Two ranks wait for each other by the order that they are given."""
    crossed = folder / "crossed.csv"
    crossed.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    return Command(folder, "--order", str(crossed)).end()


@cache
def plan_text() -> str:
    """The file of a plan of two stages, of a model of a few kilobytes."""
    sys.path[:0] = PATHS
    from tiny import TINY

    from planner import ClusterSpec, ModelSpec, Parallelism, TrainingSpec, evaluate, load_hardware

    plan = evaluate(
        ModelSpec(num_hidden_layers=6, **TINY),
        ClusterSpec(hardware=load_hardware("h100"), num_gpus=2),
        TrainingSpec(seq_length=32, global_batch_size=8),
        Parallelism(pp=2),
        runtime="torch-eager",
    )
    return json.dumps(plan.to_json())
