"""The examples of CONTRIBUTING.md, followed: each file is written, loaded and planned with, and the rule is broken."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import planner.export.export as export_module
from planner import (
    ClusterSpec,
    Infeasible,
    Parallelism,
    RuntimeSpec,
    SearchLimits,
    TrainingSpec,
    evaluate,
    load_runtime,
    plan,
)
from planner.errors import SpecError
from planner.export.refusal import Inexpressible
from planner.export.targets import TRAINERS
from planner.observe import formats
from planner.observe import log_reader as reader
from planner.observe.formats import Grammar
from planner.observe.log_reader import observe
from planner.schedule.orders import SCHEDULES
from planner.specs.base import grouped
from planner.specs.registry import load_hardware, load_model
from planner.trainers import load
from planner.trainers.rules.recipe import rules_for
from planner.trainers.rules.rule_rows import rule_table, rules_of
from planner.trainers.switches import SWITCHES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
FILES = dict(re.findall(r"```yaml\n# \S+/(\S+)\n(.*?)```", TEXT, re.DOTALL))
TRAINING = TrainingSpec(seq_length=4096, global_batch_size=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_model_a_gpu_and_a_trainer_are_one_file_each(folder: Path) -> None:
    assert sorted(FILES) == ["my-gpu-96gb.yaml", "my-model-7b.yaml", "my-trainer.yaml"]
    cluster = ClusterSpec(hardware=str(folder / "my-gpu-96gb.yaml"), num_gpus=16)
    runtime = load_runtime(folder / "my-trainer.yaml")
    best = plan(str(folder / "my-model-7b.yaml"), cluster, TRAINING, runtime=runtime)
    assert (best.model.name, best.cluster.hardware.name, best.runtime) == ("my-model-7b", "my-gpu-96gb", "my-trainer")
    assert (best.runtime_spec.host_factor, best.runtime_spec.optimizer_bytes) == (1.6, 8)
    assert best.fits
    assert set(rules_of("megatron")) <= set(rules_for(runtime))


def names_of(name: str) -> dict[str, Any]:
    """What the example that defines `name` defines."""
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if f"{name} = " in code)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def test_a_schedule_is_a_function_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = names_of("GROUPED_GPIPE")["GROUPED_GPIPE"]
    monkeypatch.setitem(SCHEDULES, kind.name, kind)
    runtime = RuntimeSpec(name="mine", trainer="torch-eager", schedules=("none", "1f1b", kind.name))
    cluster, limits = ClusterSpec(hardware="h100", num_gpus=8), SearchLimits(pp=(4,), tp=(1,), schedule=(kind.name,))
    best = plan("8b", cluster, TRAINING, limits=limits, runtime=runtime)
    assert best.parallelism.schedule == kind.name
    assert [stage.in_flight_microbatches for stage in best.stages] == [4.0] * 4
    usual = plan("8b", cluster, TRAINING, limits=limits.model_copy(update={"schedule": ("1f1b",)}), runtime=runtime)
    assert usual.step.step_s < best.step.step_s, "each group is filled and drained anew"


def test_a_switch_is_a_row_and_a_line_of_its_trainer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = names_of("LATE_GATHERS")["LATE_GATHERS"]
    monkeypatch.setitem(SWITCHES, row.name, row)
    megatron = load._shipped_file("megatron")
    has = megatron._replace(switches={**megatron.switches, row.name: (False, True)})
    monkeypatch.setattr(load, "_shipped_file", lambda name: has)
    load._shipped_switches.cache_clear()
    try:
        cluster, layout = ClusterSpec(hardware="h100", num_gpus=16), {"tp": (1,), "pp": (1,)}
        free = plan("8b", cluster, TRAINING, limits=SearchLimits(**layout))
        pinned = plan("8b", cluster, TRAINING, limits=SearchLimits(**layout, switches={row.name: True}))
    finally:
        load._shipped_switches.cache_clear()
    assert (free.best.recipe[row.name], pinned.best.recipe[row.name]) == (False, True)
    assert pinned.runtime_spec.parameter_overlap_fraction == 0
    assert free.step.step_s < pinned.step.step_s


def test_a_rule_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = yaml.safe_load(re.findall(r"```yaml\n(- .*?)```", TEXT, re.DOTALL)[0])
    monkeypatch.setitem(rule_table()["sets"], "layout mine", rows)
    runtime, limits = RuntimeSpec(name="mine", rules=("mine",)), SearchLimits(tp=(3,))
    with pytest.raises(Infeasible) as error:
        plan("8b", ClusterSpec(hardware="h100", num_gpus=6), TRAINING, limits=limits, runtime=runtime)
    assert rows[0]["reason"] in error.value.rejections


def test_an_exporter_is_a_function_and_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = names_of("MY_TARGET")
    target = names["MY_TARGET"]
    module = ModuleType("planner.export.my_trainer")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(TRAINERS, target.name, target)
    monkeypatch.setattr(export_module, "TARGETS", (*export_module.TARGETS, target.name))
    cluster = ClusterSpec(hardware="h100", num_gpus=8)
    fits = evaluate("8b", cluster, TRAINING, Parallelism(tp=2, pp=2, dp=2, micro_batch_size=1))
    written = export_module.export(fits, "my-trainer,torchrun", tmp_path / "run")
    settings = json.loads((tmp_path / "run" / "my-trainer.json").read_text())
    assert (settings["tensor"], settings["pipeline"], settings["data"]) == (2, 2, 2)
    assert settings["layers"] == [stage.num_layers for stage in fits.stages]
    assert "my_trainer --config" in (tmp_path / "run" / "launch.sh").read_text()
    assert all(path.exists() for path in written)
    interleaved = evaluate("8b", cluster, TRAINING, Parallelism(tp=2, pp=2, vpp=2, dp=2, micro_batch_size=1))
    with pytest.raises(Inexpressible, match="one chunk of layers a stage, not 2"):
        export_module.bundle_of(interleaved, "my-trainer")


def test_a_log_format_is_a_table_of_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(- name: my-log.*?)```", TEXT, re.DOTALL)
    grammar = Grammar.of(**yaml.safe_load(example)[0])
    rows = tuple(((len(formats.GRAMMARS),), row) for row in grammar.rows)
    for module in (reader, formats):
        monkeypatch.setattr(module, "GRAMMARS", (*module.GRAMMARS, grammar))
    monkeypatch.setattr(reader, "_ROWS", (*reader._ROWS, *rows))
    by_word = grouped((row.holds, at) for at, (_, row) in enumerate(reader._ROWS))
    monkeypatch.setattr(reader, "_BY_WORD", by_word)
    monkeypatch.setitem(reader._RANKS, grammar.name, grammar.rank)
    lines = [f"step {number} took {1.5 + number % 2 / 10} s, peak 61.5 GiB" for number in range(1, 31)]
    log = tmp_path / "train.log"
    log.write_text("\n".join(["64 sequences a step", *lines[:15], "saved checkpoint", *lines[15:]]))
    seen = observe([str(log)])
    assert (seen.facts.trainer, seen.sources[0].format, seen.facts.global_batch_size) == ("my-trainer", "my-log", 64)
    assert 1.5 <= (seen.step_s or 0) <= 1.6
    assert seen.peak_memory_bytes == 61.5 * 2**30


NEW = runpy.run_path(str(ROOT / "scripts" / "new"))
BEGUN = ("planner/**/*.py", "planner/**/*.yaml", "model_specs/*.yaml", "hardware_profiles/*.yaml", "tests/**/test_*.py")


def unfinished(root: Path) -> list[str]:
    """Files in which something is left to fill in."""
    files = [path for pattern in BEGUN for path in root.glob(pattern)]
    word = "TO" + "DO"
    return sorted(str(path.relative_to(root)) for path in files if re.search(rf"\b{word}\b", path.read_text()))


def test_nothing_that_was_begun_is_left_to_fill_in() -> None:
    assert unfinished(ROOT) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The tables that scripts/new puts rows into, in an empty tree."""
    for kind in NEW["SCAFFOLDS"].values():
        for row in kind.get("rows", ()):
            (tmp_path / row["file"]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / row["file"], tmp_path / row["file"])
    return tmp_path


@pytest.mark.parametrize("kind", NEW["SCAFFOLDS"])
def test_what_is_begun_parses_and_never_passes_as_finished(kind: str, tree: Path) -> None:
    files = NEW["scaffold"](kind, "my-thing-2.5", tree)
    left = unfinished(tree)
    assert all(path.exists() for path in files)
    for path in files:
        if path.suffix == ".py":
            ast.parse(path.read_text())
        else:
            begun = yaml.safe_load(path.read_text())
            assert "TO" + "DO" in str(begun.get("source", begun))
    test = next(path for path in files if path.name.startswith("test_"))
    assert str(test.relative_to(tree)) in left, "its test is refused"
    assert len(left) > 1, "and so is what it tests"
    said = [f"{path} {path.read_text()}" for path in files]
    assert [text for text in said if not re.search(r"my.thing.2.5", text, re.IGNORECASE)] == []
    with pytest.raises(SystemExit, match="is there already"):
        NEW["scaffold"](kind, "my-thing-2.5", tree)


@pytest.mark.parametrize(("kind", "load"), [("model", load_model), ("gpu", load_hardware), ("trainer", load_runtime)])
def test_a_file_that_was_begun_loads_once_it_is_filled_in_as_the_example_is(kind: str, load: Any, tree: Path) -> None:
    path = NEW["scaffold"](kind, "my-thing", tree)[0]
    with pytest.raises(SpecError) as refused:
        load(path)
    assert path.name in refused.value.message
    example = {"model": "my-model-7b.yaml", "gpu": "my-gpu-96gb.yaml", "trainer": "my-trainer.yaml"}[kind]
    begun, values = yaml.safe_load(path.read_text()), yaml.safe_load(FILES[example])
    path.write_text(yaml.safe_dump(filled_in(begun, values)))
    assert load(path).name == "my-thing"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("gpu", "h100"), ("model", "8b"), ("switch", "ep-overlap"), ("schedule", "zb-h1"), ("exporter", "megatron")],
)
def test_a_name_that_is_taken_is_no_new_one(kind: str, name: str) -> None:
    before = {path: path.read_text() for path in (ROOT / "planner").rglob("s*.py")}
    with pytest.raises(SystemExit, match="already"):
        NEW["scaffold"](kind, name)
    assert {path: path.read_text() for path in before} == before


def filled_in(begun: Any, values: Any) -> Any:
    """What was begun, with the example's value wherever something is to be filled in."""
    if isinstance(begun, dict):
        return {key: filled_in(value, values.get(key, value)) for key, value in begun.items()}
    if isinstance(begun, list) and begun and isinstance(begun[0], dict):
        return [filled_in(*pair) for pair in zip(begun, values, strict=True)]
    return values if "TO" + "DO" in str(begun) else begun


@pytest.mark.parametrize("name", ["", "Mine", "a b", "../x", "x-", "1x"])
def test_names_that_are_no_files_and_no_words_are_refused(name: str) -> None:
    assert NEW["NAME"].fullmatch(name) is None


def test_every_kind_that_can_be_begun_is_walked_through() -> None:
    titles = re.findall(r"^## Add an? (.+)$", TEXT, re.MULTILINE)
    words = {"model": "model", "gpu": "GPU", "log": "log format"}
    assert {words.get(kind, kind) for kind in NEW["SCAFFOLDS"]} <= set(titles)
