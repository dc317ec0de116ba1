"""Made files in the formats of torch: made by hand from their schemas, with numbers that a reader can add up.

They are no recordings; what was recorded stands in tests/observe/data.
"""

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

GEMM, ATTENTION = "nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "flash_fwd_kernel<Flash_fwd_kernel_traits<128>>"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
ELEMENTS = 10**6


class MadeTrace:
    """A Kineto trace: kernels on a GPU, each launched by a call of the host."""

    def __init__(
        self, rank: int = 0, world_size: int = 2, groups: dict[str, tuple[str, list[int]]] | None = None
    ) -> None:
        self.rank, self.groups = rank, groups or {}
        self.events: list[dict[str, Any]] = []
        self.header: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
            "distributedInfo": {
                "backend": "nccl", "rank": rank, "world_size": world_size,
                "pg_config": [
                    {"pg_name": name, "pg_desc": description, "pg_size": len(ranks), "ranks": ranks}
                    for name, (description, ranks) in self.groups.items()
                ],
            },
            "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        }  # fmt: skip

    def add(self, category: str, name: str, start_us: float, length_us: float, lane: int = 1, **arguments: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 0 if category in ("kernel", "gpu_memcpy") else 9,
             "tid": lane, "ts": start_us, "dur": length_us, "args": arguments}
        )  # fmt: skip

    def kernel(
        self, name: str, start_us: float, length_us: float, launch_us: float, stream: int = 7, **arguments: Any
    ) -> None:
        link = len(self.events)
        self.add("cuda_runtime", "cudaLaunchKernel", launch_us, 1, correlation=link)
        self.add("kernel", name, start_us, length_us, stream, correlation=link, **arguments)

    def collective(
        self, start_us: float, length_us: float, launch_us: float, group: str, name: str = ALL_REDUCE,
        collective: str = "allreduce", **arguments: Any,
    ) -> None:  # fmt: skip
        description, ranks = self.groups[group]
        said = {
            "Collective name": collective, "In msg nelems": ELEMENTS, "Out msg nelems": ELEMENTS, "dtype": "BFloat16",
            "Group size": len(ranks), "Process Group Name": group, "Process Group Description": description,
            "Process Group Ranks": str(ranks),
        }  # fmt: skip
        self.kernel(name, start_us, length_us, launch_us, stream=20, **said, **arguments)

    def step(self, number: int, start_us: float, length_us: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", start_us, length_us)

    def text(self) -> str:
        return json.dumps({**self.header, "traceEvents": self.events, "traceName": "made.json"}, indent=1)

    def write(self, path: Path) -> Path:
        data = self.text().encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
        return path


def training_trace(rank: int, slow: float = 1.0, late_us: float = 0.0) -> MadeTrace:
    """Two steps of 1,000 µs of a tensor-parallel pair; one of its ranks may compute longer, or come late."""
    trace = MadeTrace(rank, groups={"0": ("default_pg", [0, 1]), "1": ("TENSOR_MODEL_PARALLEL_GROUP", [0, 1])})
    for number in range(2):
        at = 1000.0 * number
        trace.step(number + 3, at, 990)
        trace.add("user_annotation", "forward_step", at, 300)
        trace.kernel(GEMM, at + 10, 200 * slow, at + 5)
        trace.kernel(ATTENTION, at + 10 + 200 * slow, 100, at + 20)
        trace.collective(at + 410 + late_us, 200 - late_us, at + 30, "1")  # all of it hidden but the first 100
        trace.add("user_annotation", "backward_step", at + 300, 400)
        trace.kernel(GEMM, at + 510, 300, at + 310)  # waits 410 - 310 for its dependency, then overlaps
        trace.kernel("multi_tensor_apply_kernel<AdamFunctor>", at + 900, 50, at + 880)
        trace.add("user_annotation", "Optimizer.step#AdamW.step", at + 870, 60)
    return trace


def frames(*lines: str) -> list[dict[str, Any]]:
    """A stack, the innermost first, from `file.py:function`."""
    pairs = [line.rsplit(":", 1) for line in lines]
    return [{"filename": file, "line": 10, "name": name} for file, name in pairs]


def made_snapshot(events: list[dict[str, Any]], segments: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A memory snapshot by the schema of torch 2.13's `torch.cuda.memory`."""
    return {
        "segments": segments, "device_traces": [events],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": "False"}, **more,
    }  # fmt: skip


def segment(address: int, blocks: list[tuple[int, str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """A segment of blocks (size, state, frames) that lie one behind the other."""
    listed, at = [], address
    for size, state, stack in blocks:
        listed.append({"address": at, "size": size, "requested_size": size, "state": state, "frames": stack})
        at += size
    in_use = sum(size for size, state, _ in blocks if state == "active_allocated")
    return {
        "address": address, "total_size": at - address, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "allocated_size": in_use, "active_size": in_use, "requested_size": in_use, "device": 0, "is_expandable": False,
        "frames": [], "blocks": listed,
    }  # fmt: skip


def event(
    action: str, address: int, size: int, time_us: int, stack: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """One entry of a device's trace."""
    return {
        "action": action, "addr": address, "size": size, "stream": 0, "time_us": time_us, "frames": stack or [],
        "pool_id": (0, 0),
    }  # fmt: skip


def write_pickle(path: Path, data: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(data, protocol))
    return path
