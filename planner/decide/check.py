"""A reviewer's questions about a launch file: does it start, does it fit, how long is a step, what changed it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from planner.answer import Interval, Plan
from planner.decide.compare import Comparison, compare, of_plan
from planner.errors import Infeasible, LayoutError, SpecError
from planner.export.import_run import ImportedRun, read
from planner.export.spelling import broken_rules_of_recipe
from planner.layout.evaluate import evaluate
from planner.layout.runs import Run, parse_run
from planner.months.losses import SECONDS_PER_DAY
from planner.specs.base import Fields, Named, Said, Spec, Texts
from planner.specs.shipped import DEFAULT_HARDWARE
from planner.specs.training import SearchLimits
from planner.trainers.stated import consented, freed, switched
from planner.trainers.switches import SWITCHES

STARTS_AND_FITS, DOES_NOT_FIT, REFUSED, WORSE, UNKNOWN = 0, 3, 8, 9, 10
"""Exit codes of `plan check`, of which the worst of several files counts (`ORDER`)."""
ORDER = (STARTS_AND_FITS, WORSE, UNKNOWN, DOES_NOT_FIT, REFUSED)
"""Exit codes from the best to the worst."""
FULLER_BYTES = 2**28
"""Bytes of the fullest stage by which a file is fuller than the old one: below, allocators differ from run to run."""


class CheckedFile(Spec):
    """A launch file as the planner sees it: whether its trainer starts it, its memory, its step."""

    file: str
    source: str
    """The trainer whose configuration it is."""
    model: str
    hardware: str
    num_gpus: int
    refused: Texts = ()
    """Rules of the trainer that it breaks: it would not start."""
    fits: bool
    oom_probability: float | None = None
    fullest_stage: int
    needed_bytes: int
    capacity_bytes: int
    step_s: float
    step_s_interval: Interval | None = None
    tokens_per_day: float
    usd_per_day: float | None = None
    """Dollars of a day of all GPUs; null where no price is known."""
    unknown: Named = Field(default_factory=dict)
    """Settings that the reader does not know, with their values: they may change seconds or bytes."""
    notes: Texts = ()
    """Assumptions where the file says nothing."""
    better: str = ""
    """The layout that the planner would choose; empty where it is this one, or was not asked for."""
    better_step_s: float | None = None


class Check(Spec):
    """A file beside the one that it replaces, if there is one."""

    new: CheckedFile
    old: CheckedFile | None = None
    comparison: Comparison | None = None
    """The settings that differ, old first, and the terms of the step whose differences add up."""

    @property
    def slower_fraction(self) -> float | None:
        """Seconds a token over the old file's, less one; null without an old file."""
        if self.comparison is None:
            return None
        old, new = self.comparison.sides
        return old.tokens_per_s / new.tokens_per_s - 1

    @property
    def is_slower(self) -> bool:
        """True where a token takes longer than under the old file by more than the half-width of the new interval."""
        more, interval = self.slower_fraction, self.new.step_s_interval
        # both files share what their intervals do not know: half of one is what a change may be wrong by
        tolerance = 0.0 if interval is None else min((interval[1] - interval[0]) / 2 / self.new.step_s, 0.05)
        return more is not None and more > tolerance

    @property
    def is_fuller(self) -> bool:
        """True where the fullest stage needs more than the old file's, and is likelier to run out of memory."""
        if self.old is None or self.new.needed_bytes <= self.old.needed_bytes + FULLER_BYTES:
            return False
        return (self.new.oom_probability or 0.0) > (self.old.oom_probability or 0.0) + 0.01

    @property
    def exit_code(self) -> int:
        """8 refused by the trainer, 3 does not fit, 10 something that decides is unknown, 9 worse than the old, 0."""
        if self.new.refused:
            return REFUSED
        if not self.new.fits:
            return DOES_NOT_FIT
        if self.new.unknown:
            return UNKNOWN
        return WORSE if self.is_slower or self.is_fuller else STARTS_AND_FITS

    def to_json(self) -> Fields:
        """Plain data, with what follows from it."""
        return {
            **self.model_dump(mode="json", exclude={"comparison"}),
            "slower_fraction": self.slower_fraction,
            "exit_code": self.exit_code,
            "comparison": None if self.comparison is None else self.comparison.to_json(),
        }


class Priced(NamedTuple):
    """A launch file as it was checked, and its price."""

    file: CheckedFile
    plan: Plan


def check(file: str | Path, against: str | Path | Priced | None = None, *, searches: bool = True, **how: Any) -> Check:
    """Check a launch file, a recipe or a configuration, and hold it against an older one.

        from planner import check

        answer = check("pretrain.sh", against="main/pretrain.sh", hardware="h100")
        print(answer.exit_code, answer.new.step_s, answer.slower_fraction)

    `how` is as `priced` has it. With `searches`, the planner's own choice for the job is named. An old file of
    several new ones may be priced once. Raises SpecError for a file that cannot be read or priced.
    """
    new = priced(file, searches=searches, **how)
    if against is None:
        return Check(new=new.file)
    old = against if isinstance(against, Priced) else priced(against, searches=False, **how)
    comparison = compare([of_plan(old.plan, old.file.file, "run"), of_plan(new.plan, new.file.file, "run")])
    return Check(new=new.file, old=old.file, comparison=comparison)


def priced(
    file: str | Path,
    *,
    source: str | None = None,
    recipe: str | None = None,
    variables: Mapping[str, str] | None = None,
    searches: bool = True,
    **given: Any,
) -> Priced:
    """A file as it is priced, with its price.

    `variables` are those that surround a script, `given` the fields of the run that the file leaves open, as
    `plan import` takes them: model, hardware, num_gpus, seq_length, global_batch_size, vocab_size.
    """
    imported = read(file, source, recipe, variables)
    try:
        run = parse_run({"run": completed(imported, given)}, str(file))
        plan, refused = judged(run)
    except LayoutError as error:
        error.exit_code, error.message = REFUSED, f"{file}: {error.message}"
        raise
    fullest = plan.best.worst_stage
    price = plan.cluster.hardware.usd_per_gpu_hour
    own = None
    if searches:
        with suppress(Infeasible, SpecError):
            own = own_choice(run)
    moves = own is not None and own.parallelism != plan.parallelism and own.step.step_s < plan.step.step_s
    checked = CheckedFile(
        file=str(file), source=imported.source, model=plan.model.name, hardware=plan.cluster.hardware.name,
        num_gpus=plan.cluster.num_gpus, refused=(*imported.refused, *refused), fits=plan.fits,
        oom_probability=plan.best.oom_probability, fullest_stage=plan.stages.index(fullest),
        needed_bytes=fullest.memory.total_bytes, capacity_bytes=plan.cluster.hardware.memory_bytes,
        step_s=plan.step.step_s, step_s_interval=plan.step.step_s_interval,
        tokens_per_day=plan.training.tokens_per_step / plan.step.step_s * SECONDS_PER_DAY,
        usd_per_day=None if price is None else price * 24 * plan.cluster.num_gpus,
        unknown=dict(imported.unknown), notes=tuple(imported.notes),
        better=str(own.parallelism) if own is not None and moves else "",
        better_step_s=own.step.step_s if own is not None and moves else None,
    )  # fmt: skip
    return Priced(checked, plan)


def completed(imported: ImportedRun, given: Said) -> Fields:
    """The run with what the user gives beside the file; on the default GPU where neither names one."""
    hardware = given.get("hardware") or imported.run.get("hardware") or DEFAULT_HARDWARE
    return imported.complete(**{**given, "hardware": hardware})


def judged(run: Run) -> tuple[Plan, list[str]]:
    """A run's price, and the rules of its trainer that it breaks: a switch that breaks one is priced as off."""
    plan = evaluate(run.model, run.cluster, run.training, run.parallelism, runtime=run.runtime)
    # FSDP and DeepSpeed run on one GPU, too, which is no use to a search
    broken = [reason for reason in broken_rules_of_recipe(plan) if reason.name != "sharding"]
    refused = [f"{reason.name} {reason.message}: priced without it" for reason in broken]
    refused += [text for warning in plan.best.warnings if (text := warning.partition("refuses this layout: ")[2])]
    if broken:
        plainest = {reason.name: SWITCHES[reason.name].plainest for reason in broken}
        runtime = switched(run.runtime, plainest)
        plan = evaluate(run.model, run.cluster, run.training, run.parallelism, runtime=runtime)
    return plan, refused


def own_choice(run: Run) -> Plan:
    """The planner's choice for the same job and trainer. Raises Infeasible where nothing fits."""
    from planner.search.search import plan

    limits = SearchLimits(allow=consented(run.runtime))
    return plan(run.model, run.cluster, run.training, limits=limits, runtime=freed(run.runtime))
