"""`plan doctor`: what this machine has of what the planner needs.

GPUs are listed by their drivers' tools, without torch; libraries are looked up and not imported.
"""

from __future__ import annotations

import csv
import datetime
import getpass
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Any, get_args

import planner
from planner.distribution import DISTRIBUTION, install_line
from planner.observe.history_place import VARIABLE, default_folder
from planner.probe.verdict.evidence import is_named
from planner.profile.findings import (
    Command,
    Extra,
    Findings,
    Folder,
    Gpu,
    Gpus,
    History,
    Installed,
    Kind,
    LastFit,
    Package,
    Profile,
    Solver,
    Terminal,
    Torch,
    Trouble,
)
from planner.search.ilp.solver import SolverName, solver_trouble
from planner.specs.hardware import HardwareSpec
from planner.specs.registry import hardware_names, load_hardware
from planner.specs.units import GIB, MIB
from planner.trainers.calibration import shipped_fits

PCI = Path("/sys/bus/pci/devices")
TOOL_S = 20.0
"""Seconds that a driver's tool may take."""
_VENDORS = {"0x10de": ("NVIDIA", "nvidia-smi"), "0x1002": ("AMD", "rocm-smi")}
"""Names of PCI vendors, and the tool that comes with their driver."""
_DISPLAY, _ACCELERATOR = "0x03", "0x12"
"""Beginnings of the PCI classes of GPUs."""


def find_gpus() -> Gpus:
    """The GPUs that nvidia-smi or else rocm-smi lists; where neither does, what the PCI bus has, with the trouble."""
    trouble = ""
    for tool, arguments, read in (
        ("nvidia-smi", ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"], _nvidia),
        ("rocm-smi", ["--showproductname", "--showmeminfo", "vram", "--json"], _amd),
    ):
        path = shutil.which(tool)
        if path is None:
            continue
        try:
            ran = subprocess.run([path, *arguments], capture_output=True, text=True, errors="replace", timeout=TOOL_S)
            gpus = tuple(read(ran.stdout)) if ran.returncode == 0 else ()
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            trouble = trouble or f"{tool} fails: {type(error).__name__}"
            continue
        if gpus:
            return Gpus(found_by=tool, gpus=gpus)
        said = (ran.stderr or ran.stdout).strip().splitlines()
        trouble = trouble or (f"{tool}: {said[0][:120]}" if ran.returncode and said else f"{tool} lists no GPU")
    on_bus = tuple(_on_bus())
    if on_bus and not trouble:
        trouble = f"{on_bus[0].vendor} on the PCI bus, but no {on_bus[0].tool}: is the driver installed?"
    return Gpus(found_by="PCI bus" if on_bus else "", gpus=tuple(card.gpu for card in on_bus), trouble=trouble)


def profile_of(gpu: Gpu) -> HardwareSpec | None:
    """The shipped profile that is named after the GPU; of several the one whose memory is nearest."""
    named = [profile for profile in map(load_hardware, hardware_names()) if is_named(profile, gpu.name)]
    words = gpu.name.lower()

    def distance(profile: HardwareSpec) -> tuple[float, int]:
        memory_gib = gpu.memory_gib or profile.memory_gib
        spelled = sum(part in words for part in profile.name.split("-"))
        return round(abs(profile.memory_gib / memory_gib - 1), 1), -spelled

    return min(named, key=distance, default=None)


def _nvidia(printed: str) -> Iterator[Gpu]:
    for row in csv.reader(printed.splitlines()):
        if len(row) == 3:
            name, memory_mib, driver = (cell.strip() for cell in row)
            known = memory_mib.replace(".", "", 1).isdigit()  # [N/A] where GPU and host share their memory
            yield Gpu(name=name, memory_gib=float(memory_mib) * MIB / GIB if known else None, driver=driver)


def _amd(printed: str) -> Iterator[Gpu]:
    for card, fields in sorted(json.loads(printed).items()):
        if card.startswith("card") and isinstance(fields, dict):
            told = {str(key).lower(): str(value) for key, value in fields.items()}  # spelled otherwise before ROCm 6
            name = told.get("card series") or told.get("device name") or card
            num_bytes = told.get("vram total memory (b)", "")
            yield Gpu(name=name, memory_gib=int(num_bytes) / GIB if num_bytes.isdigit() else None)


class _Card:
    """A GPU on the PCI bus, and the tool that would say more of it."""

    def __init__(self, vendor: str, device: str) -> None:
        self.vendor, self.tool = _VENDORS[vendor]
        self.gpu = Gpu(name=f"{self.vendor} PCI {vendor[2:]}:{device[2:]}")


def _on_bus() -> Iterator[_Card]:
    for device in sorted(PCI.glob("*")):
        try:
            kind, vendor, number = ((device / name).read_text().strip() for name in ("class", "vendor", "device"))
        except OSError:
            continue
        if kind.startswith((_DISPLAY, _ACCELERATOR)) and vendor in _VENDORS:
            yield _Card(vendor, number)


PACKAGE = Path(planner.__file__).parent
_NEED = re.compile(r"([A-Za-z0-9_.-]+)\s*([^;]*?)\s*(?:;(?:.*extra\s*==\s*[\"'](\w+)[\"'])?.*)?")
_TORCH_FACT = re.compile(r"^(cuda|hip)\b[^=]*= *'([^']+)'", re.MULTILINE)
Needs = dict[str, list[tuple[str, str]]]
"""Names and versions that are needed, by extra; those of the core under the empty name."""


def installed() -> Installed:
    """The kind of installation, its dependencies and its extras."""
    kind, needs = _needs()
    packages = {extra: tuple(_package(*need) for need in listed) for extra, listed in needs.items()}
    return Installed(
        kind=kind,
        folder=str(PACKAGE.parent),
        packages=packages.pop("", ()),
        extras=tuple(_extra(name, has) for name, has in sorted(packages.items())),
    )


def torch_of() -> Torch | None:
    """The torch that is installed, by its files; None where there is none."""
    version, spec = version_of("torch"), util.find_spec("torch")
    if spec is None or not version:
        return None
    text = ""
    for folder in spec.submodule_search_locations or ():
        path = Path(folder) / "version.py"
        text = path.read_text(encoding="utf-8") if path.is_file() else text
    built_with = dict(_TORCH_FACT.findall(text))
    names = {"cuda": "CUDA", "hip": "ROCm"}
    build = ", ".join(f"{names[name]} {'.'.join(value.split('.')[:2])}" for name, value in built_with.items())
    return Torch(version=version, build=build or ("CPU" if text else ""))


def version_of(name: str) -> str:
    """The version of a distribution; empty where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _needs() -> tuple[Kind, Needs]:
    """The kind of installation and what it needs: by its own metadata, or by a source tree's pyproject.toml."""
    pyproject = PACKAGE.parent / "pyproject.toml"
    try:
        ours = metadata.distribution(DISTRIBUTION)
        editable = json.loads(ours.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable", False)
    except metadata.PackageNotFoundError:
        ours, editable = None, False
    if ours is not None and (editable or not pyproject.is_file()):
        return "editable" if editable else "wheel", _by_extra(_parsed(ours.requires or ()))
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"] if pyproject.is_file() else {}
    extras = project.get("optional-dependencies", {})
    lines = [*project.get("dependencies", ()), *(f'{need}; extra == "{e}"' for e in extras for need in extras[e])]
    return "source tree", _by_extra(_parsed(lines))


def _parsed(lines: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for line in lines:
        if match := _NEED.fullmatch(line.strip()):
            yield match[1], match[2].strip("() "), match[3] or ""


def _by_extra(needs: Iterator[tuple[str, str, str]]) -> Needs:
    found: Needs = {}
    for name, versions, extra in needs:
        found.setdefault(extra, []).append((name, versions))
    return found


def _package(name: str, needs: str) -> Package:
    version = version_of(name)
    return Package(name=name, needs=needs, version=version, trouble=_trouble(version, needs))


def _trouble(version: str, needs: str) -> Trouble:
    if not version:
        return "missing"
    for least in re.findall(r">=\s*([\d.]+)", needs):
        if _release(version) < _release(least):
            return "too old"
    for most in re.findall(r"<\s*([\d.]+)", needs):
        if _release(version) >= _release(most):
            return "too new"
    return ""


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, so that 1.10 comes after 1.9; what follows them, such as +cpu or rc1, is left out."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    release = [int(number) for number in numbers[0].split(".")] if numbers else [0]
    while release and release[-1] == 0:
        release.pop()
    return tuple(release)


def _extra(name: str, packages: tuple[Package, ...]) -> Extra:
    lacks = any(package.trouble for package in packages)
    return Extra(name=name, packages=packages, install=install_line(name) if lacks else "")


EXTRAS = {"serve": ("serve",), "report": ("plot",), "probe": ("probe",), "profile": ("probe",)}
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
    has_torch = torch_of()
    if has_torch is not None and deep:
        has_torch = has_torch.model_copy(update={"imported": imported_torch()})
    findings = Findings(
        version=f"{DISTRIBUTION} {planner.__version__}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}".strip(
            ", "
        ),
        installed=has,
        commands=tuple(_command(name, has, gpus, has_torch) for name in commands),
        solvers=tuple(
            Solver(name=name, is_needed=needed, trouble=solver_trouble(name)) for name, needed in SOLVERS.items()
        ),
        gpus=gpus,
        torch=has_torch,
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


def _command(name: str, has: Installed, gpus: Gpus, has_torch: Torch | None) -> Command:
    extras = EXTRAS.get(name, ())
    lacks = [
        package.name for extra in has.extras if extra.name in extras for package in extra.packages if package.trouble
    ]
    if lacks:
        return Command(name=name, extras=extras, can_run=False, note=f"lacks {', '.join(lacks)}")
    if "probe" in extras:
        return Command(name=name, extras=extras, can_run=True, note=_limit_of_probe(gpus, has_torch))
    return Command(name=name, extras=extras, can_run=True)


def _limit_of_probe(gpus: Gpus, has_torch: Torch | None) -> str:
    if not gpus.gpus:
        return "on the CPU: no GPU is found"
    if gpus.trouble:
        return f"on the CPU: {gpus.trouble}"
    return "on the CPU: torch is built without GPUs" if has_torch and has_torch.build == "CPU" else ""


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


def _calibration(today: datetime.date) -> LastFit:
    last = shipped_fits().fits[-1]
    return LastFit(
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
