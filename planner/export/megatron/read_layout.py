"""The grid, the split of layers, sharding and recompute in Megatron-LM's arguments."""

from __future__ import annotations

from typing import Any

from planner.errors import SpecError
from planner.export.megatron.options import Options, number, positive, text
from planner.trainers.layout_string import expanded

_SIZES = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--micro-batch-size": "micro_batch_size",
}
LAYOUT_OPTIONS = frozenset(_SIZES) | {
    "--use-tp-pp-dp-mapping",
    "--sequence-parallel", "--expert-tensor-parallel-size", "--use-distributed-optimizer", "--use-megatron-fsdp",
    "--use-custom-fsdp", "--data-parallel-sharding-strategy", "--use-torch-fsdp2",
    "--num-distributed-optimizer-instances", "--recompute-activations", "--recompute-granularity", "--recompute-method",
    "--recompute-num-layers", "--recompute-modules", "--pipeline-model-parallel-layout",
    "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank",
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
}  # fmt: skip


def read_layout(options: Options) -> dict[str, Any]:
    """Fields of a run's parallelism, without dp. Raises SpecError for sizes that are no numbers or do not divide."""
    layout: dict[str, Any] = {name: positive(options, option) for option, name in _SIZES.items()}
    layout["sequence_parallel"] = "--sequence-parallel" in options and layout["tp"] > 1
    if "--num-experts" in options:
        layout["etp"] = number(options, "--expert-tensor-parallel-size", layout["tp"])
    if "--use-tp-pp-dp-mapping" in options:
        layout["rank_order"] = "tp-cp-ep-pp-dp"
    layout |= _sharding(options)
    layout |= _recompute(options)
    layout |= _stages(options, layout["pp"])
    return layout


def _sharding(options: Options) -> dict[str, Any]:
    """The ZeRO stage that the distributed optimizer or FSDP amounts to."""
    strategies = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    if "--use-megatron-fsdp" in options or "--use-custom-fsdp" in options:
        # unasked: all of it since 0.18, nothing before, when custom FSDP was renamed
        unasked = "optim_grads_params" if "--use-megatron-fsdp" in options else "no_shard"
        strategy = text(options, "--data-parallel-sharding-strategy", unasked)
        return {"zero_stage": strategies.get(strategy, 0)}
    if "--use-torch-fsdp2" in options:
        return {"zero_stage": 3}
    return {"zero_stage": 1 if "--use-distributed-optimizer" in options else 0}


def _recompute(options: Options) -> dict[str, Any]:
    """Recompute mode, with its modules or its number of layers."""
    mode = text(options, "--recompute-granularity")
    if not mode:
        return {"recompute": "selective"} if "--recompute-activations" in options else {}
    if mode == "selective":
        modules = options.get("--recompute-modules", ["core_attn"])
        return {
            "recompute": "selective",
            "recompute_modules": [m for word in modules for m in word.strip("[]").split()],
        }
    if options.get("--recompute-method") == ["block"]:
        num_layers = number(options, "--recompute-num-layers", 1)
        return {"recompute": "full", "recompute_num_layers": num_layers} if num_layers else {}
    return {"recompute": "full"}


def _stages(options: Options, pp: int) -> dict[str, Any]:
    """Virtual stages per rank and an uneven split, from any of Megatron's ways to give them."""
    if symbols := options.get("--pipeline-model-parallel-layout"):
        layout = "".join(symbols)
        return {"layout": layout, "vpp": (expanded(layout).count("|") + 1) // pp}
    num_layers = number(options, "--num-layers", 0) or 0
    vpp = positive(options, "--num-virtual-stages-per-pipeline-rank")
    ends = ("--account-for-embedding-in-pipeline-split" in options, "--account-for-loss-in-pipeline-split" in options)
    if "--num-layers-per-virtual-pipeline-stage" in options:
        per_chunk = positive(options, "--num-layers-per-virtual-pipeline-stage")
        vpp = max(1, (num_layers + sum(ends)) // (pp * per_chunk))
    counts = _uneven(options, num_layers, pp) or (_accounted(num_layers, pp * vpp, ends) if any(ends) else None)
    return {"vpp": vpp, **({"layers_per_stage": counts} if counts else {})}


def _uneven(options: Options, num_layers: int, pp: int) -> list[int] | None:
    """Layers of every stage where those of the first or the last are given: the middle ones are equal."""
    first = number(options, "--decoder-first-pipeline-num-layers")
    last = number(options, "--decoder-last-pipeline-num-layers")
    if (first is None and last is None) or pp == 1:
        return None
    middle = pp - (first is not None) - (last is not None)
    left = num_layers - (first or 0) - (last or 0)
    if left < 0 or (middle and left % middle) or (not middle and left):
        raise SpecError(f"{left} layers are left for {middle} middle stages", "they must divide evenly")
    return [*([] if first is None else [first]), *[left // max(middle, 1)] * middle, *([] if last is None else [last])]


def _accounted(num_layers: int, num_stages: int, ends: tuple[bool, bool]) -> list[int]:
    """Layers of every stage where embedding and loss each count as a layer of their stage."""
    layers_per_stage, rest = divmod(num_layers + sum(ends), num_stages)
    if rest:
        raise SpecError(
            f"{num_layers + sum(ends)} layers, embedding and loss counted, on {num_stages} stages", "uneven"
        )
    counts = [layers_per_stage] * num_stages
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    return counts
