"""A trainer's file: every number has a source, and what is wrong with one is said with file, field and nearest name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from planner.errors import SpecError
from planner.trainers import load
from planner.trainers.load import RUNTIMES, load_runtime, since_of, sources_of, switches_of, versions_of
from planner.trainers.rules.recipe import export_rules_for, rules_for
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import ROWWISE
from tools.calibrate.runs import COEFFICIENTS, Coefficient

TABLES = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())

DEFAULTS = RuntimeSpec(name="defaults")


def written(folder: Path, text: str) -> Path:
    path = folder / "my-trainer.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_trainer_loads_and_its_numbers_have_sources(name: str) -> None:
    runtime, sources = load_runtime(name), sources_of(name)
    assert runtime.name == name
    numbers = {
        field
        for field, value in runtime
        if isinstance(value, int | float) and not isinstance(value, bool) and value != getattr(DEFAULTS, field)
    }
    assert numbers <= sources.keys()
    assert all(len(source) > 10 or source.startswith("arXiv") for source in sources.values())


@pytest.mark.parametrize("coefficient", [c for c in COEFFICIENTS if c.of == "runtime" and c.feature is None])
def test_a_fitted_number_names_the_coefficient_that_fits_it(coefficient: Coefficient) -> None:
    """`tools/calibrate runs` prints coefficients by name; that name leads to the lines of the files they stand in."""
    for name in coefficient.names:
        assert f'"{coefficient.name}"' in sources_of(name)[coefficient.path]
    assert len({getattr(load_runtime(name), coefficient.path) for name in coefficient.names}) == 1


def test_a_base_gives_what_the_file_does_not_say() -> None:
    today, before = load_runtime("torchtitan"), load_runtime("torchtitan-2025")
    assert before.family == load_runtime("torchtitan-2024").family == "torchtitan"
    assert (before.weight_bytes, before.repeats_keys, today.repeats_keys) == (today.weight_bytes, True, False)
    assert (today.narrow_factor, before.narrow_factor) == (ROWWISE, 1.0)


def test_a_file_of_the_user_is_a_kind_of_its_base(tmp_path: Path) -> None:
    text = "source: ours\nbase: torchtitan\nnarrow_factor: {value: 1.2, source: our GPUs}\ncasts_weights: false\n"
    mine, theirs = load_runtime(written(tmp_path, text)), load_runtime("torchtitan")
    assert (mine.name, mine.family, mine.narrow_factor, mine.casts_weights) == ("my-trainer", "torchtitan", 1.2, False)
    assert {rule.reason for rule in rules_for(mine)} == {rule.reason for rule in rules_for(theirs)}
    assert sources_of(tmp_path / "my-trainer.yaml")["narrow_factor"] == "our GPUs"


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "torch-eager"])
def test_a_trainer_defined_in_python_has_the_rules_of_its_trainer(name: str) -> None:
    mine, theirs = RuntimeSpec(name="mine", trainer=name), load_runtime(name)
    assert len(rules_for(mine)) >= len(rules_for(theirs)) > 10
    assert export_rules_for(mine) == export_rules_for(theirs) != ()
    assert len(rules_for(RuntimeSpec(name="mine", rules=(name,)))) == len(rules_for(mine))


def test_software_of_the_past_is_not_exported() -> None:
    assert export_rules_for(load_runtime("megatron-2021")) == ()


@pytest.mark.parametrize(
    ("runtime", "message", "hint"),
    [
        (RuntimeSpec(name="mine", trainer="megatorn"), "trainer: unknown 'megatorn'", "did you mean megatron"),
        (RuntimeSpec(name="mine", rules=("megatorn",)), "rules: unknown 'megatorn'", "did you mean megatron"),
        (
            RuntimeSpec(name="my-megatron"),
            "names neither its trainer nor its rules",
            "give trainer, one of automodel, bridge, ",
        ),
    ],
)
def test_a_runtime_that_does_not_say_whose_rules_it_obeys_is_refused(
    runtime: RuntimeSpec, message: str, hint: str
) -> None:
    with pytest.raises(SpecError) as error:
        rules_for(runtime)
    assert message in error.value.message
    assert hint in error.value.hint


@pytest.mark.parametrize(("text", "message", "hint"), TABLES["wrong_files"])
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, message: str, hint: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(SpecError) as error:
        load_runtime(path)
    assert error.value.message.startswith(f"{path}: {message}")
    assert hint in error.value.hint


def test_a_name_that_no_trainer_has() -> None:
    with pytest.raises(SpecError, match="runtime: unknown 'megatorn'") as error:
        load_runtime("megatorn")
    assert "did you mean megatron" in error.value.hint


@pytest.fixture
def versioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A trainer that ships with two versions: layer graphs of attention and a dispatcher came with the second."""
    text = """
        source: ours
        sends_tokens_once: true
        dispatcher: hybridep
        switches:
          cuda_graph: [none, moe_router, attn+moe_router]
          dispatcher: [alltoall, deepep, hybridep]
          ep_overlap: [false, true]
        versions: ["0.9", "0.10", "0.20"]
        since: {"cuda_graph=attn+moe_router": "0.20", "dispatcher=hybridep": "0.10", ep_overlap: "0.20"}
    """
    (tmp_path / "mine.yaml").write_text(text)
    monkeypatch.setattr(load, "_DATA", tmp_path)
    monkeypatch.setattr(load, "RUNTIMES", ("mine",))
    caches = (load._shipped, load._shipped_file, load._shipped_switches)
    for kept in caches:
        kept.cache_clear()
    yield tmp_path
    for kept in caches:
        kept.cache_clear()


def test_a_version_lacks_what_came_later(versioned: Path) -> None:
    newest, before, first = load_runtime("mine"), load_runtime("mine@0.10"), load_runtime("mine@0.9")
    assert (newest.version, before.version, first.version) == ("", "0.10", "0.9")
    assert set(switches_of(newest)) == {"cuda_graph", "dispatcher", "ep_overlap"}
    assert switches_of(load_runtime("mine@0.20")) == switches_of(newest)
    assert switches_of(before) == {
        "cuda_graph": ("none", "moe_router"),
        "dispatcher": ("alltoall", "deepep", "hybridep"),
    }
    assert switches_of(first)["dispatcher"] == ("alltoall", "deepep")
    assert (since_of(newest, "ep_overlap", True), since_of(newest, "dispatcher", "deepep")) == ("0.20", "")
    assert versions_of(newest) == ("0.9", "0.10", "0.20")


def test_an_own_value_that_came_later_falls_back_to_the_plainest(versioned: Path) -> None:
    assert load_runtime("mine@0.10").dispatcher == "hybridep"
    first = load_runtime("mine@0.9")
    assert (first.dispatcher, first.sends_tokens_once) == ("alltoall", False)


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("mine@0.11", "runtime: mine has no version '0.11'", "one of 0.9, 0.10, 0.20"),
        ("mine@", "runtime: unknown 'mine@'", "did you mean mine?"),
        ("other@0.9", "runtime: unknown 'other'", "one of mine"),
    ],
)
def test_a_version_that_is_unknown_is_named(versioned: Path, name: str, message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_runtime(name)
    assert caught.value.message == message
    assert hint in caught.value.hint


def test_a_trainer_without_versions_takes_none() -> None:
    with pytest.raises(SpecError, match="torch-eager has no version"):
        load_runtime("torch-eager@1")


@pytest.mark.parametrize(("lines", "message"), TABLES["wrong_versions"])
def test_a_file_with_wrong_versions_is_named(tmp_path: Path, lines: str, message: str) -> None:
    path = written(tmp_path, f"source: ours\nbase: torchtitan\n{lines}\n")
    with pytest.raises(SpecError) as caught:
        load_runtime(path)
    assert message in caught.value.message


@pytest.mark.parametrize("values", ["null", "none", "1"])
def test_a_switch_of_a_file_lists_its_values(tmp_path: Path, values: str) -> None:
    path = written(tmp_path, f"source: ours\nbase: torchtitan\nswitches: {{compile: {values}}}\n")
    with pytest.raises(SpecError, match=r"switches: compile: .* is no list"):
        load_runtime(path)


def test_megatron_had_layer_graphs_and_hybridep_before_its_fused_experts() -> None:
    before, after = switches_of(load_runtime("megatron@0.15")), switches_of(load_runtime("megatron@0.16"))
    assert (before["cuda_graph"], before["dispatcher"]) == (("none", "full_iteration"), ("alltoall", "deepep"))
    assert "moe_router" in after["cuda_graph"]
    assert "hybridep" in after["dispatcher"]
    assert "activation_offload" in after.keys() - before.keys()
    assert "fused_experts" in switches_of(load_runtime("megatron@0.18")).keys() - after.keys()
    assert switches_of(load_runtime("megatron@0.20")) == switches_of(load_runtime("megatron"))
