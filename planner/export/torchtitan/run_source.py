"""The part of a torchtitan recipe beside model and layout: data, optimizer, checkpoints, evaluation, logs, timeouts."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.run_settings import FIRST_RUN_STEPS, run_settings
from planner.export.common.trainer_files import Placeholder

PLACEHOLDERS = (
    Placeholder(
        "HF_ASSETS_PATH",
        "folder with the model's tokenizer.json",
        default="./tests/assets/tokenizer",
        in_first_run=True,
    ),
    Placeholder("DATA_PATH", "data set at Hugging Face, or a folder in its format, with a column `text`"),
    Placeholder("CHECKPOINTS", "folder for checkpoints, which all nodes share", kind="new folder"),
)


def run_source(plan: Plan) -> str:
    """The function `run(config)`, which sets them; the first run reads torchtitan's own sample of text."""
    run = run_settings(plan)
    optimizer = run.optimizer
    factor = optimizer.min_learning_rate / optimizer.learning_rate
    ratio = None if optimizer.decay_fraction == 1 else optimizer.decay_fraction
    return f'''
FIRST_RUN = os.environ.get("MOCK") == "1"
STEPS = {FIRST_RUN_STEPS} if FIRST_RUN else {run.num_steps}


def data(config):
    path = os.environ.get("DATA_PATH")
    if FIRST_RUN or not path:
        return config.dataloader  # tests/assets/c4_test of a checkout of torchtitan
    try:
        from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

        return HuggingFaceTextDataLoader.Config(dataset="c4", dataset_path=path)
    except ImportError:  # after 0.3.0
        from dataclasses import replace

        from torchtitan.components.data import ConcatThenSplitPackingConfig, GrainDataLoader, HuggingFaceStreamingSource
        from torchtitan.hf_datasets.text_datasets import DATASETS

        source = HuggingFaceStreamingSource.Config(path=path, split="train")
        packed = ConcatThenSplitPackingConfig(dataset=replace(DATASETS["c4"], source=source))
        return GrainDataLoader.Config(dataset=packed, shuffle=False)


def run(config):
    config.hf_assets_path = os.environ.get("HF_ASSETS_PATH") or config.hf_assets_path
    config.dataloader = data(config)
    config.optimizer = default_adamw(
        lr={optimizer.learning_rate:g},
        betas=({optimizer.beta1:g}, {optimizer.beta2:g}),
        eps={optimizer.epsilon:g},
        weight_decay={optimizer.weight_decay:g},
    )
    config.lr_scheduler = LRSchedulersContainer.Config(
        warmup_steps={run.warmup_steps},
        total_steps={run.num_steps},
        decay_ratio={ratio},
        decay_type="{optimizer.decay_style}",
        min_lr_factor={factor:.4g},
    )
    config.dump_folder = os.environ.get("CHECKPOINTS") or config.dump_folder
    config.checkpoint.enable = not FIRST_RUN
    config.checkpoint.folder = "checkpoint"  # the latest in it is loaded
    config.checkpoint.interval = {run.save_interval_steps}
    config.checkpoint.async_mode = "async_with_pinned_mem"
    config.checkpoint.last_save_model_only = False
    config.metrics.log_freq = 1
    config.comm.init_timeout_seconds = {60 * run.init_timeout_minutes}
    config.comm.train_timeout_seconds = {60 * run.timeout_minutes}
    config.debug.moe_force_load_balance = FIRST_RUN
    config.validator.enable = False  # no other data is known
'''.lstrip("\n")
