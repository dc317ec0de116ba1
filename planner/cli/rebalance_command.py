"""`plan rebalance`: layers moved between the stages of a plan whose ranks are unequally fast."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from planner.cli.options import Number, Word

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.answer import Plan, StagePlan
    from planner.search.rebalance import Rebalanced


def rebalance_command(
    plan: str,
    probe: Word = None,
    slow_stage: Word = None,
    time_limit: Number = None,
    json: bool = False,
    output: Word = None,
    force: bool = False,
) -> None:
    """Move layers between stages that a probe found slow and fast, and say what it gains.

    Shape, schedule and micro-batches stay as they are. The step before and after is replayed with the measured seconds.

    \b
    Example:
      plan rebalance plan.json probe.json -o balanced.json
      plan rebalance plan.json --slow-stage 3:1.2
    """
    from planner.cli.output import dumps, save, show
    from planner.files import refuse_to_overwrite
    from planner.plan_file import read_plan
    from planner.search.rebalance import rebalance

    refuse_to_overwrite(output, force)
    saved = read_plan(plan)
    factors, guessed = _factors(saved, probe, slow_stage)
    balanced = rebalance(saved, factors, *([] if time_limit is None else [_positive(time_limit)]))
    if save(balanced.plan, output, force):
        return
    if json:
        sys.stdout.write(dumps(_to_json(balanced, guessed)))
    else:
        show(*_render(balanced, guessed))


def _factors(plan: Plan, probe: str | None, slow_stage: str | None) -> tuple[tuple[float, ...], list[str]]:
    """Each stage's factor, and what it was guessed from where nothing measured it."""
    from planner.errors import SpecError

    if (probe is None) == (slow_stage is None):
        given = "neither is given" if probe is None else "both are given"
        raise SpecError(f"PROBE.json, --slow-stage: {given}", "give one: plan rebalance plan.json --slow-stage 3:1.2")
    if probe is not None:
        from planner.cli.measurements import read_probe
        from planner.probe.verdict.evidence import slowness
        from planner.specs.reading import label

        ranks = slowness(plan, read_probe(probe), label(probe))
        return tuple(rank.factor for rank in ranks), [rank.guessed for rank in ranks]
    factors = list(plan.best.rank_factors or [1.0] * plan.parallelism.pp)
    for part in (slow_stage or "").split(","):
        stage, factor = _stage_and_factor(part, len(factors))
        factors[stage] *= factor
    return tuple(factors), [""] * len(factors)


def _stage_and_factor(text: str, pp: int) -> tuple[int, float]:
    from planner.errors import SpecError

    stage, _, factor = text.partition(":")
    try:
        rank, times = int(stage), float(factor)
    except ValueError:
        raise SpecError(f"--slow-stage: {text[:60]!r} is no stage and factor", "write 3:1.2, or 3:1.2,5:1.1") from None
    if not 0 <= rank < pp:
        raise SpecError(f"--slow-stage: {rank}, the plan has stages 0 to {pp - 1}", "name one of them")
    if not 0 < times <= 100:
        raise SpecError(f"--slow-stage: stage {rank} {times:g} times as long", "a factor above 0, at most 100")
    return rank, times


def _positive(time_limit: float) -> float:
    from planner.errors import SpecError

    if not 0 < time_limit < float("inf"):
        raise SpecError(f"--time-limit: {time_limit:g} is no time to look", "seconds above 0")
    return time_limit


def _to_json(balanced: Rebalanced, guessed: list[str]) -> dict[str, Any]:
    stages = [
        {
            "stage": before.stage,
            "rank_factor": factor,
            "rank_factor_guessed": guessed[before.stage] or None,
            "num_layers_before": before.num_layers,
            "num_layers_after": after.num_layers,
            "microbatch_before_s": _microbatch_s(before),
            "microbatch_after_s": _microbatch_s(after),
        }
        for before, after, factor in zip(
            balanced.before.stages, balanced.after.stages, balanced.after.rank_factors, strict=True
        )
    ]
    return {
        "step_before_s": balanced.before.step.step_s,
        "step_after_s": balanced.after.step.step_s,
        "gain_fraction": balanced.gain_fraction,
        "stages": stages,
        "best": balanced.after.model_dump(mode="json"),
    }


def _microbatch_s(stage: StagePlan) -> float:
    return stage.forward_s + stage.backward_s + stage.forward_comm_s + stage.backward_comm_s


def _render(balanced: Rebalanced, guessed: list[str]) -> list[RenderableType]:
    from rich.text import Text

    from planner.report.format import percent, seconds
    from planner.report.pieces import headed, section

    table = headed(("stage", "slowness", "layers", "then", "mb ms", "then"), "rrrrrr")
    for before, after, factor in zip(
        balanced.before.stages, balanced.after.stages, balanced.after.rank_factors, strict=True
    ):
        changed = after.num_layers - before.num_layers
        table.add_row(
            str(before.stage),
            f"× {factor:.3f}" + (f" ({guess})" if (guess := guessed[before.stage]) else ""),
            str(before.num_layers),
            f"{after.num_layers} ({changed:+d})" if changed else str(after.num_layers),
            f"{1e3 * _microbatch_s(before):.1f}",
            f"{1e3 * _microbatch_s(after):.1f}",
        )
    before_s, after_s = balanced.before.step.step_s, balanced.after.step.step_s
    if balanced.gain_fraction > 0:
        verdict = f"step {seconds(before_s)} → {seconds(after_s)}: {percent(balanced.gain_fraction)} shorter"
    else:
        verdict = f"step {seconds(before_s)}: no layer that may move makes it shorter"
    room = "" if balanced.after.fits else "\nit does not fit in memory, as before"
    return [
        Text(f"{balanced.plan.parallelism} · {balanced.plan.parallelism.schedule}", style="bold"),
        section("Stages, as slow as they are", table),
        Text(f"\n{verdict}{room}", style="bold"),
    ]
