"""Puts priced layouts together to the plan that is shown and saved."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from types import MappingProxyType

from planner import __version__
from planner.answer import Goodput, ModelSummary, Plan, PricedLayout, RunCost, SearchReport
from planner.errors import SpecError
from planner.layout.step.padded import Examples, run_of_examples
from planner.physics.layers import ModelTotals
from planner.physics.pricing import Pricing
from planner.specs.training import TrainingSpec
from planner.specs.units import gib


def assemble(
    pricing: Pricing,
    totals: ModelTotals,
    layouts: list[PricedLayout],
    told: tuple[str, ...],
    report: SearchReport | None = None,
    rejections: Mapping[str, int] = MappingProxyType({}),
    rejection_examples: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """The plan of `layouts`, the best of which comes first; `told` are the assumptions that change its step."""
    best, model = layouts[0], pricing.model
    plan = Plan(
        planner_version=__version__,
        model=ModelSummary(
            name=model.name,
            num_parameters=totals.num_parameters,
            num_active_parameters=totals.num_active_parameters,
            model_flops_per_token=totals.model_flops_per_token,
            num_trained_parameters=totals.num_trained_parameters,
            spec=model,
        ),
        cluster=pricing.cluster,
        training=pricing.training,
        runtime=pricing.runtime.name,
        runtime_spec=pricing.runtime,
        best=best,
        alternatives=tuple(other.model_copy(update={"trade": trade(best, other)}) for other in layouts[1:]),
        rejections=dict(sorted(rejections.items(), key=lambda item: (-item[1], item[0]))),
        rejection_examples=dict(sorted(rejection_examples.items())),
        search=report,
        assumptions=told,
    )
    run = run_of_examples(plan)
    longer_factor = 1.0 if run is None else run.longer_factor
    cost, goodput = whole_run_of(pricing, best, totals.num_trained_parameters, longer_factor)
    if run is not None and cost is not None:
        cost = cost.model_copy(update=_of_examples(pricing.training, run, cost.days))
    return plan.model_copy(update={"run_cost": cost, "goodput": goodput})


def _of_examples(training: TrainingSpec, run: Examples, days: float) -> dict[str, object]:
    """Steps, padding and epochs that stand beside the cost of a run of examples."""
    is_padded = training.batching == "padded"
    return {
        "examples": training.examples,
        "epochs": training.epochs if training.examples is not None else None,
        "num_steps": run.num_steps,
        "padding_fraction": run.padding_fraction if is_padded else None,
        "packed_days": days / run.longer_factor if is_padded else None,
    }


def whole_run_of(
    pricing: Pricing, best: PricedLayout, num_parameters: int, longer_factor: float = 1.0
) -> tuple[RunCost, Goodput] | tuple[None, None]:
    """Cost and goodput of the whole training run, as `whole_run` says; None where the training has no tokens."""
    if pricing.training.tokens is None:
        return None, None
    from planner.months.whole_run import whole_run

    runtime = pricing.runtime
    return whole_run(
        best,
        pricing.cluster,
        pricing.training,
        checkpoint_bytes=runtime.checkpoint_bytes_per_parameter * num_parameters,
        asynchronous=runtime.asynchronous_checkpoints,
        longer_factor=longer_factor,
    )


MOST_GUESSES = 12
"""Guesses after which the tokens of a time or a sum are close enough: days grow nearly along a line with tokens."""


def within(plan: Plan, days: float | None, usd: float | None) -> Plan:
    """The plan with the tokens that its GPUs train in so many days and for so many dollars, whichever are fewer.

    Where neither is asked, it stays as it is.
    Raises SpecError for dollars where nobody says what a GPU costs.
    """
    if days is None and usd is None:
        return plan
    from planner.months.whole_run import whole_run

    run, runtime, training, model = run_of_examples(plan), plan.runtime_spec, plan.training, plan.model
    trained = model.num_trained_parameters or model.num_parameters
    training = training.model_copy(update={"tokens": float(training.tokens_per_step)})
    for _ in range(MOST_GUESSES):
        cost, goodput = whole_run(
            plan.best, plan.cluster, training,
            checkpoint_bytes=runtime.checkpoint_bytes_per_parameter * trained,
            asynchronous=runtime.asynchronous_checkpoints, longer_factor=1.0 if run is None else run.longer_factor,
        )  # fmt: skip
        assert cost is not None
        assert training.tokens is not None
        if usd is not None and not cost.usd:
            raise SpecError(
                f"--usd: nothing says what {plan.cluster.hardware.name} costs", "add --usd-per-gpu-hour 2.5"
            )
        ratios = [days / cost.days if days is not None else inf, usd / cost.usd if usd and cost.usd else inf]
        if abs(min(ratios) - 1) < 1e-4:
            break
        training = training.model_copy(update={"tokens": training.tokens * min(ratios)})
    return plan.model_copy(update={"training": training, "run_cost": cost, "goodput": goodput})


def trade(best: PricedLayout, other: PricedLayout) -> str:
    """The seconds and the memory that an alternative loses or gains against the best layout."""
    slower = other.step.step_s / best.step.step_s - 1
    memory_gib = gib(other.worst_stage.memory.total_bytes - best.worst_stage.memory.total_bytes)
    parts = [f"{slower:+.1%} time", f"{memory_gib:+.1f} GiB"]
    pairs = {name: (getattr(best.step.breakdown, name), getattr(other.step.breakdown, name)) for name in _TRADED}
    worst = max(pairs, key=lambda name: pairs[name][1] - pairs[name][0])
    saved = min(pairs, key=lambda name: pairs[name][1] - pairs[name][0])
    for name in (worst, saved):
        change = pairs[name][1] - pairs[name][0]
        if abs(change) > 0.005 * best.step.step_s:
            parts.append(f"{change:+.2f} s {_TRADED[name]}")
    return ", ".join(parts)


_TRADED = {
    "compute_s": "compute",
    "tp_comm_s": "TP exchange",
    "cp_comm_s": "CP exchange",
    "ep_comm_s": "EP exchange",
    "pp_comm_s": "PP transfer",
    "exposed_dp_s": "DP exchange",
    "bubble_s": "bubble",
    "optimizer_s": "optimizer",
}
