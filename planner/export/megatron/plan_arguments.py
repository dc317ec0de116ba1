"""A plan in Megatron-LM's arguments: grid, stages, batch, precision, recompute, overlaps; and its refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner.answer import Plan
from planner.export.megatron.kernel_options import KERNELS, precision
from planner.export.megatron.layout_options import grid_arguments, is_fsdp, recompute_arguments
from planner.export.megatron.model_options import model_arguments
from planner.export.megatron.option_rows import OptionRow, row, written
from planner.export.megatron.switch_options import SWITCH_OPTIONS, switch_arguments
from planner.export.refusal import Objections, broken_rules, hint_for
from planner.export.run_settings import EVALUATION_STEPS, FIRST_RUN_STEPS, run_settings
from planner.export.spelling import broken_rules_of_recipe, unspelled
from planner.export.stages import VirtualStage, check_recompute, is_looped, virtual_stages
from planner.export.trainer_files import Arguments, Placeholder, ShellText
from planner.trainers.load import has_dtype
from planner.trainers.rules.common import Rule
from planner.trainers.rules.megatron import MEGATRON_CP_RULES, MEGATRON_RULES
from planner.trainers.rules.megatron_model import megatron_model_rules

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


_SCHEDULE: tuple[OptionRow, ...] = (
    row("--lr", "optimizer.lr", lambda run: run.optimizer.learning_rate),
    row("--min-lr", "optimizer.min_lr", lambda run: run.optimizer.min_learning_rate),
    row("--lr-warmup-iters", "scheduler.lr_warmup_iters", lambda run: run.warmup_steps),
    row("--lr-decay-iters", "scheduler.lr_decay_iters", lambda run: max(run.num_steps, run.warmup_steps + 1)),
    row("--weight-decay", "optimizer.weight_decay", lambda run: run.optimizer.weight_decay),
    row("--adam-beta1", "optimizer.adam_beta1", lambda run: run.optimizer.beta1),
    row("--adam-beta2", "optimizer.adam_beta2", lambda run: run.optimizer.beta2),
    row("--adam-eps", "optimizer.adam_eps", lambda run: run.optimizer.epsilon),
    row("--clip-grad", "optimizer.clip_grad", lambda run: run.optimizer.clip_grad),
    row("--init-method-std", "model.init_method_std", lambda run: run.optimizer.init_std),
)
_AT_ONCE: tuple[OptionRow, ...] = (
    row("--lr-decay-style", "scheduler.lr_decay_style", lambda run: run.optimizer.decay_style),
)
_AT_THE_END: tuple[OptionRow, ...] = (
    row("--lr-decay-style", "scheduler.lr_decay_style", lambda run: "WSD"),
    row("--lr-wsd-decay-style", "scheduler.lr_wsd_decay_style", lambda run: run.optimizer.decay_style),
    row("--lr-wsd-decay-iters", "scheduler.lr_wsd_decay_iters", lambda run: run.decay_steps),
)
"""The rate is constant before it falls."""
_EVERY_RUN: tuple[OptionRow, ...] = (
    row("--log-interval", "logger.log_interval", lambda run: 1),
    row("--log-throughput", "logger.log_throughput", lambda run: True),
    row("--log-memory-interval", "logger.log_memory_interval", lambda run: GC_INTERVAL_STEPS, since="0.16"),
    row("--manual-gc", "train.manual_gc", lambda run: True),
    row("--manual-gc-interval", "train.manual_gc_interval", lambda run: GC_INTERVAL_STEPS),
    row("--distributed-timeout-minutes", "dist.distributed_timeout_minutes", lambda run: run.init_timeout_minutes),
    row(
        "--distributed-timeout-seconds-after-init",
        "dist.distributed_timeout_seconds_after_init",
        lambda run: 60 * run.timeout_minutes,
        since="0.15",
    ),
)
_TRAINING_RUN: tuple[OptionRow, ...] = (
    row("--train-iters", "train.train_iters", lambda run: run.num_steps),
    row("--eval-interval", "validation.eval_interval", lambda run: run.evaluation_interval_steps),
    row("--eval-iters", "validation.eval_iters", lambda run: EVALUATION_STEPS),
    row("--data-path", "dataset.data_path", lambda run: DATA_PATH.words),
    row("--split", "dataset.split", lambda run: ShellText(f'"{SPLIT}"')),
    row("--data-cache-path", "dataset.path_to_cache", lambda run: ShellText('"${CHECKPOINTS}/data-cache"')),
    row("--tokenizer-type", "tokenizer.tokenizer_type", lambda run: "HuggingFaceTokenizer"),
    row("--tokenizer-model", "tokenizer.tokenizer_model", lambda run: TOKENIZER.value),
    row("--save", "checkpoint.save", lambda run: CHECKPOINTS.value),
    row("--load", "checkpoint.load", lambda run: CHECKPOINTS.value),
    row("--save-interval", "checkpoint.save_interval", lambda run: run.save_interval_steps),
    row("--save-retain-interval", "", lambda run: run.kept_save_interval_steps),
    row("--exit-signal-handler", "train.exit_signal_handler", lambda run: True),
)
_ASYNCHRONOUS: tuple[OptionRow, ...] = (
    row("--ckpt-format", "checkpoint.ckpt_format", lambda run: "torch_dist"),
    row("--async-save", "checkpoint.async_save", lambda run: True),
    row("--use-persistent-ckpt-worker", "checkpoint.use_persistent_ckpt_worker", lambda run: True),
    # the other needs nvidia-resiliency-ext
    row("--async-strategy", "checkpoint.async_strategy", lambda run: "mcore", since="0.17"),
)
"""Saves beside training, which the format of Megatron-FSDP has not in all versions."""
_FIRST_RUN: tuple[OptionRow, ...] = (
    row("--mock-data", "", lambda run: True),
    row("--tokenizer-type", "tokenizer.tokenizer_type", lambda run: "NullTokenizer"),
    row("--train-iters", "train.train_iters", lambda run: FIRST_RUN_STEPS),
    row("--eval-iters", "validation.eval_iters", lambda run: 0),
)

_BALANCED: tuple[OptionRow, ...] = (
    row("--moe-router-force-load-balancing", "model.moe_router_force_load_balancing", lambda plan: True),
)
BRIDGE_OF_RUN = {
    name: path
    for option in (
        *KERNELS, *_SCHEDULE, *_AT_ONCE, *_AT_THE_END, *_EVERY_RUN, *_TRAINING_RUN, *_ASYNCHRONOUS, *_FIRST_RUN,
        *_BALANCED,
    )
    for name, path in option.bridge.items()
}  # fmt: skip


def run_arguments(plan: Plan) -> Arguments:
    """The options of every run: optimizer, schedule of its rate, logs, timeouts."""
    run = run_settings(plan)
    falls = _AT_ONCE if run.optimizer.decay_fraction == 1 else _AT_THE_END
    return written((*_SCHEDULE, *falls, *_EVERY_RUN), run, plan.runtime_spec.version)


def training_arguments(plan: Plan) -> Arguments:
    """The options that only training has: length, data, checkpoints, evaluation."""
    saves = () if is_fsdp(plan) else _ASYNCHRONOUS
    multiple = plan.runtime_spec.vocab_divisible_by * plan.parallelism.tp
    # a tokenizer with fewer words would make a smaller embedding
    rows = {"--padded-vocab-size": multiple * math.ceil(plan.model.spec.vocab_size / multiple)}
    return written((*_TRAINING_RUN, *saves), run_settings(plan), plan.runtime_spec.version) | rows


def first_run_arguments(plan: Plan) -> Arguments:
    """The options of a short run on random tokens with balanced experts, as the plan prices them."""
    balanced = written(_BALANCED, plan) if plan.model.spec.moe is not None else {}
    return written(_FIRST_RUN, run_settings(plan), plan.runtime_spec.version) | balanced


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
        **grid_arguments(plan),
        **precision(plan),
        **recompute_arguments(plan),
        **written(KERNELS, plan),
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
