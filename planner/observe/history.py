"""Runs that a user keeps of a cluster, their prices by this version of the planner, and the correction that follows.

The correction is a normal mean with a normal prior, shrunk while the runs are few. A run's observation is κ, the
logarithm of the one factor on kernels with which its priced step is the measured one. Runs of one job repeat its
layout's own error, so that a job counts once, with the mean of its runs. With jobs j:

    κ ~ N(0, σ₀²)        κ_j ~ N(κ, σ_j²)        precision = 1/σ₀² + Σ 1/σ_j²        mean = Σ (κ_j/σ_j²) / precision
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field, ValidationError

from planner.answer import SIGMAS_TO_END, Plan
from planner.distribution import __version__
from planner.errors import PlannerError, SpecError
from planner.files import write_text
from planner.layout.confidence import hardware_width
from planner.layout.price import price_layout
from planner.observe import VARIABLE
from planner.observe.calibration_by_run import UNDER_PROFILER, PricedRun, evidence_of, kept_width
from planner.observe.observation import Observed
from planner.plan_file import plan_of
from planner.profile.probed import LEAST_SENSITIVE, TRANSFER_WIDTH
from planner.saved import KEY, as_saved, with_digest
from planner.specs.base import Named, NonNegativeFloat, NonNegativeInt, PositiveFloat, Spec, Texts, grouped
from planner.specs.cluster import ClusterSpec
from planner.specs.problems import checked
from planner.specs.reading import SAVED, load_yaml, printable, read_saved
from planner.specs.registry import hardware_names, load_hardware
from planner.trainers.calibration import Calibration, Factor
from planner.trainers.load import RUNTIMES, load_runtime, switches_of
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import read_recipe

LEAST_PRIOR = 0.01
"""Least standard deviation of a cluster from its profile: one measured to the digit is another after a driver."""
PRIOR_JOBS = 4
"""Jobs that the usual scatter counts for, beside the scatter of the runs at hand."""


class KeptPrice(Spec):
    """A run that is kept, beside the price of its layout by the profile that ships."""

    file: str
    """The name of its file in the folder."""
    source: str
    """The log that it was observed by."""
    belongs: str
    """The cluster and the trainer."""
    job: str
    """Model, batch and layout: runs of one job repeat its error."""
    measured_s: PositiveFloat
    predicted_s: PositiveFloat
    log_kernels: float
    """Logarithm of the factor on kernels with which the price is the measured step."""
    sensitivity: PositiveFloat
    """Change of the step by a change of all kernels, in natural logarithms."""
    job_width: NonNegativeFloat
    """Half-width that the job adds to the step's interval beside kernels: experts, exchanges, the host, scale."""
    own_width: NonNegativeFloat
    """Half-width of the run's own steps and their digits."""


class KernelPosterior(NamedTuple):
    """All that the runs of one cluster and trainer say of the seconds of its kernels, in natural logarithms."""

    mean: float
    sigma: float
    """Standard deviation of the mean."""
    scatter: float
    """Factor by which jobs lie further apart than published ones do; 1 where they do not."""
    num_runs: int
    num_jobs: int

    @property
    def step_width(self) -> float:
        """Half-width of the step of a job that was not observed: never below what tells two layouts apart."""
        return self.scatter * math.hypot(SIGMAS_TO_END * self.sigma, TRANSFER_WIDTH)

    @property
    def factor(self) -> float:
        """Factor on the seconds of kernels."""
        return math.exp(self.mean)

    @property
    def factor_interval(self) -> tuple[float, float]:
        """Its 80% interval."""
        width = SIGMAS_TO_END * self.scatter * self.sigma
        return math.exp(self.mean - width), math.exp(self.mean + width)


def posterior(runs: Sequence[KeptPrice], hardware_width: float) -> KernelPosterior:
    """The posterior of runs of one cluster and trainer, whose profile is known to `hardware_width`.

    Of the profile's width, TRANSFER_WIDTH is that between layouts of one cluster, and the rest σ₀, the cluster's own. A
    job's σ_j holds the former, what the job adds, and what its runs add, which is less the more they are.
    """
    apart = max(0.0, hardware_width**2 - TRANSFER_WIDTH**2)
    precision = 1 / max(math.sqrt(apart) / SIGMAS_TO_END, LEAST_PRIOR) ** 2
    weighted = 0.0
    known = [_job(together) for together in grouped((run.job, run) for run in runs).values()]
    for mean, variance in known:
        precision += 1 / variance
        weighted += mean / variance
    middle = weighted / precision
    squares = sum((mean - middle) ** 2 / variance for mean, variance in known)
    scatter = math.sqrt(max(1.0, (squares + PRIOR_JOBS) / (len(known) + PRIOR_JOBS)))
    return KernelPosterior(middle, 1 / math.sqrt(precision), scatter, len(runs), len(known))


def _job(runs: Sequence[KeptPrice]) -> tuple[float, float]:
    """Mean and variance of what the runs of one job say."""
    first = runs[0]
    mean = sum(run.log_kernels for run in runs) / len(runs)
    own = sum(run.own_width**2 for run in runs) / len(runs) ** 2
    width = math.sqrt(TRANSFER_WIDTH**2 + first.job_width**2 + own) / first.sensitivity
    return mean, (width / SIGMAS_TO_END) ** 2


_log = logging.getLogger(__name__)
PREFIX, SUFFIX = "run-", ".json"
PRICES = "prices.json"


class Prices(Spec):
    """The prices of all files in the folder, kept so that no command has to make them again."""

    planner_version: str = ""
    files: dict[str, tuple[int, int]] = Field(default_factory=dict)
    """Bytes and time of change of each file, in nanoseconds: another one is read again."""
    runs: tuple[KeptPrice, ...] = ()
    left_out: Named = Field(default_factory=dict)
    """The files that are no runs to learn from, and why."""


def prices_of(folder: Path, price: Callable[[Path], KeptPrice]) -> Prices:
    """The prices of all runs in a folder; those of files that changed, or of another version, are made by `price`.

    A file that holds no run is left out, with the reason. The prices are written back where the folder allows it.
    """
    files = kept_files(folder)
    known = _saved(folder)
    if known.planner_version != __version__:
        known = Prices()
    if known.files == files:
        return known
    same = {name for name, state in files.items() if known.files.get(name) == state}
    runs = {run.file: run for run in known.runs if run.file in same}
    left_out = {name: reason for name, reason in known.left_out.items() if name in same}
    for name in sorted(files.keys() - same):
        try:
            runs[name] = price(folder / name)
        except PlannerError as error:
            left_out[name] = error.message
        except Exception as error:  # an edited file may say anything, and no plan is to end by it
            left_out[name] = f"is no run that can be priced ({type(error).__name__})"
    made = Prices(
        planner_version=__version__,
        files=files,
        runs=tuple(runs[name] for name in sorted(runs)),
        left_out=dict(sorted(left_out.items())),
    )
    try:
        write_text(folder / PRICES, json.dumps(with_digest(made.model_dump(mode="json"))), force=True)
    except PlannerError:
        _log.debug("%s: cannot be written, prices are made again next time", printable(str(folder / PRICES)))
    return made


def keep(folder: Path, name: str, text: str) -> bool:
    """Write a run's file unless it is there already; true where it is new. Raises PlannerError where the folder cannot
    be made or written to."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        hint = f"--history DIR names another folder, and so does {VARIABLE}=DIR for every command"
        raise PlannerError(f"{folder}: cannot be made: {error.strerror}", hint) from None
    path = folder / name
    if path.exists():
        return False
    write_text(path, text, force=True)
    return True


def kept_files(folder: Path) -> dict[str, tuple[int, int]]:
    """The runs' files with their sizes and times; none where the folder cannot be listed."""
    found = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not (entry.name.startswith(PREFIX) and entry.name.endswith(SUFFIX) and entry.is_file()):
                    continue
                with suppress(FileNotFoundError):  # removed since
                    state = entry.stat()
                    found[entry.name] = (state.st_size, state.st_mtime_ns)
    except OSError as error:
        _log.warning("%s: cannot be listed, and is left out: %s", printable(str(folder)), error.strerror)
    return dict(sorted(found.items()))


def _saved(folder: Path) -> Prices:
    """The prices of the last time; none where there are none, or somebody edited them."""
    try:
        data = load_yaml(folder / PRICES, SAVED)
        return Prices.model_validate({} if KEY not in data else as_saved(data, PRICES, "they are made again"))
    except (SpecError, ValidationError):
        return Prices()


def said_of(left_out: Mapping[str, str], folder: Path) -> str:
    """One sentence on the files that are left out; empty without any."""
    if not left_out:
        return ""
    (name, reason), *others = left_out.items()
    more = f" (and {len(others)} more)" if others else ""
    return f"{printable(str(folder))}: {name} is left out{more}: {printable(reason)}; rm forgets it"


def belongs_to(cluster: ClusterSpec, runtime: RuntimeSpec) -> str:
    """The cluster and the trainer in words: the hardware's profile, GPUs of a node, the network's rate per GPU and
    direction, and the trainer without its version. Runs that agree in all of them correct each other."""
    rates = [f"{tier.gb_per_s / tier.oversubscription:g}" for tier in cluster.tiers[1:]]
    network = f"{' and '.join(rates)} GB/s between nodes" if rates else "no network"
    return f"{cluster.hardware.name}, {cluster.node_size} GPUs a node, {network}, {runtime.family}"


def runs_of(prices: Prices, cluster: ClusterSpec, runtime: RuntimeSpec) -> tuple[KeptPrice, ...]:
    """The runs that were kept of this cluster and trainer."""
    belongs = belongs_to(cluster, runtime)
    return tuple(run for run in prices.runs if run.belongs == belongs)


def named_runs(found: KernelPosterior, folder: Path) -> str:
    """The runs in the words of an answer: `3 runs of yours: …/history`."""
    return f"{found.num_runs} {'run' if found.num_runs == 1 else 'runs'} of yours: …/{folder.name}"


def calibration_of(
    runs: tuple[KeptPrice, ...], cluster: ClusterSpec, folder: Path
) -> tuple[Calibration, KernelPosterior] | None:
    """The calibration by runs that are kept, and what it follows from; None without any."""
    if not runs:
        return None
    found = posterior(runs, hardware_width(cluster.hardware))
    source = named_runs(found, folder)
    calibration = Calibration(
        source=source,
        by="history",
        kernels_factor=Factor(value=found.factor, source=source),
        step_width=found.step_width,
        memory_width=kept_width(cluster.hardware),
    )
    return calibration, found


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


def kept_run(observed: Observed, where: str) -> tuple[KeptRun, Texts]:
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
    plan = observed.plan
    observation = observed.observation
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
    data, where = read_saved(path)
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
    cluster = plan.cluster
    runtime = plan.runtime_spec
    if "hardware" in run.shipped:
        cluster = cluster.changed(hardware=load_hardware(cluster.hardware.name))
    if "runtime" in run.shipped:
        runtime = _renewed(runtime) or runtime
    priced = PricedRun.of(plan.model_copy(update={"runtime_spec": runtime}), cluster)
    layout = price_layout(priced.candidate(), exact=False)
    sensitivity = priced.sensitivity()
    log_kernels = priced.log_kernels(run.step_s)
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
