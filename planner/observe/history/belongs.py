"""The cluster and the trainer whose runs tell of each other, and the calibration by those that are kept of them."""

from __future__ import annotations

from pathlib import Path

from planner.layout.confidence import hardware_width
from planner.observe.calibrate.memory import kept_width
from planner.observe.history.folder import Prices
from planner.observe.history.posterior import KeptPrice, Posterior, posterior
from planner.specs.cluster import ClusterSpec
from planner.trainers.calibration import Calibration, Factor
from planner.trainers.spec import RuntimeSpec


def belongs_to(cluster: ClusterSpec, runtime: RuntimeSpec) -> str:
    """The cluster and the trainer in words: the hardware's profile, GPUs of a node, the network's rate per GPU and
    direction, and the trainer without its version. Runs that agree in all of them correct each other."""
    rates = [f"{tier.gb_per_s / tier.oversubscription:g}" for tier in cluster.tiers[1:]]
    network = f"{' and '.join(rates)} GB/s between nodes" if rates else "no network"
    return f"{cluster.hardware.name}, {cluster.node_size} GPUs a node, {network}, {runtime.family}"


def runs_of(prices: Prices, cluster: ClusterSpec, runtime: RuntimeSpec) -> tuple[KeptPrice, ...]:
    """The runs that were kept of this cluster and trainer."""
    belongs = belongs_to(cluster, runtime)
    return tuple(run for run in prices.runs if run.belongs == belongs)


def named(found: Posterior, folder: Path) -> str:
    """The runs in the words of an answer: `3 runs of yours: …/history`."""
    return f"{found.num_runs} {'run' if found.num_runs == 1 else 'runs'} of yours: …/{folder.name}"


def calibration_of(
    runs: tuple[KeptPrice, ...], cluster: ClusterSpec, folder: Path
) -> tuple[Calibration, Posterior] | None:
    """The calibration by runs that are kept, and what it follows from; None without any."""
    if not runs:
        return None
    found = posterior(runs, hardware_width(cluster.hardware))
    source = named(found, folder)
    calibration = Calibration(
        source=source,
        by="history",
        kernels_factor=Factor(value=found.factor, source=source),
        step_width=found.step_width,
        memory_width=kept_width(cluster.hardware),
    )
    return calibration, found
