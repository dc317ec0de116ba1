"""Logs of a simulated run, in the forms of Megatron-LM, torchtitan and CSV: no trainer printed them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from simulated_pieces import Place
from simulated_ranks import Simulated
from simulated_truths import Truth
from written import BEGIN_S, arguments, clock, iteration


def step_times(truth: Truth, rng: np.random.Generator, num_steps: int = 60) -> list[float]:
    """Seconds of each step: noise, a warm-up, a few slow steps, and as they are without a profiler."""
    noise = float(rng.uniform(0.003, 0.015))
    seconds = truth.step_s * (1 + noise * rng.standard_normal(num_steps))
    seconds[0] *= float(rng.uniform(1.5, 6))
    for index in rng.integers(5, num_steps, size=int(rng.integers(0, 3))):
        seconds[index] *= float(rng.uniform(1.2, 2.5))
    return [float(value) for value in seconds]


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
            at_s += 0.3 * truth.step_s
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
    begin_s = found["forward-compute"] + found["backward-compute"] + found["forward-recv"] + outside["all-grads-sync"]
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
        num_attention_heads=model.num_attention_heads, num_query_groups=model.num_key_value_heads,
        group_query_attention=True, swiglu=True, add_bias_linear=False, normalization="RMSNorm",
        position_embedding_type="rope", ffn_hidden_size=model.intermediate_size, max_position_embeddings=8192,
        padded_vocab_size=model.vocab_size, untie_embeddings_and_output_weights=True, bf16=True, log_interval=1,
        overlap_grad_reduce=runtime.gradient_overlap_fraction > 0,
        overlap_param_gather=runtime.parameter_overlap_fraction > 0,
        tp_comm_overlap=runtime.tp_overlap_fraction > 0,
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
    runtime, hardware = run.candidate.pricing.runtime, run.candidate.pricing.cluster.hardware
    by_deepep = runtime.dispatcher_on(hardware) in ("deepep", "hybridep")
    if (moe := run.truth.plan.model.spec.moe) is not None:
        more |= {
            "num_experts": moe.num_experts, "moe_router_topk": moe.num_experts_per_tok,
            "moe_ffn_hidden_size": moe.moe_intermediate_size,
            "moe_token_dispatcher_type": "flex" if by_deepep else "alltoall", "moe_enable_deepep": by_deepep,
            "moe_grouped_gemm": True, "expert_tensor_parallel_size": int(run.shape.etp),
        }  # fmt: skip
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
