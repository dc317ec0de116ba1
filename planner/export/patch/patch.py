"""A plan as a diff against the user's own script, YAML, TOML or ds_config.json: the library's side of `--patch`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.common.config_file import ConfigFile
from planner.export.common.imported_run import ImportedRun
from planner.export.common.markup import json_of
from planner.export.patch import json_text, shell_text, toml_text, yaml_text
from planner.export.patch.change import Change
from planner.export.patch.wanted import deepspeed_changes, megatron_changes, torchtitan_changes
from planner.export.read import read_configuration, read_file
from planner.export.scripts.script import read_script
from planner.export.targets import TRAINERS
from planner.export.torchtitan.settings import override_settings, toml_settings
from planner.specs.reading.text import read_configuration_text

_OF_RUN = ("seq_length", "global_batch_size", "dtype", "precision_recipe")
_UNASKED = {"cp": 1, "pp": 1, "ep": 1, "vpp": 1, "tp": 1, "recompute": "none", "sequence_parallel": False}
_UNPRICED = ("flash_attention", "flex_attention")
"""Features that plans have anyway."""
Writer = Callable[[str, Sequence[Change]], str]


@dataclass(frozen=True, slots=True)
class Patch:
    """A file of the user's with the plan in it."""

    name: str
    before: str
    after: str
    imported: ImportedRun
    """The patched file, read back."""

    def diff(self) -> str:
        """The changes as `patch` takes them."""
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True),
            self.after.splitlines(keepends=True),
            f"a/{self.name}",
            f"b/{self.name}",
        )
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def patch_of(plan: Plan, path: str, target: str) -> Patch:
    """The patch that makes the file at `path` say what the plan says, with as few changes as do.

    Raises SpecError where the file trains another model, or cannot be changed so that it reads back as the plan.
    """
    config = ConfigFile(read_configuration_text(path), Path(path))
    before = read_file(config, None)
    if before.source not in _EDITORS:
        raise SpecError(f"{path}: a {before.source} file is not patched", _whole(target))
    _check_model(plan, before, path)
    wanted = read_configuration(TRAINERS[before.source].write(plan).files[0].text, before.source)
    writers, changes = _EDITORS[before.source](plan, config)
    wrong: str | None = None
    for writer in writers:
        text = _with_nodes(writer(config.text, _fewest(config, writer, changes)), plan)
        imported = _read(config, text)
        wrong = "cannot be read any more" if imported is None else _difference(wanted, imported)
        if imported is not None and wrong is None:
            return Patch(Path(path).name, config.text, text, imported)
    raise SpecError(f"{path}: the plan does not fit into it: after the changes it {wrong}", _whole(target))


def _whole(target: str) -> str:
    return f"export the plan whole: plan export PLAN.json --to {target}"


def _fewest(config: ConfigFile, writer: Writer, changes: list[list[Change]]) -> list[Change]:
    """The changes without the groups that make no difference to what is read."""
    wanted = _read(config, writer(config.text, _all(changes)))
    for group in list(changes):
        fewer = [other for other in changes if other is not group]
        if not group[0].is_needed and _same(_read(config, writer(config.text, _all(fewer))), wanted):
            changes = fewer
    return _all(changes)


def _all(groups: Sequence[Sequence[Change]]) -> list[Change]:
    return [change for group in groups for change in group]


def _read(config: ConfigFile, text: str) -> ImportedRun | None:
    """The run that a changed text describes; None where it describes none."""
    try:
        return read_file(ConfigFile(text, config.path, config.recipe), None)
    except SpecError:
        return None


def _same(one: ImportedRun | None, other: ImportedRun | None) -> bool:
    """Both texts describe the same run."""
    return one is not None and other is not None and _said(one) == _said(other)


def _said(imported: ImportedRun) -> dict[str, Any]:
    """The layout, the batch and the switches of a configuration, without what is so unasked."""
    run = imported.run
    layout = {
        name: value
        for name, value in run["parallelism"].items()
        if _UNASKED.get(name, value) != value or name not in _UNASKED
    }
    layout.pop("dp", None)
    features = {name: value for name, value in run["features"].items() if name not in _UNPRICED}
    return {**{name: run.get(name) for name in _OF_RUN}, "features": features, **layout}


def _difference(wanted: ImportedRun, imported: ImportedRun) -> str | None:
    """The first thing that differs from the plan's own export, in words."""
    planned, read = _said(wanted), _said(imported)
    for name in {**planned, **read}:
        if planned.get(name) != read.get(name):
            return f"says {name} {read.get(name)}, not {planned.get(name)}"
    return None


def _check_model(plan: Plan, imported: ImportedRun, path: str) -> None:
    """Raise SpecError where the file describes a model of other sizes than the plan's."""
    model = imported.run.get("model")
    if not isinstance(model, dict):
        return
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
        if model[name] != getattr(plan.model.spec, name):
            raise SpecError(
                f"{path}: trains a model with {name} {model[name]}, the plan's has {getattr(plan.model.spec, name)}",
                "plan the model of the script: plan import FILE -o run.jsonl shows it",
            )


def _with_nodes(text: str, plan: Plan) -> str:
    """Slurm's number of nodes as the plan's."""
    nodes = -(-plan.cluster.num_gpus // plan.cluster.node_size)
    return shell_text.directive_changed(text, "nodes", str(nodes))


def _megatron(plan: Plan, config: ConfigFile) -> tuple[list[Writer], list[list[Change]]]:
    changes = megatron_changes(plan, read_script(config.text, config.beside))
    if re.search(r"^MODEL_ARGS:", config.text, re.MULTILINE):
        return [yaml_text.changed], changes
    return [shell_text.changed, partial(shell_text.changed, quotes=False)], changes


def _torchtitan(plan: Plan, config: ConfigFile) -> tuple[list[Writer], list[list[Change]]]:
    settings = toml_settings(config.text)
    if settings is not None:
        return [toml_text.changed], torchtitan_changes(plan, settings)
    settings = override_settings(read_script(config.text, config.beside))
    options = [[c.as_option() for c in group] for group in torchtitan_changes(plan, settings)]
    return [shell_text.changed, partial(shell_text.changed, quotes=False)], options


def _deepspeed(plan: Plan, config: ConfigFile) -> tuple[list[Writer], list[list[Change]]]:
    return [json_text.changed], deepspeed_changes(plan, json_of(config.text, "give a ds_config.json"))


_EDITORS: dict[str, Callable[[Plan, ConfigFile], tuple[list[Writer], list[list[Change]]]]] = {
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "deepspeed": _deepspeed,
}
"""The sources whose files can be changed in place: the ways to write changes, and changes that go together."""
