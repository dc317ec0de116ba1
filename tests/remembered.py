"""Searches and prices that many tests ask for again, kept: both are functions of their arguments alone.

That they are is what tests/search holds, which remembers no search but in the tests of reasons (tests/search/why).
"""

import hashlib
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from planner.answer import Plan, PricedLayout
from planner.layout.evaluate import price_given
from planner.search.case import Case, Deadline
from planner.search.layouts import News
from planner.search.search import search_within_risk
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.spec import RuntimeSpec

A = TypeVar("A")


@dataclass
class Kept(Generic[A]):
    """Answers by the text of what was asked for, which workers leave for each other."""

    folder: Path | None = None
    known: dict[str, A] = field(default_factory=dict)

    def find(self, asked: str) -> A | None:
        """The answer that this worker or another one has kept."""
        path = self.path(asked)
        if path.name not in self.known and path.exists():
            self.known[path.name] = pickle.loads(path.read_bytes())
        return self.known.get(path.name)

    def keep(self, asked: str, answer: A) -> A:
        """Keep an answer, which is whole as soon as it stands there."""
        path = self.path(asked)
        self.known[path.name] = answer
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(answer))
        part.rename(path)
        return answer

    def path(self, asked: str) -> Path:
        """The file of an answer."""
        assert self.folder is not None, "the session names it"
        return self.folder / hashlib.sha256(asked.encode()).hexdigest()


@dataclass
class Searches(Kept[Plan]):
    """`search_within_risk`, which a case that a search ended by itself does not go through twice, in any worker."""

    anew: bool = False
    """True while a test runs that is of the search itself."""

    def __call__(self, case: Case, deadline: Deadline | None = None, news: News | None = None) -> Plan:
        if self.anew or news is not None:
            return search_within_risk(case, deadline, news)
        asked = repr(case)
        if (known := self.find(asked)) is not None:
            return known
        answer = search_within_risk(case, deadline)
        is_whole = answer.search is not None and answer.search.outcome != "feasible"  # more time would tell another
        return self.keep(asked, answer) if is_whole else answer


@dataclass
class Prices(Kept[PricedLayout]):
    """`price_given`, which prices the same run once, in any worker."""

    def __call__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        training: TrainingSpec,
        parallelism: Parallelism,
        runtime: RuntimeSpec,
        says_switches: bool = True,
    ) -> PricedLayout:
        asked = repr((model, cluster, training, parallelism, runtime, says_switches))
        known = self.find(asked)
        if known is not None:
            return known
        return self.keep(asked, price_given(model, cluster, training, parallelism, runtime, says_switches))
