"""The runs that a plan gives: its stages at full size on GPUs, or its schedule in small on this machine's processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from planner.answer import Plan, PricedLayout, StagePlan
from planner.errors import ProbeError, SpecError
from planner.probe.plan_slice import (
    FEWEST_STEPS,
    RECOMPUTABLE,
    ProbeOptions,
    RankGrid,
    fit_gpus,
    fit_processes,
    fully_shards,
    real_chunks,
    recompute_modules,
    sampled_stages,
    scaled_chunks,
    sharing_dp,
    slice_schedule,
)
from planner.probe.result import PlanSlice
from planner.probe.run import ChunkSpec, ProbeRun
from planner.schedule.actions import Schedule
from planner.shape import Shape
from planner.specs.base import Fields, Texts
from planner.specs.model import ModelSpec
from planner.specs.model_parts import TracedOperator, TracedSpec
from planner.specs.training import tokens_split
from planner.specs.units import gib
from planner.trainers.rules.rule_rows import first_broken, rules_of


def require_runnable(plan: Plan, options: ProbeOptions) -> None:
    """Raise ProbeError where the probe has no modules, no exchanges or no kernels for the plan's layers."""
    layout = plan.parallelism
    model = plan.model.spec
    if model.moe is not None and layout.etp > 1:
        raise ProbeError(f"the probe shards no single expert: etp {layout.etp} must be 1", "plan again with --etp 1")
    if model.moe is not None and layout.tp > 1 and not layout.sequence_parallel:
        raise ProbeError("the probe's experts need sequence parallelism beside tp", "plan with --sequence-parallel")
    require_layers(plan)
    require_split(plan, options)


def require_layers(plan: Plan) -> None:
    """Raise ProbeError where the probe has no modules for the model's layers, or for adapters beside them."""
    adapters = plan.training.adapters
    if adapters is not None:
        raise ProbeError(
            f"training.adapters: LoRA of rank {adapters.rank} cannot be probed: the probe trains all weights",
            "plan export PLAN.json --to hf writes the job itself, whose launch.sh takes 20 steps with MOCK=1",
        )
    if plan.training.objective.name != "lm":
        raise ProbeError(
            f"training.objective: {plan.training.objective.name} cannot be probed: the probe learns the next token",
            "probe a plan with --objective lm",
        )
    of_runner = plan.model.spec, plan.training, Shape()
    if broken := first_broken(rules_of("export torch-eager"), *of_runner):
        raise ProbeError(
            f"{plan.model.name} cannot be probed: {broken.reason}: {broken.message(*of_runner)}",
            "probe a plan of a plain model of its size, such as llama-3.1-8b",
        )
    model = plan.model.spec
    seq_length = plan.training.seq_length
    if model.position_embedding == "learned" and seq_length > (model.max_position_embeddings or 0):
        raise ProbeError(
            f"{plan.model.name} has {model.max_position_embeddings} learned positions for sequences of {seq_length}",
            f"plan with --seq-length {model.max_position_embeddings}",
        )


def require_split(plan: Plan, options: ProbeOptions) -> None:
    """Raise ProbeError where the probe cannot split the plan's sequences over its context-parallel ranks."""
    layout = plan.parallelism
    model = plan.model.spec
    seq_length = plan.training.seq_length
    if layout.cp == 1:
        return
    unit = tokens_split(layout.cp, layout.tp if layout.sequence_parallel else 1)
    if seq_length % unit:
        raise ProbeError(
            f"sequences of {seq_length} tokens do not split into two equal chunks for each of cp {layout.cp} ranks"
            + (f" and tp {layout.tp} shards" if unit > 2 * layout.cp else ""),
            f"plan with a --seq-length that is a multiple of {unit}",
        )
    chunk = model.attention_chunk_size or seq_length
    unsplit = f"chunks of {chunk} tokens" if chunk < seq_length else ""
    unsplit = "ALiBi" if model.position_embedding == "alibi" else unsplit
    if unsplit and options.device == "cuda":
        raise ProbeError(
            f"flash attention over split sequences (cp {layout.cp}) takes no {unsplit}",
            "plan with --cp 1, or prove the order and the gradients with --device cpu",
        )


class PlannedRun(NamedTuple):
    """The run that a plan gives."""

    plan: Plan
    """The plan, or the one that it was changed to, so that it fits where it is probed."""
    run: ProbeRun
    grid: RankGrid
    stages: Sequence[int]
    """The plan's stage that each of the run's stages is."""
    changes: Texts = ()
    """Sizes that are other than planned, in words; none where the plan fits as it is."""


AXES = {"tp": "tensor", "cp": "context", "pp": "pipeline", "dp": "data", "ep": "expert"}


def describe_slice(
    asked: Plan,
    planned: PlannedRun,
    options: ProbeOptions,
    reduced: Sequence[str] = (),
    extrapolated: Sequence[str] = (),
) -> PlanSlice:
    """The part of the plan `asked` that runs, in words; `reduced` and `extrapolated` are what else is so."""
    plan, grid, order = planned.plan, planned.grid, planned.run.order
    layout = plan.best.parallelism
    sizes = [(name.upper(), getattr(layout, name), getattr(grid, name)) for name in AXES]
    sizes.append(("micro-batches", layout.num_microbatches, order.num_microbatches))
    verified, not_verified = _claims(options, grid)
    unshared = [axis for name, axis in AXES.items() if getattr(layout, name) > getattr(grid, name) == 1]
    more_ranks = layout.num_gpus_used - grid.num_ranks
    is_sharded = fully_shards(plan.best, order) and grid.dp * grid.cp > 1
    own_stages = options.device == "cuda" or options.stages is not None
    left_out = [name for name in layout.recompute_modules if name not in RECOMPUTABLE]
    exchange = plan.runtime_spec.cp_comm_type
    gathers = layout.cp == 1 or exchange == "all_gather"
    rows = (
        (more_ranks > 0, f"{more_ranks:,} more ranks"),
        (is_sharded and own_stages, "seconds of passes that gather weights (shown, not judged)"),
        (layout.zero_stage > 1 and not is_sharded, f"ZeRO-{layout.zero_stage} (this run shards optimizer states only)"),
        (grid.cp > 1 and not gathers,
         f"context parallelism by {exchange} (this run gathers keys and values)"),
        (left_out, f"recomputation of {', '.join(left_out)}"),
        (plan.model.spec.traced is not None, "your module's own code (this run computes the operators of its trace)"),
        (plan.training.dtype != "bf16" and own_stages, f"{plan.training.dtype} (the probe computes in bf16)"),
        (plan.runtime != "torch-eager" and own_stages,
         f"{plan.runtime}'s own kernels and overlaps (the probe runs eager torch)"),
        *((True, says) for says in extrapolated),
        (planned.changes, "what was changed to fit"),
    )  # fmt: skip
    context = f"CP {grid.cp} × " if layout.cp > 1 else ""
    ranks = f"TP {grid.tp} × {context}PP {grid.pp} × DP {grid.dp}"
    smaller = (f"{name} {planned} → {running}" for name, planned, running in sizes if planned != running)
    unverified = (*not_verified, *(f"{axis}-parallel exchanges" for axis in unshared))
    return PlanSlice(
        asked=f"{asked.parallelism} · {asked.parallelism.schedule}",
        run=f"{ranks} · {order.name} · {order.num_microbatches} micro-batches",
        reduced=(*planned.changes, *smaller, *reduced),
        verified=tuple(verified),
        extrapolated=(*unverified, *(says for is_so, says in rows if is_so)),
    )


def _claims(options: ProbeOptions, grid: RankGrid) -> tuple[list[str], list[str]]:
    """Two lists of words: what a run of this kind verifies, and what it cannot."""
    if options.stages is not None:
        not_verified = ["network", "ranks waiting for each other"]
        if options.device == "cpu":  # which keeps no account of memory
            return ["compute seconds of each stage that ran"], ["memory", *not_verified]
        return ["compute seconds and memory of each stage that ran"], not_verified
    if options.device == "cuda":
        return ["seconds and memory of each stage that ran", "exchanges among the ranks that ran"], []
    exchanges = ["exchanges"] if grid.pp > 1 else []
    verified = ["order", *exchanges, "in flight", "loss", "gradients", "gradient norm"]
    return verified, ["GPU seconds", "GPU memory", "network"]


MICROBATCHES_PER_STAGE = 3
"""Micro-batches per stage of a stage alone: enough for a steady state after the warm-up."""


def ranks_run(plan: Plan, options: ProbeOptions, num_gpus: int) -> PlannedRun:
    """The run of as many whole tp × cp groups and stages as `num_gpus` hold."""
    layout = plan.best
    grid = fit_gpus(layout, num_gpus)
    order = options.order or slice_schedule(layout, grid.pp)
    if order.pp != grid.pp:
        raise ProbeError(
            f"--order has {order.pp} ranks, the slice of the plan that fits here {grid.pp} stages",
            f"an order of {grid.pp} ranks, or prove it with --device cpu",
        )
    if layout.parallelism.zero_stage > 1 and not fully_shards(layout, order):
        raise ProbeError(
            f"the probe runs no ZeRO-{layout.parallelism.zero_stage} under {order.name}: ZeRO-1 or, where no backward "
            "is split, ZeRO-3",
            "plan with --zero-stage 1, or 3 and another --schedule",
        )
    stages = sampled_stages(layout.parallelism.pp, grid.pp)
    return PlannedRun(plan, real_run(plan, options, order, real_chunks(layout, order, stages), grid), grid, stages)


def stages_run(plan: Plan, options: ProbeOptions) -> PlannedRun:
    """The run of stages alone, with all ranks that share something, of which one runs at a time."""
    layout = plan.best
    asked = plan.parallelism
    order = slice_schedule(layout, asked.pp, max(4, MICROBATCHES_PER_STAGE * asked.pp))
    grid = RankGrid(asked.pp, sharing_dp(layout), asked.cp, asked.tp, asked.ep)
    run = real_run(plan, options, order, real_chunks(layout, order, range(asked.pp)), grid)
    return PlannedRun(plan, run.model_copy(update={"warm_up_steps": 2}), grid, range(asked.pp))


def real_run(
    plan: Plan, options: ProbeOptions, order: Schedule, chunks: Sequence[ChunkSpec], grid: RankGrid
) -> ProbeRun:
    """The plan's stages at full size in bf16; on the CPU too, for models that it can hold."""
    layout = plan.best.parallelism
    return ProbeRun.of(
        order,
        model=plan.model.spec,
        device=options.device,
        dtype="bfloat16",
        dp_stands_for=sharing_dp(plan.best) // grid.dp if layout.zero_stage == 1 else 1,
        micro_batch_size=layout.micro_batch_size,
        seq_length=plan.training.seq_length // layout.cp,
        chunks=tuple(chunks),
        balanced_routing=True,
        **options.repeats,
        **_as_planned(plan.best, order, grid),
        timeout_s=options.timeout_s,
    )


def _as_planned(layout: PricedLayout, order: Schedule, grid: RankGrid) -> Fields:
    """The fields of a run that are those of its grid and of the plan's layout, whatever the size of the model."""
    sizes = layout.parallelism
    return {
        **{axis: size for axis, size in grid._asdict().items() if axis != "pp"},
        "dp_outermost": sizes.dp_outermost,
        "zero": sizes.zero_stage > 0,
        "fully_sharded": fully_shards(layout, order),
        "sequence_parallel": sizes.sequence_parallel and grid.tp > 1,
        "recompute_modules": recompute_modules(layout),
    }


def require_memory(stages: Sequence[StagePlan]) -> None:
    """Raise ProbeError if a stage needs more memory than this machine has. The kernel would kill it without an
    error."""
    largest = max(stages, key=lambda stage: stage.memory.peak_allocated_bytes)
    needed_bytes = largest.memory.peak_allocated_bytes
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed_bytes > memory_bytes:
        raise ProbeError(
            f"--stage {largest.stage}: its tensors are {gib(needed_bytes):.1f} GiB, "
            f"this machine has {gib(memory_bytes):.1f}",
            "leave out --stage to run the plan in small, or run the stage on a GPU",
        )


def stage_asked_for(stage: object, pp: int) -> int:
    if not isinstance(stage, int) or not 0 <= stage < pp:
        raise SpecError(f"--stage {stage}: the plan has stages 0 to {pp - 1}", "name one of them, or all")
    return stage


def stand_in_stages(layout: PricedLayout) -> list[int]:
    """For each stage, the first stage with the same layers, recomputation and number of micro-batches in flight."""

    def key(stage: StagePlan) -> tuple[object, ...]:
        seconds = (round(stage.forward_s, 9), round(stage.backward_s, 9))  # tells apart layers of different kinds
        return stage.num_layers, stage.holds, str(stage.recompute), stage.in_flight_microbatches, seconds

    first: dict[tuple[object, ...], int] = {}
    return [first.setdefault(key(stage), stage.stage) for stage in layout.stages]


HEAD_DIM = 8


def scaled_model(model: ModelSpec, hidden_size: int, num_layers: int, seq_length: int, grid: RankGrid) -> ModelSpec:
    """A small model of the same structure: every kind of layer, norm, bias and router, with narrow matrices."""
    heads = max(hidden_size // HEAD_DIM // grid.tp, 1) * grid.tp
    grouped = model.num_key_value_heads < model.num_attention_heads
    kv_heads = heads // 2 if grouped and heads // 2 % grid.tp == 0 and heads // 2 >= grid.tp else heads
    unit = 8 * grid.tp
    changes: dict[str, object] = {
        "num_hidden_layers": num_layers,
        "other_parameters": 0,
        "hidden_size": hidden_size,
        "intermediate_size": None if model.intermediate_size is None else max(unit, hidden_size // unit * unit),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": 64 * grid.tp,
        "num_nextn_predict_layers": min(1, model.num_nextn_predict_layers),
    }
    smaller = {
        "max_position_embeddings": seq_length, "sliding_window": max(2, seq_length // 4),
        "attention_chunk_size": max(2, seq_length // 2),
        "sliding_window_pattern": min(2, model.sliding_window_pattern or 2),
        "layer_types": model.layer_types and model.layer_types[:num_layers],
        "mlp_layer_types": model.mlp_layer_types and model.mlp_layer_types[:num_layers],
    }  # fmt: skip
    changes |= {name: value for name, value in smaller.items() if getattr(model, name) is not None}
    if model.traced is not None:
        changes["traced"] = _scaled_trace(model.traced, hidden_size / model.hidden_size)
    if model.mla is not None:
        dims = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), HEAD_DIM)
        rank = None if model.mla.q_lora_rank is None else hidden_size // 2
        changes["mla"] = {**model.mla.model_dump(), **dims, "q_lora_rank": rank, "kv_lora_rank": hidden_size // 2}
    if (moe := model.moe) is not None:
        experts = max(grid.ep, 4) if max(grid.ep, 4) % grid.ep == 0 else grid.ep
        changes["moe"] = {
            **moe.model_dump(), "num_experts": experts, "num_experts_per_tok": min(moe.num_experts_per_tok, 2, experts),
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": unit * bool(moe.shared_expert_intermediate_size),
            "first_k_dense_replace": min(1, moe.first_k_dense_replace), "moe_layer_freq": min(2, moe.moe_layer_freq),
            "n_group": None, "topk_group": None,  # four experts are too few for groups of them
        }  # fmt: skip
    return ModelSpec.model_validate({**model.model_dump(), **changes})


def _scaled_trace(traced: TracedSpec, factor: float) -> Fields:
    """The same operators with widths, bytes and weights times `factor`; what grows with the sequence stays."""

    def scaled(row: TracedOperator) -> Fields:
        n, k = ((max(1, round(factor * size[0])), *size[1:]) if size[0] else size for size in (row.n, row.k))
        own = n[0] * k[0] / (row.n[0] * row.k[0]) if row.weight else factor
        return row.model_dump() | {
            "n": n, "k": k, "parameters": row.parameters and max(1, round(own * row.parameters)),
            "bytes": tuple(factor * size for size in row.bytes),
            "kept": [{"num_bytes": tuple(factor * size for size in one.num_bytes)} for one in row.kept],
            **dict.fromkeys(("qk_dim", "v_dim"), HEAD_DIM * (row.kind == "attention")),
        }  # fmt: skip

    layers = [[scaled(row) for row in rows] for rows in traced.layers]
    return traced.model_dump() | {"layers": layers, "other_parameters": 0}


SEQ_LENGTH = 16


def laptop_run(plan: Plan, options: ProbeOptions) -> PlannedRun:
    """The run of processes on a CPU."""
    layout = plan.best
    model = plan.model.spec
    # shares of what flows through traced operators are no part of what one process computes
    grid = fit_processes(layout, options.num_processes, most_tp=2 if model.traced is None else 1)
    if options.order is not None:
        grid = grid._replace(pp=options.order.pp)
    order = options.order or slice_schedule(layout, grid.pp)
    stages = sampled_stages(layout.parallelism.pp, grid.pp)
    chunks = scaled_chunks(real_chunks(layout, order, stages), options.most_layers)
    run = ProbeRun.of(
        order,
        model=scaled_model(model, options.hidden_size, chunks[-1].last_layer, SEQ_LENGTH, grid),
        **_as_planned(layout, order, grid),
        micro_batch_size=min(2, layout.parallelism.micro_batch_size),
        seq_length=SEQ_LENGTH // grid.cp,
        chunks=chunks,
        check=True,
        warm_up_steps=0,
        num_steps=options.num_steps or FEWEST_STEPS,
        timeout_s=options.timeout_s,
    )
    return PlannedRun(plan, run, grid, stages)
