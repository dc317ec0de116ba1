"""The seconds until a resumed job trains, and what it loses until its old layout runs again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from planner.decide.resume.job import Choice, Loads, ResumedJob
from planner.months.closed_form import Standstill, break_even_s, going_on_s, return_pays_s, waiting_s
from planner.months.losses import Fact, Losses, losses_of, stated

CONVERSIONS = 2
"""Times that a tool which converts a checkpoint moves all of its bytes, at least: it reads them and writes them."""


def losses_on(job: ResumedJob, num_gpus: int) -> Losses:
    """The figures of the job's failures, restarts and checkpoints on some GPUs."""
    operations, asynchronous = job.case.training.operations, job.old.runtime_spec.asynchronous_checkpoints
    return losses_of(job.case.cluster, operations, num_gpus, job.old.checkpoint_bytes, asynchronous)


def transfer(losses: Losses) -> Fact:
    """Seconds in which a checkpoint is read, or written, with their interval."""
    rate = losses.storage_gb_per_s
    seconds = [losses.transfer_s(each) for each in (rate.value, rate.high, rate.low)]
    return Fact(value=seconds[0], low=seconds[1], high=seconds[2], source=rate.source)


@dataclass(frozen=True, slots=True)
class Clock:
    """The seconds of one job that resumes."""

    job: ResumedJob
    interim_gpus: int | None = None
    """GPUs of the split that writes a checkpoint again, and the seconds of its step."""
    interim_step_s: float = 0.0

    @property
    def old(self) -> Losses:
        """The figures on the old GPUs."""
        return losses_on(self.job, self.job.layout.num_gpus_used)

    def standstill(self, num_gpus: int, loads: Loads) -> Standstill:
        """From the failure until a layout on some GPUs trains; from the planned stop where GPUs were added."""
        losses = losses_on(self.job, num_gpus)
        first = {"save": transfer(self.old)} if self.job.grows else {"detection": losses.detection_s}
        return Standstill({**first, **self._rewriting(loads), "start": losses.restart_s, "read": transfer(losses)})

    def _rewriting(self, loads: Loads) -> dict[str, Fact]:
        """The parts that come before the start of a job whose checkpoint has to be written again or converted."""
        if loads == "convert":
            return {"convert": transfer(self.old).times(CONVERSIONS)}
        if loads != "resave" or self.interim_gpus is None:
            return {}
        interim = losses_on(self.job, self.interim_gpus)
        moved = transfer(interim)
        return {
            "start of the split": interim.restart_s,
            "read by the split": moved,
            "step of the split": stated(self.interim_step_s),
            "save by the split": moved,
        }

    def timed(self, choice: Choice) -> Choice:
        """A choice that goes on, with its seconds and break-evens."""
        if choice.kind == "stay":
            return choice
        still = self.standstill(choice.num_gpus_used, choice.loads)
        update = {
            "back_s": still.value_s,
            "back_s_interval": still.interval_s,
            "seconds": {name: part.value for name, part in still.parts.items()},
        }
        if choice.loads in ("resave", "convert"):
            update["ready_back_s"] = self.standstill(choice.num_gpus_used, "as_is").value_s
        more = self._growing(still, choice) if self.job.grows else self._shrinking(still, choice)
        return choice.model_copy(update=update | more)

    def _growing(self, still: Standstill, choice: Choice) -> dict[str, object]:
        """The seconds that the job has to run on: v·b / (v − v₀), with v₀ trained meanwhile at the old rate."""
        fraction = choice.rate_fraction
        return {"break_even_wait_s": still.value_s * fraction / (fraction - 1) if fraction > 1 else None}

    def _shrinking(self, still: Standstill, choice: Choice) -> dict[str, object]:
        fraction, back_s = choice.rate_fraction, still.value_s
        save_s = transfer(losses_on(self.job, choice.num_gpus_used)).value
        return_s = save_s + self.again_s
        repair = self.old.repair_s
        lost = [float(going_on_s(each, back_s, fraction, return_s)) for each in (repair.value, repair.low, repair.high)]
        pays_s = return_pays_s(return_s, fraction)
        return {
            "break_even_wait_s": break_even_s(back_s, fraction, save_s),
            "return_pays_s": pays_s if math.isfinite(pays_s) else None,
            "lost_until_repair_s": lost[0],
            "lost_until_repair_s_interval": (lost[1], lost[2]),
        }

    @property
    def again_s(self) -> float:
        """Seconds in which the old layout starts and reads a checkpoint."""
        return self.old.restart_s.value + transfer(self.old).value

    def waiting(self, choice: Choice) -> Choice:
        """The choice to wait: seconds beside the wait, and what is lost in the usual one."""
        old = self.old
        still = Standstill({"start": old.restart_s, "read": transfer(old)})
        lost = [
            float(waiting_s(repair, old.detection_s.value, still.value_s))
            for repair in (old.repair_s.value, old.repair_s.low, old.repair_s.high)
        ]
        update = {
            "back_s": still.value_s,
            "back_s_interval": still.interval_s,
            "seconds": {name: part.value for name, part in still.parts.items()},
            "lost_until_repair_s": lost[0],
            "lost_until_repair_s_interval": (lost[1], lost[2]),
        }
        return choice.model_copy(update=update)

    @property
    def standby(self) -> Standstill:
        """From the failure until the old layout trains again where spare nodes stand in."""
        old = self.old
        return Standstill({"detection": old.detection_s, "start": old.standby_restart_s, "read": transfer(old)})

    @property
    def sources(self) -> dict[str, str]:
        """The origin of each figure."""
        old = self.old
        names = ("detection_s", "restart_s", "standby_restart_s", "repair_s", "node_loss_fraction", "storage_gb_per_s")
        rate = {"failures_per_1000_gpu_days": old.failures_per_1000_gpu_days.source}
        return {name: getattr(old, name).source for name in names} | rate

    def with_interim(self, num_gpus: int, step_s: float) -> Clock:
        """The clock of a job whose checkpoint a split on some GPUs can write again."""
        return replace(self, interim_gpus=num_gpus, interim_step_s=step_s)
