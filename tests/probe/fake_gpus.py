"""A fake GPU on a machine without any: torch as a CUDA or a ROCm build of it presents itself, without memory or time.

Tensors are torch's fake ones (shapes and dtypes, no values), so that stages of real size run in a second. They live on
the CPU, whose autograd every build has, and say that they are on a GPU. What our own modules take of torch.cuda is what
stands in `FakeCuda`; anything else, and whatever ROCm builds lack, is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

GIB = 2**30
_GPU = torch.device("cuda", 0)


@dataclass(frozen=True)
class FakeGPU:
    """A GPU as torch.cuda.get_device_properties describes it, and the build of torch that drives it."""

    name: str
    gcnArchName: str  # noqa: N815
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    warp_size: int
    hip: str | None = None
    cuda: str | None = None
    uuid: str = "GPU-0"


MI300X = FakeGPU(
    "AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 9, 4, round(191.98 * GIB), 304, 64, hip="7.0.51831-a3e329ad8"
)
MI355X = FakeGPU(
    "AMD Instinct MI355X", "gfx950:sramecc+:xnack-", 9, 5, round(287.98 * GIB), 256, 64, hip="7.1.52802-26aae437f6"
)
H200 = FakeGPU("NVIDIA H200", "NVIDIA H200", 9, 0, round(139.8 * GIB), 132, 32, cuda="12.8")

ROCM_LACKS = {
    "nn.attention.SDPBackend.CUDNN_ATTENTION": "no cuDNN (aten/native/transformers/cuda/sdp_utils.cpp)",
    "backends.cuda.enable_cudnn_sdp": "no cuDNN (same)", "backends.cuda.cudnn_sdp_enabled": "no cuDNN (same)",
    "backends.cudnn": "stands for MIOpen there, with versions of its own (torch/backends/cudnn)",
    "cuda.get_device_capability": "9.4 of gfx942 is no compute capability (docs/source/notes/hip.rst)",
    "cuda.utilization": "needs pynvml, or AMD's amdsmi (torch/cuda/__init__.py)",
    "cuda.temperature": "needs pynvml, or AMD's amdsmi (same)",
    "cuda.power_draw": "needs pynvml, or AMD's amdsmi (same)",
    "cuda.clock_rate": "needs pynvml, or AMD's amdsmi (same)",
    "cuda.device_memory_used": "needs pynvml, or AMD's amdsmi (same)",
    "cuda.list_gpu_processes": "needs pynvml, or AMD's amdsmi (torch/cuda/memory.py)",
    "cuda.green_contexts": "CUDA's own (torch/cuda/green_contexts.py)",
    "cuda.gds": "cuFile, CUDA's own (torch/cuda/gds.py)", "version.cuda": "None there (docs/source/notes/hip.rst)",
    "float8_e4m3fn": "gfx942 has float8_e4m3fnuz (aten/native/cuda/GroupedBlas.cpp)",
    "float8_e5m2": "gfx942 multiplies float8_e5m2fnuz (same)",
}  # fmt: skip
"""Names below torch that ROCm builds lack or give another meaning, why, and where it is written (pytorch/pytorch)."""


class Event:
    """Recorded a tenth of a second after the last one."""

    now_s = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_s = 0.0

    def record(self) -> None:
        Event.now_s += 0.1
        self.at_s = Event.now_s

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


@dataclass
class FakeCuda:
    """torch.cuda as our modules see it. torch's own modules keep the real one."""

    gpu: FakeGPU
    num_gpus: int = 1
    calls: list[str] = field(default_factory=list)
    """Names below torch.cuda that our modules asked for."""
    functions: list[str] = field(default_factory=list)
    """Names of the functions of torch that ran."""
    real: Any = torch.cuda

    def __getattr__(self, name: str) -> Any:
        if not _asked_by_planner():
            return getattr(self.real, name)
        if self.gpu.hip is not None and f"cuda.{name}" in ROCM_LACKS:
            raise AssertionError(f"torch.cuda.{name} under ROCm: {ROCM_LACKS[f'cuda.{name}']}")
        values = self.values()
        if name not in values:
            raise AssertionError(f"torch.cuda.{name} is no part of the fake GPU: add it, if ROCm builds have it")
        self.calls.append(name)
        value = values[name]
        return value if isinstance(value, type) else lambda *_, **__: value

    def values(self) -> dict[str, Any]:
        """The value that each function of torch.cuda returns."""
        total = self.gpu.total_memory
        return {
            "is_available": True, "device_count": self.num_gpus, "set_device": None, "current_device": 0,
            "synchronize": None, "empty_cache": None, "get_device_properties": self.gpu,
            "get_device_name": self.gpu.name, "get_device_capability": (self.gpu.major, self.gpu.minor),
            "reset_peak_memory_stats": None, "memory_allocated": 10 * GIB, "max_memory_allocated": 20 * GIB,
            "max_memory_reserved": 21 * GIB, "memory_reserved": 0, "mem_get_info": (total - 23 * GIB, total),
            "Event": Event,
        }  # fmt: skip


_WRITTEN_IN_PYTHON = (
    "torch.nn.functional", "torch.overrides", "torch._tensor", "torch.functional", "torch._jit_internal",
)  # fmt: skip


def _asked_by_planner() -> bool:
    """True if one of our modules called, by itself or through a function of torch that is written in Python."""
    frame = sys._getframe(2)
    while frame.f_globals["__name__"] in _WRITTEN_IN_PYTHON and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith("planner.")


MADE = {"empty", "zeros", "ones", "full", "arange", "tensor", "randn", "randint", "rand"}
"""Functions that make a tensor on the device that they are told, else in the host's memory."""
TAKES_HOST = {"copy_", "__getitem__", "__setitem__", "tensor_split", "to", "set_", "__set__"}
"""Functions of a GPU's tensor to which a tensor in the host's memory may be given."""


class OnGPU(TorchFunctionMode):
    """Tensors that are made on a GPU are made here; nobody can read their values; attention obeys the build's rules.

    A tensor that our modules make in the host's memory is marked, and so is what is computed from it. Together with
    others, which are on the GPU, it is an error, as on a real one.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        on_host = _is_on_host(name, args, kwargs) if _asked_by_planner() else None
        args, kwargs = tuple(_here(value) for value in args), {k: _here(value) for k, value in kwargs.items()}
        self.cuda.functions.append(name)
        if func is torch.Tensor.item or func is torch.Tensor.__float__:
            return 1.0
        if func is torch.Tensor.tolist:
            return _ones(*args[0].shape)
        if func is torch.nn.functional.scaled_dot_product_attention:
            _require_equal_widths(self.cuda.gpu, *args[:3], kwargs.get("attn_mask"))
        result = func(*args, **kwargs)
        for tensor in _tensors(result) if on_host is not None else ():
            tensor.on_host = on_host  # type: ignore[attr-defined]
        return result


def is_on_host(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "on_host", False)


def _is_on_host(name: str, args: Any, kwargs: Any) -> bool | None:
    """True if a function's result is in the host's memory, False if on the GPU, None if that is no question.

    Raises AssertionError where it takes tensors of both. Tensors of one number may be on the host anywhere.
    """
    devices = [value for value in (*args, *kwargs.values()) if isinstance(value, (str, torch.device))]
    told = [str(device) for device in devices if str(device).partition(":")[0] in ("cpu", "cuda", "meta")]
    if name in MADE:
        return not told or told[0] == "cpu"
    if name == "cpu":
        return True
    if name == "to" and told:
        return told[0] == "cpu"
    given = [tensor for value in (*args, *kwargs.values()) for tensor in _tensors(value)]
    if not given:
        return None
    if name.startswith("new_") or name == "to":  # beside the first one, or where another one is
        return is_on_host(given[-1] if name == "to" else given[0])
    hosts = [is_on_host(tensor) for tensor in given if tensor.dim() or name == "detach"]
    if name not in TAKES_HOST and len(set(hosts)) > 1:
        raise AssertionError(f"torch.{name} of tensors in the host's memory and on a GPU: {[t.shape for t in given]}")
    return is_on_host(given[0]) if name in TAKES_HOST else any(hosts) if hosts else all(map(is_on_host, given))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def _ones(*shape: int) -> Any:
    return [_ones(*shape[1:]) for _ in range(shape[0])] if shape else 1.0


def _here(value: Any) -> Any:
    """A device in place of a GPU."""
    is_gpu = (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.partition(":")[0] == "cuda"
    )
    return torch.device("cpu") if is_gpu else value


def _require_equal_widths(gpu: FakeGPU, q: Any, k: Any, v: Any, mask: Any) -> None:
    if gpu.hip is not None and mask is None and v.shape[-1] != k.shape[-1]:
        raise RuntimeError("No available kernel: AOTriton's wants values as wide as keys, and torch falls back to math")


class Generator(torch.Generator):
    """A generator of random numbers for a GPU, which is none."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, _here(device))  # type: ignore[call-arg]


@contextmanager
def fake_gpu(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch, num_gpus: int = 1) -> Iterator[FakeCuda]:
    """A machine with `num_gpus` of a GPU, a build of torch for it, and none of NVIDIA's tools under ROCm."""
    cuda = FakeCuda(gpu, num_gpus)
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", gpu.hip)
    monkeypatch.setattr(torch.version, "cuda", gpu.cuda)
    monkeypatch.setenv("PATH", "")
    for name in ("pynvml", "amdsmi"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES"):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch, "Generator", Generator)
    real = torch.Tensor.is_cuda
    on_gpu = property(lambda tensor: (_asked_by_planner() and not is_on_host(tensor)) or real.__get__(tensor))
    monkeypatch.setattr(torch.Tensor, "is_cuda", on_gpu, raising=False)
    real_device = FakeTensor.device

    def device(tensor: FakeTensor) -> torch.device:
        # within a backward nobody would translate it
        says_gpu = torch._C._len_torch_function_stack() and _asked_by_planner() and not is_on_host(tensor)
        return _GPU if says_gpu else real_device.__get__(tensor)

    monkeypatch.setattr(FakeTensor, "device", property(device))
    with FakeTensorMode(), OnGPU(cuda):
        yield cuda


class Neighbours:
    """A store in which all other ranks have said the same as this one, but for their device."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set_timeout(self, timeout: Any) -> None: ...

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return True

    def get(self, key: str) -> bytes:
        own = next((value for name, value in list(self.values.items()) if name.startswith("rank ")), "")
        if key == "verdict":  # which rank 0 says
            return self.values.get(key, '["", []]').encode()
        return self.values.get(key, own.replace("GPU-0", f"GPU-{key.split()[-1]}")).encode()


@contextmanager
def fake_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Process groups without any other process, whose exchanges return at once. Gives the backends asked for."""
    backends: list[str] = []
    init: Callable[..., None] = dist.init_process_group

    def init_process_group(backend: str, rank: int, world_size: int, **_: Any) -> None:
        backends.append(backend)
        init("fake", rank=rank, world_size=world_size, store=FakeStore())

    from_group = DeviceMesh.from_group

    def mesh_from_group(*args: Any, **kwargs: Any) -> DeviceMesh:
        with unset_fake_temporarily():  # a mesh looks for this rank in a tensor
            return from_group(*args, **kwargs)

    monkeypatch.setattr(DeviceMesh, "from_group", staticmethod(mesh_from_group))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    try:
        yield backends
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
