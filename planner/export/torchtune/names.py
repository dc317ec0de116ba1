"""torchtune's names: builders of models, modules with adapters, optimizers."""

from __future__ import annotations

import re

from planner.export.common.exported_model import Model, model_called

MODULES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
"""Attention's projections by peft's names, and by torchtune's (lora_attn_modules)."""
OPTIMIZERS = {
    "adamw": "torch.optim.AdamW",
    "adamw-8bit": "bitsandbytes.optim.AdamW8bit",
    "paged-adamw": "bitsandbytes.optim.PagedAdamW",
    "paged-adamw-8bit": "bitsandbytes.optim.PagedAdamW8bit",
    "sgd": "torch.optim.SGD",
}
"""Values of the switch `optimizer`, and the classes that recipes name."""
_BUILDER = re.compile(r"torchtune\.models\.\w+\.(q?lora_|q?dora_)?(\w+)")


_BUILDERS = {
    "llama-2-7b": "llama2_7b", "llama-2-13b": "llama2_13b", "llama-2-70b": "llama2_70b",
    "llama-3.1-8b": "llama3_1_8b", "llama-3.1-70b": "llama3_1_70b", "llama-3.1-405b": "llama3_1_405b",
    "llama-3.2-1b": "llama3_2_1b", "qwen2.5-32b": "qwen2_5_32b_instruct", "qwen2.5-72b": "qwen2_5_72b_instruct",
    "qwen3-8b": "qwen3_8b_instruct", "qwen3-32b": "qwen3_32b",
}  # fmt: skip
"""Builders in torchtune/models, of the models that ship here."""


def model_of_builder(component: str) -> tuple[Model | None, str]:
    """The model that a builder makes, and what stands before its name: lora_, qlora_, dora_ or nothing."""
    found = _BUILDER.fullmatch(component)
    if found is None:
        return None, ""
    own = next((name for name, builder in _BUILDERS.items() if builder == found[2]), None)
    return own or model_called(found[2].replace("_", "-")), found[1] or ""
