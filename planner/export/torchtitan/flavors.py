"""The models in torchtitan's registries and the published models that they are."""

from __future__ import annotations

from planner.export.common.exported_model import Model, model_called

FLAVORS = {
    ("llama3", "8B"): "llama-3.1-8b",
    ("llama3", "70B"): "llama-3.1-70b",
    ("llama3", "405B"): "llama-3.1-405b",
    ("llama3", "1B"): "llama-3.2-1b",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
}
"""(module, flavor) to the model's name here."""


_PREFIXES = {
    "deepseek_v3": "deepseek-",
    "llama3": "llama-3-",
    "llama4": "llama-4-",
    "llama2": "llama-2-",
    "llama": "llama-3-",
}


def model_of_flavor(name: str, flavor: str) -> Model | None:
    """The published model of a registry's flavor; None where it is of another size than any."""
    return FLAVORS.get((name, flavor)) or model_called(f"{_PREFIXES.get(name, f'{name}-')}{flavor}")


def flavor_of(module: str, function: str) -> tuple[str, str] | None:
    """The (module, flavor) that a registered function configures: `llama3_405b` of llama3 is its 405B."""
    flavor = function.removeprefix(f"{module}_").replace("_", "-").lower()
    return next((names for names in FLAVORS if (names[0], names[1].lower()) == (module, flavor)), None)
