"""A model's positions from Megatron-LM's arguments: rotary frequencies, their stretching, and layers without them."""

from __future__ import annotations

import re
from typing import Any

from planner.errors import SpecError
from planner.export.megatron.model.layer_flags import layer_flags
from planner.export.megatron.options import Options, decimal, size, text
from planner.specs.units import is_count
from planner.trainers.rules.facts import every_nth

POSITION_OPTIONS = {
    "--position-embedding-type", "--use-rotary-position-embeddings", "--no-position-embedding",
    "--max-position-embeddings", "--rotary-base", "--rotary-percent", "--use-rope-scaling", "--rope-scaling-factor",
    "--rotary-scaling-factor", "--rotary-seq-len-interpolation-factor", "--mscale", "--mscale-all-dim",
    "--yarn-original-max-position-embeddings", "--yarn-beta-fast", "--yarn-beta-slow",
    "--no-yarn-correction-range-round-to-int", "--no-rope-freq",
}  # fmt: skip
_KINDS = {
    "learned_absolute": "learned", "rope": "rope", "yarn": "rope", "mrope": "rope", "alibi": "alibi", "none": "none",
}  # fmt: skip
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_positions(options: Options, num_layers: int) -> dict[str, Any]:
    """Fields of positions. Raises SpecError for kinds and patterns that are unknown."""
    kind = text(options, "--position-embedding-type", "learned_absolute")
    if "--use-rotary-position-embeddings" in options:
        kind = "rope"
    elif "--no-position-embedding" in options and kind == "learned_absolute":
        kind = "none"
    position = _KINDS.get(kind)
    if position is None:
        raise SpecError(f"--position-embedding-type: {str(kind)[:60]!r} is unknown", f"one of {', '.join(_KINDS)}")
    if position == "learned":
        rows = "--max-position-embeddings" if "--max-position-embeddings" in options else "--seq-length"
        return {"position_embedding": position, "max_position_embeddings": size(options, rows)}
    if position != "rope":
        return {"position_embedding": position}
    base = text(options, "--rotary-base", "10000")
    share = text(options, "--rotary-percent", "1.0")
    return {
        "position_embedding": position,
        "rope_theta": float(base) if re.fullmatch(r"\d+(\.0*)?", base) else None,
        "partial_rotary_factor": float(share) if re.fullmatch(r"[0-9.]+", share) else 1.0,
        "rope_scaling": _scaling(options, kind),
        "no_rope_layer_interval": _unrotated(options, num_layers),
    }


def _scaling(options: Options, kind: str) -> dict[str, Any] | None:
    """How frequencies are stretched. Latent attention has yarn, whose numbers without an option are DeepSeek's."""
    if kind == "yarn":
        return _yarn(options)
    if "--multi-latent-attention" in options:
        factor = decimal(options, "--rotary-scaling-factor", 1.0)
        return None if factor == 1 else _yarn(options)
    if "--use-rope-scaling" in options:
        return {"rope_type": "llama3", "factor": decimal(options, "--rope-scaling-factor", 8.0), **_LLAMA3}
    if "--rotary-seq-len-interpolation-factor" in options:
        factor = decimal(options, "--rotary-seq-len-interpolation-factor", 1.0)
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    return None


def _yarn(options: Options) -> dict[str, Any]:
    positions = "--yarn-original-max-position-embeddings"
    return {
        "rope_type": "yarn",
        "factor": decimal(options, "--rotary-scaling-factor", 1.0),
        "original_max_position_embeddings": size(options, positions) if positions in options else 4096,
        "beta_fast": decimal(options, "--yarn-beta-fast", 32.0),
        "beta_slow": decimal(options, "--yarn-beta-slow", 1.0),
        "mscale": decimal(options, "--mscale"),
        "mscale_all_dim": decimal(options, "--mscale-all-dim"),
        "truncate": False if "--no-yarn-correction-range-round-to-int" in options else None,
    }


def _unrotated(options: Options, num_layers: int) -> int | None:
    """n where every n-th layer has no rotary positions."""
    pattern = text(options, "--no-rope-freq").strip()
    if not pattern or is_count(pattern):
        return int(pattern) if pattern else None
    n = every_nth(layer_flags("--no-rope-freq", pattern, num_layers))
    if n is None:
        raise SpecError(f"--no-rope-freq: {pattern[:60]!r} has no counterpart here", "every n-th layer is unrotated")
    return n
