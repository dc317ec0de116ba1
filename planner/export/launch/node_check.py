"""Looks at one node before any rank starts, in ten seconds: GPUs, driver, packages, links, disk, clock, processes.

This file is exported as preflight.py, with the checks of one plan in CHECKS; it needs nothing but Python 3.9.
Each missing thing is one line on stderr that names the node, and the exit status is then 1.

    python3 preflight.py --measured LOG     hold the steps in a first run's log against the plan
    python3 rank_trials.py [FOLDER]         the same file without CHECKS: rank the layouts of trials.json by their logs

A log's first steps are left out: they compile and allocate.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import runpy
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from re import Pattern
from typing import Any

CHECKS: dict[str, Any] = json.loads("{}")


def release(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version, to compare."""
    numbers = []
    for part in version.replace("+", ".").split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def version_of(package: str, module: Any = None) -> str:
    """The version of an installed distribution, or of a module that is on the path only; empty if neither says."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(getattr(module, "__version__", ""))


def missing_package(need: dict[str, str]) -> str:
    """The reason why a required module or version is not here; empty where it is."""
    module, _, name = need["module"].partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a broken extension may raise anything
        reason = (str(error).splitlines() or [""])[0]
        return f"python package {module} cannot be imported ({type(error).__name__}: {reason})"
    if name and not hasattr(found, name):
        return f"python package {module} has no {name}"
    if need["at_least"]:
        version = version_of(need["package"], sys.modules[module.split(".")[0]])
        if release(version) < release(need["at_least"]):
            return f"{need['package']} {version or 'of an unknown version'} is older than {need['at_least']}"
    return ""


def wrong_value(place: dict[str, Any]) -> str:
    """The reason why a value that the user gives will not do; empty where it will."""
    name, kind = place["name"], place["kind"]
    value = os.environ.get(name, "").strip()
    if not value:
        return "" if place["is_optional"] else f"{name} is empty: {place['meaning']}"
    if kind == "folder" and not Path(value).is_dir():
        return f"{name}: {value} is no folder"
    if kind == "file" and not Path(value).is_file():
        return f"{name}: {value} is no file"
    if kind == "new folder":
        folder = Path(value).absolute()
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            return f"{name}: cannot write to {folder}"
    if kind == "prefix":
        prefixes = [word for word in value.split() if not word.replace(".", "", 1).isdigit()]
        for prefix in prefixes:
            if not Path(prefix + ".idx").is_file():
                return f"{name}: {prefix}.idx is no file"
    if kind == "text" and value.startswith(("/", "./", "../")) and not Path(value).exists():
        return f"{name}: {value} does not exist"
    return ""


def wrong_trainer() -> str:
    """The reason why the trainer found is not one that the options are for; empty where it is."""
    wanted = CHECKS["trainer"]
    where = "this environment"
    if wanted["package"]:
        found = version_of(wanted["package"])
        if not found:
            return f"{wanted['package']} is not installed"
    elif wanted["file"]:
        os.environ.setdefault("NO_VCS_VERSION", "1")
        where = wanted["folder"]
        source = Path(os.environ.get(where, "")) / wanted["file"]
        if not source.is_file():
            return f"{where}: {source} is no file"
        found = str(runpy.run_path(str(source))["__version__"])
    else:
        return ""
    if wanted["is_exactly"] and release(found)[:2] != release(wanted["is_exactly"])[:2]:
        return f"the options are for {wanted['name']} {wanted['is_exactly']}, {where} has {found}"
    if wanted["at_least"] and release(found) < release(wanted["at_least"]):
        return f"the options are for {wanted['name']} {wanted['at_least']} and above, {where} has {found}"
    return ""


def sees_gpus() -> bool:
    """True where torch or the system shows a GPU, so that ranks could start here."""
    if any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return True
    try:
        return bool(importlib.import_module("torch").cuda.device_count())
    except Exception:
        return False


def missing_gpus() -> str:
    """The reason why this node cannot run its ranks; empty where it can, or where torch is missing, which is said."""
    if "cpu" in sys.argv[1:]:  # the torch runner's --device cpu
        return ""
    wanted = int(os.environ.get("GPUS") or CHECKS["gpus"])
    try:
        found = importlib.import_module("torch").cuda.device_count()
    except Exception:  # said by the package's own line
        return ""
    return f"{wanted} GPUs wanted on this node, {found} found" if found < wanted else ""


def said_by(*words: str) -> str:
    """The text that a program of the system prints; empty where it is missing, fails or takes two seconds."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=2)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def busy_gpus() -> str:
    """The reason why GPUs are not free: other processes that hold more memory than a context."""
    held = said_by("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
    rows = [line.split(",") for line in held.splitlines() if line.count(",") == 1]
    pids = [pid.strip() for pid, used in rows if used.strip().isdigit() and int(used) > 1024]
    return f"processes {', '.join(pids[:4])} hold memory of the GPUs" if pids else ""


def wrong_driver() -> str:
    """The reason why torch cannot use the driver; empty where it can, or where no GPU is looked for."""
    if "cpu" in sys.argv[1:] or not Path("/dev/nvidiactl").exists():
        return ""
    if not said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"):
        return "the driver of the GPUs does not answer (nvidia-smi)"
    try:
        torch = importlib.import_module("torch")
        torch.cuda.init()
    except Exception as error:
        return f"torch cannot use the driver of the GPUs ({str(error).splitlines()[0]})"
    return ""


def wrong_network() -> str:
    """The reason why ranks of this node would not reach the others' as planned: no card, a port that is down."""
    wanted = CHECKS["network"]
    folder = Path(wanted.get("devices") or "/")
    if not folder.is_dir() or not any(folder.iterdir()):
        return f"no card of the planned network {wanted['kind']} in {folder}"
    for port in sorted(folder.glob("*/ports/*")):
        layer, state = (port / name for name in ("link_layer", "state"))
        is_planned = wanted.get("link_layer") in (None, layer.read_text().strip() if layer.is_file() else None)
        if is_planned and state.is_file() and "ACTIVE" not in state.read_text():
            return f"{port.parents[1].name} is down ({state.read_text().strip()})"
    names = wanted.get("plugin", "").split()
    if names and not any(map(loads, names)):
        return f"NCCL has no plugin for {wanted['kind']} here: none of {', '.join(names)} can be loaded"
    return ""


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def wrong_machine() -> Iterator[str]:
    """The reasons why a run would end early: no room for checkpoints, a clock that is not set, a port that is taken."""
    folder = Path(os.environ.get("CHECKPOINTS", "").strip() or ".").absolute()
    while not folder.exists():
        folder = folder.parent
    room, wanted = shutil.disk_usage(folder).free, CHECKS["checkpoint_bytes"]
    if os.environ.get("MOCK") != "1" and room < 2 * wanted:
        yield f"{folder} has room for {room / 2**30:,.0f} GiB, two checkpoints take {2 * wanted / 2**30:,.0f}"
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).total < CHECKS["shared_bytes"]:
        yield f"/dev/shm has {shutil.disk_usage(shared).total / 2**20:,.0f} MiB, NCCL and loaders share more"
    if "no" in said_by("timedatectl", "show", "-p", "NTPSynchronized", "--value"):
        yield "the clock is not synchronised (timedatectl)"
    if os.environ.get("NODE_RANK", os.environ.get("SLURM_NODEID", "0")) == "0":
        port = int(os.environ.get("MASTER_PORT") or 29500)
        with socket.socket() as listener:
            listener.settimeout(1)
            if listener.connect_ex(("127.0.0.1", port)) == 0:
                yield f"port {port} is taken: MASTER_PORT names another"


def problems() -> Iterator[tuple[str, str]]:
    """Each problem in words, empty where there is none, and the way to solve it."""
    if shutil.which("torchrun") is None:
        yield "torchrun is not on PATH", "activate the environment that has torch"
    for need in CHECKS["packages"]:
        problem = missing_package(need)
        yield problem and f"{problem}, needed for {need['reason']}", need["hint"]
    yield missing_gpus(), ""
    yield wrong_driver(), ""
    yield busy_gpus(), "end them, or leave these GPUs out with CUDA_VISIBLE_DEVICES"
    yield wrong_network() if CHECKS["network"] else "", ""
    yield from ((problem, "") for problem in wrong_machine())
    for place in CHECKS["placeholders"]:
        if place["in_first_run"] or os.environ.get("MOCK") != "1":
            yield wrong_value(place), ""
    yield wrong_trainer(), ""


SKIPPED = 5
"""Steps at the beginning that are not counted, where as many others are left."""
Trial = dict[str, Any]


def per_gpu(found: str, trial: Trial) -> float:
    """Seconds of a step at a rate of tokens per second and GPU."""
    rate = float(found.replace(",", ""))
    return float(trial["tokens_per_step"]) / (rate * trial["num_gpus"]) if rate else float("inf")


SECONDS: tuple[tuple[Pattern[str], Callable[[str, Trial], float]], ...] = (
    # Megatron-LM: elapsed time per iteration (ms): 3210.5
    (re.compile(r"elapsed time per iteration \(ms\): *([\d.]+)"), lambda found, trial: float(found) / 1000),
    # Megatron-Bridge: Step Time : 3.21s
    (re.compile(r"[Ss]tep [Tt]ime *:? *([\d.]+) ?s"), lambda found, trial: float(found)),
    # tps: 5,678 (tokens per second and GPU)
    (re.compile(r"\btps: *(?:\x1b\[[\d;]*m)?([\d,]+)"), per_gpu),
    # DeepSpeed: CurrSamplesPerSec=12.3
    (re.compile(r"CurrSamplesPerSec=([\d.]+)"), lambda found, trial: trial["global_batch_size"] / float(found)),
    # planner's own runner: step 12: 3.21 s
    (re.compile(r"\bstep \d+: *([\d.]+) s\b"), lambda found, trial: float(found)),
)


def measured_s(place: Path, trial: Trial) -> tuple[float, int] | None:
    """The median step of a log, or of a folder's that has most, and how many steps it rests on; None without any."""
    best: list[float] = []
    logs = sorted(path for end in ("*.log", "*.out", "*.txt") for path in place.rglob(end))
    for path in logs or ([place] if place.is_file() else []):
        text = path.read_text(errors="replace")
        for pattern, seconds in SECONDS:
            steps = [seconds(found, trial) for found in pattern.findall(text)]
            if len(steps) > len(best):
                best = steps
    kept = best[SKIPPED:] if len(best) >= 2 * SKIPPED else best
    return (statistics.median(kept), len(kept)) if kept else None


def rank(root: Path) -> None:
    """Print the trials of a folder by their measured steps, beside the predicted ones."""
    trials = json.loads((root / "trials.json").read_text())["trials"]
    rows = [(trial, measured_s(root / trial["folder"], trial)) for trial in trials]
    rows.sort(key=lambda row: row[1][0] if row[1] else float("inf"))
    print(f"{'trial':8} {'measured':>10} {'predicted':>10} {'off by':>8} {'tokens/s':>12}  layout")
    for trial, found in rows:
        predicted = trial["step_s"]
        if found is None:
            print(f"{trial['folder']:8} {'no log':>10} {predicted:8.3f} s {'':8} {'':12}  {trial['layout']}")
            continue
        seconds, count = found
        rate = trial["tokens_per_step"] / seconds
        off = f"{100 * (seconds / predicted - 1):+.1f}%"
        times = f"{seconds:8.3f} s {predicted:8.3f} s {off:>8}"
        print(f"{trial['folder']:8} {times} {rate:12,.0f}  {trial['layout']} ({count} steps)")
    if not any(found for _, found in rows):
        sys.exit(
            "no trial has a log with step times: run them with run_trials.sh, or put their logs into their folders"
        )


def compare(log: Path) -> int:
    """Print the step of a first run beside the promised one; 0 whether or not it is as fast."""
    plan = CHECKS["promised"]
    found = measured_s(log, plan)
    if found is None:
        # only the node that prints the steps has them
        return 0
    seconds, count = found
    low, high = plan["step_s_interval"] or (plan["step_s"], plan["step_s"])
    place = "inside" if low <= seconds <= high else "outside"
    print(
        f"first run: measured {seconds:.4g} s a step (median of {count}), promised {plan['step_s']:.4g} s: "
        f"{100 * (seconds / plan['step_s'] - 1):+.1f}%, {place} the 80% interval of {low:.3g} to {high:.3g} s\n"
        f"first run: plan observe {log} --plan PLAN.json says where the difference is, and corrects later plans",
        file=sys.stderr,
    )
    return 0


def main() -> int:
    """Print every problem; 1 if there are any, but for a machine without GPUs, where ranks cannot start anyway."""
    if not CHECKS:
        rank(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
        return 0
    if sys.argv[1:2] == ["--measured"]:
        return compare(Path(sys.argv[2]))
    found = [f"{problem}: {hint}" if hint else problem for problem, hint in problems() if problem]
    left_out = [place["name"] for place in CHECKS["placeholders"] if not place["in_first_run"]]
    if found:
        found.append("PREFLIGHT=0 starts without these checks")
    if found and left_out and os.environ.get("MOCK") != "1":
        found.append(f"MOCK=1 starts a short run on random tokens, which needs no {', '.join(left_out)}")
    is_told_only = bool(found) and not sees_gpus()
    if is_told_only:
        found.append("no GPU is visible here: this is told, and nothing is stopped")
    node = socket.gethostname()
    for line in found:
        print(f"preflight: {node}: {line}", file=sys.stderr)
    return 1 if found and not is_told_only else 0


if __name__ == "__main__":
    sys.exit(main())
