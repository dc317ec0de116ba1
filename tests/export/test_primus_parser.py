"""Primus' own parser gives the values that are read here, for every experiment of a checkout (PRIMUS_CHECKOUT)."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.export.imported_run import ConfigFile
from planner.export.keyed_settings import dialect
from planner.export.megatron.keyed_reading import OPTION_OF_KEY
from planner.export.primus_reading import READERS, Tree, trainer_of, tree_of, values_of
from planner.export.torchtitan_reading import flat

CHECKOUT = os.environ.get("PRIMUS_CHECKOUT")
KEYS = {*OPTION_OF_KEY, *dialect("primus").renamed, "tokenizer_type", "tokenizer_model", *dialect("primus").read}
SECTIONS = ("model", "parallelism", "training", "activation_checkpoint", "compile", "quantize", "primus_turbo")
NO_FACTS = ("hf_assets_path", "dataset", "dataset_path", "per_op_sac_force_recompute_mm_shapes_by_fqns")


@pytest.mark.skipif(CHECKOUT is None, reason="needs a checkout of Primus")
def test_every_shipped_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CHECKOUT is not None
    monkeypatch.chdir(tmp_path)  # the parser makes folders
    monkeypatch.setattr(sys, "path", [CHECKOUT, *sys.path])
    parser = importlib.import_module("primus.core.launcher.parser").PrimusParser
    num_compared = 0
    for path in sorted(Path(CHECKOUT, "examples").rglob("*.yaml")):
        text = path.read_text()
        if "\nmodules:" not in text or "<YOUR_MODEL" in text or "diffusion" in str(path):
            continue
        framework = trainer_of(tree_of(text, str(path))).get("framework")
        if framework in READERS:
            ours, _, _ = values_of(ConfigFile(text, path))
            theirs = parser().parse(SimpleNamespace(config=str(path))).get_module_config("pre_trainer")
            assert facts(ours, framework) == facts(plain(theirs), framework), path
            num_compared += 1
    assert num_compared > 300


def facts(values: Tree, framework: str) -> Tree:
    """The values that a run's price depends on."""
    if framework == "torchtitan":
        settings = flat({name: values[name] for name in SECTIONS if isinstance(values.get(name), dict)})
        return {name: value for name, value in settings.items() if name.rpartition(".")[2] not in NO_FACTS}
    return {key: None if values.get(key) == "null" else values.get(key) for key in KEYS}


def plain(value: Any) -> Any:
    if isinstance(value, SimpleNamespace):
        return {key: plain(inner) for key, inner in vars(value).items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value
