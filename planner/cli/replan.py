"""`plan --from plan.json --gpus N`: how a running job goes on after nodes came or went."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from planner.cli.job_options import SearchOptions, command_line
from planner.errors import SpecError

if TYPE_CHECKING:
    from planner.answer import Plan
    from planner.specs.training import TrainingSpec

OF_THE_JOB = (
    "model", "hardware", "gpus_per_node", "tier", "seq_length", "batch_tokens", "dtype", "runtime", "assume",
    "calibration", "no_history", "allow",
)  # fmt: skip
"""Options that the running job has answered: another answer would be another job."""


def replan_command(asked: SearchOptions, path: str, keep: str | None, json: bool, output: str | None,
                   force: bool) -> None:  # fmt: skip
    """Answer how the job of a saved plan goes on with `--gpus`."""
    from planner.cli.inputs import Job, listed, read_limits
    from planner.cli.output import dumps, save, show, waiting
    from planner.decide.resume.resume import replan
    from planner.files import refuse_to_overwrite
    from planner.plan_file import read_plan
    from planner.report.resume import render_resume

    _check(asked, path)
    assert asked.gpus is not None
    if output is not None:
        refuse_to_overwrite(output, force)
    old = read_plan(path)
    training = _training(asked, old)
    job = Job(old.model.spec, old.cluster, training, old.runtime, old.runtime_spec, {})
    limits = read_limits(asked, job)
    axes = () if keep is None else tuple(axis.replace("-", "_") for axis in listed("keep", keep, str))
    with waiting("replanning"):
        found = replan(old, asked.gpus, axes, training=training, limits=limits)
    plan = found.plan.model_copy(update={"command": command_line(asked)}) if found.resume.choices else found.plan
    if save(plan, output, force):
        return
    if json:
        sys.stdout.write(dumps({**plan.to_json(), "resume": found.resume.to_json()}))
    else:
        show(render_resume(found.resume, plan))


def _check(asked: SearchOptions, path: str) -> None:
    """Raise SpecError for an option that the running job answers, and without a number of GPUs."""
    for name in OF_THE_JOB:
        if getattr(asked, name) not in (None, False):
            option = "--" + name.replace("_", "-")
            ways = {"batch_tokens": "give sequences: -b", "allow": "move a switch: --switch NAME=VALUE"}
            raise SpecError(f"{option}: the running job's comes from {path}", ways.get(name, f"leave {option} out"))
    if asked.gpus is None:
        raise SpecError("--gpus: is missing", f"for example plan --from {path} --gpus 1984")


def _training(asked: SearchOptions, old: Plan) -> TrainingSpec:
    """The old plan's training, with the options that may change while a job runs."""
    from planner.cli.inputs import option
    from planner.months.whole_run import check_spares
    from planner.specs.problems import checked
    from planner.specs.training import OperationsSpec, TrainingSpec
    from planner.specs.units import parse_count

    names = ("global_batch_size", "moe_imbalance", "straggler_fraction")
    changed: dict[str, Any] = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    if asked.tokens is not None:
        try:
            changed["tokens"] = parse_count(asked.tokens)
        except (ValueError, OverflowError):
            raise SpecError(f"--tokens: {asked.tokens[:60]!r} is not a count", "write 15T") from None
    stated = {
        "storage_gb_per_s": asked.storage_gb_per_s,
        "failures_per_1000_gpu_days": asked.failures_per_1000_gpu_days,
        "num_spare_nodes": asked.spares,
        "usd_per_gpu_hour": asked.usd_per_gpu_hour,
    }
    given = {name: value for name, value in stated.items() if value is not None}
    spelling = {name: option(name) for spec in (TrainingSpec, OperationsSpec) for name in spec.model_fields}
    operations = checked(OperationsSpec, {**old.training.operations.model_dump(), **given}, spelling=spelling)
    values = {**old.training.model_dump(), **changed, "operations": operations}
    training = checked(TrainingSpec, values, spelling=spelling)
    check_spares(old.cluster.changed(num_gpus=asked.gpus), training)
    return training
