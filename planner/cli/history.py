"""The runs that a user keeps, applied to a job: `plan validate --add` keeps them, `--no-history` leaves them out."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from planner.specs.reading import printable

if TYPE_CHECKING:
    from pathlib import Path

    from planner.observe.history import KeptPrice
    from planner.specs.cluster import ClusterSpec
    from planner.trainers.spec import RuntimeSpec

_log = logging.getLogger(__name__)


def with_history(cluster: ClusterSpec, runtime: RuntimeSpec, said: set[str] | None = None) -> ClusterSpec:
    """`cluster` corrected by the runs that are kept of it and of the trainer; as it is where none are.

    What was said once of a command with many jobs stands in `said`, and is not said again.
    """
    from planner.observe.history_place import default_folder

    folder = default_folder()
    if folder is None or not os.path.isdir(folder):
        return cluster
    from planner.observe.history import calibration_of, prices_of, runs_of, said_of

    prices = prices_of(folder, _priced)
    said = set() if said is None else said
    _say_once(logging.WARNING, said_of(prices.left_out, folder), said)
    known = calibration_of(runs_of(prices, cluster, runtime), cluster, folder)
    if known is None:
        return cluster
    calibration, found = known
    for correction in calibration.corrections(cluster.hardware, cluster.tiers):
        runs = f"{found.num_runs} {'run' if found.num_runs == 1 else 'runs'} of yours"
        text = f"{printable(str(folder))}: {correction.brief} by {runs}; --no-history leaves them out"
        _say_once(logging.INFO, text, said)
    return calibration.of_cluster(cluster)


def _priced(path: Path) -> KeptPrice:
    from planner.observe.history import price_of_file

    return price_of_file(path)


def _say_once(level: int, text: str, said: set[str]) -> None:
    if text and text not in said:
        said.add(text)
        _log.log(level, "%s", text)
