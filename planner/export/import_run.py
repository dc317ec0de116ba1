"""A trainer's configuration as the run that it describes: the library's side of `plan import`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from planner.errors import SpecError
from planner.export.followed.job_manifest import job_of
from planner.export.imported_run import ConfigFile, json_of
from planner.export.imported_run import ImportedRun as ImportedRun
from planner.export.keyed_settings import table
from planner.export.targets import READERS, SOURCES, UNMARKED
from planner.specs.reading import STDIN, label, read_configuration_text, text_beside

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


def read(
    path: str | Path,
    source: str | None = None,
    recipe: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> ImportedRun:
    """Read a launch script, an argument list, a YAML, a recipe, a ds_config.json, or a folder with one of them.

    `-` is stdin. Nothing is run.

        from planner.export.import_run import read

        imported = read("pretrain.sh")
        print(imported.source, imported.run["parallelism"], imported.unknown)
        run = imported.complete(hardware="h100", num_gpus=64)

    `source` names the trainer (`megatron`, `torchtitan`, `deepspeed`, …) where the text does not show it, `recipe` the
    function of a Python file with several, `variables` the values of those that are set around a script. Raises
    SpecError for a file that cannot be read, or that is no configuration of these trainers.
    """
    name = str(path)
    if os.path.isdir(name):  # Path.is_dir raises for a name that is too long
        name = str(configuration_in(Path(name)))
    config = ConfigFile(read_configuration_text(name), None if name == STDIN else Path(name), recipe, variables or {})
    try:
        return read_file(config, source)
    except SpecError as error:
        if not error.message.startswith((label(name), "--from", "--recipe")):
            error.message = f"{label(name)}: {error.message}"
        raise


def read_configuration(text: str, source: str | None = None, recipe: str | None = None) -> ImportedRun:
    """The run that `text` describes, as `read` gives it for a file."""
    return read_file(ConfigFile(text, None, recipe), source)


_LAUNCHED = re.compile(
    r"^\s*!\s*(?:sudo\s+)?(.*\b(?:accelerate|torchrun|deepspeed|llamafactory-cli|axolotl|swift|megatron|verl|tune|trl)\b.*)"
)
"""A command of a shell that a cell of a notebook starts a training with."""


def _of_notebook(text: str) -> str:
    """The command that a notebook's cells launch, or their code without what only a notebook runs; else the text."""
    code = text
    if re.match(r'\s*\{\s*"(cells|nbformat|metadata)"', text):
        cells = json_of(text, "give the notebook").get("cells")
        sources = (cell.get("source") or "" for cell in cells or () if _is_code(cell))
        code = "\n".join("".join(map(str, source)) for source in sources)
    # a line that goes on begins with a space of its own there
    lines = re.sub(r"\\\n\s*", " ", code).splitlines() if code is not text or text.startswith("!") else []
    launched = [found[1] for line in lines if "install" not in line and (found := _LAUNCHED.match(line))]
    if launched and not re.search(r"Trainer\(", code):
        return "\n".join(launched)
    return text if code is text else "\n".join(line for line in code.splitlines() if not re.match(r"\s*[%!?]", line))


def _is_code(cell: object) -> bool:
    return isinstance(cell, dict) and cell.get("cell_type") == "code"


def _refuse_unread(text: str) -> None:
    """Raise SpecError for the configuration of a trainer that has no reader."""
    for name, mark in table()["unread"].items():
        if re.search(mark, text, re.MULTILINE) and "--tensor-model-parallel-size" not in text:
            raise SpecError(
                f"this is a configuration of {name}, which is not read",
                "price its layout with plan evaluate --model NAME --gpus N --tp N --pp N --micro-batch-size N, "
                "or name the trainer that it resembles with --from",
            )


def read_file(config: ConfigFile, source: str | None) -> ImportedRun:
    """The run of a configuration, as `read` gives it; of a manifest, that of the script it starts."""
    config = replace(config, text=_of_notebook(config.text))
    job = job_of(config.text)
    if job is not None:
        config = replace(config, text=job.script)
    source = source or next((name for name in SOURCES if READERS[name].recognises(config.text)), None)
    if source is None:
        _refuse_unread(config.text)
        if not re.search(r"(^|\s)--?\w|MODEL_ARGS|\A\s*[\[{]|^\s*(import|from) ", config.text, re.MULTILINE):
            known = f"the script that launches it; --from NAME if it is one of {', '.join(SOURCES)}"
            raise SpecError("no trainer that is read has such a file", f"give the file of its settings, or {known}")
        source = UNMARKED
    if source not in SOURCES:
        raise SpecError(f"--from: {source!r} is unknown", f"one of {', '.join(SOURCES)}")
    if config.recipe is not None and not re.search(r"^\s*(def|from|import) ", config.text, re.MULTILINE):
        raise SpecError(f"--recipe: {config.recipe[:80]!r}: the file has no functions to choose from", "leave it out")
    try:
        imported = READERS[source].read(config.filled())
    except RecursionError:
        raise SpecError("the configuration is nested too deeply", "give a simpler file") from None
    if job is not None:
        imported.run["num_gpus"] = imported.run.get("num_gpus") or job.num_gpus
        imported.run.setdefault("hardware", job.hardware)
        imported.unknown |= job.unknown
    return imported
