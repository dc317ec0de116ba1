"""`plan doctor`: what this machine has of what the planner needs, as one screen to paste into an issue.

GPUs are listed by their drivers' tools, without torch; libraries are looked up and not imported. Neither user names nor
host names are told.
"""

from __future__ import annotations

import csv
import getpass
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal, get_args

from planner.distribution import DISTRIBUTION, __version__, install_line
from planner.observe import default_folder
from planner.probe.evidence import named_profiles, spelled
from planner.search.ilp.solver import SolverName, solver_trouble
from planner.specs.base import Ints, Named, Spec
from planner.specs.hardware import HardwareSpec
from planner.specs.registry import load_hardware
from planner.specs.units import GIB, MIB
from planner.trainers.calibration import shipped_fits

TOOL_S = 20.0
"""Seconds that a driver's tool may take."""
Kind = Literal["wheel", "editable", "source tree"]
"""Ways in which the planner may have come here."""
Trouble = Literal["", "missing", "too old", "too new"]
EXTRAS = {"probe": "plan probe and plan profile", "serve": "plan serve"}
"""The extras that commands need; all other commands run without any."""
SOLVERS: dict[SolverName, bool] = {"HiGHS": True, "CBC": False}
"""Solvers, and if plans need them: CBC only checks what HiGHS proves."""


class Package(Spec):
    """A library that the planner, or one of its extras, needs."""

    name: str
    needs: str
    """Versions that will do, such as >=2.10."""
    version: str = ""
    """The version installed; empty where there is none."""
    trouble: Trouble = ""


class Extra(Spec):
    """One of the planner's extras, and how to get what it lacks."""

    name: str
    packages: tuple[Package, ...]
    install: str = ""
    """The line that installs what is missing; empty where nothing is."""


class Gpu(Spec):
    """One GPU as its driver's tool names it."""

    name: str
    memory_gib: float | None = None
    driver: str = ""
    """Version of the driver; empty where the tool does not say."""


class Findings(Spec):
    """The findings of this machine."""

    schema_version: Literal[1] = 1
    version: str
    python: str
    system: str
    kind: Kind
    folder: str
    packages: tuple[Package, ...]
    extras: tuple[Extra, ...]
    solvers: Named
    """The trouble of each solver; empty for one that works."""
    gpus: tuple[Gpu, ...]
    gpu_trouble: str = ""
    """The reason why a tool of a driver lists none."""
    torch: str
    """The version of torch and what it is built for; empty where there is none."""
    profile: str
    """The hardware profile that plans use, and why."""
    calibration: str
    """The last fit of the numbers that ship."""
    history: str
    num_runs: int
    temp: str
    temp_trouble: str = ""

    @property
    def troubles(self) -> list[str]:
        """Reasons why the core does not work; none where it does."""
        packages = [
            f"{one.name} {one.version} is {one.trouble}: {one.needs} is needed"
            if one.version
            else f"{one.name} is missing"
            for one in self.packages
            if one.trouble
        ]
        solvers = [f"{name}: {self.solvers[name]}" for name, needed in SOLVERS.items() if needed and self.solvers[name]]
        return [*packages, *solvers, *([f"{self.temp}: {self.temp_trouble}"] if self.temp_trouble else [])]


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The GPUs that nvidia-smi or else rocm-smi lists, or why none is listed."""
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
            if gpus := tuple(read(ran.stdout)) if ran.returncode == 0 else ():
                return gpus, ""
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            trouble = trouble or f"{tool} fails: {type(error).__name__}"
            continue
        said = (ran.stderr or ran.stdout).strip().splitlines()
        trouble = trouble or (f"{tool}: {said[0][:120]}" if ran.returncode and said else f"{tool} lists no GPU")
    return (), trouble


def profile_of(gpu: Gpu) -> HardwareSpec | None:
    """The shipped profile that is named after the GPU; of several the one whose memory is nearest."""

    def distance(profile: HardwareSpec) -> tuple[float, int]:
        memory_gib = gpu.memory_gib or profile.memory_gib
        return round(abs(profile.memory_gib / memory_gib - 1), 1), -spelled(profile, gpu.name)

    return min(named_profiles(gpu.name), key=distance, default=None)


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


PACKAGE = Path(__file__).parents[1]
_NEED = re.compile(r"([A-Za-z0-9_.-]+)\s*([^;]*?)\s*(?:;(?:.*extra\s*==\s*[\"'](\w+)[\"'])?.*)?")
_TORCH_FACT = re.compile(r"^(cuda|hip)\b[^=]*= *'([^']+)'", re.MULTILINE)


def installed() -> tuple[Kind, dict[str, tuple[Package, ...]]]:
    """The kind of installation, and what it depends on by extra (the core's under the empty name): by its own metadata,
    or by a source tree's pyproject.toml."""
    pyproject = PACKAGE.parent / "pyproject.toml"
    kind: Kind = "source tree"
    try:
        ours = metadata.distribution(DISTRIBUTION)
        editable = json.loads(ours.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable", False)
        kind = "editable" if editable else "source tree" if pyproject.is_file() else "wheel"
        lines = ours.requires or ()
    except metadata.PackageNotFoundError:
        lines = ()
    if kind == "source tree" and pyproject.is_file():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        extras = project.get("optional-dependencies", {})
        lines = [*project.get("dependencies", ()), *(f'{need}; extra == "{e}"' for e in extras for need in extras[e])]
    found: dict[str, list[Package]] = defaultdict(list)
    for match in filter(None, map(_NEED.fullmatch, map(str.strip, lines))):
        version = version_of(match[1])
        needs = match[2].strip("() ")
        found[match[3] or ""].append(
            Package(name=match[1], needs=needs, version=version, trouble=_trouble(version, needs))
        )
    return kind, {extra: tuple(packages) for extra, packages in found.items()}


def torch_of() -> str:
    """The torch that is installed, by its files; empty where there is none."""
    version = version_of("torch")
    spec = util.find_spec("torch")
    if spec is None or not version:
        return ""
    paths = [Path(folder) / "version.py" for folder in spec.submodule_search_locations or ()]
    text = "".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())
    built_with = dict(_TORCH_FACT.findall(text))
    names = {"cuda": "CUDA", "hip": "ROCm"}
    build = ", ".join(f"{names[name]} {'.'.join(value.split('.')[:2])}" for name, value in built_with.items())
    return f"{version}, built for {build or 'CPU'}"


def version_of(name: str) -> str:
    """The version of a distribution; empty where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


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


def _release(version: str) -> Ints:
    """The numbers of a version, so that 1.10 comes after 1.9; what follows them, such as +cpu or rc1, is left out."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    release = [int(number) for number in numbers[0].split(".")] if numbers else [0]
    while release and release[-1] == 0:
        release.pop()
    return tuple(release)


def examine(default_hardware: str) -> Findings:
    """Everything that `plan doctor` shows of this machine."""
    (kind, packages), (gpus, gpu_trouble) = installed(), find_gpus()
    libc = " ".join(platform.libc_ver())
    last = shipped_fits().fits[-1]
    history, num_runs = _history()
    temp, temp_trouble = _temp()
    findings = Findings(
        version=f"{DISTRIBUTION} {__version__}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=f"{platform.system()} {platform.release()} {platform.machine()}, {libc}".strip(", "),
        kind=kind,
        folder=str(PACKAGE.parent),
        packages=packages.pop("", ()),
        extras=tuple(
            Extra(name=name, packages=has, install=install_line(name) if any(one.trouble for one in has) else "")
            for name, has in sorted(packages.items())
        ),
        solvers={name: solver_trouble(name) for name in SOLVERS},
        gpus=gpus,
        gpu_trouble=gpu_trouble,
        torch=torch_of(),
        profile=_profile(gpus, default_hardware),
        calibration=f"{last.date.isoformat()}: {last.numbers} ({last.source})",
        history=history,
        num_runs=num_runs,
        temp=temp,
        temp_trouble=temp_trouble,
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


def _profile(gpus: Sequence[Gpu], default_hardware: str) -> str:
    """The profile of the first GPU; without one, the profile that plans take unless they are told another."""
    own = profile_of(gpus[0]) if gpus else None
    profile = own or load_hardware(default_hardware)
    default = "none is named after this GPU, plan profile measures one" if gpus else "no GPU is found"
    reason = f"the default: {default}" if own is None else "of this GPU: --hardware takes it"
    evidence = {
        "measured": "measured on this kind of GPU",
        "family": "measured on GPUs of its family",
        "spec_sheet": "data sheet, nothing measured",
    }[profile.efficiency.evidence]
    return f"{profile.name}, {reason}; {evidence}"


def _history() -> tuple[str, int]:
    """The folder of kept runs and their number, or why there is none."""
    from planner.observe.history import kept_files

    folder = default_folder()
    if folder is None:
        return "no home folder, and PLANNER_HISTORY names none", 0
    if not folder.exists():
        return str(folder), 0
    if not folder.is_dir():
        return f"{folder} is no folder, so that no runs are kept there", 0
    if not os.access(folder, os.R_OK | os.X_OK):
        return f"{folder} cannot be read", 0
    return str(folder), len(kept_files(folder))


def _temp() -> tuple[str, str]:
    """The folder for temporary files, and why it cannot be written."""
    path = ""
    try:
        path = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"planner")
    except OSError as error:
        return path, f"cannot be written: {error.strerror}"
    return path, ""
