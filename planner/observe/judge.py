"""An observed run beside the price of its layout: the prediction, the gap, and what explains it; read back, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from planner.answer import Plan
from planner.errors import SpecError
from planner.observe.accounts import GAP_TABLE, beside_steps, waterfall
from planner.observe.case import recipe_terms, remedy_of_change, slower_settings
from planner.observe.gap_rows import GAP_ROWS, OF_MEMORY, RECORDINGS, Finding, GapRow, RunFiles
from planner.observe.observation import GapCause, GapRemedy, Observation, Observed, Prediction, Term, Verdict
from planner.observe.traces.recorded import ObservedFiles, Recorded
from planner.plan_file import refuse_contradiction
from planner.saved import as_saved
from planner.specs.base import Fields, Texts
from planner.specs.expressions import told
from planner.specs.problems import checked
from planner.specs.reading import read_saved
from planner.specs.units import GIB


def judged(
    observation: Observation,
    held: Plan | Observed | None = None,
    source: str = "",
    recorded: Recorded | None = None,
    doubt: str = "",
) -> Observed:
    """The observation beside what it is held against, and the verdict by the predicted intervals.

    That is a plan, or an earlier run of the same job, which is taken as it should be. Beside nothing there is no
    verdict, but the causes that its own files show. A `doubt` whether a plan is of this run leaves the verdict open.
    """
    plan = held.plan if isinstance(held, Observed) else held
    if plan is not None:
        observation = with_mfu(observation, plan)
    if isinstance(held, Observed):
        return _told(RunFiles(observation, recorded, of_run(held, source), plan, held))
    if plan is None:
        return _told(RunFiles(observation, recorded))
    prediction = predicted(plan, source)
    if differing := differences(observation, plan):
        doubt = f"the log is of another job than {source}: {'; '.join(differing)}"
    if doubt:
        alone = _told(RunFiles(observation, recorded))
        return alone.model_copy(update={"prediction": prediction, "says": f"no verdict: {doubt}"})
    plan = plan.model_copy(update={"alternatives": (), "search": None})
    return _told(RunFiles(observation, recorded, prediction, plan))


def _told(case: RunFiles) -> Observed:
    """All that is said of a case."""
    verdict, says = (None, "") if case.prediction is None else verdict_of(case.observation, case.prediction)
    gap = waterfall(case, recipe_terms(case))
    causes = shown_rows(case, verdict)
    return Observed(
        observation=case.observation,
        prediction=case.prediction,
        waterfall=gap,
        beside=beside_steps(case.observation),
        verdict=verdict,
        says=says,
        causes=causes,
        next_test=next_recording(case, gap, verdict, causes),
        plan=case.plan,
    )


LEAST_PART, LEAST_GAP = 0.25, 0.04
"""Part of the gap that a row has to explain where its evidence is a number beside a price, twice as much inside of the
predicted interval; and the share of a step that a gap has to have there."""
_MAKE_STAGES_WAIT = ("straggler_rank", "data_stall", "no_ep_overlap", "expert_imbalance", "slow_link")
"""Rows for which stages wait: their pipeline's bubble is no other thing."""
_BESIDE_STEPS = ("checkpoint_stall", "garbage_collection")
"""Rows of what a mean step has and a steady one has not."""
_NOT_IN_GAP = ("recompute_unneeded", "recipe", *_BESIDE_STEPS)
"""And those that are a choice of the job, so that the plan's own step may have them, too."""


def shown_rows(case: RunFiles, verdict: Verdict | None = None) -> tuple[GapCause, ...]:
    """The rows whose mechanism the files show, the one that takes most first, each with its remedy."""
    settings = slower_settings(case, _ROW_OF_SWITCH)
    causes = []
    for row in GAP_ROWS.values():
        found = next((one for see in row.looks if (one := see(case)) is not None), None)
        if found is not None and row.beside and not _explains(case, found, verdict):
            found = None
        stated = [Finding(term.evidence, term.seconds, name) for name, term in settings.get(row.name, ())]
        if row.name == "recipe":
            causes += [_cause(case, row, one, (one.where,)) for one in stated]
        elif found is not None or stated:
            one = found or Finding("; ".join(each.says for each in stated), sum(each.seconds or 0.0 for each in stated))
            causes.append(_cause(case, row, one, row.switches))
    if any(cause.name in _MAKE_STAGES_WAIT for cause in causes):
        causes = [cause for cause in causes if cause.name != "bubble"]
    return tuple(sorted(causes, key=lambda cause: -(cause.seconds or 0.0)))


def _explains(case: RunFiles, found: Finding, verdict: Verdict | None) -> bool:
    """True where the step is longer than predicted, and the finding takes a fair part of that; alone, of anything."""
    step_s = case.observation.step_s
    prediction = case.prediction
    if prediction is None or step_s is None:
        return True
    gap_s = step_s - prediction.step_s
    if found.seconds is None or verdict == "slow":
        return verdict == "slow" and (found.seconds is None or found.seconds >= LEAST_PART * gap_s)
    return gap_s > LEAST_GAP * step_s and found.seconds >= 2 * LEAST_PART * gap_s


_ROW_OF_SWITCH = {name: row.name for row in GAP_ROWS.values() for name in row.switches}


def _cause(case: RunFiles, row: GapRow, found: Finding, switches: Sequence[str]) -> GapCause:
    """The row as an answer has it; its seconds are no more than the step is above what was predicted at least.

    Where no change of the job is priced there is the advice, and the step without the row, never below the prediction.
    """
    prediction = case.prediction
    step_s = case.observation.step_s
    seconds = found.seconds
    if prediction is not None and step_s is not None and seconds is not None and row.name not in _NOT_IN_GAP:
        low_s = (prediction.step_s_interval or (prediction.step_s, 0.0))[0]
        seconds = min(seconds, max(0.0, step_s - low_s))
    remedy = remedy_of_change(case, switches, row.layouts)
    if remedy is None and row.helps:
        least_s = min(prediction.step_s, step_s or 0.0) if prediction is not None else 0.0
        with_s = None if row.name in _BESIDE_STEPS else step_s
        without_s = max(with_s - seconds, least_s) if with_s is not None and seconds else None
        remedy = GapRemedy(options=tuple(row.options), step_s=without_s, is_priced=False, says=row.helps)
    return GapCause(name=row.name, seconds=seconds, evidence=found.says, where=found.where, remedy=remedy)


def next_recording(case: RunFiles, gap: Sequence[Term], verdict: Verdict | None, causes: Sequence[GapCause]) -> str:
    """The recording to make of a run that is slow, or takes more memory, and of which no file shows why."""
    if verdict == "memory":
        return "" if any(cause.name in OF_MEMORY for cause in causes) else _lacking(case, ("memory_log", "snapshot"))
    if verdict != "slow" or any(cause.seconds for cause in causes):
        return ""
    largest = max(gap, key=lambda term: term.seconds, default=None)
    wanted = [row.record for row in GAP_ROWS.values() if largest is not None and largest.term in row.terms]
    return _lacking(case, (*dict.fromkeys(wanted), "one_trace", "stage_traces", "arguments"))


def _lacking(case: RunFiles, recordings: Iterable[str]) -> str:
    """The first of some recordings that the files do not have yet."""
    ranks, observation = case.ranks, case.observation
    has = {
        "one_trace": ranks, "stage_traces": ranks[1:], "pipeline_traces": len({rank.stage for rank in ranks}) > 1,
        "batch_timer": observation.data_s is not None, "long_log": observation.series.steps,
        "memory_log": observation.memory_series, "snapshot": case.recorded and case.recorded.snapshots,
        "arguments": observation.facts.stated_switches,
    }  # fmt: skip
    return next((RECORDINGS[one] for one in recordings if not has.get(one)), "")


def predicted(plan: Plan, source: str) -> Prediction:
    """The price of a plan's best layout, as an observation is held against it."""
    step = plan.step
    stage = plan.best.worst_stage.memory
    return Prediction(
        source=source,
        model=plan.model.name,
        hardware=plan.cluster.hardware.name,
        num_gpus=plan.cluster.num_gpus,
        layout=str(plan.parallelism),
        step_s=step.step_s,
        step_s_interval=step.step_s_interval,
        tokens_per_s=step.tokens_per_s,
        mfu=step.mfu,
        peak_memory_bytes=stage.peak_allocated_bytes,
        total_memory_interval=stage.total_bytes_interval,
        breakdown=step.breakdown.model_dump(),
    )


RUN_FRACTION = 0.02
"""Least distance of a run's step from an earlier one's that is worth a verdict: the same job on other nodes, on
another day. MLPerf's submitters repeat a run within 1.0% in 13 of 14 cases (docs/OBSERVE.md)."""


def of_run(earlier: Observed, source: str) -> Prediction:
    """An earlier run as a later one is held against it; its interval is its own spread, and what a repeat may differ.

    Raises SpecError where it has no step.
    """
    observation = earlier.observation
    known = earlier.prediction
    step_s = observation.step_s
    peak = observation.peak_memory_bytes
    if step_s is None:
        raise SpecError(f"{source}: the run in it has no steps", "name a plan, or observe a log with steps")
    low_s, high_s = observation.step_s_spread or (step_s, step_s)
    slack_s = step_s * (RUN_FRACTION + observation.step_s_precision_fraction)
    facts = observation.facts
    return Prediction(
        kind="run",
        source=source,
        model=known.model if known else facts.model or "",
        hardware=known.hardware if known else facts.hardware or "",
        num_gpus=known.num_gpus if known else facts.num_gpus or 0,
        layout=known.layout if known else "",
        step_s=step_s,
        step_s_interval=(min(low_s, step_s - slack_s), max(high_s, step_s + slack_s)),
        tokens_per_s=observation.tokens_per_s or 0.0,
        mfu=observation.mfu or 0.0,
        peak_memory_bytes=peak or 0,
        total_memory_interval=None if peak is None else (peak * (1 - RUN_FRACTION), peak * (1 + RUN_FRACTION)),
        breakdown=observation.breakdown,
    )


_AXES = ("tp", "cp", "pp", "vpp", "ep", "micro_batch_size")


def differences(observation: Observation, plan: Plan) -> Texts:
    """The numbers of the job and of the layout that the log states and that the plan has otherwise, in words.

    Tokens of a step differ by a factor of two at least: logs count those of padding or not.
    """
    facts = observation.facts
    layout, planned = plan.parallelism, plan.training.tokens_per_step
    tokens = round((observation.tokens_per_s or 0.0) * (observation.step_s or 0.0))
    pairs = {
        "GPUs": (facts.num_gpus, plan.cluster.num_gpus),
        "global batch size": (facts.global_batch_size, plan.training.global_batch_size),
        "sequence length": (facts.seq_length, plan.training.seq_length),
        "tokens of a step": (None if tokens == 0 or planned / 2 < tokens < 2 * planned else tokens, planned),
        "rank of adapters": (facts.lora_rank, plan.training.adapters.rank if plan.training.adapters else 0),
    }
    stated = facts.run.get("parallelism") or {}
    pairs |= {name: (stated.get(name), getattr(layout, name)) for name in _AXES}
    return tuple(
        f"{name} {ours:,}, not {theirs:,}" for name, (ours, theirs) in pairs.items() if ours not in (None, theirs)
    )


def with_mfu(observation: Observation, plan: Plan) -> Observation:
    """The observation with the MFU of the planner's definition: the plan's, at the observed tokens per second."""
    facts = observation.facts
    tokens_per_s = observation.tokens_per_s
    if tokens_per_s is None and observation.step_s is not None:
        batch = facts.global_batch_size or plan.training.global_batch_size
        tokens_per_s = batch * (facts.seq_length or plan.training.seq_length) / observation.step_s
    if tokens_per_s is None:
        return observation
    mfu = plan.step.mfu * tokens_per_s / plan.step.tokens_per_s
    asks = tuple(option for option in observation.asks if option.split()[0] not in _SAID)
    return observation.model_copy(update={"mfu": mfu, "tokens_per_s": tokens_per_s, "asks": asks})


_SAID = ("--gpus", "--global-batch-size", "--seq-length")
"""Options whose values a plan has in a log's place."""


def verdict_of(observation: Observation, prediction: Prediction) -> tuple[Verdict | None, str]:
    """`slow` and `fast` by the interval of the step, as far as its digits tell; `memory` by that of the memory."""
    step_s = observation.step_s
    if step_s is None:
        return None, "no step was found to hold against the prediction"
    low_s, high_s = prediction.step_s_interval or (prediction.step_s, prediction.step_s)
    excess = excess_bytes(observation, prediction)
    memory = f"memory: {excess / GIB:.1f} GiB more {observation.peak_memory_kind} than predicted" if excess else ""
    names = {
        "o": observation, "low_s": low_s, "high_s": high_s, "slack_s": step_s * observation.step_s_precision_fraction,
        "by": step_s / prediction.step_s, "memory": memory,
    }  # fmt: skip
    verdict, says = next(told(GAP_TABLE["verdicts"], names))
    return cast(Verdict, verdict), says


def excess_bytes(observation: Observation, prediction: Prediction) -> float:
    """Bytes of the observed peak beyond the predicted one; 0 where it is inside of its interval.

    Allocated bytes are held against torch's peak, with the room above it that the interval of the total has; others
    against the upper end of the total.
    """
    peak = observation.peak_memory_bytes
    interval = prediction.total_memory_interval
    if peak is None or not prediction.peak_memory_bytes:  # an earlier run may have printed none
        return 0.0
    if observation.peak_memory_kind != "allocated":
        return max(0.0, peak - interval[1]) if interval else 0.0
    room = (interval[1] - interval[0]) / 2 if interval else 0.0
    most = prediction.peak_memory_bytes + room
    return peak - prediction.peak_memory_bytes if peak > most else 0.0


_HINT = "an observation is not for editing: run plan observe … -o observed.json again"


def read_observed(path: str) -> Observed:
    """The observation in a file, `-` for stdin; SpecError where the file holds none."""
    data, where = read_saved(path)
    if not is_observed(data):
        raise SpecError(f"{where}: is no observation", "save one with plan observe train.log -o observed.json")
    return observed_of(data, where)


def is_observed(data: Fields) -> bool:
    """True if what a file held is an observation."""
    return {"observation", "verdict"} <= data.keys()


def observed_of(data: Fields, where: str) -> Observed:
    """The observation in what a file held, with what traces show beside it; SpecError where a field is wrong, or was
    edited."""
    data = as_saved(data, where, _HINT)
    observed = checked(ObservedFiles if "recorded" in data else Observed, data, where)
    if observed.plan is not None:
        refuse_contradiction(observed.plan, f"{where}: plan")
    step_s = observed.observation.step_s
    known = observed.prediction
    breakdown = observed.observation.breakdown
    sums = [("observation.breakdown", step_s, list(breakdown.values()))]
    if known is not None:
        sums.append(("prediction.breakdown", known.step_s, list(known.breakdown.values())))
        sums.append(("waterfall", (step_s or 0.0) - known.step_s, [term.seconds for term in observed.waterfall]))
    for name, total_s, parts in sums:
        if parts and total_s is not None and abs(sum(parts) - total_s) > 1e-6 * (step_s or total_s):
            raise SpecError(f"{where}: {name}: its terms add up to {sum(parts):.6g} s, not to {total_s:.6g}", _HINT)
    return observed
