"""Megatron-LM's options as keys of Primus, which sets arguments by the names that the parser gives their values.

Read from the parser of the commit that Primus pins, d3528a21 (core 0.16.0, March 2026). The values of a YAML pass by
the conversions of the parser, so they are written as these would leave them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from planner.export.common.arguments import ShellText, Value
from planner.specs.reading.python_text import literal, parse_expression
from planner.specs.units import is_count

Keys = dict[str, Any]
"""Keys of `overrides:` and their values."""

_OFF = {
    "--disable-bias-linear": "add_bias_linear",
    "--no-bias-gelu-fusion": "bias_gelu_fusion",
    "--no-bias-swiglu-fusion": "bias_swiglu_fusion",
    "--no-check-for-nan-in-loss-and-grad": "check_for_nan_in_loss_and_grad",
    "--no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "--no-overlap-p2p-communication": "overlap_p2p_comm",
    "--no-rope-fusion": "apply_rope_fusion",
}
"""Options that set a value to false."""
_RENAMED = {
    "--apply-layernorm-1p": "layernorm_zero_centered_gamma",
    "--fp4-format": "fp4",
    "--fp4-param-gather": "fp4_param",
    "--fp8-format": "fp8",
    "--norm-epsilon": "layernorm_epsilon",
}
"""Options whose value has another name."""
_PATTERNS = ("--no-rope-freq", "--window-attn-skip-freq", "--window-size")
"""Options whose text the parser evaluates; Primus does so itself for `moe_layer_freq` alone."""

MEGATRON_DEFAULTS: Keys = {
    "add_bias_linear": True,
    "add_position_embedding": True,
    "dataloader_type": None,
    "exit_on_missing_checkpoint": False,
    "finetune": False,
    "mscale_all_dim": 0.0,
    "num_query_groups": 1,
    "override_opt_param_scheduler": False,
    "sequence_parallel": False,
    "swiglu": False,
    "untie_embeddings_and_output_weights": False,
    "use_distributed_optimizer": False,
    # the preset's true ends every deterministic run
    "use_flash_attn": False,
}
"""Arguments that Primus' presets `pre_trainer.yaml` and `language_model.yaml` set otherwise than Megatron-LM's parser,
and that decide what is trained; they stand at the parser's values wherever a plan says nothing else."""


def key_of(option: str) -> str:
    """The name under which Primus knows an option of Megatron-LM."""
    return _OFF.get(option) or _RENAMED.get(option) or option.removeprefix("--").replace("-", "_")


def keys_of(arguments: Mapping[str, Value]) -> Keys:
    """Arguments of Megatron-LM as keys of Primus and their values."""
    return {key_of(option): _value(option, value) for option, value in arguments.items()}


def _value(option: str, value: Value) -> Any:
    if option in _OFF:
        return False
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, ShellText):
        return value.unquoted
    if option in _PATTERNS and isinstance(value, str):
        return _evaluated(value)
    return int(value) if isinstance(value, str) and is_count(value) else value


def _evaluated(text: str) -> Any:
    """The list that an expression such as `([0]*3+[1]*58)` or `(127,0)` stands for."""
    tree = parse_expression(text)
    return list(_items(tree)) if not isinstance(tree, ast.Constant) else tree.value


def _items(tree: ast.expr) -> list[int]:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        return _items(tree.left) + _items(tree.right)
    if isinstance(tree, ast.BinOp):
        return _items(tree.left) * int(literal(tree.right))
    items: tuple[int, ...] | list[int] = literal(tree)
    return list(items)
