"""The configuration in a folder of several files: the one that names the others."""

from __future__ import annotations

import re
from pathlib import Path

from planner.errors import SpecError
from planner.specs.reading.text import text_beside

_NAMED = (
    "training_arguments.yaml", "training_arguments.json", "training_args.yaml", "training_args.json", "recipe.yaml",
    "config.yaml", "accelerate_config.yaml", "ds_config.json", "deepspeed.json", "adapter_config.json",
)  # fmt: skip
"""Files that the trainers and our exports have under these names, the most telling first."""
_OURS = (
    "megatron.yaml", "bridge.json", "planned_recipe.py", "plan.torch.yaml", "primus.yaml", "torchtune.yaml",
)  # fmt: skip
"""The first files of our other exports."""
_SUFFIXES = (".yaml", ".yml", ".json", ".sh", ".py", ".toml")
_TELLING = (
    r"per_device_train_batch_size|^base_model:|^micro_batch_size:|recipes\.|_component_",
    r"^distributed_type:",
    r'"zero_optimization"|"train_micro_batch_size_per_gpu"',
    r'"peft_type"',
)
"""Marks of files of other names, the most telling first."""


def configuration_in(folder: Path) -> Path:
    """The file of a folder that describes the run; readers find the others beside it.

    Raises SpecError where there is none.
    """
    written = [folder / name for name in (*_OURS, *_NAMED) if (folder / name).is_file()]
    if written:
        return written[0]
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())
        texts = {path: text for path in files if (text := text_beside(path)) is not None}
    except OSError as error:
        raise SpecError(f"{folder}: {error.strerror}", "name a folder that can be read, or a file in it") from None
    for mark in _TELLING:
        for path, text in texts.items():
            if re.search(mark, text, re.MULTILINE):
                return path
    if len(files) == 1:
        return files[0]
    raise SpecError(f"{folder}: none of its files is a configuration by its name or its marks", "name the file itself")
