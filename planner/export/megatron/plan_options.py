"""Megatron-LM's options that say a plan, both ways: grid, stages, sharding, recompute, dtypes, kernels, switches."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from planner.answer import Plan
from planner.export.keyed_settings import readings
from planner.export.megatron.model_options import hybrid_pattern
from planner.export.megatron.option_rows import (
    Codec,
    Options,
    read_fields,
    reading,
    sections_of,
    table,
    text,
)
from planner.export.spelling import recipe_of, spelling_of, spellings
from planner.export.stages import VirtualStage, all_full, block_size, is_even, virtual_stages
from planner.export.trainer_files import Arguments
from planner.specs.base import Fields
from planner.trainers.layout_string import expanded
from planner.trainers.rules.facts import is_hybrid
from planner.trainers.switches import Value


def layout_string(stages: Iterable[VirtualStage], num_mtp: int = 0) -> str:
    """E embedding, t decoder layer, m MTP block, L loss, | between virtual stages, and x*n, (…)*n for repetition.

    `Et|(tt|)*62tL` is 64 stages: one layer in the first and the last, two in each between.
    """
    return fold([_symbols(stage, num_mtp) for stage in stages])


def fold(stages: list[str]) -> str:
    """Join the stages by |, runs of equal ones as (stage|)*n; the last has no | behind it."""
    *inner, last = stages
    parts = []
    for symbols, group in groupby(inner):
        times = len(list(group))
        stage = f"{symbols}|"
        # Megatron unrolls one level of parentheses, then x*n of one symbol
        parts.append(stage if times == 1 else f"|*{times}" if not symbols else f"({stage})*{times}")
    return "".join(parts) + last


def _symbols(stage: VirtualStage, num_mtp: int) -> str:
    text = "E" if stage.embedding else ""
    text += _repeat("t", stage.num_layers)
    text += _repeat("m", num_mtp) if stage.mtp else ""
    return text + ("L" if stage.head else "")


def _repeat(symbol: str, times: int) -> str:
    return symbol * times if times < 3 else f"{symbol}*{times}"


def is_fsdp(plan: Plan) -> bool:
    """ZeRO-2 and 3 are Megatron-FSDP; ZeRO-1 is the distributed optimizer."""
    return plan.parallelism.zero_stage >= 2


def _write_stages(plan: Plan) -> Arguments:
    """The split of layers: even stages by their number, all others by a layout string; a hybrid's by its pattern."""
    layout, model = plan.parallelism, plan.model.spec
    if is_hybrid(model):
        stages = virtual_stages(plan)
        return {"--hybrid-layer-pattern": hybrid_pattern(model, [stage.last_layer for stage in stages])}
    if layout.pp == 1:
        return {}
    stages = virtual_stages(plan)
    if not is_even(stages):
        return {"--pipeline-model-parallel-layout": layout_string(stages, model.num_nextn_predict_layers)}
    return {"--num-virtual-stages-per-pipeline-rank": layout.vpp} if layout.vpp > 1 else {}


def _write_recompute(plan: Plan) -> Arguments:
    layout = plan.parallelism
    if layout.recompute == "none":
        return {}
    if layout.recompute == "selective":
        return {
            "--recompute-granularity": "selective",
            "--recompute-modules": layout.recompute_modules or ("core_attn",),
        }
    size = block_size(plan.best, virtual_stages(plan))
    if size is None or all_full(plan.best):
        method, size = "uniform", plan.runtime_spec.layers_at_once
    else:
        method = "block"
    return {"--recompute-granularity": "full", "--recompute-method": method, "--recompute-num-layers": size}


def _read_stages(options: Options) -> Fields:
    """Virtual stages per rank and an uneven split, from any of Megatron's ways to give them."""
    layout: Fields = readings("megatron-stages", options, **reading(options), expanded=expanded)["layout"]
    return layout


def has_published_scales(plan: Plan) -> bool:
    """The model was published with scales of blocks, which Hopper has (Megatron-Bridge's subchannel precision)."""
    scales, is_hopper = plan.best.narrow_scaling, plan.cluster.hardware.architecture == "hopper"
    return plan.training.dtype == "fp8" and is_hopper and scales is not None and scales.published == "blockwise"


def precision(plan: Plan) -> Arguments:
    """The dtypes of matrix products and of weights, and that of the gradients of fp16."""
    dtype = plan.training.dtype
    runtime = plan.runtime_spec.in_dtype(dtype, plan.cluster.hardware.architecture)
    arguments: Arguments = dict(table()["dtypes"][dtype])
    if has_published_scales(plan):
        arguments["--fp8-recipe"] = "blockwise"
    if runtime.narrow_parameters and plan.parallelism.zero_stage >= 1:
        arguments |= table()["narrow_weights"].get(dtype, {})
    if dtype == "fp16" and runtime.gradient_bytes == 4:
        arguments["--accumulate-allreduce-grads-in-fp32"] = True
    return arguments


def read_dtype(options: Options) -> str:
    """The dtype that matrix products compute in."""
    if "--fp4-format" in options:
        return "nvfp4"
    if "--fp8-format" in options or "--fp8-hybrid" in options or "--fp8-e4m3" in options:
        return "mxfp8" if options.get("--fp8-recipe") == ["mxfp8"] else "fp8"
    return "fp16" if "--fp16" in options else "bf16"


def read_scales(options: Options) -> str | None:
    """The recipe of 8-bit scales, as a run's `precision_recipe` has it: `fp8-tensorwise`; None for other dtypes.

    Megatron-LM's own, where none is named, is `delayed`.
    """
    return f"fp8-{text(options, '--fp8-recipe', 'delayed')}" if read_dtype(options) == "fp8" else None


PRECISION_OPTIONS = frozenset({
    "--bf16", "--fp16", "--fp8-format", "--fp8-recipe", "--fp4-format", "--fp4-recipe", "--fp8-hybrid", "--fp8-e4m3",
})  # fmt: skip
"""Options that are read for the dtype; the first two formats have older names."""
CODECS = {
    "stages": Codec(_write_stages, _read_stages),
    "recompute": Codec(_write_recompute),
}
_SECTIONS = sections_of("layout", CODECS)
GRID, RECOMPUTE, KERNELS = (_SECTIONS[name] for name in ("grid", "recompute", "kernels"))
LAYOUT_OPTIONS = GRID.names_read() | RECOMPUTE.names_read()
"""Options that are read for a layout."""


def read_layout(options: Options) -> Fields:
    """Fields of a run's parallelism, without dp. Raises SpecError for sizes that are no numbers or do not divide."""
    return read_fields((GRID, RECOMPUTE), options)


SWITCH_OPTIONS = spellings(table()["switches"])
"""Megatron-LM's options for each value of each switch, which the exporter and the importer share."""
SWITCHING = frozenset(name for row in SWITCH_OPTIONS for name in row.settings)
"""All options that say a switch."""
CAPACITY = 1.5
"""Room of a rank for tokens of its experts, over the mean: the recipes of Megatron-Bridge for DeepSeek-V3 and Qwen3."""
STASH = 1.2
"""Buffers of the paged stash, over what balanced experts keep (Megatron-Bridge's recipes for DeepSeek-V3)."""
INFLIGHT = 1
"""Offloads of one kind that may be in flight at once inside a CUDA graph of a whole iteration (Megatron-Bridge's recipe
of DeepSeek-V3 for GB300)."""


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
