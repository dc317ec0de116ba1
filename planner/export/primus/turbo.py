"""Primus-Turbo's kernels in Primus' keys: what a plan's recipe asks for."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.refusal import Reason
from planner.export.primus.keys import Keys

_EP_OVER_NODES, _UNITS_OVER_NODES = 16, 32
"""Expert parallelism from which exchanges of experts take no more compute units (Primus, rocm_arg_validation.py)."""


def turbo_keys(plan: Plan, keys: Keys) -> Keys:
    """The keys of Megatron-LM with Primus-Turbo's own, which stand for DeepEP, sync-free experts and their products."""
    if plan.model.spec.moe is None:
        return keys
    recipe, own = plan.best.recipe, Keys()
    if keys.get("moe_flex_dispatcher_backend") == "deepep" or keys.get("moe_enable_deepep"):
        keys = {name: value for name, value in keys.items() if name not in _FLEX}
        most = _UNITS_OVER_NODES if plan.parallelism.ep >= _EP_OVER_NODES else plan.runtime_spec.deepep_sms
        units = min(most, plan.runtime_spec.deepep_sms)
        # its patch makes the dispatcher flex, after Megatron-LM has looked at it
        own |= {"moe_token_dispatcher_type": "alltoall", "use_turbo_deepep": True, "turbo_deepep_num_cu": units}
    if recipe.get("sync_free_moe"):
        own["turbo_sync_free_moe_stage"] = recipe["sync_free_moe"]
    own |= _GROUPED.get(str(recipe.get("grouped_gemm")), {})
    is_turbo = any(name.startswith(("use_turbo", "turbo_")) for name in own)
    return {**keys, **own, **({"enable_primus_turbo": True} if is_turbo else {})}


_GROUPED: dict[str, Keys] = {
    "legacy": {"moe_use_legacy_grouped_gemm": True},
    "turbo": {"moe_use_legacy_grouped_gemm": False, "use_turbo_grouped_gemm": True},
}
_FLEX = ("moe_flex_dispatcher_backend", "moe_enable_deepep")


def objections_to_recipe(plan: Plan) -> list[Reason]:
    """The switches that name what only NVIDIA's GPUs have."""
    is_hybrid = plan.model.spec.moe is not None and plan.runtime_spec.dispatcher == "hybridep"
    return [Reason("dispatcher", "hybridep is NVIDIA's, deepep is what Primus-Turbo has")] if is_hybrid else []
