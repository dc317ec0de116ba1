"""The recipe of a run beside the best one, switch by switch, and beside its plan's where the log states another."""

from __future__ import annotations

from dataclasses import dataclass

from planner.layout.candidate import Candidate
from planner.observe.case import Case
from planner.observe.observation import Term
from planner.observe.remedy.change import options_between, runtime_of, spoken
from planner.observe.remedy.estimate import best_of, expected_step_s
from planner.observe.remedy.moves import switch
from planner.observe.remedy.running import differences, layout_before, running, states_switches
from planner.observe.remedy.written import settings_between
from planner.trainers.switches import SWITCHES, written

CAUSE_OF = {
    "ep_overlap": "no_ep_overlap",
    **dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), "exposed_dp"),
    **dict.fromkeys(("attention_kernel", "flash_attention"), "attention_kernel"),
    **dict.fromkeys(
        ("compile", "cross_entropy_fusion", "activation_fusion", "gradient_accumulation_fusion", "grouped_gemm"),
        "unfused_kernels",
    ),
    **dict.fromkeys(("cuda_graph", "sync_free_moe"), "host_bound"),
}
"""The cause that a switch at the wrong value is, where it has a name; others are a `recipe`."""


@dataclass(frozen=True, slots=True)
class RecipeRow:
    """A switch of a run that is not at its best value."""

    switch: str
    has: str
    better: str
    gain_s: float
    """Seconds of the step that the better value wins by itself, by the price, with the switches that it needs."""
    options: tuple[str, ...]
    """Words of `plan evaluate`."""
    settings: tuple[str, ...]
    """Lines of the trainer's files, as `plan export` writes them."""
    is_stated: bool
    """True where the log's own arguments say the value that the run has."""
    planned: str
    """The value in the plan; that of the run where the plan was made of the log."""

    @property
    def cause(self) -> str:
        """The name of the cause that this is, for which `remedy_for` has the remedy."""
        return CAUSE_OF.get(self.switch, "recipe")

    @property
    def evidence(self) -> str:
        """The value in one sentence, and who says so."""
        says = "the log shows" if self.is_stated else "the plan has"
        return f"{says} {self.switch} {self.has}, and {self.better} is faster"


def recipe_gap(case: Case) -> tuple[RecipeRow, ...]:
    """The switches that would win something at another value, the most winning first; nothing without a plan.

    Only values that change no numerics, that the trainer's rules allow on this layout, and that fit.
    """
    now = running(case)
    if now is None or case.plan is None:
        return ()
    planned = {row.name: row.planned for row in differences(case)}
    rows = []
    for name in spoken(now):
        best = best_of(now, switch(name)(now))
        if best is not None:
            has, better = (written(SWITCHES[name].value_of(runtime_of(each))) for each in (now, best))
            gain_s = _gain_s(case, now, best)
            rows.append(
                RecipeRow(
                    name, has, better, gain_s, options_between(now, best), settings_between(case.plan, now, best),
                    states_switches(case), planned.get(name, has),
                )
            )  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.gain_s))


def _gain_s(case: Case, now: Candidate, best: Candidate) -> float:
    return (case.observation.step_s or now.step_s) - expected_step_s(case, now, best)


def recipe_terms(case: Case) -> tuple[Term, ...]:
    """The price of the layout under the log's recipe less that under the plan's, one switch at a time.

    The order is fixed, and the terms add up to the whole difference, whichever way switches act on each other. Beside
    an earlier run, the recipe is that of its log; nothing where that says none.
    """
    before, terms, theirs = layout_before(case), list[Term](), "the plan"
    if case.earlier is not None:
        theirs = "the earlier run"
        if not states_switches(Case(case.earlier.observation)):
            return ()
    for row in differences(case):
        assert before is not None
        seconds = row.candidate.step_s - before.step_s
        says = f"the log shows {row.name} {row.has}, {theirs} has {row.planned}"
        terms.append(Term(term=f"recipe: {row.name}", seconds=seconds, evidence=says, recoverable_s=max(0.0, seconds)))
        before = row.candidate
    return tuple(terms)
