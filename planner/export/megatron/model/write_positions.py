"""A model's positions in Megatron-LM's arguments: rotary frequencies, their stretching, and layers without them."""

from __future__ import annotations

from planner.export.common.arguments import Arguments
from planner.export.common.model import ROTARY_BASE, listed
from planner.specs.model import ModelSpec
from planner.specs.model_parts import RopeScalingSpec
from planner.trainers.rules.facts import rotary_method


def position_arguments(model: ModelSpec, seq_length: int) -> Arguments:
    """The arguments of a model's positions; a table of learned ones has the model's rows."""
    learned = model.position_embedding == "learned"
    arguments: Arguments = {
        "--position-embedding-type": "learned_absolute" if learned else model.position_embedding,
        "--max-position-embeddings": (model.max_position_embeddings or 0) if learned else seq_length,
    }
    if model.position_embedding == "rope":
        # it reads a whole number
        arguments["--rotary-base"] = round(model.rope_theta or ROTARY_BASE)
        if model.partial_rotary_factor < 1:
            arguments["--rotary-percent"] = model.partial_rotary_factor
        arguments |= _stretched(model) | _unrotated(model)
    return arguments


def _stretched(model: ModelSpec) -> Arguments:
    """Stretched frequencies. Latent attention is always yarn there, whose factor 1 stretches nothing."""
    scaling, method = model.rope_scaling, rotary_method(model)
    if scaling is None or method is None:
        return {} if model.mla is None else {"--rotary-scaling-factor": 1.0}
    factor = scaling.factor or 1.0
    if method == "yarn":
        return _weights(scaling) | (_yarn(scaling) if model.mla is None else {"--rotary-scaling-factor": factor})
    if method == "llama3":
        return {"--use-rope-scaling": True, "--rope-scaling-factor": factor}
    return {"--rotary-seq-len-interpolation-factor": round(factor)}


def _yarn(scaling: RopeScalingSpec) -> Arguments:
    """Yarn of attention that is not latent, which has each number as an option."""
    arguments: Arguments = {
        "--position-embedding-type": "yarn",
        "--rotary-scaling-factor": scaling.factor or 1.0,
        "--yarn-original-max-position-embeddings": scaling.original_max_position_embeddings or 4096,
        "--yarn-beta-fast": scaling.beta_fast or 32.0,
        "--yarn-beta-slow": scaling.beta_slow or 1.0,
    }
    if scaling.truncate is False:
        arguments["--no-yarn-correction-range-round-to-int"] = True
    return arguments


def _weights(scaling: RopeScalingSpec) -> Arguments:
    """Weights of yarn's scales, 1 and 0 unless they are told."""
    weights = {"--mscale": scaling.mscale, "--mscale-all-dim": scaling.mscale_all_dim}
    return {option: weight for option, weight in weights.items() if weight is not None}


def _unrotated(model: ModelSpec) -> Arguments:
    """Every n-th layer without rotary positions; as a list where n does not divide the layers."""
    n, layers = model.no_rope_layer_interval, model.num_hidden_layers
    if n is None or n > layers:
        return {}
    return {"--no-rope-freq": n if layers % n == 0 else listed((i + 1) % n == 0 for i in range(layers))}
