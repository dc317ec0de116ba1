"""The vision tower of a multimodal config: `vision_config` by the table in vision.yaml, as fields of a VisionSpec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from planner.specs.architectures.derivations import ACTIVATIONS, Config, Derived, InexpressibleError, sum_of, whole
from planner.specs.reading import load_yaml

_TABLE = Path(__file__).parent / "vision.yaml"
_NORMS = {"rms_norm": "rmsnorm", "layer_norm": "layernorm"}
_MOST, _MOST_LAYERS = 10**9, 1000
"""The largest number that is taken for a size, and for a number of layers or projectors."""
_PATCHES = 8192
"""The most patches along the side of an image that are taken for a size."""


@cache
def _table() -> dict[str, Any]:
    return load_yaml(_TABLE)


def _row(part: str, name: str) -> dict[str, Any]:
    """A row of the table, with what it takes over from another."""
    row: dict[str, Any] = _table()[part].get(name, {})
    like = _row(part, row["like"]) if "like" in row else {}
    return {**like, **row, "defaults": like.get("defaults", {}) | row.get("defaults", {})}


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes of a tower by short names, or by the keys of its config."""

    vision: Config
    config: Config
    row: Mapping[str, Any]
    text_hidden: int

    def __getitem__(self, name: str) -> int:
        if name == "t":
            return self.text_hidden
        if name == "n":
            return (self["i"] // self["k"]) ** 2
        if name == "q":
            return self["n"] // self["m"] ** 2
        keys = self.row.get("keys", {}).get(name) or _table()["sizes"].get(name, [name])
        # the language model's sizes stand in the whole config under the same keys
        places = (self.vision,) if name in _table()["sizes"] and name != "m" else (self.vision, self.config)
        found = [(key, place[key]) for place in places for key in keys if place.get(key) is not None]
        default = self.row["defaults"].get(name)
        if not found and isinstance(default, str):
            return self.sum_of(default)
        key, value = found[0] if found else (keys[0], default)
        if isinstance(value, (list, tuple)) and value:
            value = len(value) if name == self.row.get("again") else value[0]
        size = int(value) if isinstance(value, bool) else whole({key: value}, key)
        most = _MOST_LAYERS if name in ("l", self.row.get("again")) else _MOST
        if not 0 <= size <= most or (size == 0 and name in "hlaftkmi"):
            raise InexpressibleError(f"vision_config: {key}: {size} is no size")
        if name == "i" and size > _PATCHES * self["k"]:
            raise InexpressibleError(f"vision_config: {key}: {size} is no side of an image")
        return size

    def sum_of(self, text: str | int) -> int:
        """A sum of products of sizes."""
        return sum_of(text, self.__getitem__)


def vision_of(config: Config, text_hidden: int) -> Derived | None:
    """Fields of the VisionSpec of a config's tower; None where there is none, or none that the table knows."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping) or not vision:
        return None
    kind, inner = str(config.get("model_type")), str(vision.get("model_type") or "")
    kind = kind.removesuffix("_thinker")
    same, between = _table()["same_as"], _table()["between_same_as"].get(kind, kind)
    behind, rows = _row("between", between), [_row("encoders", same.get(name, name)) for name in (inner, kind)]
    row = next((one for one in rows if "patch" in one and ("projector" in one or "projector" in behind)), None)
    if row is None:
        return None
    sizes = _Sizes(vision, config, {**row, "defaults": row["defaults"] | behind["defaults"]}, text_hidden)
    projector = [*row.get("projector", ()), *behind.get("projector", ())]
    again = sizes[row["again"]] if "again" in row else 0
    tokens = behind.get("tokens", row.get("tokens"))
    image_tokens = 1024 if tokens is None else max(sizes.sum_of(tokens), 1)
    merged = sizes["m"] ** 2 if "m" in sizes.row["defaults"] else sizes["n"] // image_tokens
    return {
        "encoder": _encoder(sizes, vision, row),
        "patch_values": sizes.sum_of(row["patch"]),
        "patches_per_token": max(merged, 1),
        "num_extra_patches": row.get("extra", 0),
        "projector": [[*map(sizes.sum_of, each), 1][:3] for each in projector * (1 + again)],
        "other_parameters": sizes.sum_of(row["other"]) + sizes.sum_of(behind.get("other", 0)),
        "image_tokens": image_tokens,
    }


def _encoder(sizes: _Sizes, vision: Config, row: Mapping[str, Any]) -> Derived:
    """Fields of the ModelSpec of a tower's layers."""
    fields: Derived = {
        "name": "vision", "vocab_size": 1, "causal": False, "num_hidden_layers": sizes["l"], "hidden_size": sizes["h"],
        "num_attention_heads": sizes["a"], "intermediate_size": sizes["f"], "gated_mlp": False,
        "position_embedding": "none", **row["fields"],
    }  # fmt: skip
    fields |= {key: vision[key] for key in ("head_dim", "num_key_value_heads") if vision.get(key) is not None}
    if vision.get("qkv_hidden_size"):
        fields["head_dim"] = sizes["qkv_hidden_size"] // sizes["a"]
    if isinstance(act := vision.get("hidden_act"), str) and act in ACTIVATIONS:
        fields["activation"] = ACTIVATIONS[act]
    if isinstance(kind := vision.get("norm_type"), str) and kind in _NORMS:
        fields["norm"] = _NORMS[kind]
    if vision.get("use_qk_norm") or vision.get("qk_normalization"):
        fields |= {"qk_norm": True, "qk_norm_over": "hidden"}
    if "biases" in row:
        fields["attention_bias"] = row["biases"][bool(vision.get("attention_bias", vision.get("qkv_bias")))]
    if "windows" in row:
        stated = vision.get("fullatt_block_indexes")
        given = stated if isinstance(stated, (list, tuple)) else row["windows"]
        fields["attention_chunk_size"] = max(sizes["window_size"] // sizes["k"], 1) ** 2
        layers = min(fields["num_hidden_layers"], 1000)
        fields["layer_types"] = ["full" if layer in given else "chunked" for layer in range(layers)]
    return fields
