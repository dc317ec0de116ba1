"""Searches and prices that many tests ask for again, kept: both are functions of their arguments alone.

That they are is what tests/search and tests/layout hold, which remember nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from planner.answer import Plan, PricedLayout
from planner.layout.evaluate import price_given
from planner.search.case import Case
from planner.search.deadline import Deadline
from planner.search.layouts import News
from planner.search.search import search_within_risk
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.spec import RuntimeSpec


@dataclass
class Searches:
    """`search_within_risk`, which a case that a search ended by itself does not go through twice."""

    known: list[tuple[Case, Plan]] = field(default_factory=list)

    def __call__(self, case: Case, deadline: Deadline | None = None, news: News | None = None) -> Plan:
        if news is not None:
            return search_within_risk(case, deadline, news)
        for other, answer in self.known:
            if other == case:
                return answer
        answer = search_within_risk(case, deadline)
        if answer.search is not None and answer.search.outcome != "feasible":
            self.known.append((case, answer))
        return answer


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
