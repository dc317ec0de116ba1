"""Megatron-LM's options for a run beside model and layout: its length, optimizer, checkpoints, evaluation, logs, data.

Read from the parsers of the branches core_r0.14.0 to core_r0.19.0 and of main (0.20.0, August 2026).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from planner.answer import Plan
from planner.export.common.arguments import Arguments, ShellText, Value
from planner.export.common.run_settings import EVALUATION_STEPS, FIRST_RUN_STEPS, RunSettings, run_settings
from planner.export.common.trainer_files import Placeholder
from planner.export.megatron.runtime import is_fsdp
from planner.trainers.rules.common import release

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
