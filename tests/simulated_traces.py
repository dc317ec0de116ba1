"""Kineto traces of some ranks of a simulated run: no profiler wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from made_traces import MadeTrace
from simulated_pieces import Piece, Place
from simulated_ranks import STEP_GAP_S, Simulated
from simulated_truths import Truth

US = 1e6
NAMES = {
    "gemm": "nvjet_tst_192x192_64x4_1x2_h_bz_coopA_TNT",
    "attention": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
    "softmax": "scaled_upper_triang_masked_softmax_warp_forward<__nv_bfloat16, __nv_bfloat16, float, 13>",
    "memory": "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits>",
    "memory, unfused": "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float>>",
    "elementwise": "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
    "optimizer": "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctorMaster<float>>",
}
"""Names of kernels by family, as public traces have them."""
KERNELS = {
    "all_gather": ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "_allgather_base"),
    "reduce_scatter": ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                       "_reduce_scatter_base"),
    "all_reduce": ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "allreduce"),
    "all_to_all": ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "all_to_allv"),
    "send_recv": ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "recv"),
}  # fmt: skip
"""(kernel, collective) of exchanges as NCCL and torch name them."""
DESCRIPTIONS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP", "cp": "CONTEXT_PARALLEL_GROUP", "dp": "DATA_PARALLEL_GROUP_WITH_CP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP", "ep": "EXPERT_MODEL_PARALLEL_GROUP", "model": "MODEL_PARALLEL_GROUP",
    "edp": "EXPERT_DATA_PARALLEL_GROUP",
}  # fmt: skip
LEAD_S = 4e-3
"""Seconds by which the host runs ahead of the GPU where it can."""
TRACED_STEPS = 2


def groups_of(run: Simulated, place: Place) -> dict[str, tuple[str, list[int]]]:
    """The process groups of a rank, with what its trainer calls them."""
    shape = run.shape
    tp, cp, dp, pp, ep = (int(size) for size in (shape.tp, shape.cp, shape.dp, shape.pp, shape.ep))
    per_stage, first = tp * cp * dp, place.stage * tp * cp * dp
    inside = place.rank - first
    data = [first + place.tp + tp * index for index in range(cp * dp)]
    at = data.index(place.rank) // ep * ep
    groups = {
        "tp": [place.rank - place.tp + index for index in range(tp)],
        "cp": [first + place.tp + tp * (index + cp * place.dp) for index in range(cp)],
        "dp": data,
        "pp": [inside + per_stage * index for index in range(pp)],
        "ep": data[at : at + ep],
        "edp": data[data.index(place.rank) % ep :: ep] if ep > 1 else [],
        "model": [
            place.rank - first - place.tp + index + per_stage * stage for stage in range(pp) for index in range(tp)
        ],
    }
    described = DESCRIPTIONS | {"torchtitan": {"dp": "mesh_dp_shard"}, "deepspeed": {"dp": "data_parallel_group"}}.get(
        run.truth.job.trainer, {}
    )
    return {name: (described[name], ranks) for name, ranks in groups.items() if len(ranks) > 1}


def kernel_name(truth: Truth, family: str) -> str:
    """The kernel of a family, by the switches that the run really has."""
    runtime = truth.candidate.pricing.runtime
    if family == "memory" and not runtime.fused_norm:
        return NAMES["memory, unfused"]
    return NAMES[family]


def trace_of(run: Simulated, rank: int, noise: Sequence[float], skew_us: float = 0.0) -> MadeTrace:
    """The trace of one rank over as many steps as there are factors of `noise`."""
    place = Place.of(run.candidate, rank)
    groups = groups_of(run, place)
    trace = MadeTrace(rank, int(run.candidate.pricing.cluster.num_gpus), groups)
    trace.header["deviceProperties"] = [{"id": 0, "name": DEVICES[run.truth.job.hardware]}]
    at_us = 10_000.0 + skew_us
    for number, factor in enumerate(noise, start=10):
        pieces = sorted(piece for piece in run.step(place, number) if piece.length_s > 0)
        _add_step(trace, run, pieces, at_us, factor * US)
        length_us = run.truth.step_s * factor * US
        trace.step(number, at_us - 60, length_us)
        if run.truth.stall_s > 0:
            name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
            trace.add("user_annotation", name, at_us - 50, run.truth.stall_s * factor * US + 40)
        at_us += length_us
    return trace


DEVICES = {
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "a100": "NVIDIA A100-SXM4-80GB",
    "b200": "NVIDIA B200",
}


def _add_step(trace: MadeTrace, run: Simulated, pieces: Sequence[Piece], at_us: float, scale: float) -> None:
    """Kernels of a step with their launches, each after the one before, and the annotations around them."""
    launch_us, first_us, phase = at_us - 50 + run.truth.stall_s * scale, 0.0, ""
    for piece in pieces:
        start_us, length_us = at_us + piece.start_s * scale, piece.length_s * scale
        ahead_us = STEP_GAP_S * US if piece.late else LEAD_S * US
        launch_us = max(launch_us + 0.5, start_us - ahead_us)
        if piece.phase != phase:
            _annotate(trace, phase, first_us, launch_us - 0.2)
            first_us, phase = launch_us - 0.1, piece.phase
        if piece.family == "comm":
            if piece.group not in trace.groups:
                continue
            _exchange(trace, piece, (start_us, length_us, launch_us))
        else:
            trace.kernel(kernel_name(run.truth, piece.family), start_us, length_us, launch_us)
    _annotate(trace, phase, first_us, launch_us + 0.2)


def _annotate(trace: MadeTrace, phase: str, begin_us: float, end_us: float) -> None:
    name = {"F": "forward_step", "B": "backward_step", "O": "Optimizer.step#Adam.step"}.get(phase[:1])
    if name:
        trace.add("user_annotation", name, begin_us, end_us - begin_us)


def _exchange(trace: MadeTrace, piece: Piece, times: tuple[float, float, float]) -> None:
    kernel, collective = KERNELS[piece.collective]
    description, ranks = trace.groups[piece.group]
    num = max(1, int(piece.num_bytes) // 2)
    gathers = collective == "_allgather_base"
    scatters = collective == "_reduce_scatter_base"
    said: dict[str, Any] = {
        "Collective name": collective, "In msg nelems": num // len(ranks) if gathers else num,
        "Out msg nelems": num // len(ranks) if scatters else num, "dtype": "BFloat16", "Group size": len(ranks),
        "Process Group Name": piece.group, "Process Group Description": description,
        "Process Group Ranks": str(ranks) if len(ranks) <= 30 else str(ranks[:30])[:-1] + ", ...]",
    }  # fmt: skip
    trace.kernel(kernel, *times, stream=20 + list(trace.groups).index(piece.group), **said)


def traced_ranks(run: Simulated, most: int = 8) -> list[int]:
    """Ranks of which several share a stage, and several a group, and the slow one is among them."""
    shape = run.shape
    tp, cp, dp, pp, ep = (int(size) for size in (shape.tp, shape.cp, shape.dp, shape.pp, shape.ep))
    per_stage, slow_stage = tp * cp * dp, run.truth.slow_stage
    whole = slow_stage if slow_stage is not None else pp // 2
    beside = tp if tp > 1 else ep if ep > 1 else per_stage
    others = sorted({0, pp - 1, pp // 2} - {whole})
    counts = dict.fromkeys(others, 2) | {whole: max(2, most - 2 * len(others) * (ep == 1))}
    return [
        stage * per_stage + index
        for stage, count in sorted(counts.items())
        for index in range(min(count, beside, per_stage))
    ]


def write_traces(run: Simulated, folder: Path, ranks: Sequence[int], rng: np.random.Generator) -> list[Path]:
    """Traces of some ranks, whose clocks differ."""
    noise = [1 + 0.004 * float(rng.standard_normal()) for _ in range(TRACED_STEPS)]
    paths = []
    for rank in ranks:
        trace = trace_of(run, rank, noise, float(rng.uniform(-2000, 2000)))
        paths.append(trace.write(folder / f"rank{rank}.json"))
    return paths
