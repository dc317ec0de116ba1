"""The findings of `plan doctor`, as JSON has them; the command prints them."""

from __future__ import annotations

from typing import Literal

from planner.specs.base import Spec

Kind = Literal["wheel", "editable", "source tree"]
"""Ways in which the planner may have come here."""
Trouble = Literal["", "missing", "too old", "too new"]


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


class Installed(Spec):
    """How the planner came here, and what it depends on."""

    kind: Kind
    folder: str
    packages: tuple[Package, ...]
    extras: tuple[Extra, ...]


class Command(Spec):
    """A command, the extras that it needs, and if it can run here."""

    name: str
    extras: tuple[str, ...] = ()
    can_run: bool
    note: str = ""
    """The obstacle, or the limit under which it runs."""


class Gpu(Spec):
    """One GPU as its driver's tool names it."""

    name: str
    memory_gib: float | None = None
    driver: str = ""
    """Version of the driver; empty where the tool does not say."""


class Gpus(Spec):
    """The GPUs of this machine."""

    found_by: str
    """The tool that lists them; empty where none is found."""
    gpus: tuple[Gpu, ...]
    trouble: str = ""


class Torch(Spec):
    """The torch that is installed, looked up and not imported."""

    version: str
    build: str
    """CUDA 12.8, ROCm 6.3 or CPU; empty where its files do not say."""
    imported: str = ""
    """The words of a process that imported it, with --deep; empty where nobody asked."""


class Profile(Spec):
    """The hardware profile that plans would use."""

    name: str
    reason: str
    evidence: str
    """The measurements that its shares of peak rest on."""
    source: str


class LastFit(Spec):
    """The last fit of the numbers that ship."""

    date: str
    age_days: int
    numbers: str
    source: str


class Folder(Spec):
    """A folder that the planner reads or writes."""

    path: str
    trouble: str = ""


class History(Folder):
    """The folder of kept runs."""

    num_runs: int


class Solver(Spec):
    """A solver, and what is wrong with it."""

    name: str
    is_needed: bool
    trouble: str = ""


class Terminal(Spec):
    """The terminal that answers are printed to."""

    num_columns: int
    encoding: str
    is_terminal: bool


class Findings(Spec):
    """One screen to paste into an issue. Neither user names nor host names are in it."""

    schema_version: Literal[1] = 1
    version: str
    python: str
    system: str
    installed: Installed
    commands: tuple[Command, ...]
    solvers: tuple[Solver, ...]
    gpus: Gpus
    torch: Torch | None
    profile: Profile
    calibration: LastFit
    history: History
    temp: Folder
    terminal: Terminal
    variables: tuple[str, ...]
    """Names of the variables of the environment that change what the planner does."""

    @property
    def troubles(self) -> list[str]:
        """Reasons why the core does not work; none where it does."""
        packages = [
            f"{package.name} {package.version} is {package.trouble}: {package.needs} is needed"
            if package.version
            else f"{package.name} is missing"
            for package in self.installed.packages
            if package.trouble
        ]
        temp = [f"{self.temp.path}: {self.temp.trouble}"] if self.temp.trouble else []
        return [
            *packages,
            *(f"{one.name}: {one.trouble}" for one in self.solvers if one.is_needed and one.trouble),
            *temp,
        ]
