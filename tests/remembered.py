"""Searches and prices that many tests ask for again, kept: both are functions of their arguments alone.

That they are is what tests/search holds, which remembers no search but in the tests of reasons (tests/search/why).
"""

from __future__ import annotations

import hashlib
import pickle
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from planner.answer import Plan, PricedLayout
from planner.layout.evaluate import price_given
from planner.search.case import Case, Deadline
from planner.search.layouts import News
from planner.search.search import search_within_risk
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.spec import RuntimeSpec


@dataclass
class Searches:
    """`search_within_risk`, which a case that a search ended by itself does not go through twice, in any worker."""

    folder: Path
    """Where the workers leave their answers for each other."""
    anew: bool = False
    """True while a test runs that is of the search itself."""
    known: dict[str, Plan] = field(default_factory=dict)

    def __call__(self, case: Case, deadline: Deadline | None = None, news: News | None = None) -> Plan:
        if self.anew or news is not None:
            return search_within_risk(case, deadline, news)
        name = hashlib.sha256(repr(case).encode()).hexdigest()
        answer = self.known.get(name) or self._read(name)
        if answer is None:
            answer = search_within_risk(case, deadline)
            if answer.search is None or answer.search.outcome == "feasible":  # more time would tell another
                return answer
            part = self.folder / f"{name}.{id(self)}.part"
            part.write_bytes(pickle.dumps(answer))
            part.rename(self.folder / name)
        self.known[name] = answer
        return answer

    def _read(self, name: str) -> Plan | None:
        """The answer that another worker left."""
        path = self.folder / name
        return pickle.loads(path.read_bytes()) if path.exists() else None


Job = tuple[ModelSpec, ClusterSpec, TrainingSpec, RuntimeSpec]


@dataclass
class Prices:
    """`price_given`, which prices the same run once."""

    known: dict[tuple[str, bool], list[tuple[Job, PricedLayout]]] = field(default_factory=lambda: defaultdict(list))

    def __call__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        training: TrainingSpec,
        parallelism: Parallelism,
        runtime: RuntimeSpec,
        says_switches: bool = True,
    ) -> PricedLayout:
        job = model, cluster, training, runtime
        same_layout = self.known[f"{model.name} {parallelism!r}", says_switches]
        for other, priced in same_layout:
            if other == job:
                return priced
        priced = price_given(model, cluster, training, parallelism, runtime, says_switches)
        same_layout.append((job, priced))
        return priced
