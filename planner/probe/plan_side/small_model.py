"""A model of the plan's structure with narrow matrices, for processes on a CPU."""

from __future__ import annotations

from planner.probe.plan_side.rank_grid import RankGrid
from planner.specs.base import Spec
from planner.specs.model import ModelSpec

HEAD_DIM = 8


def scaled_model(model: ModelSpec, hidden_size: int, num_layers: int, seq_length: int, grid: RankGrid) -> ModelSpec:
    """A small model of the same structure: every kind of layer, norm, bias and router, with narrow matrices."""
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
    for name in ("layer_types", "mlp_layer_types"):
        listed = getattr(model, name)
        changes[name] = None if listed is None else listed[:num_layers]
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
                # four experts are too few for groups of them
                "n_group": None,
                "topk_group": None,
            }
        )
    return ModelSpec.model_validate({**model.model_dump(), **{k: _plain(v) for k, v in changes.items()}})


def _plain(value: object) -> object:
    return value.model_dump() if isinstance(value, Spec) else value
