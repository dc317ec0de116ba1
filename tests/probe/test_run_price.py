"""A run is priced before it starts: default plans fit into eager torch, changed by as little as it takes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from planner.answer import Plan
from planner.layout.evaluate import evaluate
from planner.probe.plan_runs import ranks_run, stages_run
from planner.probe.plan_slice import ProbeOptions
from planner.probe.run import num_communicators
from planner.probe.run_price import ROOM_FRACTION, made_to_fit, run_bytes, what_starts
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.specs.units import GIB

GPUS = ProbeOptions(device="cuda")
WHOLE = {"tp": 1, "cp": 1, "ep": 1, "pp": 1, "vpp": 1, "zero_stage": 1}
TP, INTERLEAVED = {"sequence_parallel": True}, {"schedule": "interleaved-1f1b"}
PLANS: dict[str, tuple[str, str, int, int, dict[str, Any], tuple[bool, bool, bool]]] = {
    "8b 8": ("8b", "h100", 8192, 512, {"dp": 8, "zero_stage": 2}, (True, True)),
    "8b 8 H200": ("8b", "h200", 8192, 512, {"dp": 8, "micro_batch_size": 2, "zero_stage": 2}, (True, True)),
    "8b 8 A100": ("8b", "a100-sxm-80gb", 8192, 512, {"dp": 8, "zero_stage": 2}, (True, True)),
    "8b 16": ("8b", "h100", 8192, 512, {"pp": 2, "vpp": 4, "dp": 8, **INTERLEAVED}, (False, True)),
    "8b 64": ("8b", "h100", 8192, 512, {"pp": 2, "vpp": 4, "dp": 32, **INTERLEAVED}, (False, True)),
    "1b 8": ("llama-3.2-1b", "h100", 8192, 512, {"dp": 8, "micro_batch_size": 4}, (False, True)),
    "qwen3-30b 64": ("qwen3-30b-a3b", "h100", 4096, 1024,
                     {"pp": 2, "vpp": 3, "dp": 32, "ep": 8, "micro_batch_size": 2, **INTERLEAVED},
                     (False, True)),
    "gpt-oss-20b 32": ("gpt-oss-20b", "h100", 4096, 1024, {"dp": 32, "ep": 8, "micro_batch_size": 2},
                       (False, True)),
    "70b 64 MI300X": ("70b", "mi300x", 8192, 512, {"cp": 4, "pp": 4, "dp": 4}, (False, True)),
    "70b 64": ("70b", "h100", 8192, 512, {"tp": 4, "cp": 2, "pp": 4, "vpp": 5, "dp": 2, **TP, **INTERLEAVED},
               (False, False)),
    "70b 128 B200": ("70b", "b200", 8192, 512, {"tp": 2, "pp": 4, "vpp": 5, "dp": 16, **TP, **INTERLEAVED},
                     (False, True)),
    "405b 512": ("405b", "h100", 8192, 2048, {"tp": 8, "cp": 2, "pp": 16, "dp": 2, **TP}, (False, False)),
    "mixtral 64": ("mixtral-8x7b", "h100", 32768, 128,
                   {"tp": 2, "cp": 4, "pp": 2, "vpp": 4, "dp": 4, "ep": 8, **TP, **INTERLEAVED}, (False, True)),
    "deepseek-v3 256": ("deepseek-v3", "h200", 4096, 15360,
                        {"tp": 2, "pp": 8, "dp": 16, "ep": 16, "recompute": "selective", **TP}, (False, True)),
}  # fmt: skip
"""Plans like those that plan makes: model, GPU, sequence, batch, layout; and what is changed of them: ZeRO, layers
recomputed."""


def planned(name: str) -> Plan:
    model, hardware, seq_length, batch, layout, _ = PLANS[name]
    sizes = {**WHOLE, **layout}
    num_gpus = sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"]
    cluster = ClusterSpec(hardware=load_hardware(hardware), num_gpus=num_gpus)
    training = TrainingSpec(seq_length=seq_length, global_batch_size=batch)
    return evaluate(load_model(model), cluster, training, Parallelism(**sizes), runtime="megatron")


@pytest.mark.parametrize("name", PLANS)
def test_default_plans_fit_into_eager_torch(name: str) -> None:
    plan = planned(name)
    num_ranks = plan.parallelism.num_gpus_used
    start = what_starts(plan, GPUS, "plan probe plan.json")
    assert start.num_ranks == num_ranks
    said = " ".join(start.made_to_fit)
    assert tuple(word in said for word in ("ZeRO", "recomputed")) == PLANS[name][-1]
    capacity_bytes = plan.cluster.hardware.memory_bytes
    fullest = max(stage.total_bytes for stage in start.stages)
    assert 0.4 * capacity_bytes < fullest <= (1 - ROOM_FRACTION) * capacity_bytes
    assert set(start.commands) == {"torchrun", "slurm", "kubernetes"}
    alone = made_to_fit(plan, partial(stages_run, options=GPUS), capacity_bytes, alone=True)
    held = run_bytes(alone.run, plan.cluster, alone=True)
    assert max(stage.total_bytes for stage in held) <= (1 - ROOM_FRACTION) * capacity_bytes


def test_communicators_are_counted_as_they_are_made() -> None:
    """Of all ranks, tp and dp; two a neighbour: up, and down."""
    plan = planned("70b 128 B200")
    run = ranks_run(plan, GPUS, 128).run
    assert num_communicators(run) == [3 + 2 * 2] * 4  # of an interleaved order, whose ends are neighbours
    straight = run.model_copy(update={"ranks": (("0F0", "0B0"), ("1F0", "1B0")), "stage_to_rank": (0, 1), "dp": 1})
    assert num_communicators(straight.model_copy(update={"chunks": run.chunks[:2], "num_microbatches": 1})) == [6, 6]


def test_a_stage_that_never_fits_is_refused_with_what_it_needs() -> None:
    from planner.errors import ProbeError

    plan = planned("8b 8")
    with pytest.raises(ProbeError, match=r"needs \d+\.\d GiB of 4\.0 here, \d+\.\d with all layers recomputed"):
        made_to_fit(plan, partial(ranks_run, options=GPUS, num_gpus=8), 4 * GIB)


def test_the_documented_command_starts_a_run_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan --model 8b --gpus 16`, probed on the eight GPUs of a node."""
    torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")
    from planner.probe import probe as probing

    started = []

    def launch(run: Any, *_: Any, **__: Any) -> Any:
        started.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(probing, "require_startable", lambda plan, options: None)
    monkeypatch.setattr(probing, "launch", launch)
    plan = planned("8b 16")
    for options in (GPUS, GPUS._replace(stages="all")):
        with pytest.raises(KeyboardInterrupt):
            probing.probe(plan, options)
    held = [run_bytes(started[0], plan.cluster), run_bytes(started[1], plan.cluster, alone=True)]
    assert [run.world_size for run in started] == [8, 16]
    assert max(stage.total_bytes for stages in held for stage in stages) < plan.cluster.hardware.memory_bytes
    assert all(chunk.num_recomputed for run in started for chunk in run.chunks if chunk.num_layers)
