"""From a plan to what can be run here: the largest faithful slice of it, and what that leaves to extrapolation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.answer import PricedLayout, StagePlan
from planner.errors import ProbeError
from planner.probe.run import ChunkSpec, SleepSeconds
from planner.schedule.actions import Schedule
from planner.schedule.orders import build_schedule, violation
from planner.specs.base import Spec
from planner.specs.model import ModelSpec

RECOMPUTABLE = frozenset({"core_attn", "mlp", "moe", "shared_experts"})
"""Selective recompute modules that the probe's model knows."""
HEAD_DIM = 8
MAX_MICROBATCHES_PER_RANK = 3


class Slice(Spec):
    """What of a plan is run."""

    asked: str
    run: str
    reduced: tuple[str, ...] = ()
    """What is smaller than in the plan."""
    verified: tuple[str, ...] = ()
    extrapolated: tuple[str, ...] = ()


class Grid(NamedTuple):
    """Sizes of the ranks that are started."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


def fit_grid(layout: PricedLayout, num_processes: int, most_dp: int) -> Grid:
    """The largest slice of the plan's ranks in `num_processes`: data parallelism is given up first, then tensor and
    context parallelism down to 1 (on the CPU only their presence matters), then pipeline stages."""
    asked = layout.parallelism
    tp, cp, dp = min(asked.tp, 2), min(asked.cp, 2), min(asked.dp, most_dp)
    dp = max(1, min(dp, num_processes // (asked.pp * cp * tp)))
    tp = tp if asked.pp * dp * cp * tp <= num_processes else 1
    cp = cp if asked.pp * dp * cp * tp <= num_processes else 1
    pp = min(asked.pp, num_processes)
    return Grid(pp, dp, cp, tp, _largest_divisor(dp * cp * tp, asked.ep))


def fit_gpus(layout: PricedLayout, num_gpus: int) -> Grid:
    """As `fit_grid` with whole tensor- and context-parallel groups: less dp first, then fewer stages.

    Of several instances of a sharded optimizer one is run: the runner shards over all its replicas.

    Raises ProbeError where not even one group fits, or one stage of a pipeline alone.
    """
    asked = layout.parallelism
    group = asked.tp * asked.cp
    if num_gpus < group * min(2, asked.pp):
        needed = "one group" if num_gpus < group else f"two of {asked.pp} stages"
        raise ProbeError(
            f"{num_gpus} GPUs are less than {needed} of tp {asked.tp} × cp {asked.cp}",
            "run the stages one by one on a single GPU: --stage all",
        )
    pp = min(asked.pp, num_gpus // group)
    dp = _largest_divisor(sharing_dp(layout), num_gpus // (group * pp))
    return Grid(pp, dp, asked.cp, asked.tp, _largest_divisor(dp * group, asked.ep))


def sharing_dp(layout: PricedLayout) -> int:
    """Replicas that share one sharded optimizer; all of them where nothing is sharded."""
    asked = layout.parallelism
    return max(1, asked.shard_size // asked.cp) if asked.zero_stage else asked.dp


def _largest_divisor(number: int, at_most: int) -> int:
    return next(n for n in range(min(number, at_most), 0, -1) if number % n == 0)


def sampled_stages(asked_pp: int, pp: int) -> list[int]:
    """Which stages of the plan stand for the `pp` that are run: the ends, and evenly between."""
    return [round(i * (asked_pp - 1) / (pp - 1)) for i in range(pp)] if pp > 1 else [0]


def slice_schedule(layout: PricedLayout, pp: int, most: int | None = None) -> Schedule:
    """The plan's schedule on `pp` ranks, with at most `most` micro-batches (a few per rank unless given)."""
    asked = layout.parallelism
    name = asked.schedule if pp > 1 else "none"
    vpp = asked.vpp if pp > 1 else 1
    most = min(asked.num_microbatches, most or max(2, MAX_MICROBATCHES_PER_RANK * pp))
    for count in (*range(most, 0, -1), *range(most, 8 * pp * vpp + 1)):
        if violation(name, pp, vpp, count) is None:
            return build_schedule(name, pp, vpp, count)
    error = violation(name, pp, vpp, most)
    raise ProbeError(f"the plan's schedule cannot be run on {pp} stages: {error}", "give it more ranks")


def fully_shards(layout: PricedLayout, order: Schedule) -> bool:
    """Whether the run shards weights and gradients as the plan does: torch's fully_shard splits no backward."""
    return layout.parallelism.zero_stage == 3 and not order.splits_backward


def real_chunks(layout: PricedLayout, order: Schedule, stages: Sequence[int]) -> tuple[ChunkSpec, ...]:
    """Virtual stages with the plan's own layers; `stages` are the plan's stages that the pipeline ranks stand for."""
    n, seen = order.num_model_stages, [0] * order.pp
    chunks = []
    for virtual in range(n):
        rank = order.stage_to_rank[virtual]
        plan_stage = layout.stages[stages[rank]]
        first, last = _span(plan_stage, seen[rank], order.vpp)
        seen[rank] += 1
        recomputed = _recomputed(plan_stage, last - first)
        chunks.append(
            ChunkSpec(
                first_layer=first,
                last_layer=last,
                embedding=virtual == 0,
                head=virtual == n - 1,
                mtp=virtual == n - 1 and any("mtp" in stage.holds for stage in layout.stages),
                num_recomputed=recomputed,
            )
        )
    return tuple(chunks)


def _span(stage: StagePlan, index: int, vpp: int) -> tuple[int, int]:
    """Layers of a chunk: the plan's own, or an even part of the stage's where an order has more or fewer chunks."""
    if vpp == len(stage.chunks):
        return stage.chunks[index]
    first, layers = stage.chunks[0][0], stage.num_layers
    return first + layers * index // vpp, first + layers * (index + 1) // vpp


def scaled_chunks(chunks: Sequence[ChunkSpec], most_layers: int) -> tuple[ChunkSpec, ...]:
    """The same chunks with at most `most_layers` layers each, in proportion, one layer at least where there is any."""
    largest = max(chunk.num_layers for chunk in chunks)
    scaled, first = [], 0
    for chunk in chunks:
        layers = max(1, round(chunk.num_layers * min(1.0, most_layers / largest))) if chunk.num_layers else 0
        share = chunk.num_recomputed / chunk.num_layers if chunk.num_layers else 0
        scaled.append(
            chunk.model_copy(
                update={
                    "first_layer": first,
                    "last_layer": first + layers,
                    "num_recomputed": round(layers * share),
                }
            )
        )
        first += layers
    return tuple(scaled)


def _recomputed(stage: StagePlan, layers: int) -> int:
    """Layers of a chunk that are recomputed whole: the stage's share of them."""
    total = max(1, sum(stage.recompute.values()))
    return round(layers * stage.recompute.get("full", 0) / total)


def scaled_model(model: ModelSpec, hidden_size: int, num_layers: int, seq_length: int, grid: Grid) -> ModelSpec:
    """The same structure in small: every kind of layer, norm, bias and router, with narrow matrices."""
    heads = max(hidden_size // HEAD_DIM // grid.tp, 1) * grid.tp
    grouped = model.num_key_value_heads < model.num_attention_heads
    kv_heads = heads // 2 if grouped and heads // 2 % grid.tp == 0 and heads // 2 >= grid.tp else heads
    unit = 8 * grid.tp
    changes: dict[str, object] = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": None if model.intermediate_size is None else max(unit, hidden_size // unit * unit),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": 64 * grid.tp,
        "num_nextn_predict_layers": min(1, model.num_nextn_predict_layers),
    }
    if model.max_position_embeddings is not None:
        changes["max_position_embeddings"] = seq_length
    if model.sliding_window is not None:
        changes["sliding_window"] = max(2, seq_length // 4)
    if model.attention_chunk_size is not None:
        changes["attention_chunk_size"] = max(2, seq_length // 2)
    if model.sliding_window_pattern is not None:
        changes["sliding_window_pattern"] = min(2, model.sliding_window_pattern)
    if model.mla is not None:
        changes["mla"] = model.mla.model_copy(
            update={
                "q_lora_rank": None if model.mla.q_lora_rank is None else hidden_size // 2,
                "kv_lora_rank": hidden_size // 2,
                "qk_nope_head_dim": HEAD_DIM,
                "qk_rope_head_dim": HEAD_DIM,
                "v_head_dim": HEAD_DIM,
            }
        )
    if model.moe is not None:
        moe = model.moe
        experts = max(grid.ep, 4) if max(grid.ep, 4) % grid.ep == 0 else grid.ep
        changes["moe"] = moe.model_copy(
            update={
                "num_experts": experts,
                "num_experts_per_tok": min(moe.num_experts_per_tok, 2, experts),
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": unit if moe.shared_expert_intermediate_size else 0,
                "first_k_dense_replace": min(1, moe.first_k_dense_replace),
                "moe_layer_freq": min(2, moe.moe_layer_freq),
            }
        )
    return ModelSpec.model_validate({**model.model_dump(), **{k: _plain(v) for k, v in changes.items()}})


def _plain(value: object) -> object:
    return value.model_dump() if isinstance(value, Spec) else value


def recompute_modules(layout: PricedLayout) -> tuple[str, ...]:
    """Selectively recomputed modules that the probe's model can recompute."""
    return tuple(name for name in layout.parallelism.recompute_modules if name in RECOMPUTABLE)


def planned_seconds(layout: PricedLayout, order: Schedule, stages: Sequence[int]) -> tuple[SleepSeconds, ...]:
    """Planned seconds of every virtual stage, exchanges included: a stage's are shared among its chunks by layers."""
    seen = [0] * order.pp
    raw = []
    for rank in order.stage_to_rank[: order.num_model_stages]:
        stage = layout.stages[stages[rank]]
        layers = [last - first for first, last in stage.chunks]
        whole = order.vpp != len(layers)
        share = 1 / order.vpp if whole or not sum(layers) else layers[seen[rank]] / sum(layers)
        seen[rank] += 1
        input_grad_s = stage.backward_s - stage.weight_grad_s + stage.backward_comm_s
        raw.append(
            SleepSeconds(
                share * (stage.forward_s + stage.forward_comm_s), share * input_grad_s, share * stage.weight_grad_s
            )
        )
    return tuple(raw)


def scaled_seconds(planned: Sequence[SleepSeconds], mean_forward_s: float) -> tuple[SleepSeconds, ...]:
    """The same proportions with a mean forward of `mean_forward_s`."""
    factor = mean_forward_s * len(planned) / sum(seconds.forward_s for seconds in planned)
    return tuple(SleepSeconds(*(factor * s for s in seconds)) for seconds in planned)
