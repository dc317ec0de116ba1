"""Simulated runs with known causes, and what `plan observe` says of them.

    case = drawn(np.random.default_rng(1), "straggler_rank", "traces")
    observed = observed_of(case, tmp_path)

No GPU ran any of them: they are made from the planner's own model with hidden errors (`simulated_truths`), so that they
prove what is concluded from files, and nothing about the physics.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from simulated_logs import csv_of, megatron_log, torchtitan_log
from simulated_ranks import Simulated
from simulated_traces import traced_ranks, write_traces
from simulated_truths import CAUSES, HEALTHY, JOBS, Truth, fits_job, truth_of

from planner.observe.judge import judged
from planner.observe.observation import Observed
from planner.observe.read import observe
from planner.observe.traces.recorded import kinds_of, observation_of, read_recorded

LEVELS = ("steps", "log", "timers", "trace", "traces", "traces and log")
"""Evidence: step times alone; a log with its dump and memory; with timers; one rank's trace; those of several ranks."""
CAN_TELL: dict[str, tuple[str, ...]] = {
    HEALTHY: LEVELS,
    "straggler_rank": ("timers", "traces", "traces and log"),
    "slow_link": ("traces", "traces and log"),
    "no_ep_overlap": ("log", "timers", "traces", "traces and log"),
    "exposed_dp": ("log", "timers", "traces", "traces and log"),
    "attention_kernel": ("log", "timers", "trace", "traces", "traces and log"),
    "unfused_kernels": ("log", "timers", "trace", "traces", "traces and log"),
    "host_bound": ("trace", "traces", "traces and log"),
    "expert_imbalance": ("traces", "traces and log"),
    "clocks": ("traces", "traces and log"),
    "bubble": ("traces", "traces and log"),
    "data_stall": ("timers", "trace", "traces", "traces and log"),
    "leak": ("log", "timers", "traces and log"),
    "fragmentation": ("log", "timers", "traces and log"),
    "recompute_unneeded": LEVELS,  # the plan shows it by itself
}
"""Levels of evidence at which a cause can be told; elsewhere an honest answer has it as one of several, unlikely."""
SAID_BY_DUMP = (
    "no_ep_overlap",
    "exposed_dp",
    "attention_kernel",
    "unfused_kernels",
    "fragmentation",
)
"""Causes that a log shows only where it dumps its arguments, or tells allocated memory from reserved."""
_ATTEMPTS = 100


@dataclass(frozen=True)
class SimulatedCase:
    """A run with its cause, and what is left of it."""

    truth: Truth
    level: str
    seed: int

    @property
    def can_tell(self) -> bool:
        """True where the files show the cause."""
        if self.level not in CAN_TELL[self.truth.cause]:
            return False
        by_log = self.level in ("log", "timers")
        if self.truth.cause == "straggler_rank" and by_log:
            return self.seed % 2 == 1  # least and most over all stages say nothing of one stage
        if self.truth.cause == "expert_imbalance":
            return int(self.truth.candidate.shape.ep) <= 8  # of more, ranks without a trace may be the fullest
        if self.truth.cause in SAID_BY_DUMP and by_log:
            return self.truth.job.trainer == "megatron"
        return True

    def __str__(self) -> str:
        truth = self.truth
        extra = truth.extra_s / truth.healthy.step_s
        return f"{truth.cause} in {truth.job.name} by {self.level} ({extra:+.1%} {truth.where}, seed {self.seed})"


def drawn(seed: int, cause: str, level: str, jobs: tuple[str, ...] = ()) -> SimulatedCase:
    """A run with the cause, of a job that it can strike, where it takes enough to be worth a word."""
    rng = np.random.default_rng([seed, list(CAUSES).index(cause), LEVELS.index(level)])
    fitting = [job for job in JOBS if fits_job(cause, job) and (not jobs or job.name in jobs)]
    if level in ("timers",):
        fitting = [job for job in fitting if job.trainer == "megatron"] or fitting
    for _ in range(_ATTEMPTS):
        truth = truth_of(fitting[int(rng.integers(len(fitting)))], cause, rng)
        if cause == HEALTHY or truth.likely_seen:
            return SimulatedCase(truth, level, seed)
    raise AssertionError(f"{cause}: too weak in all jobs")


def files_of(case: SimulatedCase, folder: Path) -> list[Path]:
    """The files that the run leaves, written to a folder."""
    run, rng = Simulated(case.truth), np.random.default_rng([case.seed, 7])
    paths, megatron = [], case.truth.job.trainer == "megatron"
    if case.level in ("log", "timers", "traces and log"):
        timers = ("minmax", "all")[case.seed % 2] if case.level == "timers" else ""
        text = (
            megatron_log(run, rng, timers, dump=case.level != "traces and log")
            if megatron
            else torchtitan_log(run, rng)
        )
        paths.append(folder / "train.log")
        paths[-1].write_text(text)
    elif case.level == "steps":
        paths.append(folder / "steps.csv")
        paths[-1].write_text(csv_of(run, rng))
    if "trace" in case.level:
        ranks = traced_ranks(run)
        paths += write_traces(run, folder, ranks if case.level != "trace" else ranks[:1], rng)
    return paths


def observed_of(case: SimulatedCase, folder: Path) -> Observed:
    """What `plan observe FILE… --plan plan.json` answers."""
    paths = [str(path) for path in files_of(case, folder)]
    kinds = kinds_of(paths)
    logs = [path for path in paths if path not in kinds]
    recorded = read_recorded(kinds) if kinds else None
    observation = observe(logs) if recorded is None or logs else observation_of(recorded)
    return judged(observation, case.truth.plan, "plan.json", recorded)
