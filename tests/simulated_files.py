"""Files of simulated runs: Kineto traces of some ranks, and logs in the trainers' forms. No trainer printed them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from made_traces import MadeTrace
from simulated_ranks import STEP_GAP_S, Piece, Place, Simulated
from simulated_truths import Truth
from written import BEGIN_S, arguments, clock, iteration

US = 1e6
NAMES = {
    "gemm": "nvjet_tst_192x192_64x4_1x2_h_bz_coopA_TNT",
    "attention": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
    "attention, unfused": "scaled_upper_triang_masked_softmax_warp_forward<__nv_bfloat16, __nv_bfloat16, float, 13>",
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
COLLECTIVE = {"tp": ("all_gather", "reduce_scatter"), "cp": ("all_gather", "all_gather"),
              "ep": ("all_to_all", "all_to_all")}  # fmt: skip
DESCRIPTIONS = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP", "cp": "CONTEXT_PARALLEL_GROUP", "dp": "DATA_PARALLEL_GROUP_WITH_CP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP", "ep": "EXPERT_MODEL_PARALLEL_GROUP", "model": "MODEL_PARALLEL_GROUP",
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
    if family == "attention" and not runtime.flash_attention:
        return NAMES["attention, unfused"]
    if family == "memory" and not runtime.fused_norm:
        return NAMES["memory, unfused"]
    return NAMES[family]


def _named(run: Simulated, piece: Piece, count: int) -> tuple[str, str]:
    """The kernel and the collective of an exchange."""
    ways = COLLECTIVE.get(piece.group, ("all_gather", "reduce_scatter"))
    kind = piece.collective or ways[count % 2]
    return KERNELS[kind]


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
    for count, piece in enumerate(pieces):
        start_us, length_us = at_us + piece.start_s * scale, piece.length_s * scale
        ahead_us = STEP_GAP_S * US if piece.late else LEAD_S * US
        launch_us = max(launch_us + 0.5, start_us - ahead_us)
        if piece.phase != phase:
            _annotate(trace, phase, first_us, launch_us - 0.2)
            first_us, phase = launch_us - 0.1, piece.phase
        if piece.family == "comm":
            if piece.group not in trace.groups:
                continue
            _exchange(trace, run, piece, count, (start_us, length_us, launch_us))
        else:
            trace.kernel(kernel_name(run.truth, piece.family), start_us, length_us, launch_us)
    _annotate(trace, phase, first_us, launch_us + 0.2)


def _annotate(trace: MadeTrace, phase: str, begin_us: float, end_us: float) -> None:
    name = {"F": "forward_step", "B": "backward_step", "O": "Optimizer.step#Adam.step"}.get(phase[:1])
    if name:
        trace.add("user_annotation", name, begin_us, end_us - begin_us)


def _exchange(trace: MadeTrace, run: Simulated, piece: Piece, count: int, times: tuple[float, float, float]) -> None:
    kernel, collective = _named(run, piece, count)
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
    per_stage = tp * cp * dp
    slow_stage = run.truth.slow_stage
    stages = sorted({0, pp - 1, slow_stage if slow_stage is not None else pp // 2, pp // 2})[:4]
    each = max(2, most // len(stages))
    beside = tp if tp > 1 else ep if ep > 1 else per_stage
    return [stage * per_stage + index for stage in stages for index in range(min(each, beside, per_stage))]


def step_times(truth: Truth, rng: np.random.Generator, num_steps: int = 60) -> list[float]:
    """Seconds of each step: noise, a warm-up, a few slow steps, and as they are without a profiler."""
    noise = float(rng.uniform(0.003, 0.015))
    seconds = truth.step_s * (1 + noise * rng.standard_normal(num_steps))
    seconds[0] *= float(rng.uniform(1.5, 6))
    for index in rng.integers(5, num_steps, size=int(rng.integers(0, 3))):
        seconds[index] *= float(rng.uniform(1.2, 2.5))
    return [float(value) for value in seconds]


def write_traces(run: Simulated, folder: Path, ranks: Sequence[int], rng: np.random.Generator) -> list[Path]:
    """Traces of some ranks, whose clocks differ."""
    noise = [1 + 0.004 * float(rng.standard_normal()) for _ in range(TRACED_STEPS)]
    paths = []
    for rank in ranks:
        trace = trace_of(run, rank, noise, float(rng.uniform(-2000, 2000)))
        paths.append(trace.write(folder / f"rank{rank}.json"))
    return paths


def megatron_log(
    run: Simulated, rng: np.random.Generator, timers: str = "", dump: bool = False, memory: bool = True
) -> str:
    """Megatron-LM's log of a run, with timers of `minmax` or `all` where asked for."""
    truth, at_s = run.truth, float(BEGIN_S)
    lines = [dump_of(run)] if dump else []
    pp, per_stage = int(run.shape.pp), int(run.shape.tp * run.shape.cp * run.shape.dp)
    grows = 1.0
    for number, seconds in enumerate(step_times(truth, rng), start=1):
        at_s += seconds
        lines.append(iteration(number, seconds, at_s, truth.job.batch))
        if timers:
            lines += _timers(run, rng, timers == "all")
        if memory and number % 5 == 1:
            grows = 1 + truth.strength * number / 60 if truth.leaks else 1.0
            for stage in range(pp):
                for tp in range(min(2, int(run.shape.tp))):
                    lines.append(_memory(run, stage, stage * per_stage + tp, number, grows))
        if number % 20 == 0 and rng.uniform() < 0.5:
            lines.append(f"saving checkpoint at iteration {number:7d} to /checkpoints in torch_dist format")
            at_s += 20.0
            lines.append(f"  successfully saved checkpoint from iteration {number:7d} to /checkpoints")
    return "\n".join(lines) + "\n"


def _memory(run: Simulated, stage: int, rank: int, number: int, grows: float) -> str:
    memory = run.candidate.memory[stage]
    rng = np.random.default_rng(rank)
    peak = memory.peak_allocated_bytes * float(rng.uniform(0.97, 1.03))
    allocated = 0.7 * peak + (grows - 1) * peak
    peak *= grows
    whole = run.candidate.pricing.cluster.hardware.memory_bytes
    reserved = min(peak * float(rng.uniform(1.02, 1.06)) * run.truth.fragmented, max(0.97 * whole, peak))
    values = " | ".join(
        f"{name}: {value / 2**20:.2f}"
        for name, value in (("allocated", allocated), ("max allocated", peak), ("reserved", reserved),
                            ("max reserved", reserved))
    )  # fmt: skip
    return f"[Rank {rank}] (after {number} iterations) memory (MB) | {values}"


def timer_values(run: Simulated, rank: int) -> dict[str, float]:
    """Seconds of Megatron-LM's timers on one rank: passes with their exchanges, waits apart."""
    place = Place.of(run.candidate, rank)
    found = dict.fromkeys(("forward-compute", "backward-compute", "forward-recv", "batch-generator"), 0.0)
    found["batch-generator"] = run.truth.stall_s + 2e-3 * float(run.candidate.num_microbatches)
    outside = {"all-grads-sync": 0.0, "optimizer": 0.0}
    last_s = 0.0
    for piece in run.step(place, 0):
        end_s = piece.start_s + piece.length_s
        if piece.phase[:1] in "FB" and piece.phase:
            last_s = max(last_s, end_s)
        if piece.group == "pp":
            found["forward-recv"] += piece.length_s
        elif piece.group == "dp" or piece.group == "model":
            outside["all-grads-sync"] += max(0.0, end_s - max(last_s, piece.start_s)) if not piece.phase else 0.0
        elif piece.family == "optimizer":
            outside["optimizer"] += piece.length_s
    found |= _passes_s(run, place)
    begin_s = found["forward-compute"] + found["backward-compute"] + found["forward-recv"]
    return {"forward-backward": begin_s + run.truth.stall_s, **found, **outside}


def _passes_s(run: Simulated, place: Place) -> dict[str, float]:
    """Seconds of all forwards and backwards of a rank, with the waits inside of them."""
    spans: dict[str, list[float]] = {}
    for piece in run.step(place, 0):
        if piece.phase[:1] in ("F", "B"):
            end_s = piece.start_s + piece.length_s
            low, high = spans.get(piece.phase, [piece.start_s, end_s])
            spans[piece.phase] = [min(low, piece.start_s), max(high, end_s)]
    totals = {"forward-compute": 0.0, "backward-compute": 0.0}
    for phase, (low, high) in spans.items():
        totals["forward-compute" if phase[0] == "F" else "backward-compute"] += high - low
    return totals


def _timers(run: Simulated, rng: np.random.Generator, each: bool) -> Iterator[str]:
    """The timers of one step: least and most over the ranks, or every rank's."""
    known = run.timers or {rank: timer_values(run, rank) for rank in _timed_ranks(run)}
    run.timers = known
    rows = {
        name: {rank: values[name] * (1 + 0.003 * float(rng.standard_normal())) for rank, values in known.items()}
        for name in next(iter(known.values()))
    }
    if each:
        yield "times across ranks (ms):"
        for name, of_ranks in rows.items():
            yield f"  {name}:"
            yield from (f"     rank {rank:2d}: {seconds * 1e3:.2f}" for rank, seconds in of_ranks.items())
        return
    yield "(min, max) time across ranks (ms):"
    for name, of_ranks in rows.items():
        low, high = min(of_ranks.values()) * 1e3, max(of_ranks.values()) * 1e3
        yield f"    {name} {'.' * (47 - len(name))}: ({low:.2f}, {high:.2f})"


def _timed_ranks(run: Simulated) -> list[int]:
    """Ranks whose timers are worked out: of every stage one, the slow GPU's replica, and another replica."""
    per_stage, pp = int(run.shape.tp * run.shape.cp * run.shape.dp), int(run.shape.pp)
    beside = 0 if run.slow is None else run.slow.rank % per_stage
    inside = sorted({0, 1, beside, per_stage - 1} & set(range(per_stage)))
    return [stage * per_stage + index for stage in range(pp) for index in inside]


def dump_of(run: Simulated) -> str:
    """The arguments that Megatron-LM would dump for the run as it really is."""
    truth, shape = run.truth, run.shape
    runtime, model = run.candidate.pricing.runtime, truth.plan.model.spec
    return arguments(
        world_size=truth.job.num_gpus, seq_length=truth.job.seq_length, global_batch_size=truth.job.batch,
        micro_batch_size=int(shape.micro_batch_size), tensor_model_parallel_size=int(shape.tp),
        pipeline_model_parallel_size=int(shape.pp), context_parallel_size=int(shape.cp),
        expert_model_parallel_size=int(shape.ep), num_layers=model.num_hidden_layers, hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads, bf16=True, log_interval=1,
        overlap_grad_reduce=runtime.gradient_overlap_fraction > 0,
        overlap_param_gather=runtime.parameter_overlap_fraction > 0,
        overlap_moe_expert_parallel_comm=runtime.ep_overlap_fraction > 0,
        bias_swiglu_fusion=runtime.fused_activation, apply_rope_fusion=runtime.fused_rotary,
        gradient_accumulation_fusion=runtime.fused_grad_accumulation,
        cross_entropy_loss_fusion=runtime.fused_cross_entropy, moe_permute_fusion=runtime.fused_permute,
        attention_backend="AttnBackend.flash" if runtime.flash_attention else "AttnBackend.unfused",
        use_distributed_optimizer=True, sequence_parallel=int(shape.tp) > 1, **_more(run),
    )  # fmt: skip


def _more(run: Simulated) -> dict[str, object]:
    """Arguments that only some layouts have."""
    more: dict[str, object] = {}
    vpp, layers = int(run.shape.vpp), run.truth.plan.model.spec.num_hidden_layers
    if vpp > 1:
        more["num_layers_per_virtual_pipeline_stage"] = layers // (vpp * int(run.shape.pp))
    if run.truth.cause == "recompute_unneeded":
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return more


def torchtitan_log(run: Simulated, rng: np.random.Generator) -> str:
    """torchtitan's log of a run."""
    truth, at_s, lines = run.truth, float(BEGIN_S), []
    tokens = truth.job.batch * truth.job.seq_length / truth.job.num_gpus
    lines.append(
        f"[rank0]:[titan] {clock(at_s)},000 - root - INFO - Training starts at step 1, with local batch size 1, global "
        f"batch size {truth.job.batch}, sequence length {truth.job.seq_length}, total steps 1000 (warmup 200)"
    )
    peak = run.candidate.memory[0].peak_allocated_bytes
    whole = run.candidate.pricing.cluster.hardware.memory_bytes
    for number, seconds in enumerate(step_times(truth, rng), start=1):
        at_s += seconds
        stamp = f"[titan] {clock(at_s)},{int(at_s % 1 * 1000):03d} - root - INFO - "
        reserved = min(peak * 1.04 * truth.fragmented * (1 + truth.leaks * truth.strength * number / 60), 0.97 * whole)
        lines.append(
            f"[rank0]:{stamp}step: {number:2}  loss: {7:7.4f}  memory: {reserved / 2**30:5.2f}GiB"
            f"({100 * reserved / whole:.2f}%)  tps: {round(tokens / seconds):,}  tflops: 300.00  mfu: 30.00%"
        )
    return "\n".join(lines) + "\n"


def csv_of(run: Simulated, rng: np.random.Generator) -> str:
    """A bare table of step times."""
    rows = (f"{number},{seconds:.4f}" for number, seconds in enumerate(step_times(run.truth, rng), start=1))
    return "\n".join(["step,step_time_s", *rows]) + "\n"
