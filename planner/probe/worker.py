"""The runner of `plan export --to torch`: torchrun starts one of it per GPU, and all run the exported file.

torchrun --nnodes 4 --nproc-per-node 8 … -m planner.probe.worker --config plan.torch.yaml
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from pathlib import Path
from statistics import median

from planner.errors import PlannerError, ProbeError, SpecError
from planner.probe.launch.joined import joins_others, run_rank
from planner.probe.model.attention import require_flash
from planner.probe.result import RankFailure, RankResult
from planner.probe.run import Device, ProbeRun
from planner.probe.torch_build import default_device, require_gpu
from planner.schedule.graph import from_torch_csv
from planner.specs.base import Fields
from planner.specs.problems import checked
from planner.specs.reading import CSV, label, load_yaml, read_text
from planner.specs.training import tokens_split

_CSV = "schedule_csv"
_OTHER_TRAINER = "export the plan to a trainer with kernels of its own, such as --to megatron"


def main(arguments: list[str] | None = None) -> int:
    """Run this process's rank; rank 0 prints the steps' seconds as one JSON object. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="planner.probe.worker", description="Runs one rank of an exported plan.")
    parser.add_argument("--config", required=True, help="plan.torch.yaml, beside its schedule.csv")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument("--steps", type=int, default=3, help="steps to measure, after one to warm up")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds without progress before a rank gives up")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    arguments_given = parser.parse_args(arguments)
    try:
        run = read_run(arguments_given.config, arguments_given.device).model_copy(
            update={"num_steps": arguments_given.steps, "timeout_s": arguments_given.timeout}
        )
        require_gpu(run.device)
        require_flash(run.cp, run.device, _OTHER_TRAINER)
        results = _joined(run)
    except PlannerError as error:
        if arguments_given.debug:
            traceback.print_exc()
        sys.stderr.write(error.lines())
        return error.exit_code
    if results:
        print(json.dumps(summary(run, results)))
    return 0


def read_run(path: str | Path, device: Device = "cuda") -> ProbeRun:
    """The run that the file `path` and the schedule file beside it describe. Raises SpecError where they are wrong."""
    data = load_yaml(path)
    where = label(path)
    name = data.pop(_CSV, None)
    if not isinstance(name, str):
        raise SpecError(f"{where}: {_CSV} is missing", "export again: plan export plan.json --to torch")
    try:
        order = from_torch_csv(read_text(Path(path).parent / name, CSV.num_bytes))
    except SpecError as error:
        raise SpecError(f"{where}: {_CSV}: {error.message}", "keep the exported files together") from None
    ranks = tuple(tuple(map(str, actions)) for actions in order.ranks)
    run = checked(ProbeRun, {**data, "ranks": ranks, "device": device}, where)
    return run.model_copy(update={"seq_length": _share(run, where)})


def _share(run: ProbeRun, where: str) -> int:
    """Number of tokens of a sequence that one context-parallel rank holds. Raises SpecError where sequences do not
    split."""
    shards = run.tp if run.sequence_parallel else 1
    unit = tokens_split(run.cp, shards)
    if run.seq_length % unit:
        raise SpecError(
            f"{where}: seq_length: {run.seq_length} tokens do not split over cp {run.cp} and tp {shards}",
            f"a multiple of {unit}: each rank of cp has two equal chunks",
        )
    return run.seq_length // run.cp


def _joined(run: ProbeRun) -> tuple[RankResult, ...]:
    if not joins_others():
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "29500")
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != run.world_size:
        raise SpecError(
            f"{world_size} ranks were started, the plan has {run.world_size}",
            f"pp {run.pp} × dp {run.dp} × cp {run.cp} × tp {run.tp} ranks",
        )
    _, outcome = run_rank(lambda: run, run.timeout_s)
    if isinstance(outcome, RankFailure):
        raise ProbeError(outcome.in_words(run.place(outcome.rank)), "a smaller micro-batch, or more recomputation")
    return outcome


def summary(run: ProbeRun, results: tuple[RankResult, ...]) -> Fields:
    """Seconds of each step on the slowest rank, losses, and the most any rank allocated."""
    steps = [max(rank.steps[i].step_s for rank in results) for i in range(len(results[0].steps))]
    last = next(rank for rank in results if rank.stage == run.stage_to_rank[-1])
    memory = [rank.memory.peak_allocated_bytes for rank in results if rank.memory is not None]
    tokens = run.whole_seq_length * run.micro_batch_size * run.num_microbatches * run.dp
    return {
        "step_s": steps,
        "tokens_per_s": tokens / median(steps),
        "loss": [step.loss for step in last.steps],
        "peak_allocated_bytes": max(memory, default=None),
        "num_parameters": {rank.stage: rank.num_parameters for rank in results},
    }


if __name__ == "__main__":
    raise SystemExit(main())
