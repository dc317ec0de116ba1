"""A plan in Megatron-LM's arguments: grid, stages, batch, precision, recompute, overlaps; and its refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from planner.answer import Plan
from planner.export.megatron.model_arguments import model_arguments
from planner.export.megatron.switch_options import SWITCH_OPTIONS, switch_arguments
from planner.export.refusal import Objections, broken_rules, hint_for
from planner.export.run_settings import EVALUATION_STEPS, FIRST_RUN_STEPS, RunSettings, run_settings
from planner.export.spelling import broken_rules_of_recipe, unspelled
from planner.export.stages import VirtualStage, block_size, check_recompute, is_even, is_looped, virtual_stages
from planner.export.trainer_files import Arguments, Placeholder, ShellText, Value
from planner.trainers.load import has_dtype
from planner.trainers.rules.common import Rule, release
from planner.trainers.rules.megatron import MEGATRON_CP_RULES, MEGATRON_RULES
from planner.trainers.rules.megatron_model import megatron_model_rules


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


def data_parallel(plan: Plan) -> Arguments:
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


_PRECISION: dict[str, Arguments] = {
    "bf16": {"--bf16": True},
    "fp16": {"--fp16": True},
    "fp8": {"--bf16": True, "--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"},
    "mxfp8": {"--bf16": True, "--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
    "nvfp4": {"--bf16": True, "--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"},
}


_NARROW: dict[str, Arguments] = {
    "fp8": {"--fp8-param-gather": True},
    "mxfp8": {"--fp8-param-gather": True, "--reuse-grad-buf-for-mxfp8-param-ag": True},
    "nvfp4": {"--fp4-param-gather": True},
}
"""Weights of the recipe's own dtype; the tiles of mxfp8 cannot be gathered into a buffer of weights."""


def precision(plan: Plan) -> Arguments:
    """The dtypes of matrix products and of weights, and that of the gradients of fp16."""
    dtype = plan.training.dtype
    runtime = plan.runtime_spec.in_dtype(dtype, plan.cluster.hardware.architecture)
    arguments = dict(_PRECISION[dtype])
    if runtime.narrow_parameters and plan.parallelism.zero_stage >= 1:
        arguments |= _NARROW.get(dtype, {})
    if dtype == "fp16" and runtime.gradient_bytes == 4:
        arguments["--accumulate-allreduce-grads-in-fp32"] = True
    return arguments


def kernels(plan: Plan) -> Arguments:
    """Kernels and fusions that no switch chooses."""
    runtime, model = plan.runtime_spec, plan.model.spec
    arguments: Arguments = {
        "--transformer-impl": "transformer_engine",
        "--attention-backend": "auto" if runtime.flash_attention else "unfused",
    }
    if not runtime.fused_grad_accumulation:
        arguments["--no-gradient-accumulation-fusion"] = True
    if not runtime.fused_rotary and model.position_embedding == "rope":
        arguments["--no-rope-fusion"] = True
    if not runtime.fused_activation:
        is_swiglu = model.gated_mlp and model.activation == "silu"
        arguments["--no-bias-swiglu-fusion" if is_swiglu else "--no-bias-gelu-fusion"] = True
    return arguments


GC_INTERVAL_STEPS = 100
"""Steps between collections of Python's garbage, which all ranks do at once (Megatron-Bridge's recipes)."""
SPLIT = "99,1,0"
"""Parts of the data for training, evaluation and tests."""

DATA_PATH = Placeholder(
    "DATA_PATH", "prefix of the tokenized data (PREFIX.bin and .idx), or weights and prefixes in turn", kind="prefix"
)
TOKENIZER = Placeholder("TOKENIZER", "folder of the model's tokenizer, or its name at Hugging Face")
CHECKPOINTS = Placeholder("CHECKPOINTS", "folder for checkpoints, which all nodes share", kind="new folder")
PLACEHOLDERS = (DATA_PATH, TOKENIZER, CHECKPOINTS)


class _Row(NamedTuple):
    """An option, its value, and the first version that has it."""

    option: str
    value: Callable[[RunSettings], Value]
    since: str = ""


_SCHEDULE = (
    _Row("--lr", lambda run: run.optimizer.learning_rate),
    _Row("--min-lr", lambda run: run.optimizer.min_learning_rate),
    _Row("--lr-warmup-iters", lambda run: run.warmup_steps),
    _Row("--lr-decay-iters", lambda run: max(run.num_steps, run.warmup_steps + 1)),
    _Row("--weight-decay", lambda run: run.optimizer.weight_decay),
    _Row("--adam-beta1", lambda run: run.optimizer.beta1),
    _Row("--adam-beta2", lambda run: run.optimizer.beta2),
    _Row("--adam-eps", lambda run: run.optimizer.epsilon),
    _Row("--clip-grad", lambda run: run.optimizer.clip_grad),
    _Row("--init-method-std", lambda run: run.optimizer.init_std),
)
_AT_ONCE = (_Row("--lr-decay-style", lambda run: run.optimizer.decay_style),)
_AT_THE_END = (
    _Row("--lr-decay-style", lambda run: "WSD"),
    _Row("--lr-wsd-decay-style", lambda run: run.optimizer.decay_style),
    _Row("--lr-wsd-decay-iters", lambda run: run.decay_steps),
)
"""The rate is constant before it falls."""
_EVERY_RUN = (
    _Row("--log-interval", lambda run: 1),
    _Row("--log-throughput", lambda run: True),
    _Row("--log-memory-interval", lambda run: GC_INTERVAL_STEPS, since="0.16"),
    _Row("--manual-gc", lambda run: True),
    _Row("--manual-gc-interval", lambda run: GC_INTERVAL_STEPS),
    _Row("--distributed-timeout-minutes", lambda run: run.init_timeout_minutes),
    _Row("--distributed-timeout-seconds-after-init", lambda run: 60 * run.timeout_minutes, since="0.15"),
)
_TRAINING_RUN = (
    _Row("--train-iters", lambda run: run.num_steps),
    _Row("--eval-interval", lambda run: run.evaluation_interval_steps),
    _Row("--eval-iters", lambda run: EVALUATION_STEPS),
    _Row("--data-path", lambda run: DATA_PATH.words),
    _Row("--split", lambda run: ShellText(f'"{SPLIT}"')),
    _Row("--data-cache-path", lambda run: ShellText('"${CHECKPOINTS}/data-cache"')),
    _Row("--tokenizer-type", lambda run: "HuggingFaceTokenizer"),
    _Row("--tokenizer-model", lambda run: TOKENIZER.value),
    _Row("--save", lambda run: CHECKPOINTS.value),
    _Row("--load", lambda run: CHECKPOINTS.value),
    _Row("--save-interval", lambda run: run.save_interval_steps),
    _Row("--save-retain-interval", lambda run: run.kept_save_interval_steps),
    _Row("--exit-signal-handler", lambda run: True),
)
_ASYNCHRONOUS = (
    _Row("--ckpt-format", lambda run: "torch_dist"),
    _Row("--async-save", lambda run: True),
    _Row("--use-persistent-ckpt-worker", lambda run: True),
    # the other needs nvidia-resiliency-ext
    _Row("--async-strategy", lambda run: "mcore", since="0.17"),
)
"""Saves beside training, which the format of Megatron-FSDP has not in all versions."""
_FIRST_RUN = (
    _Row("--mock-data", lambda run: True),
    _Row("--tokenizer-type", lambda run: "NullTokenizer"),
    _Row("--train-iters", lambda run: FIRST_RUN_STEPS),
    _Row("--eval-iters", lambda run: 0),
)


def run_arguments(plan: Plan) -> Arguments:
    """The options of every run: optimizer, schedule of its rate, logs, timeouts."""
    run = run_settings(plan)
    falls = _AT_ONCE if run.optimizer.decay_fraction == 1 else _AT_THE_END
    return _written(plan, run, (*_SCHEDULE, *falls, *_EVERY_RUN))


def training_arguments(plan: Plan) -> Arguments:
    """The options that only training has: length, data, checkpoints, evaluation."""
    saves = () if is_fsdp(plan) else _ASYNCHRONOUS
    multiple = plan.runtime_spec.vocab_divisible_by * plan.parallelism.tp
    # a tokenizer with fewer words would make a smaller embedding
    rows = {"--padded-vocab-size": multiple * math.ceil(plan.model.spec.vocab_size / multiple)}
    return _written(plan, run_settings(plan), (*_TRAINING_RUN, *saves)) | rows


def first_run_arguments(plan: Plan) -> Arguments:
    """The options of a short run on random tokens with balanced experts, as the plan prices them."""
    arguments = _written(plan, run_settings(plan), _FIRST_RUN)
    if plan.model.spec.moe is not None:
        arguments["--moe-router-force-load-balancing"] = True
    return arguments


def _written(plan: Plan, run: RunSettings, rows: Iterable[_Row]) -> Arguments:
    version = plan.runtime_spec.version
    return {
        row.option: row.value(run)
        for row in rows
        if not version or not row.since or release(row.since) <= release(version)
    }


NEWEST = "0.20"
WRITTEN_FOR = f"Megatron-LM core {NEWEST}.0"
_SCHEDULES = ("1f1b", "interleaved-1f1b", "none")
_RECOMPUTABLE = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


def written_for(plan: Plan) -> str:
    """Megatron-LM and the version that the arguments are for."""
    version = plan.runtime_spec.version
    return f"Megatron-LM core {version}" if version else WRITTEN_FOR


def megatron_arguments(
    plan: Plan,
    target: str = "megatron",
    of_model: tuple[Rule, ...] | None = None,
    own_schedules: tuple[str, ...] = (),
) -> Arguments:
    """All arguments of `pretrain_gpt.py` but for data, length and checkpoints, which a first run has not.

    Another target puts them into its own words, under its own rules, and says by itself what its own schedules need.

    Raises Inexpressible with every reason where Megatron-LM cannot run the plan as it is.
    """
    stages = virtual_stages(plan.best, plan.model.spec.num_hidden_layers)
    rules = megatron_model_rules(plan.runtime_spec.version) if of_model is None else of_model
    _check_expressible(plan, stages, target, rules, own_schedules)
    runtime = plan.runtime_spec
    return {
        **model_arguments(plan.model.spec, plan.training.seq_length, runtime.vocab_divisible_by, runtime.dropout),
        **_grid(plan),
        **_pipeline(plan, stages),
        **_batch(plan),
        **data_parallel(plan),
        **precision(plan),
        **_recompute(plan, stages),
        **kernels(plan),
        **switch_arguments(plan),
        **run_arguments(plan),
    }


def _check_expressible(
    plan: Plan,
    stages: tuple[VirtualStage, ...],
    target: str,
    of_model: tuple[Rule, ...],
    own_schedules: tuple[str, ...],
) -> None:
    """Raise Inexpressible, with every reason, where Megatron-LM cannot run the plan."""
    layout, runtime = plan.parallelism, plan.runtime_spec
    rules = (*of_model, *MEGATRON_RULES, *MEGATRON_CP_RULES[runtime.cp_comm_type])
    objections = Objections(target, broken_rules(rules, plan), hint_for(plan, target, of_model))
    objections.when(
        not has_dtype(runtime, plan.training.dtype), "dtype", f"{written_for(plan)} has no {plan.training.dtype}"
    )
    check_recompute(plan.best, stages, objections)
    schedules = (*_SCHEDULES, *own_schedules)
    objections.when(
        layout.schedule not in schedules, "schedule", f"{layout.schedule} is none of {', '.join(schedules)}"
    )
    is_placed = is_looped(stages, layout.pp) or layout.schedule in own_schedules
    objections.when(not is_placed, "placement", "virtual stage j must be on rank j mod pp")
    objections.when(
        any(stage.mtp and stage.chunk < layout.vpp - 1 for stage in stages),
        "mtp_placement",
        "MTP blocks belong to the last chunk of a rank",
    )
    objections.when(
        is_fsdp(plan) and layout.pp > 1, "zero_stage", f"FSDP (zero_stage {layout.zero_stage}) at pp {layout.pp}"
    )
    objections.reasons += broken_rules_of_recipe(plan)
    objections.reasons += unspelled(plan, SWITCH_OPTIONS, "Megatron core")
    for module, obstacle in _unknown_modules(plan):
        objections.when(True, "recompute_modules", f"{module} {obstacle}")
    objections.raise_any()


def _unknown_modules(plan: Plan) -> Iterator[tuple[str, str]]:
    """Modules of selective recompute that Megatron-LM or this model does not have, and why not."""
    model = plan.model.spec
    modules = plan.parallelism.recompute_modules if plan.parallelism.recompute == "selective" else ()
    for module in modules:
        if module not in _RECOMPUTABLE:
            yield module, f"is none of {', '.join(_RECOMPUTABLE)}"
        elif module == "mla_up_proj" and model.mla is None:
            yield module, "needs latent attention"
        elif module == "moe_act" and model.moe is None:
            yield module, "needs experts"


def _grid(plan: Plan) -> Arguments:
    layout = plan.parallelism
    arguments: Arguments = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": layout.cp,
    }
    if layout.tp > 1 and layout.sequence_parallel:
        arguments["--sequence-parallel"] = True
    if layout.dp_outermost:
        arguments["--use-tp-pp-dp-mapping"] = True
    if plan.model.spec.moe is None and layout.dp_outermost and layout.cp > 1:
        # it asks for as many replicas of experts as of the rest, also where there are none
        arguments["--expert-tensor-parallel-size"] = layout.tp * layout.cp
    if plan.model.spec.moe is not None:
        # the default would be tp
        arguments["--expert-model-parallel-size"] = layout.ep
        arguments["--expert-tensor-parallel-size"] = layout.etp
    return arguments


def _pipeline(plan: Plan, stages: tuple[VirtualStage, ...]) -> Arguments:
    """The split of layers: even stages by their number, all others by a layout string."""
    layout, arguments = plan.parallelism, Arguments()
    if layout.pp == 1:
        return arguments
    if not is_even(stages):
        arguments["--pipeline-model-parallel-layout"] = layout_string(stages, plan.model.spec.num_nextn_predict_layers)
    elif layout.vpp > 1:
        arguments["--num-virtual-stages-per-pipeline-rank"] = layout.vpp
    return arguments


def _batch(plan: Plan) -> Arguments:
    return {
        "--seq-length": plan.training.seq_length,
        "--micro-batch-size": plan.parallelism.micro_batch_size,
        "--global-batch-size": plan.training.global_batch_size,
    }


def _recompute(plan: Plan, stages: tuple[VirtualStage, ...]) -> Arguments:
    layout = plan.parallelism
    if layout.recompute == "none":
        return {}
    if layout.recompute == "selective":
        return {
            "--recompute-granularity": "selective",
            "--recompute-modules": layout.recompute_modules or ("core_attn",),
        }
    size = block_size(plan.best, stages)
    method, layers = ("uniform", 1) if size is None else ("block", size)
    return {"--recompute-granularity": "full", "--recompute-method": method, "--recompute-num-layers": layers}
