"""Wall time per step less the steady step: what a run spends beside steps, and beyond them."""

from __future__ import annotations

from planner.observe.case import Case
from planner.observe.gap.terms import BESIDE
from planner.observe.measured import Wall
from planner.observe.observation import Observation, Term
from planner.report.format import seconds

_SLOW = {
    "checkpoint": "slow_after_checkpoints",
    "evaluation": "slow_after_evaluations",
    "periodic": "slow_periodic",
    "slow_spell": "slow_spells",
    "unexplained": "slow_unexplained",
}
"""The term of each kind of outlier."""
_NOISE = 0.1
"""Share of steps below which what lies between their lines and what two of them claim is the clock of the lines."""
_NEEDED = ("evaluation", "start_up")
"""Terms of which nothing tells how much is needed."""


def beside_steps(case: Case) -> tuple[Term, ...]:
    """Terms that add up to the wall time per step less the steady step; nothing where lines have no times.

    A step counts once, however often it was made.
    """
    observation = case.observation
    wall, step_s = observation.wall, observation.step_s
    made_again = sum(restart.lost_steps for restart in observation.restarts)
    num_steps = observation.num_steps - made_again
    if wall is None or step_s is None or num_steps < 1:
        return ()
    found: dict[str, tuple[float, str]] = {}
    for name, total_s, says in (*_of_steps(observation, step_s, wall), *_of_wall(observation, wall)):
        found[name] = (found.get(name, (0.0, ""))[0] + total_s, says)
    if made_again:
        says = f"{_steps(made_again)} were made twice, at {seconds(step_s)} each"
        found["steps_made_again"] = (made_again * step_s, says)
    order = list(BESIDE)
    return tuple(
        Term(
            term=name,
            seconds=total_s / num_steps,
            evidence=f"{says}: {seconds(abs(total_s))} of {_steps(num_steps)}",
            recoverable_s=None if name in _NEEDED else max(0.0, total_s / num_steps),
        )
        for name, (total_s, says) in sorted(found.items(), key=lambda pair: order.index(pair[0]))
        if total_s
    )


def _of_steps(observation: Observation, step_s: float, wall: Wall) -> list[tuple[str, float, str]]:
    """Seconds of all steps beyond as many steady ones, and why."""
    found = [
        (
            _SLOW[outlier.kind],
            outlier.extra_s,
            f"{_steps(outlier.num_steps)} took longer{f' ({outlier.likely})' if outlier.likely else ''}",
        )
        for outlier in observation.outliers
    ]
    if observation.num_warmup_steps:
        says = f"{_steps(observation.num_warmup_steps)} at the begin took longer"
        found.append(("warm_up", observation.warmup_extra_s, says))
    jitter_s = wall.steps_s - observation.num_steps * step_s - sum(total_s for _, total_s, _ in found)
    low_s, high_s = observation.step_s_spread or (step_s, step_s)
    says = f"the mean of steady steps less their median; 8 of 10 took {seconds(low_s)} to {seconds(high_s)}"
    return [*found, ("jitter", jitter_s, says)]


def _of_wall(observation: Observation, wall: Wall) -> list[tuple[str, float, str]]:
    """Seconds beside steps, and what the log says of them."""
    downs = f"{len(observation.restarts)} interruption{'s' if len(observation.restarts) != 1 else ''}"
    return [
        ("checkpoints", wall.checkpoint_s, "training stood still for them"),
        ("evaluation", wall.evaluation_s, "training stood still for it"),
        ("start_up", wall.startup_s, "from the first line to the first step"),
        ("interruptions", wall.down_s, downs),
        *_of_clock(wall, _NOISE * (observation.step_s or 0.0) * observation.num_steps),
    ]


def _of_clock(wall: Wall, noise_s: float) -> list[tuple[str, float, str]]:
    """Idle time, and time that two lines claim; a line that is printed late leaves as much of both."""
    idle_s, overlap_s = wall.idle_s, wall.overlap_s
    if idle_s and overlap_s and max(idle_s, overlap_s) < noise_s:
        says = f"{seconds(idle_s)} between lines and {seconds(overlap_s)} claimed twice, as lines come late"
        return [("log_clock", idle_s - overlap_s, says)]
    return [
        ("idle", idle_s, "no line says what happened there"),
        ("counted_twice", -overlap_s, "two lines claim the same time"),
    ]


def _steps(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"
