"""Stands in for the CUDA that a trainer asks for on a machine that has none; Python runs it before any program.

Calls about devices answer as one H100 would or do nothing, tensors for a GPU are made on the CPU, and modules that need
triton or a compiler hold nothing. What is computed is the trainer's own. `scripts/run_exports` puts it on PYTHONPATH.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
import typing
from collections import defaultdict

CPU = "cpu"
EMPTY = ("megatron.core.transformer.moe.ops.", "megatron.core.ssm.ops.", "megatron.core.datasets.helpers_cpp",
         "torchtitan.distributed.minimal_async_ep.kernels")  # fmt: skip
"""Modules, and beginnings of modules, that need triton or a compiler."""


class Nothing:
    """A stream, an event, or what is entered and left."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return False

    def __getattr__(self, name):
        return {"elapsed_time": lambda end: 0.0, "query": lambda: True}.get(name, Nothing)


def nothing(*args, **kwargs):
    return None


class Module(types.ModuleType):
    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return sample_index if name.startswith("build_sample_idx") else None


def sample_index(sizes, documents, length, num_epochs, tokens_per_epoch, drops_last=True, extra=1):
    """Where each sequence begins in the documents that are laid behind each other: document and offset."""
    import numpy

    count = (num_epochs * tokens_per_epoch - extra) // length
    begins = numpy.arange(count + 1) * length
    ends = numpy.concatenate([[0], numpy.cumsum(sizes[documents])])
    index = numpy.minimum(numpy.searchsorted(ends, begins, side="right") - 1, len(documents) - 1)
    return numpy.stack([index, begins - ends[index]], axis=1).astype(numpy.int32)


class Norms:
    """Norms of any kind, as Transformer Engine has them; Megatron-LM's own without it know fewer (torch_norm.py)."""

    def __new__(cls, config, hidden_size, eps=1e-5, **kwargs):
        import torch

        kind = torch.nn.LayerNorm if config.normalization == "LayerNorm" else torch.nn.RMSNorm
        norm = kind(hidden_size, eps=eps)
        if config.layernorm_zero_centered_gamma:
            torch.nn.init.zeros_(norm.weight)
            torch.nn.utils.parametrize.register_parametrization(norm, "weight", shifted(), unsafe=True)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm


def shifted():
    """A norm's weight plus one: its own is around zero."""
    import torch

    class Shifted(torch.nn.Module):
        def forward(self, weight):
            return weight + 1

    return Shifted()


def widths_of_latents(module):
    """Attention that is told the widths of keys and values, as latent attention tells Transformer Engine's."""
    begin = module.DotProductAttention.__init__

    def begin_without(self, *args, k_channels=None, v_channels=None, **kwargs):
        begin(self, *args, **kwargs)

    module.DotProductAttention.__init__ = begin_without


def plain_cpu(module):
    """torchtitan asks its device's type for a backend and kernels: those of a CPU, whose FlexAttention is eager."""
    import torch
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp
    from torch.nn.attention import flex_attention

    factors = fsdp._get_gradient_divide_factors
    # gloo sums, and divides nothing
    fsdp._get_gradient_divide_factors = lambda *args: factors(*args[:5], True)
    flex_attention._validate_device = lambda *args: None
    # of torch above 2.13
    torch.distributed.set_timeout = lambda *args: None
    module.device_type = CPU
    torch.cuda.is_available, torch.cuda.current_device = lambda: False, lambda: 0


CHANGED = {
    "torchtitan.tools.utils": plain_cpu,
    "megatron.core.transformer.torch_norm": lambda module: setattr(module, "WrappedTorchNorm", Norms),
    "megatron.core.transformer.dot_product_attention": widths_of_latents,
}
"""Modules that ask for a GPU, or know less without Transformer Engine, and what they learn."""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that hold nothing, and those that know more."""

    def find_spec(self, name, path=None, target=None):
        if change := CHANGED.get(name):
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            run = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (run(module), change(module))
            return spec
        found = name.startswith(EMPTY)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


def on_cpu(value):
    """A device of CUDA as the CPU; all else as it is."""
    import torch

    named = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return torch.device(CPU) if named else value


def stand_in():
    """Put the answers into torch."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function, kinds, args=(), kwargs=None):
            if function is torch.device:
                return torch.device(CPU) if str(args[0]).startswith("cuda") else function(*args, **(kwargs or {}))
            kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
            if isinstance(kwargs.get("device"), int):
                kwargs["device"] = torch.device(CPU)
            found = args[0] if function is torch.Tensor.pin_memory else function(*map(on_cpu, args), **kwargs)
            is_name = function is torch.Tensor.type and isinstance(found, str)
            return found.replace("torch.", "torch.cuda.") if is_name else found

    card = types.SimpleNamespace(
        major=9, minor=0, name="H100", multi_processor_count=132, total_memory=80 << 30, gcnArchName=""
    )
    answers = {
        "is_available": True, "is_initialized": True, "device_count": 8, "current_device": torch.device(CPU),
        "get_device_capability": (9, 0), "get_device_name": card.name, "get_device_properties": card,
        "mem_get_info": (80 << 30, 80 << 30), "memory_stats": {}, "is_current_stream_capturing": False,
        "memory_allocated": 0, "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "is_bf16_supported": True, "set_device": None, "synchronize": None, "empty_cache": None, "manual_seed": None,
        "manual_seed_all": None, "reset_peak_memory_stats": None, "reset_max_memory_allocated": None,
        "check_error": None, "ipc_collect": None, "_lazy_init": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
    for name in ("_cuda_getDevice", "_cuda_setDevice", "_cuda_exchangeDevice", "_cuda_maybeExchangeDevice"):
        setattr(torch._C, name, lambda *args: 0)
    for name in ("Stream", "Event", "stream", "current_stream", "default_stream", "device"):
        setattr(torch.cuda, name, Nothing)
    torch.cuda.nvtx = types.SimpleNamespace(range_push=nothing, range_pop=nothing, mark=nothing)
    torch.cuda.default_generators = defaultdict(lambda: torch.default_generator)
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    exchange = torch.distributed.all_to_all_single

    def exchange_numbers(output, data, output_split_sizes=None, input_split_sizes=None, **kwargs):
        """gloo takes no tensors of sizes."""
        sizes = (
            None if each is None else [int(size) for size in each] for each in (output_split_sizes, input_split_sizes)
        )
        return exchange(output, data, *sizes, **kwargs)

    torch.distributed.all_to_all_single = exchange_numbers
    OnCpu().__enter__()


if not hasattr(typing, "override"):  # Python 3.12 has it, which Megatron-LM asks for
    typing.override = lambda function: function
os.environ.setdefault("NO_VCS_VERSION", "1")
if "LOCAL_RANK" in os.environ and os.environ.get("STAND_IN_FOR_CUDA") == "1":
    sys.meta_path.insert(0, Finder())
    stand_in()
