"""A plan's recipe in Megatron-LM's options."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.arguments import Arguments
from planner.export.common.recipe import recipe_of
from planner.export.common.spelling import spelling_of
from planner.export.megatron.switches import CAPACITY, SWITCH_OPTIONS
from planner.trainers.switches import Value

STASH = 1.2
"""Buffers of the paged stash, over what balanced experts keep (Megatron-Bridge's recipes for DeepSeek-V3)."""
INFLIGHT = 1
"""Copies to the host, of one kind, that a graph of a whole iteration does not wait for: Megatron-Bridge's recipe of
DeepSeek-V3 for GB300."""


def switch_arguments(plan: Plan) -> Arguments:
    """The options that say the plan's recipe in its version's words; those of refused values are left out."""
    arguments: Arguments = {}
    for name, value in _recipe(plan).items():
        arguments |= spelling_of(SWITCH_OPTIONS, name, value, plan.runtime_spec.version) or {}
    if plan.model.spec.moe is not None:
        # allgather unless told
        arguments.setdefault("--moe-token-dispatcher-type", "alltoall")
        arguments |= _whole_mixture(plan)
    if plan.runtime_spec.cuda_graphs and plan.runtime_spec.offload_modules:
        arguments["--fine-grained-offloading-max-inflight-offloads"] = INFLIGHT
    if not plan.model.spec.gated_mlp:
        arguments.pop("--moe-mlp-glu-interleave-size", None)
    return arguments


def _recipe(plan: Plan) -> dict[str, Value]:
    recipe = dict(recipe_of(plan, SWITCH_OPTIONS))
    if plan.training.dtype == "fp16":
        # the other way about: gradients are 16 bits wide unless they are asked to be 32
        recipe.pop("bf16_gradients")
    return recipe


def _whole_mixture(plan: Plan) -> Arguments:
    """The room for tokens of experts in a graph that replays whatever their numbers are: no host sees these."""
    if not (plan.runtime_spec.cuda_graphs and plan.runtime_spec.fuses_experts):
        return {}
    return {
        "--moe-token-dispatcher-type": "flex",
        "--moe-flex-dispatcher-backend": "hybridep",
        "--moe-expert-rank-capacity-factor": CAPACITY,
        "--moe-paged-stash": True,
        "--moe-paged-stash-buffer-size-factor-cuda": STASH,
    }
