"""What only runs on a GPU, run once on stand-ins for torch.cuda: events, memory, devices, NCCL's exchanges."""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from fake_gpus import Neighbours  # noqa: E402

from planner.errors import ProbeError  # noqa: E402
from planner.probe import worker as exported  # noqa: E402
from planner.probe.launch.process import StageWorker  # noqa: E402
from planner.probe.model.layers import takes_groups  # noqa: E402
from planner.probe.model.peers import GroupPeers  # noqa: E402
from planner.probe.rank import exchanges  # noqa: E402
from planner.probe.rank.gradients import FlatParameters, Sharding  # noqa: E402
from planner.probe.rank.groups import RankGroups, results_in  # noqa: E402
from planner.probe.rank.pipeline import RankClock, StepRecord  # noqa: E402
from planner.probe.rank.training import trainer_alone  # noqa: E402
from planner.probe.rank.worker import Worker  # noqa: E402
from planner.probe.torch_build import GATHER, SCATTER, default_device, require_gpu, this_build  # noqa: E402
from planner.profile import measure  # noqa: E402
from planner.profile.measure import Ranks, Stopwatch, machine_of, tasks  # noqa: E402
from planner.profile.measurements import QUICK  # noqa: E402

GIB = 2**30


class Event:
    """Recorded at every tenth of a second, one after the other."""

    now_s = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_s: float | None = None

    def record(self) -> None:
        Event.now_s += 0.1
        self.at_s = Event.now_s

    def synchronize(self) -> None:
        assert self.at_s is not None

    def elapsed_time(self, end: Event) -> float:
        assert self.at_s is not None
        assert end.at_s is not None
        return 1e3 * (end.at_s - self.at_s)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch.cuda of a machine with two GPUs; what was called of it, in order."""
    calls: list[str] = []

    def noted(name: str, value: Any = None) -> None:
        def call(*arguments: Any, **_: Any) -> Any:
            calls.append(" ".join([name, *map(str, arguments)]))
            return value

        monkeypatch.setattr(torch.cuda, name, call)

    properties = SimpleNamespace(
        name="NVIDIA H200", uuid="GPU-1", major=9, minor=0, total_memory=140 * GIB, multi_processor_count=132
    )
    for name, value in {
        "is_available": True, "is_current_stream_capturing": False, "device_count": 2, "set_device": None,
        "current_device": 1, "synchronize": None, "empty_cache": None, "get_device_properties": properties,
        "get_device_name": "NVIDIA H200", "get_device_capability": (9, 0), "reset_peak_memory_stats": None,
        "memory_allocated": 10 * GIB, "max_memory_allocated": 20 * GIB, "max_memory_reserved": 21 * GIB,
        "memory_reserved": 0, "mem_get_info": (117 * GIB, 140 * GIB),
    }.items():  # fmt: skip
        noted(name, value)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return calls


def test_a_stage_alone_on_a_gpu(make_run: Any, called: list[str], monkeypatch: Any) -> None:
    run = make_run(("1f1b", 2, 1, 3), check=False, warm_up_steps=2, num_steps=1, dtype="bfloat16")
    worker = StageWorker(run.model_copy(update={"device": "cuda"}), 1, 0, Neighbours)

    def use_device() -> None:
        Worker.use_device(worker)
        worker.device = "cpu"  # where its tensors really are

    monkeypatch.setattr(worker, "use_device", use_device)
    monkeypatch.setattr("planner.probe.rank.training.RankClock", lambda device: RankClock("cuda:0"))
    worker.main()
    (rank,) = results_in(worker.store, [1])
    assert rank.device_name == "NVIDIA H200"
    assert (rank.memory.static_bytes, rank.memory.peak_allocated_bytes) == (10 * GIB, 20 * GIB)
    assert (rank.memory.peak_reserved_bytes, rank.memory.device_used_bytes) == (21 * GIB, 23 * GIB)
    assert [chunk.stage for chunk in rank.chunks] == [1]
    assert rank.chunks[0].forward_s == pytest.approx(0.1)
    order = [call.split()[0] for call in called]
    # static memory after what building needed is freed; peaks from the start of each step
    assert order.index("set_device") < order.index("empty_cache") < order.index("memory_allocated")
    assert order.index("memory_allocated") < order.index("reset_peak_memory_stats") < order.index("mem_get_info")
    assert order.count("reset_peak_memory_stats") == 3


def test_a_gpu_is_waited_for_behind_the_whole_step(make_run: Any, called: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(Event, "synchronize", lambda event: called.append("synchronize event"))
    monkeypatch.setattr(FlatParameters, "step", lambda flat, scale: called.append("optimizer"))
    monkeypatch.setattr("planner.probe.rank.training.RankClock", lambda device: RankClock("cuda:0"))
    trainer = trainer_alone(make_run(("1f1b", 2, 1, 3), check=False), 1, "cpu")
    trainer.step(0, lambda at: None)
    assert called.index("optimizer") < called.index("synchronize event")


def test_where_a_gpu_hangs_is_the_first_mark_that_it_does_not_get_to(called: list[str], monkeypatch: Any) -> None:
    def synchronize(event: Event) -> None:
        if event is hung:
            raise TimeoutError

    monkeypatch.setattr(Event, "synchronize", synchronize)
    clock, told = RankClock("cuda:0"), list[str]()
    clock.start()
    marks = [(action, *(clock.mark() for _ in range(3))) for action in ("0F0", "0F1", "0F2")]
    for mark, words in ((2, "0F1 (waiting)"), (3, "0F1 (computing)")):
        hung = marks[1][mark]
        with pytest.raises(TimeoutError):
            StepRecord(marks).read(clock, told.append)  # type: ignore[arg-type]
        assert told[-1] == words


@pytest.mark.parametrize(
    "start", [default_device, lambda: require_gpu("cuda"), lambda: exported.main(["--config", "none"])]
)
def test_connections_are_set_before_cuda_is_asked_for_anything(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[str | None] = []

    def is_available() -> bool:
        connections.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        return True

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # put back afterwards
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    start()
    assert connections == ["32"]


@pytest.mark.parametrize(
    ("inherited", "rank", "used", "is_told"),
    [("1", None, "32", True), ("1", "3", "32", False), ("many", "0", "32", True), ("64", "0", "64", False)],
)
def test_connections_that_a_training_script_left_are_overridden(
    inherited: str, rank: str | None, used: str, is_told: bool, called: list[str], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", inherited)
    monkeypatch.setenv("RANK", rank or "0")
    if rank is None:
        monkeypatch.delenv("RANK")
    require_gpu("cuda")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == used
    told = f"CUDA_DEVICE_MAX_CONNECTIONS={inherited} of the environment is overridden by 32"
    assert (told in caplog.text) == is_told


def test_groups_have_the_time_limit_of_their_ranks(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[timedelta] = []
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks, timeout: limits.append(timeout))
    RankGroups.of(make_run(("1f1b", 2, 1, 3)), 0, timedelta(seconds=7))
    assert set(limits) == {timedelta(seconds=7)}


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 5), "turing"),
        ((8, 0), "ampere"),
        ((8, 9), "ada"),
        ((9, 0), "hopper"),
        ((10, 3), "blackwell"),
        ((13, 0), "sm_130"),
    ],
)
def test_silicon_is_told_by_capability(capability: tuple[int, int], name: str) -> None:
    major, minor = capability
    assert this_build().architecture_of(SimpleNamespace(major=major, minor=minor)) == name


@pytest.mark.parametrize(("value", "is_refused"), [("1", True), ("0", False), ("", False)])
def test_launches_that_block_are_refused(value: str, is_refused: bool, called: list[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    with pytest.raises(ProbeError, match="CUDA_LAUNCH_BLOCKING") if is_refused else nullcontext():
        require_gpu("cuda")


def test_connections_are_set_before_links_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the device is named, so that nothing looked for one."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")  # put back afterwards
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ProbeError, match="torch sees no GPU"):
        machine_of("cuda")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


@pytest.mark.parametrize(("visible", "device"), [(4, "cuda:3"), (1, "cuda:0"), (2, None)])
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_it_is_shown(
    visible: int, device: str | None, make_run: Any, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    run = make_run(("1f1b", 2, 1, 3)).model_copy(update={"device": "cuda"})
    worker = Worker(run, 1, 3, Neighbours)
    if device is None:
        with pytest.raises(RuntimeError, match="no GPU for rank 1, number 3 of its machine: torch sees 2"):
            worker.use_device()
        return
    worker.use_device()
    assert called == [f"get_device_properties {device[-1]}", f"set_device {device}"], (
        "it is looked at before it is used"
    )
    assert worker.identity().device == "GPU-1"
    assert default_device() == "cuda"


def test_ranks_wait_for_each_other_on_their_own_gpus(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(
        torch.distributed, "barrier", lambda group, device_ids: called.append(f"barrier {group} {device_ids}")
    )
    exchanges.barrier("cuda:1", "tp")
    assert called == ["synchronize", "current_device", "barrier tp [1]"]


class OnGPU:
    """A tensor that says it is on a GPU."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.is_cuda, self.device = tensor, True, SimpleNamespace(type="cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def __getitem__(self, index: Any) -> Any:
        return self.tensor[index]


def test_nccl_scatters_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    scattered: list[tuple[int, ...]] = []

    def scatter(shard: Any, whole: Any, group: Any) -> None:
        scattered.append((shard.numel(), whole.numel()))

    monkeypatch.setattr(torch.distributed, SCATTER, scatter)
    whole: Any = OnGPU(torch.ones(8, 3))
    assert GroupPeers(4, 1, True).reduce_scatter(whole).shape == (2, 3)
    for stands_for in (1, 2):
        sharding = Sharding("dp", 4, 1, stands_for=stands_for)
        flat = FlatParameters([torch.nn.Parameter(torch.ones(10))], [], sharding, torch.float32, 1e-3)
        flat.grads = OnGPU(flat.grads)  # type: ignore[assignment]
        exchanged = next(flat.exchanges())
        exchanged.call()
        assert (exchanged.name, exchanged.passes) == ("gradient reduce-scatter", 1)
    assert scattered == [(6, 24), (3, 12), (4, 16)]


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped products")
def test_grouped_products_are_torchs_on_hopper_in_bf16(called: list[str]) -> None:
    assert takes_groups(OnGPU(torch.empty(1, dtype=torch.bfloat16)))  # type: ignore[arg-type]
    assert not takes_groups(OnGPU(torch.empty(1)))  # type: ignore[arg-type]


def test_kernels_are_timed_between_events(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones(2, 2)
    monkeypatch.setattr(Stopwatch, "normal", lambda *_: called.append("operand") or ones)
    bench = Stopwatch("cuda", 0.5)
    assert bench.microseconds(lambda: None) == pytest.approx(1e5)
    assert called[0] == "operand", "a cold GPU is warmed up"
    called.clear()
    machine = machine_of("cuda")
    assert called.index("operand") < called.index("mem_get_info 0"), "a product is run before memory is read"
    assert (machine.name, machine.architecture, machine.num_sms) == ("NVIDIA H200", "hopper", 132)
    assert (machine.memory_bytes, machine.context_bytes, machine.num_devices) == (140 * GIB, 23 * GIB, 2)
    backends = {task.key["backend"] for task in tasks("cuda", QUICK) if task.table == "attention"}
    assert backends == {"flash", "cudnn"}


@pytest.mark.parametrize(("visible", "device"), [(2, 1), (1, 0)])
def test_links_are_timed_over_nccl(visible: int, device: int, called: list[str], monkeypatch: Any) -> None:
    exchanged, limits = list[str](), list[float]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)

    def noted(name: str, value: Any = None) -> None:
        def call(*arguments: Any, **named: Any) -> Any:
            exchanged.append(f"{name} {arguments[0]}" if name == "init_process_group" else name)
            limits.extend([named["timeout"].total_seconds()] if name == "new_group" else [])
            return value

        monkeypatch.setattr(torch.distributed, name, call)

    names = ("init_process_group", "destroy_process_group", "barrier", GATHER, "all_reduce")
    for name in (*names, SCATTER, "new_group"):
        noted(name)
    monkeypatch.setattr(measure, "_on", lambda device: "cpu")
    rows = measure.exchange_rows("cuda", Ranks(1, 2, 1, 2), (64,), store="store", wait_s=7.0)
    assert [(row["tier"], row["kind"], row["num_bytes"]) for row in rows] == [
        (0, "all_gather", 64), (0, "reduce_scatter", 64), (0, "all_reduce", 64),
    ]  # fmt: skip
    assert called[0] == f"set_device {device}"
    assert set(limits) == {7.0}
    assert exchanged[0] == "init_process_group nccl"
    assert exchanged[-1] == "destroy_process_group"
    assert {GATHER, SCATTER, "all_reduce", "barrier"} <= set(exchanged)
