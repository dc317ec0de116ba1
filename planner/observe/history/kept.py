"""A run as the folder keeps it, and its price by the profile and the trainer that ship."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from planner import __version__
from planner.answer import Plan
from planner.errors import SpecError
from planner.layout.confidence import hardware_width
from planner.layout.price import price_layout
from planner.observe.calibrate.evidence import evidence_of
from planner.observe.calibrate.from_run import UNDER_PROFILER
from planner.observe.calibrate.priced import PricedRun
from planner.observe.history.belongs import belongs_to
from planner.observe.history.folder import PREFIX, SUFFIX
from planner.observe.history.posterior import KeptPrice
from planner.observe.observation import Observed
from planner.plan_file import plan_of
from planner.profile.probed.doubt import LEAST_SENSITIVE
from planner.saved import as_saved, with_digest
from planner.specs.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, Spec
from planner.specs.checking import checked
from planner.specs.cluster import ClusterSpec
from planner.specs.reading import label, load_yaml
from planner.specs.reading.limits import SAVED
from planner.specs.registry import hardware_names, load_hardware
from planner.trainers.load import RUNTIMES, load_runtime, switches_of
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import read_recipe

NUM_DIGITS = 16
"""Digits of the hash in a file's name."""
LEFT_OUT: Mapping[str, object] = {
    "alternatives": (),
    "search": None,
    "rejections": {},
    "rejection_examples": {},
    "command": "",
}
"""Fields of a plan that say nothing of the run."""


class KeptRun(Spec):
    """A measured step and the plan that it is a run of."""

    schema_version: Literal[1] = 1
    planner_version: str
    source: str
    """The names of logs that it was observed by."""
    step_s: PositiveFloat
    """The measured step, less what causes took that are no property of the hardware."""
    own_width: NonNegativeFloat
    """Half-width of the run's own steps and their digits."""
    num_steps: NonNegativeInt
    shipped: tuple[Literal["hardware", "runtime"], ...]
    """Specs of the plan that ship with the planner: a later version takes its own in their place."""
    plan: Plan


def kept_run(observed: Observed, where: str) -> tuple[KeptRun, tuple[str, ...]]:
    """An observed run as it is kept, and sentences on what was left out of it. Raises SpecError where it teaches
    nothing about its cluster."""
    cluster = None if observed.plan is None else _as_it_ships(observed.plan, where)
    evidence = evidence_of(observed, observed.plan, cluster, where)
    if not evidence.has_log:
        raise SpecError(f"{where}: {UNDER_PROFILER}", "plan observe train.log --plan plan.json -o observed.json")
    assert observed.plan is not None, "evidence_of refuses a run without a plan"
    assert cluster is not None, "a plan has a cluster"
    plan = PricedRun.of(observed.plan, cluster).plan
    plan = plan.model_copy(update=LEFT_OUT)
    shipped: dict[Literal["hardware", "runtime"], bool] = {
        "hardware": _ships(cluster),
        "runtime": _renewed(plan.runtime_spec) == plan.runtime_spec,
    }
    run = KeptRun(
        planner_version=__version__,
        source=", ".join(Path(source.path).name for source in observed.observation.sources[:3]) or where,
        step_s=evidence.step_s,
        own_width=evidence.width,
        num_steps=observed.observation.num_steps,
        shipped=tuple(name for name, ships in shipped.items() if ships),
        plan=plan,
    )
    return run, evidence.left_out


def name_of(observed: Observed) -> str:
    """The name of a run's file: the same log is the same run, whatever the planner said of it."""
    plan, observation = observed.plan, observed.observation
    assert plan is not None
    told = [observation.step_s, observation.step_s_spread, observation.num_steps, observation.series.seconds]
    text = json.dumps([job_of(plan), plan.cluster.hardware.name, plan.runtime_spec.family, told])
    return f"{PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:NUM_DIGITS]}{SUFFIX}"


def job_of(plan: Plan) -> str:
    """The job in one line: runs of one repeat the error of its layout."""
    training = plan.training
    batch = f"{training.global_batch_size} × {training.seq_length} {training.dtype}"
    return f"{plan.model.name} on {plan.cluster.num_gpus:,} GPUs, {plan.parallelism}, {batch}"


def text_of(run: KeptRun) -> str:
    """The text of a run's file."""
    return json.dumps(with_digest({**run.model_dump(mode="json", exclude={"plan"}), "plan": run.plan.to_json()})) + "\n"


def read_kept(path: Path) -> KeptRun:
    """The run in a file; SpecError where it holds none, or was edited."""
    data, where = load_yaml(path, SAVED), label(path)
    if not isinstance(data.get("plan"), dict):
        raise SpecError(f"{where}: is no run that plan validate --add kept", f"rm {where}")
    data = as_saved(data, where, f"rm {where} forgets the run; plan validate --add keeps it again")
    plan = plan_of(data["plan"], where)
    return checked(KeptRun, {**data, "plan": plan}, where)


def price_of_file(path: Path) -> KeptPrice:
    """The price of the run in a file; SpecError where it holds none."""
    return price_of(read_kept(path), path.name)


def price_of(run: KeptRun, file: str) -> KeptPrice:
    """The step that this version of the planner prices for the run's layout, and the factor on kernels that is missing.

    Raises SpecError where kernels decide nothing, or no plausible factor explains the run.
    """
    plan = run.plan
    cluster, runtime = plan.cluster, plan.runtime_spec
    if "hardware" in run.shipped:
        cluster = cluster.changed(hardware=load_hardware(cluster.hardware.name))
    if "runtime" in run.shipped:
        runtime = _renewed(runtime) or runtime
    priced = PricedRun.of(plan.model_copy(update={"runtime_spec": runtime}), cluster)
    layout = price_layout(priced.candidate(), exact=False)
    sensitivity, log_kernels = priced.sensitivity(), priced.log_kernels(run.step_s)
    asked = f"{file}: its step of {run.step_s:.4g} s, priced {layout.step.step_s:.4g},"
    if sensitivity < LEAST_SENSITIVE:
        raise SpecError(f"{asked} is held up by host and links, and says little of kernels", "add another run")
    if log_kernels is None:
        raise SpecError(
            f"{asked} is none that any factor on the kernels of {cluster.hardware.name} explains",
            "check that the plan is the run's: plan observe train.log --plan plan.json",
        )
    low_s, high_s = layout.step.step_s_interval or (layout.step.step_s, layout.step.step_s)
    width = math.log(high_s / low_s) / 2
    return KeptPrice(
        file=file,
        source=run.source,
        belongs=belongs_to(cluster, runtime),
        job=job_of(plan),
        measured_s=run.step_s,
        predicted_s=layout.step.step_s,
        log_kernels=log_kernels,
        sensitivity=sensitivity,
        job_width=math.sqrt(max(0.0, width**2 - hardware_width(cluster.hardware) ** 2)),
        own_width=run.own_width,
    )


def _ships(cluster: ClusterSpec) -> bool:
    name = cluster.hardware.name
    return name in hardware_names() and cluster.hardware == load_hardware(name)


def _as_it_ships(plan: Plan, where: str) -> ClusterSpec:
    """The plan's cluster before a calibration; SpecError where it is not known any more."""
    cluster = plan.cluster
    if not cluster.hardware.corrections:
        return cluster
    if cluster.hardware.name not in hardware_names() or cluster.network_tiers:
        raise SpecError(
            f"{where}: its plan was made with a calibration, and {cluster.hardware.name} does not ship",
            "observe the log with a plan made with --no-history and without --calibration",
        )
    return cluster.changed(hardware=load_hardware(cluster.hardware.name))


def _renewed(runtime: RuntimeSpec) -> RuntimeSpec | None:
    """The trainer of that name as this version ships it, with the run's switches; None for a trainer of one's own."""
    name = f"{runtime.name}@{runtime.version}" if runtime.version else runtime.name
    if runtime.name not in RUNTIMES:
        return None
    return load_runtime(name).with_features(read_recipe(runtime, switches_of(runtime)))[0]
