"""The options of Megatron-LM that say a layout: grid, stages, batch, sharding and recompute, written and read."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.megatron.option_rows import Fields, OptionRow, names_read, read_fields, row, written
from planner.export.megatron.option_words import Options, number, positive, text
from planner.export.stages import VirtualStage, block_size, is_even, virtual_stages
from planner.export.trainer_files import Arguments
from planner.trainers.layout_string import expanded


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


def _axis(name: str, field: str, bridge: str) -> OptionRow:
    """A size of the grid."""
    size = attrgetter(field)
    return row(name, bridge, lambda plan: size(plan.parallelism), lambda options: {field: positive(options, name)})


def _write_expert_ranks(plan: Plan) -> int | None:
    """Tensor parallelism of experts, which would be tp unless told."""
    layout = plan.parallelism
    if plan.model.spec.moe is not None:
        return layout.etp
    # it asks for as many replicas of experts as of the rest, also where there are none
    return layout.tp * layout.cp if layout.dp_outermost and layout.cp > 1 else None


def _read_expert_ranks(options: Options) -> Fields:
    if "--num-experts" not in options:
        return {}
    return {"etp": number(options, "--expert-tensor-parallel-size", positive(options, "--tensor-model-parallel-size"))}


def _write_stages(plan: Plan) -> Arguments:
    """The split of layers: even stages by their number, all others by a layout string."""
    layout, model = plan.parallelism, plan.model.spec
    if layout.pp == 1:
        return {}
    stages = virtual_stages(plan.best, model.num_hidden_layers)
    if not is_even(stages):
        return {"--pipeline-model-parallel-layout": layout_string(stages, model.num_nextn_predict_layers)}
    return {"--num-virtual-stages-per-pipeline-rank": layout.vpp} if layout.vpp > 1 else {}


def _write_sharding(plan: Plan) -> Arguments:
    """Distributed optimizer or FSDP, the ranks it shards over, and the size of its buckets."""
    layout, runtime, arguments = plan.parallelism, plan.runtime_spec, Arguments()
    if is_fsdp(plan):
        strategy = "optim_grads_params" if layout.zero_stage == 3 else "optim_grads"
        arguments |= {
            "--use-megatron-fsdp": True,
            "--data-parallel-sharding-strategy": strategy,
            "--ckpt-format": "fsdp_dtensor",
        }
    if layout.zero_stage >= 1:
        arguments["--use-distributed-optimizer"] = True
        if layout.shard_size < layout.dp * layout.cp:
            arguments["--num-distributed-optimizer-instances"] = layout.dp * layout.cp // layout.shard_size
    if runtime.gradient_overlap_fraction > 0 and not is_fsdp(plan) and runtime.bucket_parameters is not None:
        arguments["--ddp-bucket-size"] = runtime.bucket_among(layout.shard_size)
    return arguments


def _read_sharding(options: Options) -> Fields:
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


def _write_recompute(plan: Plan) -> Arguments:
    layout = plan.parallelism
    if layout.recompute == "none":
        return {}
    if layout.recompute == "selective":
        return {
            "--recompute-granularity": "selective",
            "--recompute-modules": layout.recompute_modules or ("core_attn",),
        }
    size = block_size(plan.best, virtual_stages(plan.best, plan.model.spec.num_hidden_layers))
    method, layers = ("uniform", 1) if size is None else ("block", size)
    return {"--recompute-granularity": "full", "--recompute-method": method, "--recompute-num-layers": layers}


def _read_recompute(options: Options) -> Fields:
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


def _read_stages(options: Options) -> Fields:
    """Virtual stages per rank and an uneven split, from any of Megatron's ways to give them."""
    pp = positive(options, "--pipeline-model-parallel-size")
    if symbols := options.get("--pipeline-model-parallel-layout"):
        layout = "".join(symbols)
        return {"layout": layout, "vpp": (expanded(layout).count("|") + 1) // pp}
    num_layers = number(options, "--num-layers", 0) or 0
    vpp = positive(options, "--num-virtual-stages-per-pipeline-rank")
    ends = ("--account-for-embedding-in-pipeline-split" in options, "--account-for-loss-in-pipeline-split" in options)
    if "--num-layers-per-virtual-pipeline-stage" in options:
        per_chunk = positive(options, "--num-layers-per-virtual-pipeline-stage")
        vpp = max(1, (num_layers + sum(ends)) // (pp * per_chunk))
    is_counted = any(ends) and num_layers > 0
    counts = _uneven(options, num_layers, pp) or (_accounted(num_layers, pp * vpp, ends) if is_counted else None)
    return {"vpp": vpp, **({"layers_per_stage": counts} if counts else {})}


def _uneven(options: Options, num_layers: int, pp: int) -> list[int] | None:
    """Layers of every stage where those of the first or the last are given: the middle ones are equal."""
    first = number(options, "--decoder-first-pipeline-num-layers")
    last = number(options, "--decoder-last-pipeline-num-layers")
    if (first is None and last is None) or pp == 1 or not num_layers:
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


_GRID: tuple[OptionRow, ...] = (
    _axis("--tensor-model-parallel-size", "tp", "model.tensor_model_parallel_size"),
    _axis("--pipeline-model-parallel-size", "pp", "model.pipeline_model_parallel_size"),
    _axis("--context-parallel-size", "cp", "model.context_parallel_size"),
    row(
        "--sequence-parallel", "", lambda plan: plan.parallelism.tp > 1 and plan.parallelism.sequence_parallel,
        lambda options: {
            "sequence_parallel": "--sequence-parallel" in options
            and positive(options, "--tensor-model-parallel-size") > 1
        },
    ),
    row(
        "--use-tp-pp-dp-mapping", "dist.use_tp_pp_dp_mapping", lambda plan: plan.parallelism.dp_outermost,
        lambda options: {"rank_order": "tp-cp-ep-pp-dp"} if "--use-tp-pp-dp-mapping" in options else {},
    ),
    row(
        "--expert-model-parallel-size", "model.expert_model_parallel_size",
        lambda plan: plan.parallelism.ep if plan.model.spec.moe is not None else None,
        lambda options: {"ep": positive(options, "--expert-model-parallel-size")},
    ),
    row("--expert-tensor-parallel-size", "model.expert_tensor_parallel_size", _write_expert_ranks, _read_expert_ranks),
    OptionRow(
        {
            "--pipeline-model-parallel-layout": "model.pipeline_model_parallel_layout",
            "--num-virtual-stages-per-pipeline-rank": "", "--num-layers-per-virtual-pipeline-stage": "",
            "--decoder-first-pipeline-num-layers": "", "--decoder-last-pipeline-num-layers": "",
            "--account-for-embedding-in-pipeline-split": "", "--account-for-loss-in-pipeline-split": "",
        },
        _write_stages, _read_stages,
    ),
    row("--seq-length", "", lambda plan: plan.training.seq_length),
    _axis("--micro-batch-size", "micro_batch_size", "train.micro_batch_size"),
    row("--global-batch-size", "train.global_batch_size", lambda plan: plan.training.global_batch_size),
    OptionRow(
        {
            "--use-megatron-fsdp": "ddp.use_megatron_fsdp", "--use-custom-fsdp": "", "--use-torch-fsdp2": "",
            "--data-parallel-sharding-strategy": "ddp.data_parallel_sharding_strategy",
            "--use-distributed-optimizer": "",
            "--num-distributed-optimizer-instances": "ddp.num_distributed_optimizer_instances",
        },
        _write_sharding, _read_sharding,
    ),
    OptionRow({"--ckpt-format": "checkpoint.ckpt_format", "--ddp-bucket-size": ""}, lambda plan: {}),
)  # fmt: skip
_RECOMPUTE: tuple[OptionRow, ...] = (
    OptionRow(
        {
            "--recompute-granularity": "model.recompute_granularity", "--recompute-method": "model.recompute_method",
            "--recompute-num-layers": "model.recompute_num_layers", "--recompute-modules": "",
            "--recompute-activations": "",
        },
        _write_recompute, _read_recompute,
    ),
)  # fmt: skip
LAYOUT_OPTIONS = names_read((*_GRID, *_RECOMPUTE))
"""Options that are read for a layout."""
BRIDGE_OF_LAYOUT = {name: path for option in (*_GRID, *_RECOMPUTE) for name, path in option.bridge.items()}


def grid_arguments(plan: Plan) -> Arguments:
    """Grid, stages, batch and sharding."""
    return written(_GRID, plan)


def recompute_arguments(plan: Plan) -> Arguments:
    return written(_RECOMPUTE, plan)


def read_layout(options: Options) -> Fields:
    """Fields of a run's parallelism, without dp. Raises SpecError for sizes that are no numbers or do not divide."""
    return read_fields((*_GRID, *_RECOMPUTE), options)
