"""A trainer's configuration as the run that it describes: the library's side of `plan import`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from planner.errors import SpecError
from planner.export.common.config_file import ConfigFile
from planner.export.common.imported_run import ImportedRun
from planner.export.folder import configuration_in
from planner.export.targets import READERS, SOURCES, UNMARKED
from planner.specs.reading import STDIN, label
from planner.specs.reading.text import read_configuration_text


def read(path: str | Path, source: str | None = None, recipe: str | None = None) -> ImportedRun:
    """Read a launch script, an argument list, a YAML, a recipe, a ds_config.json, or a folder with one of them.

    `-` is stdin. Nothing is run.

        from planner.export.read import read

        imported = read("pretrain.sh")
        print(imported.source, imported.run["parallelism"], imported.unknown)
        run = imported.complete(hardware="h100", num_gpus=64)

    `source` names the trainer (`megatron`, `torchtitan`, `deepspeed`, …) where the text does not show it, `recipe` the
    function of a Python file with several. Raises SpecError for a file that cannot be read, or that is no configuration
    of these trainers.
    """
    name = str(path)
    if os.path.isdir(name):  # Path.is_dir raises for a name that is too long
        name = str(configuration_in(Path(name)))
    config = ConfigFile(read_configuration_text(name), None if name == STDIN else Path(name), recipe)
    try:
        return read_file(config, source)
    except SpecError as error:
        if not error.message.startswith((label(name), "--from", "--recipe")):
            error.message = f"{label(name)}: {error.message}"
        raise


def read_configuration(text: str, source: str | None = None, recipe: str | None = None) -> ImportedRun:
    """The run that `text` describes, as `read` gives it for a file."""
    return read_file(ConfigFile(text, None, recipe), source)


def read_file(config: ConfigFile, source: str | None) -> ImportedRun:
    """The run of a configuration, as `read` gives it."""
    source = source or next((name for name in SOURCES if READERS[name].recognises(config.text)), UNMARKED)
    if source not in SOURCES:
        raise SpecError(f"--from: {source!r} is unknown", f"one of {', '.join(SOURCES)}")
    if config.recipe is not None and not re.search(r"^\s*(def|from|import) ", config.text, re.MULTILINE):
        raise SpecError(f"--recipe: {config.recipe[:80]!r}: the file has no functions to choose from", "leave it out")
    try:
        return READERS[source].read(config)
    except RecursionError:
        raise SpecError("the configuration is nested too deeply", "give a simpler file") from None
