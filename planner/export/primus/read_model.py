"""Models of Primus that Megatron-LM's arguments alone do not say: sinks, caps, convolutions, gated delta nets."""

from __future__ import annotations

import re
from typing import Any

from planner.errors import SpecError

Values = dict[str, Any]
MODEL_KEYS = frozenset({
    "use_sink_attention", "sink_sliding_window", "sink_window_even_layers_only", "final_logit_softcapping",
    "attn_logit_softcapping", "router_logit_softcapping", "lfm_layer_types", "conv_L_cache", "conv_bias",
    "experimental_attention_variant", "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "model_type", "spec",
})  # fmt: skip
"""Keys that are read here."""
_OTHERS = {
    "mamba": "Mamba, a state-space model, or one of its hybrids",
    "deepseek_v4": "DeepSeek-V4, whose layers choose keys from compressed ones and keep several residual streams",
    "kimi_k3": "Kimi K3, whose layers attend to the residuals of earlier ones",
}
"""Values of `model_type`, and what they are."""


def check_is_transformer(values: Values) -> None:
    """Raise SpecError for a model whose layers are none that this planner has."""
    kind = str(values.get("model_type") or "gpt")
    if kind != "gpt":
        what = _OTHERS.get(kind, "a diffusion model" if re.search("flux|diffusion|wan", kind) else f"{kind[:40]!r}")
        raise SpecError(f"model_type: this is {what}", "only decoder-only transformers in training are planned")
    if re.search(r"mamba|hybrid", str(values.get("spec") or "")):
        raise SpecError(f"spec: {str(values['spec'])[:80]}: this is a hybrid", "give the experiment of a transformer")


def add_to_model(model: Values, values: Values) -> None:
    """Put what Primus' own keys say of a model into its fields."""
    for cap in ("final_logit_softcapping", "attn_logit_softcapping"):
        if isinstance(values.get(cap), (int, float)) and values[cap]:
            model[cap] = values[cap]
    if values.get("use_sink_attention"):
        model["attention_sinks"] = True
        window = values.get("sink_sliding_window") or 0
        if type(window) is int and window > 0:
            model["sliding_window"] = window
            if values.get("sink_window_even_layers_only", True):
                model["sliding_window_pattern"] = 2
    if (kinds := values.get("lfm_layer_types")) is not None:
        if not isinstance(kinds, list):
            raise SpecError(f"lfm_layer_types: {kinds!r:.60} is no list of layers", "write [conv, full_attention, …]")
        model["layer_types"] = ["conv" if kind == "conv" else "full" for kind in kinds]
        model["short_conv_kernel"] = values.get("conv_L_cache") or 3
    if (variant := values.get("experimental_attention_variant")) == "gated_delta_net":
        _add_delta_net(model, values)
    elif variant is not None:
        raise SpecError(f"experimental_attention_variant: {str(variant)[:40]} is not modelled", "leave it out")


def _add_delta_net(model: Values, values: Values) -> None:
    """Gated delta nets on all layers but every n-th, which attends."""
    every = values.get("linear_attention_freq")
    if type(every) is not int or every < 2:
        raise SpecError(f"linear_attention_freq: {every!r:.60} is no interval of layers", "write a number from 2 on")
    model["layer_types"] = (["gated_delta"] * (every - 1) + ["full"])[: model["num_hidden_layers"]]
    model["linear_attention"] = {
        "num_key_heads": values.get("linear_num_key_heads"),
        "num_value_heads": values.get("linear_num_value_heads"),
        "key_head_dim": values.get("linear_key_head_dim"),
        "value_head_dim": values.get("linear_value_head_dim"),
        "conv_kernel": values.get("linear_conv_kernel_dim"),
    }
