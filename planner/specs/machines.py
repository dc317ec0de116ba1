"""Networks, hosts and rented instances by name: what stands around a GPU where its profile does not say it.

`machines.yaml` has a row for each, with its source. Nothing is inferred from the rate of a line: a cluster whose
network or host nobody names keeps the profile's numbers, and its interval covers the others (layout/confidence.py).
"""

import re
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from planner.errors import SpecError
from planner.specs.base import NonNegativeFloat, Overhead, Rate, Spec
from planner.specs.hardware import HardwareSpec, LinkTier
from planner.specs.problems import among, checked, nearest
from planner.specs.reading import load_yaml

_FILE = Path(__file__).with_name("machines.yaml")
_WORDS = re.compile(r"[\s()/]+")
_NETWORK_NAMES = {"infiniband", "roce", "efa", "slingshot", "tcp", "ethernet", "network"}
"""Names of tiers outside a node that say no more than their network's kind."""


class NetworkKind(Spec):
    """One kind of network."""

    says: str
    tier: dict[str, float | bool]
    """Fields of a LinkTier with their values on this kind."""
    source: str


class Transport(Spec):
    """A carrier of the rows that a dispatcher sends between nodes."""

    networks: tuple[str, ...]
    """The networks on which it is known to gain over NCCL."""
    start_us: Overhead = 0.0
    """Microseconds to begin an exchange on a network that the host's threads drive."""
    row_fraction: NonNegativeFloat = 1.0
    """Share of a tier's `message_us` that a row takes there."""
    source: str


class HostKind(Spec):
    """One kind of CPU beside the GPUs."""

    host_us: Rate
    """Microseconds to issue one kernel of a layer in eager torch."""
    aliases: tuple[str, ...] = ()
    source: str


class Instance(Spec):
    """A machine that is rented: a profile, its network and its host."""

    hardware: str
    network: str
    gb_per_s: Rate
    """Network rate per GPU and direction."""
    host: str
    tier: dict[str, float | bool] = Field(default_factory=dict)
    """Fields of a LinkTier, where its network's generation has others than its kind."""
    aliases: tuple[str, ...] = ()
    source: str


R = TypeVar("R", bound=HostKind | Instance)


class Machines(Spec):
    """The whole table."""

    networks: dict[str, NetworkKind]
    transports: dict[str, Transport]
    hosts: dict[str, HostKind]
    instances: dict[str, Instance] = Field(default_factory=dict)


@cache
def machines() -> Machines:
    """The table that ships with the planner."""
    return checked(Machines, load_yaml(_FILE), _FILE.name)


def instance_names() -> dict[str, tuple[str, ...]]:
    """Every instance with its aliases."""
    return {name: row.aliases for name, row in machines().instances.items()}


def find_instance(name: str) -> tuple[str, Instance] | None:
    """The instance of a name or an alias; None where there is none."""
    return _called(name, machines().instances)


def transport_of(name: str) -> Transport:
    """The transport of a name; of none, the one of DeepEP on networks that the host drives."""
    return machines().transports[name or "nvshmem"]


def find_host(name: str) -> tuple[str, HostKind] | None:
    """The kind of CPU of its name, of an alias or of an instance; None where there is none."""
    found = find_instance(name)
    return _called(name if found is None else found[1].host, machines().hosts)


def known_hosts() -> list[str]:
    """All names that `find_host` knows."""
    table = machines()
    rows: dict[str, Any] = {**table.hosts, **table.instances}
    return [word for name, row in rows.items() for word in (name, *row.aliases)]


def _called(name: str, rows: dict[str, R]) -> tuple[str, R] | None:
    """The row of a name or an alias; None where there is none."""
    word = _WORDS.sub("-", name.strip().lower()).strip("-")
    return next(((known, row) for known, row in rows.items() if word in (known, *row.aliases)), None)


def with_network(hardware: HardwareSpec, kind: str, where: str = "network", keeps: bool = False) -> HardwareSpec:
    """The profile with its tiers outside a node on a kind of network; with `keeps`, where they do not say themselves.

    Raises SpecError for an unknown kind.
    """
    row = machines().networks.get(kind)
    if row is None:
        known = list(machines().networks)
        raise SpecError(f"{where}: unknown {kind[:60]!r}", among(known, kind))

    named = {"name": "infiniband" if kind == "ib" else kind}
    hardware = _on_tiers(hardware, row.tier, keeps)
    inner, *outer = hardware.tiers
    outer = [tier.model_copy(update=named) if tier.name in _NETWORK_NAMES and not keeps else tier for tier in outer]
    return hardware.model_copy(update={"network": kind, "tiers": (inner, *outer)})


def _on_tiers(hardware: HardwareSpec, fields: dict[str, float | bool], keeps: bool = False) -> HardwareSpec:
    """The profile with fields of its tiers outside a node; with `keeps`, those that a tier states itself stay."""

    def on(tier: LinkTier) -> LinkTier:
        own = tier.model_fields_set if keeps else frozenset[str]()
        return tier.model_copy(update={name: value for name, value in fields.items() if name not in own})

    inner, *outer = hardware.tiers
    return hardware.model_copy(update={"tiers": (inner, *map(on, outer))})


def with_host(hardware: HardwareSpec, name: str, where: str = "host") -> HardwareSpec:
    """The profile beside a kind of CPU, or that of an instance. Raises SpecError for an unknown one."""
    found = find_host(name)
    if found is None:
        known = known_hosts()
        raise SpecError(
            f"{where}: unknown {name[:60]!r}", f"one of {', '.join(machines().hosts)}{nearest(name, known)}"
        )
    kind, row = found
    rented = find_instance(name)
    if rented is not None and rented[1].network == hardware.network:
        hardware = _on_tiers(hardware, rented[1].tier)
    efficiency = hardware.efficiency.model_copy(update={"host_us": row.host_us})
    return hardware.model_copy(
        update={"efficiency": efficiency, "host": hardware.host.model_copy(update={"kind": kind})}
    )


def made_instance(name: str, row: Instance, base: HardwareSpec) -> HardwareSpec:
    """The profile of an instance: its GPU's, on its network, beside its host."""
    hardware = _on_tiers(with_host(with_network(base, row.network), row.host), row.tier)
    inner, *outer = hardware.tiers
    rated = (inner, *(tier.model_copy(update={"gb_per_s": row.gb_per_s}) for tier in outer))
    source = f"{base.source} {row.source}"
    return hardware.model_copy(update={"name": name, "aliases": row.aliases, "tiers": rated, "source": source})
