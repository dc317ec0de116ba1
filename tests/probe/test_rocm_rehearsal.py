"""The probe and the profile on a ROCm build of torch, rehearsed on a fake GPU: no kernel runs, every call is made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from fake_gpus import H200, MI300X, MI355X, ROCM_LACKS, FakeGPU, Neighbours, fake_gpu, fake_group  # noqa: E402
from small_plans import SMALL, plan_of  # noqa: E402
from torch_names import FILES, torch_names  # noqa: E402

from planner.errors import ProbeError  # noqa: E402
from planner.probe import torch_build  # noqa: E402
from planner.probe.launch.process import StageWorker, kind_of  # noqa: E402
from planner.probe.model.attention import require_flash  # noqa: E402
from planner.probe.probe import ProbeOptions, probe  # noqa: E402
from planner.probe.rank.groups import results_in  # noqa: E402
from planner.probe.rank.worker import Worker  # noqa: E402
from planner.probe.result import RankResult  # noqa: E402
from planner.probe.run import ProbeRun  # noqa: E402
from planner.profile.measure import Ranks, Stopwatch, exchange_rows, machine_of, tasks  # noqa: E402
from planner.profile.measurements import GPU  # noqa: E402
from planner.specs.model import ModelSpec  # noqa: E402

# torch 2.13 has new names for exchanges
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.distributed.*is deprecated:FutureWarning"),
]
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MLA = {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {}, "mixture": {"moe": MOE}, "latent": {"mla": MLA, "moe": MOE},
    "windows": {"sliding_window": 4, "sliding_window_pattern": 2}, "sinks": {"attention_sinks": True, "bias": True},
}  # fmt: skip


@pytest.fixture
def on_mi300x(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with fake_gpu(MI300X, monkeypatch, num_gpus=8) as cuda:
        yield cuda


def rehearsed(worker: Worker) -> RankResult:
    worker.main()
    return results_in(worker.store, [worker.rank])[0]


def on_gpus(run: ProbeRun) -> ProbeRun:
    return run.model_copy(update={"device": "cuda", "dtype": "bfloat16", "balanced_routing": True})


@pytest.mark.thorough(3)
@pytest.mark.parametrize("gpu", [MI300X, H200], ids=["rocm", "cuda"])
@pytest.mark.parametrize("model", MODELS)
def test_a_stage_alone(model: str, gpu: FakeGPU, make_run: Any, monkeypatch: Any) -> None:
    run = make_run(("1f1b", 2, 1, 3), 4, check=False, num_steps=1, model=MODELS[model])
    with fake_gpu(gpu, monkeypatch) as cuda:
        rank = rehearsed(StageWorker(on_gpus(run), 1, 0, Neighbours))
    assert (rank.device_name, rank.chunks[0].forward_s > 0) == (gpu.name, True)
    assert rank.memory is not None
    ran = set(cuda.functions)
    assert ("_grouped_mm" in ran) == ("moe" in MODELS[model])
    assert not rank.experts_one_by_one
    # AOTriton's flash kernel, called by itself, is the only fused one that is sure to take values narrower than keys
    by_itself = model in ("windows", "sinks") or (model == "latent" and gpu is MI300X)
    assert ("_flash_attention_forward" in ran) == by_itself
    assert ("scaled_dot_product_attention" in ran) == (not by_itself or model == "windows")


@pytest.mark.thorough(3)
@pytest.mark.parametrize("model", ["dense", "mixture", "latent"])
def test_a_rank_among_others(model: str, make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every phase from the handshake on, with tensor, expert, data and pipeline parallelism over RCCL."""
    shape: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "dp": 2, "ep": 4 if "moe" in MODELS[model] else 1}
    run = make_run(("1f1b", 2, 1, 3), check=False, num_steps=1, model=MODELS[model], **shape)
    with fake_gpu(MI300X, monkeypatch, num_gpus=8), fake_group(monkeypatch) as backends:
        rank = rehearsed(Worker(on_gpus(run), 0, 0, Neighbours))
    assert backends == ["nccl"]
    names = {exchange.name for exchange in rank.exchanges}
    assert {"tp all-gather", "tp all-reduce", "gradient reduce-scatter", "weight all-gather"} <= names


def test_this_machine_is_told_by_its_compiler_target_and_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, architecture, runtime in ((MI300X, "cdna3", "ROCm 7.0"), (MI355X, "cdna4", "ROCm 7.1")):
        with monkeypatch.context() as patch, fake_gpu(gpu, patch, num_gpus=8):
            machine = machine_of("cuda")
        assert (machine.name, machine.architecture, machine.num_devices) == (gpu.name, architecture, 8)
        assert f", {runtime}" in machine.software
        assert machine.context_bytes == 23 * 2**30


def test_every_shape_of_the_profile_is_one_that_rocm_runs(on_mi300x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(bench: Stopwatch, call: Any) -> float:
        call()
        return 1.0

    monkeypatch.setattr(Stopwatch, "microseconds", once)
    measured = {"stream": 0, "gemm": 0, "attention": 0}
    for task in tasks("cuda", GPU):
        if task.table in measured:
            row = task.measure()
            measured[task.table] += row["forward_us"] == 1.0
            assert task.key.get("backend", "flash") == "flash", "there is no cuDNN"
    assert measured == {"stream": len(GPU.streams), "gemm": len(GPU.products), "attention": len(GPU.attentions)}


def test_links_are_timed_over_rccl(on_mi300x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_group(monkeypatch) as backends:
        rows = exchange_rows("cuda", Ranks(0, 8, 0, 8), (2**20,), store="store")
    assert backends == ["nccl"]
    assert [row["kind"] for row in rows] == ["all_gather", "reduce_scatter", "all_reduce"]


def test_queues_are_as_many_as_channels_before_a_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.probe.torch_build import default_device

    for gpu, variable in ((MI300X, "GPU_MAX_HW_QUEUES"), (H200, "CUDA_DEVICE_MAX_CONNECTIONS")):
        with monkeypatch.context() as patch, fake_gpu(gpu, patch):
            assert default_device() == "cuda"
            assert int(os.environ[variable]) >= 16


def test_sequences_that_would_attend_otherwise_are_refused(on_mi300x: Any) -> None:
    with pytest.raises(ProbeError, match="takes no sequences split over cp 2"):
        probe(plan_of(ModelSpec(**SMALL), 2, 32, 8, tp=1, pp=1, cp=2, dp=1), ProbeOptions(device="cuda"))
    with pytest.raises(ProbeError, match="takes no sequences split over cp 2"):
        require_flash(2, "cuda", "another trainer")


@pytest.mark.parametrize(("version", "takes"), [("2.9.1+rocm6.4", False), ("2.10.0a0+git1c57644", True)])
def test_grouped_products_are_torchs_where_rocm_has_them(
    version: str, takes: bool, on_mi300x: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert torch_build.this_build().takes_groups(torch.device("cpu")) == takes


def test_a_gpu_without_memory_says_so_in_hips_words() -> None:
    assert kind_of(RuntimeError("HIP error: out of memory\nHIP kernel errors")) == "out_of_memory"


def test_the_fake_gpu_refuses_what_rocm_lacks_and_what_it_does_not_know(on_mi300x: Any) -> None:
    namespace: dict[str, Any] = {"__name__": "planner.probe.somewhere"}
    exec("import torch\ndef call(name): return getattr(torch.cuda, name)()", namespace)
    for name in ("get_device_capability", "utilization"):
        with pytest.raises(AssertionError, match="under ROCm"):
            namespace["call"](name)
    with pytest.raises(AssertionError, match="no part of the fake GPU"):
        namespace["call"]("ipc_collect")


def test_the_fake_gpu_refuses_tensors_of_the_host_among_its_own(on_mi300x: Any) -> None:
    namespace: dict[str, Any] = {"__name__": "planner.probe.somewhere", "torch": torch}
    exec("def mixed(on): return torch.arange(2) * torch.ones(2, device=on)", namespace)
    exec("def sent(): return (torch.ones(2) / 2).to('cuda') + torch.ones(2, device='cuda')", namespace)
    assert namespace["sent"]().shape == (2,)
    assert namespace["mixed"]("cpu").shape == (2,)
    with pytest.raises(AssertionError, match="mul of tensors in the host's memory and on a GPU"):
        namespace["mixed"]("cuda:0")


NAMES = {path: torch_names(path) for path in FILES}


def test_what_rocm_lacks_stands_in_one_place() -> None:
    home = Path(torch_build.__file__)
    lacking = {
        f"{path.name}: torch.{name}"
        for path, names in NAMES.items()
        for name in names
        for lacks in ROCM_LACKS
        if path != home and (name == lacks or name.startswith(f"{lacks}."))
    }
    assert lacking == set(), "ask planner/probe/torch_build.py"
    assert NAMES[home] >= {"cuda.get_device_capability", "version.cuda"}, "names are found"
