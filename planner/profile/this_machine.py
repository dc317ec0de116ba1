"""The device at hand: its name, its software, its memory."""

from __future__ import annotations

import os
import platform
import resource
import sys
from functools import partial

import torch

from planner.probe.device_state import Monitor
from planner.probe.run import Device
from planner.probe.torch_build import require_gpu, this_build
from planner.profile.record import Machine
from planner.profile.stopwatch import Stopwatch
from planner.profile.time_kernels import product_row


def machine_of(device: Device) -> Machine:
    """The device of this machine. Raises ProbeError if there is none of the kind."""
    if device == "cpu":
        cores, pages = os.cpu_count() or 1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)
        return Machine(
            device=device, name=_cpu_name(), software=f"torch {torch.__version__}, one thread a process",
            architecture="cpu", memory_bytes=pages // cores, num_sms=1, num_devices=cores,
            context_bytes=resident,
        )  # fmt: skip
    require_gpu(device)
    properties = torch.cuda.get_device_properties(0)
    product_row(
        Stopwatch(device, 0.0), 256, 256, 256
    )  # a context without cuBLAS (hipBLASLt) and loaded kernels is smaller
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(0)
    build = this_build()
    driver = build.driver()
    software = f"torch {torch.__version__}, {build.runtime}" + (f", driver {driver}" if driver else "")
    return Machine(
        device=device, name=properties.name, software=software, architecture=build.architecture_of(properties),
        memory_bytes=properties.total_memory, num_sms=properties.multi_processor_count,
        num_devices=torch.cuda.device_count(),
        context_bytes=total - free - torch.cuda.memory_reserved(0),
    )  # fmt: skip


def monitor_of(device: Device) -> Monitor:
    """The monitor of the GPU that is measured, which has looked at it once; of a CPU it says nothing."""
    if device == "cpu":
        return Monitor()
    require_gpu(device)
    monitor = Monitor(partial(this_build().state, str(torch.cuda.get_device_properties(0).uuid)))
    monitor.before()
    return monitor


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def free_memory_bytes(device: Device) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else machine_of(device).memory_bytes
