"""The exported file is the run that was planned; torchrun starts our runner with it, and it trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from tables import beside

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.export import bundle_of, write_bundle
from planner.export.stages import ORDER_FILE
from planner.export.torch_runner import PIPELINING_FILE, PLAN_FILE, export_torch
from planner.schedule.orders import build_schedule
from planner.search.search import plan as search
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import SearchLimits, TrainingSpec

pytest.importorskip("torch", reason="torch is not installed")

TABLES = beside(__file__)

Planned = Callable[..., Plan]

SMALL = ModelSpec.model_validate(
    {
        "name": "small", "num_hidden_layers": 6, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "first_k_dense_replace": 2,
    }
)  # fmt: skip


def eager(planned: Planned, model: str | ModelSpec = "llama-3.1-8b", gpus: int = 16, **options: Any) -> Plan:
    return planned(model, gpus, runtime="torch-eager", **options)


def written(plan: Plan, folder: Path) -> Path:
    write_bundle(bundle_of(plan, ["torch"]), folder)
    return folder / PLAN_FILE


@pytest.mark.parametrize(("model", "gpus", "options"), TABLES["the_file_is_the_planned_run"])
def test_the_file_is_the_planned_run(
    planned: Planned, tmp_path: Path, model: str, gpus: int, options: dict[str, Any]
) -> None:
    from planner.probe.worker import read_run

    plan = eager(planned, model, gpus, **options)
    run, layout = read_run(written(plan, tmp_path)), plan.parallelism
    assert run.world_size == gpus
    assert (run.pp, run.tp, run.cp, run.dp, run.ep) == (layout.pp, layout.tp, layout.cp, layout.dp, layout.ep)
    assert (run.whole_seq_length, run.seq_length) == (2048, 2048 // layout.cp)
    assert run.zero == (layout.zero_stage > 0)
    assert run.num_microbatches == layout.num_microbatches
    held: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(layout.pp)}
    recomputed = dict.fromkeys(range(layout.pp), 0)
    for stage, chunk in enumerate(run.chunks):
        held[run.stage_to_rank[stage]].append((chunk.first_layer, chunk.last_layer))
        recomputed[run.stage_to_rank[stage]] += chunk.num_recomputed
    assert held == {stage.stage: list(stage.chunks) for stage in plan.stages}
    assert recomputed == {stage.stage: stage.recompute.get("full", 0) for stage in plan.stages}
    assert run.chunks[0].embedding
    assert run.chunks[-1].head
    counts = [len(actions) for actions in run.ranks]
    assert min(counts) >= 2 * layout.vpp * layout.num_microbatches
    assert run.model.num_hidden_layers == plan.model.spec.num_hidden_layers


def test_an_order_made_to_measure_is_run_as_it_is(planned: Planned, tmp_path: Path) -> None:
    from planner.probe.worker import read_run

    plan = eager(planned, pp=4, num_microbatches=8)
    order = [" ".join(map(str, actions)) for actions in build_schedule("zb-h1", 4, 1, 8).ranks]
    layout = plan.parallelism.model_copy(update={"schedule": "auto"})
    best = plan.best.model_copy(update={"actions": tuple(order), "parallelism": layout})
    run = read_run(written(plan.model_copy(update={"best": best}), tmp_path))
    assert [" ".join(actions) for actions in run.ranks] == order
    assert "schedule" not in json.loads((tmp_path / PIPELINING_FILE).read_text()), "torch has no class for it"


def test_what_torch_s_pipelining_needs(planned: Planned, tmp_path: Path) -> None:
    plan = eager(planned, pp=4, vpp=2, layers_per_stage=(1, 5, 4, 4, 4, 5, 5, 4))
    written(plan, tmp_path)
    assert json.loads(
        (tmp_path / PIPELINING_FILE).read_text(),
    ) == {
        "schedule": "Interleaved1F1B", "pp": 4, "n_microbatches": 16, "stage_layers": [1, 5, 4, 4, 4, 5, 5, 4],
        "stage_to_rank": [0, 1, 2, 3, 0, 1, 2, 3], "csv": ORDER_FILE,
    }  # fmt: skip


def test_a_class_that_would_refuse_the_plan_is_not_named(planned: Planned, tmp_path: Path) -> None:
    written(eager(planned, pp=4, num_microbatches=2), tmp_path)
    assert "schedule" not in json.loads((tmp_path / PIPELINING_FILE).read_text()), "1F1B wants a micro-batch a stage"


def test_long_sequences_are_planned_over_cp_and_exported(tmp_path: Path) -> None:
    from planner.probe.worker import read_run

    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=64)
    training = TrainingSpec(seq_length=131072, global_batch_size=16)
    # eager torch's attention over cp is FlashAttention-2, half as fast as cuDNN's on this GPU: nobody chooses it here
    best = search(load_model("8b"), cluster, training, limits=SearchLimits(cp=(2, 4, 8)), runtime="torch-eager")
    run = read_run(written(best, tmp_path))
    assert run.cp == best.parallelism.cp > 1
    assert (run.seq_length * run.cp, run.world_size) == (131072, 64)


@pytest.mark.parametrize(("runtime", "cp", "said"), [("megatron", 2, 1), ("megatron", 1, 0), ("torch-eager", 2, 0)])
def test_keys_are_gathered_whatever_was_planned(planned: Planned, runtime: str, cp: int, said: int) -> None:
    notes = export_torch(planned("llama-3.1-8b", 16, runtime=runtime, cp=cp)).notes
    assert sum("gathers keys and values over cp, which was planned as p2p" in note for note in notes) == said


def test_sequences_that_do_not_split_are_named(planned: Planned, tmp_path: Path) -> None:
    from planner.probe.worker import read_run

    path = written(eager(planned, tp=2, cp=2), tmp_path)
    path.write_text(path.read_text().replace("seq_length: 2048", "seq_length: 2046"))
    with refused(r"seq_length: 2046 tokens do not split over cp 2 and tp 2", "a multiple of 4"):
        read_run(path)


def test_a_missing_schedule_is_named(planned: Planned, tmp_path: Path) -> None:
    from planner.probe.worker import read_run

    path = written(eager(planned, pp=4), tmp_path)
    (tmp_path / ORDER_FILE).unlink()
    with pytest.raises(SpecError, match=r"schedule\.csv: no such file"):
        read_run(path)


def trained(plan: Plan, folder: Path, steps: int) -> dict[str, Any]:
    """The answers of a plan's ranks about their steps, when the exported launch.sh starts them on the CPU."""
    written(plan, folder)
    layout = plan.parallelism
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1",
        "MASTER_PORT": str(20_000 + os.getpid() % 10_000 + 2 * layout.pp + 4 * layout.cp + layout.tp),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(folder / "launch.sh"), "--device", "cpu", "--steps", str(steps)],
        env=environment, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_torchrun_trains_it(planned: Planned, tmp_path: Path) -> None:
    plan = eager(planned, SMALL, 2, seq_length=32, num_microbatches=4, pp=2, vpp=2)
    answer = trained(plan, tmp_path, steps=1)
    assert len(answer["step_s"]) == 1
    assert 4 < answer["loss"][0] < 6, "ln 128 = 4.9"
    measured = {int(stage): parameters for stage, parameters in answer["num_parameters"].items()}
    assert measured == {stage.stage: stage.num_parameters for stage in plan.stages}


@pytest.mark.thorough(0)
def test_split_sequences_train_as_whole_ones_do(planned: Planned, tmp_path: Path) -> None:
    losses = []
    for options in ({}, {"cp": 2, "ep": 2}):
        plan = eager(planned, SMALL, options.get("cp", 1), seq_length=32, num_microbatches=4, **options)
        losses.append(trained(plan, tmp_path / str(len(losses)), steps=2)["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=3e-4), "but for bf16"


@pytest.mark.thorough(0)
def test_the_wrong_number_of_ranks_is_refused(planned: Planned, tmp_path: Path) -> None:
    path = written(eager(planned, SMALL, 2, seq_length=32, pp=2), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "planner.probe.worker", "--config", str(path), "--device", "cpu"],
        cwd=Path(__file__).parents[2],
        env={key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "SLURM_NTASKS")},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert "error: 1 ranks were started, the plan has 2" in done.stderr
