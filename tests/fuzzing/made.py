"""Corpus that is made by code: what our own commands save, and traces and pickles by their schemas."""

from __future__ import annotations

import gzip
import json
import shlex
import tempfile
from functools import cache
from pathlib import Path

from made_traces import event, frames, made_snapshot, segment, training_trace, write_pickle
from measured_runs import observed, priced
from probes import probe_result

from planner.answer import Plan
from planner.export.export import bundle_of
from planner.layout.evaluate import evaluate
from planner.observe.history import KeptPrice, kept_run, name_of, price_of, text_of
from planner.observe.observation import Observed
from planner.probe.run_price import in_eager_torch
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec

TESTS = Path(__file__).parents[1]
CORPUS = Path(__file__).parent / "corpus"
Seeds = dict[str, bytes]
"""Contents by the names of their files."""


def lines_of(*names: str) -> Seeds:
    """Command lines, each as a JSON list of words."""
    lines = [line for name in names for line in (CORPUS / "commands" / name).read_text().splitlines()]
    return {f"{number}.json": json.dumps(shlex.split(line)).encode() for number, line in enumerate(lines)}


@cache
def plan_of(runtime: str = "megatron", **sizes: int) -> Plan:
    """The price of a small job, whose files are small too."""
    layout = {"tp": 2, "pp": 2, "dp": 2, **sizes}
    return evaluate(
        load_model("llama-3.2-1b"),
        ClusterSpec(hardware=load_hardware("mi300x" if runtime.startswith("primus") else "h200"), num_gpus=8),
        TrainingSpec(seq_length=2048, global_batch_size=16), Parallelism.model_validate(layout), runtime=runtime,
    )  # fmt: skip


def plans() -> Seeds:
    return {"plan.json": plan_of().saved_text().encode()}


@cache
def _observed() -> Observed:
    return observed(plan_of(), 1.3 * plan_of().step.step_s)


def observations() -> Seeds:
    return {"observed.json": _observed().model_dump_json().encode()}


def probes() -> Seeds:
    plan = plan_of("torch-eager")
    stages = in_eager_torch(plan, alone=True).stages
    result = probe_result(plan, lambda j: (1.2 * stages[j].forward_s, 1.2 * stages[j].backward_s))
    return {"probe.json": result.model_dump_json().encode()}


@cache
def _run_to_keep() -> Observed:
    """A run whose layers no host holds up: it says something of the GPU."""
    plan = priced()
    return observed(plan, 1.2 * plan.step.step_s)


def kept_runs() -> Seeds:
    """A folder of two kept runs, and a file of prices that somebody wrote."""
    run = _run_to_keep()
    text = text_of(kept_run(run, "observed.json")[0]).encode()
    prices = json.dumps(
        {"planner_version": "0", "files": {name_of(run): [1, 1]}, "runs": [], "left_out": {"run-1": "x"}}
    )
    return {name_of(run): text, "prices.json": prices.encode()}


@cache
def kept_price() -> KeptPrice:
    return price_of(kept_run(_run_to_keep(), "observed.json")[0], "observed.json")


def traces() -> Seeds:
    text = training_trace(0).text().encode()
    return {"rank0.json": text, "rank1.json.gz": gzip.compress(training_trace(1).text().encode(), mtime=0)}


def snapshots() -> Seeds:
    stack = frames("model/attention.py:forward", "train.py:step")
    events = [
        event("segment_alloc", 4096, 8192, 1), event("alloc", 4096, 500, 2, stack),
        event("alloc", 5000, 700, 3, stack), event("free_requested", 4096, 500, 4),
        event("free_completed", 4096, 500, 5), event("oom", 0, 10**9, 6, stack),
    ]  # fmt: skip
    data = made_snapshot(events, [segment(4096, [(4000, "active_allocated", stack), (4192, "inactive", [])])])
    with tempfile.TemporaryDirectory() as folder:
        return {"s.pickle": write_pickle(Path(folder) / "s", data).read_bytes()}


def flight_dumps() -> Seeds:
    return {path.name: path.read_bytes() for path in sorted((TESTS / "observe" / "data").glob("*_[01]"))}


def exported(target: str, runtime: str | None = None, **sizes: int) -> Seeds:
    """The files of a target."""
    files = bundle_of(plan_of(runtime or target, **sizes), [target], force=True).files
    return {Path(file.name).name: file.text.encode() for file in files if file.text and not file.name.endswith(".md")}


def timelines() -> Seeds:
    """Two steps of operators on two workers of two stages, with the names of their threads."""
    events = [
        {"name": f"{way}-compute", "cat": f"{way}-compute", "ph": "X", "pid": worker, "tid": 3 * stage,
         "ts": 1e6 * step + 1e4 * batch + 5e3 * stage + (5e4 if way == "backward" else 0), "dur": 4e3,
         "args": {"step": step}}
        for step in (1, 2) for worker in (0, 1) for stage in (0, 1) for batch in range(2)
        for way in ("forward", "backward")
    ]  # fmt: skip
    named = [
        {"name": "thread_name", "ph": "M", "pid": worker, "tid": 3 * stage,
         "args": {"name": f"PP rank {stage}, TP rank 0, compute"}}
        for worker in (0, 1) for stage in (0, 1)
    ]  # fmt: skip
    return {"timeline.json": json.dumps(events + named).encode()}


def bodies() -> Seeds:
    """What the page of `plan serve` sends."""
    forms = (
        {"model": "llama-3.2-1b", "gpus": "8", "global_batch_size": "64", "micro_batch_size": "1,2", "top": "2"},
        {"model": "8b", "gpus": "16", "hardware": "h100-sxm-80gb", "tier": "leaf:32:50,spine:*:50:4x", "dtype": "fp8",
         "switch.ep_overlap": "true", "network_gb_per_s": "25", "assume": "tp_overlap_fraction=0.5", "tokens": "1T"},
        {"model": "qwen3-8b", "gpus": "8", "lora": "on", "lora_rank": "16", "example_lengths": "400:2048",
         "examples": "50k", "epochs": "2", "batching": "padded", "spares": "1", "oom_risk": "0.05", "pp": "1"},
    )  # fmt: skip
    return {
        f"{number}.json": json.dumps({"form": form, "shown": "0" * 32, "alternative": number}).encode()
        for number, form in enumerate(forms)
    }
