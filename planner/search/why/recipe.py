"""The worth of every switch: each is set to each of its other values, and the whole search is done again.

These searches run side by side, in as many processes as there are processors.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from pydantic import Field

from planner.answer import SCHEMA_VERSION, Layout, Plan
from planner.errors import Infeasible, SolverError
from planner.layout.price import reprice
from planner.search.case import Case, Deadline
from planner.search.recipes import Recipes, pinned
from planner.search.search import planned, search
from planner.specs.base import Spec
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import Setting, broken_recipe_rules
from planner.trainers.stated import partners, switched
from planner.trainers.switches import SWITCHES, Value, read_recipe

LONGEST_SEARCH_S = 10.0
"""Most seconds that one of the searches may take."""


class OtherValue(Spec):
    """A switch at another value than the chosen one, with everything else planned again."""

    switch: str
    value: Value
    step_s: float | None = None
    """Seconds of the best step with the value; null if a rule refuses it, or nothing fits or was found in time."""
    more_fraction: float | None = None
    """step_s over the step of the chosen recipe, less one."""
    replanned: bool = False
    """True if the step is that of the best layout for the value, false if it is of the chosen layout."""
    parallelism: Layout | None = None
    beside: dict[str, Value] = Field(default_factory=dict)
    """Switches that are set with it, since rules ask for that."""
    rule: str = ""
    """The rule that refuses the value for this job, in words; empty if none does."""
    changes: str = ""
    """The thing that the value changes and for which it needs consent; empty if it needs none."""


class SwitchWorth(Spec):
    """A switch of the trainer: its chosen value, and all others."""

    switch: str
    says: str
    value: Value
    has_effect: bool
    """False if the switch changes nothing on the chosen layout."""
    others: tuple[OtherValue, ...]


class RecipeTable(Spec):
    """The answer of `plan explain --recipe`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    job: str
    step_s: float
    parallelism: Layout
    switches: tuple[SwitchWorth, ...]

    def to_json(self) -> dict[str, Any]:
        """The table as plain data."""
        return self.model_dump(mode="json")


def other_values(case: Case) -> Sequence[tuple[str, Value]]:
    """All values of all switches of the case's trainer; each but the chosen ones is tried."""
    return [(name, value) for name, values in switches_of(case.runtime).items() for value in values]


def recipe_table(case: Case, tick: Callable[[], None] = lambda: None) -> RecipeTable:
    """Every switch at each of its other values, with the rest planned again until the case's time limit.

    What there is no time to plan again is priced on the chosen layout. `tick` is called once a value of `other_values`.
    Raises Infeasible if nothing fits.
    """
    deadline = Deadline(case.limits.time_limit_s)
    best = planned(case)
    case = replace(case, training=best.training)  # whose dtype consent may have changed
    chosen = read_recipe(best.runtime_spec, switches_of(case.runtime)) | best.best.recipe
    rows: dict[tuple[str, Value], OtherValue] = {}
    on_this_layout = _of_this_layout(case, best)
    for name, value in other_values(case):
        if value != chosen[name]:
            rows[name, value] = on_this_layout(_legal(case, name, value))
    legal = [key for key, row in rows.items() if not row.rule]
    # what asks for another layout first, then what matters most on this one
    tried = sorted(legal, key=lambda key: -abs(1.0 if (more := rows[key].more_fraction) is None else more))
    for _ in range(len(other_values(case)) - len(tried)):
        tick()
    assert best.search is not None, "the best layout was searched"
    asked, search_s = partial(_asked, case, best.step.step_s, deadline), best.search.seconds or 0.0
    for found in side_by_side(asked, [rows[key] for key in tried], search_s, tick):
        rows[found.switch, found.value] = found
    return RecipeTable(
        job=f"{case.model.name} on {case.cluster.num_gpus:,} × {case.cluster.hardware.name}, {case.runtime.name}",
        step_s=best.step.step_s,
        parallelism=best.parallelism,
        switches=tuple(
            SwitchWorth(
                switch=name,
                says=SWITCHES[name].says,
                value=chosen[name],
                has_effect=name in best.best.recipe,
                others=tuple(rows[name, value] for value in values if value != chosen[name]),
            )
            for name, values in switches_of(case.runtime).items()
        ),
    )


def _legal(case: Case, name: str, value: Value) -> OtherValue:
    """A value with the other switches that it needs to be set, or with the rule that refuses it for the job."""
    runtime, beside = pinned(case).runtime, dict[str, Value]()
    while True:
        recipe = {name: value, **beside}
        setting = Setting(case.model, case.cluster, case.training, switched(runtime, recipe))
        broken = next((rule for rule in broken_recipe_rules(setting) if not rule.is_about_layout), None)
        consents = (SWITCHES[switch].consent.get(chosen, "") for switch, chosen in recipe.items())
        if broken is None:
            changes = " and ".join(dict.fromkeys(filter(None, consents)))
            return OtherValue(switch=name, value=value, beside=beside, changes=changes)
        partner = next(((n, v) for n, v in partners(setting, broken, recipe) if n not in recipe), None)
        if partner is None:
            return OtherValue(switch=name, value=value, rule=f"{broken.switch} {broken.says}")
        beside[partner[0]] = partner[1]


def _asked(case: Case, now_s: float, deadline: Deadline, asked: OtherValue) -> OtherValue:
    """The value with the step of the best layout for it; as it was where there is no time."""
    if deadline.passed:
        return asked
    held = case.limits.switches
    recipe = read_recipe(case.runtime, switches_of(case.runtime)) if held == "default" else dict(held or {})
    limited = case.limited(
        switches=recipe | {asked.switch: asked.value, **asked.beside},
        top=1,
        time_limit_s=min(LONGEST_SEARCH_S, deadline.left_s),
    )
    try:
        found = search(pinned(limited))
    except SolverError:
        return asked
    except Infeasible:
        return asked.model_copy(update={"step_s": None, "more_fraction": None, "replanned": True})
    if asked.step_s is not None and asked.step_s < found.step.step_s:
        # the search stopped short of the layout that is chosen now
        return asked.model_copy(update={"replanned": True})
    more_fraction = found.step.step_s / now_s - 1
    update = {"step_s": found.step.step_s, "more_fraction": more_fraction, "parallelism": found.parallelism}
    return asked.model_copy(update={**update, "replanned": True})


def _of_this_layout(case: Case, best: Plan) -> Callable[[OtherValue], OtherValue]:
    """A function that adds the step of the best layout with a value, where rules allow it there and it fits."""
    recipes, candidate = Recipes.of(case), reprice(best, best.best, headroom_bytes=case.headroom_bytes)

    def priced(asked: OtherValue) -> OtherValue:
        other = None if asked.rule else recipes.moved(candidate, {asked.switch: asked.value, **asked.beside})
        if other is None or not other.fits:
            return asked
        more_fraction = other.step_s / candidate.step_s - 1
        update = {"step_s": other.step_s, "more_fraction": more_fraction, "parallelism": best.parallelism}
        return asked.model_copy(update=update)

    return priced


A = TypeVar("A")
R = TypeVar("R")

WORTH_PROCESSES_S = 3.0
"""Seconds of all searches together below which they run one after another: a process needs half a second to start."""


def side_by_side(
    search: Callable[[A], R], asked: Sequence[A], search_s: float, tick: Callable[[], None] = lambda: None
) -> list[R]:
    """The result of each search, in order, where one takes about `search_s` seconds; `tick` is called after each.

    They run one after another where they are short or no processors are free. So do those that are left where the
    system allows no processes, or kills one.
    """
    num_workers, results = min(len(asked), num_processors()), list[R]()
    if num_workers > 1 and search_s * len(asked) >= WORTH_PROCESSES_S:
        with suppress(OSError, BrokenProcessPool):  # OSError where a sandbox allows no semaphores
            for result in _in_processes(search, asked, num_workers):
                results.append(result)
                tick()
    for one in asked[len(results) :]:
        results.append(search(one))
        tick()
    return results


def _in_processes(search: Callable[[A], R], asked: Sequence[A], num_workers: int) -> Iterator[R]:
    others = set(multiprocessing.active_children())
    # spawned, since whoever shows that this is waited for has threads; Ctrl-C is the parent's, which ends them all
    context = multiprocessing.get_context("spawn")
    ignored = signal.SIGINT, signal.SIG_IGN
    with ProcessPoolExecutor(num_workers, context, initializer=signal.signal, initargs=ignored) as pool:
        try:
            yield from pool.map(search, asked)
        except BaseException:  # Ctrl-C, or nobody asks for the next result: do not wait for searches under way
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


def num_processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
