"""Looks at this machine for what the planner needs."""

from __future__ import annotations

import datetime
import getpass
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import planner
from planner.distribution import DISTRIBUTION
from planner.doctor.findings import (
    Calibration,
    Command,
    Findings,
    Folder,
    Gpus,
    History,
    Installed,
    Kind,
    Profile,
    Solver,
    Terminal,
    Torch,
    Trouble,
)
from planner.doctor.gpus import find_gpus, profile_of
from planner.doctor.installed import installed, torch_of
from planner.observe.history_place import VARIABLE, default_folder
from planner.search.ilp.self_test import SolverName, solver_trouble
from planner.specs.registry import load_hardware
from planner.trainers.fits import shipped_fits

EXTRAS = {"serve": ("serve",), "probe": ("probe",), "profile": ("probe",)}
"""The extras that commands need; all others run without any."""
SOLVERS: dict[SolverName, bool] = {"HiGHS": True, "CBC": False}
"""Solvers, and if plans need them: CBC only checks what HiGHS proves."""
VARIABLES = (
    VARIABLE, "COLUMNS", "CUDA_VISIBLE_DEVICES", "FORCE_COLOR", "HIP_VISIBLE_DEVICES", "NO_COLOR", "PYTHONPATH",
    "ROCR_VISIBLE_DEVICES", "TERM",
)  # fmt: skip
IMPORT_S = 180.0
"""Seconds that importing torch may take: minutes from a network's file system."""
_ASK_TORCH = (
    "import torch; print(f'{torch.cuda.device_count()} GPU(s)' if torch.cuda.is_available() else 'no GPU', "
    "'and NCCL' if torch.distributed.is_available() and torch.distributed.is_nccl_available() else 'without NCCL')"
)


def examine(commands: Sequence[str], default_hardware: str, deep: bool, num_columns: int) -> Findings:
    """Everything that `plan doctor` shows of this machine, for these commands; `deep` imports torch in a process."""
    has, gpus = installed(), find_gpus()
    torch = torch_of()
    if torch is not None and deep:
        torch = torch.model_copy(update={"imported": imported_torch()})
    findings = Findings(
        version=f"{DISTRIBUTION} {planner.__version__}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}".strip(
            ", "
        ),
        installed=has,
        commands=tuple(_command(name, has, gpus, torch) for name in commands),
        solvers=tuple(
            Solver(name=name, is_needed=needed, trouble=solver_trouble(name)) for name, needed in SOLVERS.items()
        ),
        gpus=gpus,
        torch=torch,
        profile=_profile(gpus, default_hardware),
        calibration=_calibration(datetime.date.today()),
        history=_history(),
        temp=_temp(),
        terminal=Terminal(
            num_columns=num_columns,
            encoding=sys.stdout.encoding or "",
            is_terminal=sys.stdout.isatty(),
        ),
        variables=tuple(name for name in VARIABLES if name in os.environ),
    )
    return Findings.model_validate(_each_text(findings.model_dump(), anonymous))


def anonymous(text: str) -> str:
    """`text` with ~ for the home folder, USER for the user's name in paths, HOST for the machine's name."""
    home = os.path.expanduser("~")
    if home not in ("~", "/"):
        text = re.sub(rf"{re.escape(home)}(?=[/\s,:;'\"]|$)", "~", text)
    with suppress(OSError, KeyError, ImportError):
        text = re.sub(rf"(?<=[/\\]){re.escape(getpass.getuser())}(?=[/\\\s,:;'\"]|$)", "USER", text)
    host = socket.gethostname()
    for name in dict.fromkeys((host, host.partition(".")[0])):
        if name and name != "localhost":
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", "HOST", text)
    return text


_WORDS = {word for words in (Kind, Trouble) for word in get_args(words)}
"""Texts that are ours, whatever a machine is called."""


def _each_text(data: Any, change: Callable[[str], str]) -> Any:
    if isinstance(data, dict):
        return {key: _each_text(value, change) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(_each_text(value, change) for value in data)
    return change(data) if isinstance(data, str) and data not in _WORDS else data


def imported_torch() -> str:
    """The GPUs that torch tells a process that imports it, or the reason why it cannot be imported."""
    try:
        ran = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"not imported within {IMPORT_S:.0f} s"
    if ran.returncode:
        said = ran.stderr.strip().splitlines()
        return f"cannot be imported: {said[-1][:200]}" if said else f"cannot be imported: exit code {ran.returncode}"
    return f"imports, with {ran.stdout.strip()}"


def _command(name: str, has: Installed, gpus: Gpus, torch: Torch | None) -> Command:
    extras = EXTRAS.get(name, ())
    lacks = [
        package.name for extra in has.extras if extra.name in extras for package in extra.packages if package.trouble
    ]
    if lacks:
        return Command(name=name, extras=extras, can_run=False, note=f"lacks {', '.join(lacks)}")
    if "probe" in extras:
        return Command(name=name, extras=extras, can_run=True, note=_limit_of_probe(gpus, torch))
    return Command(name=name, extras=extras, can_run=True)


def _limit_of_probe(gpus: Gpus, torch: Torch | None) -> str:
    if not gpus.gpus:
        return "on the CPU: no GPU is found"
    if gpus.trouble:
        return f"on the CPU: {gpus.trouble}"
    return "on the CPU: torch is built without GPUs" if torch and torch.build == "CPU" else ""


def _profile(gpus: Gpus, default_hardware: str) -> Profile:
    """The profile of the first GPU; without one, the profile that plans take unless they are told another."""
    own = profile_of(gpus.gpus[0]) if gpus.gpus else None
    profile = own or load_hardware(default_hardware)
    if own is not None:
        reason = "of this GPU: --hardware takes it"
    elif gpus.gpus:
        reason = "the default: none is named after this GPU, plan profile measures one"
    else:
        reason = "the default: no GPU is found"
    evidence = {
        "measured": "measured on this kind of GPU",
        "family": "measured on GPUs of its family",
        "spec_sheet": "data sheet, nothing measured",
    }[profile.efficiency.evidence]
    return Profile(name=profile.name, reason=reason, evidence=evidence, source=" ".join(profile.source.split()))


def _calibration(today: datetime.date) -> Calibration:
    last = shipped_fits().fits[-1]
    return Calibration(
        date=last.date.isoformat(), age_days=(today - last.date).days, numbers=last.numbers, source=last.source
    )


def _history() -> History:
    from planner.observe.history import PREFIX, SUFFIX

    folder = default_folder()
    if folder is None:
        return History(path="", num_runs=0, trouble="no home folder, and PLANNER_HISTORY names none")
    if folder.exists() and not folder.is_dir():
        return History(path=str(folder), num_runs=0, trouble="is no folder, so that no runs are kept there")
    try:
        return History(path=str(folder), num_runs=sum(1 for _ in folder.glob(f"{PREFIX}*{SUFFIX}")))
    except OSError as error:
        return History(path=str(folder), num_runs=0, trouble=error.strerror or "cannot be read")


def _temp() -> Folder:
    try:
        path = Path(tempfile.gettempdir())
    except OSError as error:
        return Folder(path="", trouble=f"no folder for temporary files: {error.strerror}")
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"planner")
    except OSError as error:
        return Folder(path=str(path), trouble=f"cannot be written: {error.strerror}")
    return Folder(path=str(path))
