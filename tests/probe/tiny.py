"""A model of a few kilobytes, and what older versions of torch cannot run; no conftest, of which there are several."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

TINY: dict[str, Any] = {
    "name": "tiny",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}


def skip_where_torch_is_too_old(fully_sharded: bool) -> None:
    """Skip a test of ZeRO-3 on versions of torch that the probe refuses it on."""
    if fully_sharded and not hasattr(import_module("torch.distributed.fsdp").FSDPModule, "set_custom_all_gather"):
        pytest.skip("fully_shard of this torch is too old")
