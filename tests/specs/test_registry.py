"""A name, an alias, a file, a directory or stdin: found from anywhere, or one error that says what to do."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused
from tables import beside

from planner.errors import SpecError
from planner.specs import registry, shipped
from planner.specs.base import Spec
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import (
    AttentionEfficiency,
    Efficiency,
    GemmEfficiency,
    HardwareSpec,
    LinkTier,
    ReservedMemory,
)
from planner.specs.model import ModelSpec
from planner.specs.model_parts import MLASpec, MoESpec, TrainingDefaults
from planner.specs.registry import hardware_names, load_hardware, load_model, model_names, model_of
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.trainers.spec import RuntimeSpec

TABLES = beside(__file__)

TINY = TABLES["tiny"]
LLAMA = TABLES["llama"]


def failure(call: Any, argument: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        call(argument)
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


def test_names_are_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_model("8b").num_hidden_layers == 32


def test_a_name_wins_over_a_directory_that_is_called_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "405b").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(LLAMA))
    assert load_model("405b").num_hidden_layers == 126
    assert load_model("mine").num_hidden_layers == 2
    assert "without config.json" in failure(load_model, "./405b").message


def test_one_name_opens_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing every file to find one would take as long as the plan."""
    registry._shipped_model.cache_clear()
    parsed: list[str] = []
    load = registry.load_yaml

    def spy(path: str | Path) -> dict[str, Any]:
        parsed.append(Path(path).name)
        return load(path)

    monkeypatch.setattr(registry, "load_yaml", spy)
    load_model("405b")
    load_model("llama-3.1-405b")
    assert parsed == ["llama-3.1-405b.yaml"]


def test_the_index_of_aliases_is_what_the_files_say() -> None:
    assert {name: load_model(name).aliases for name in model_names()} == model_names()
    assert {name: load_hardware(name).aliases for name in hardware_names()} == hardware_names()


@pytest.mark.parametrize("names", [model_names(), hardware_names()])
def test_no_name_means_two_things(names: dict[str, tuple[str, ...]]) -> None:
    spoken = [*names, *(alias for aliases in names.values() for alias in aliases)]
    assert len(spoken) == len(set(spoken))
    assert spoken == [name.lower() for name in spoken]


@pytest.mark.parametrize(("kind", "name", "near"), TABLES["an_unknown_name_brings_the_nearest"])
def test_an_unknown_name_brings_the_nearest(kind: str, name: str, near: str) -> None:
    error = failure({"model": load_model, "hardware": load_hardware}[kind], name)
    assert repr(name) in error.message
    assert near in error.hint


@pytest.mark.parametrize("name", ["", "zzz", "x" * 5000, "nul\0", "../../etc/passwd\n"])
def test_a_nonsense_name_is_no_crash(name: str) -> None:
    failure(load_model, name)
    failure(load_hardware, name)


@pytest.mark.parametrize("name", ["models/llama-3.1-8b.yaml", "missing.yaml", "missing/config.json", "meta-llama/x"])
def test_a_missing_path_is_named_as_a_file(name: str) -> None:
    assert failure(load_model, name).message.startswith(f"{name}: no such file")


@pytest.mark.parametrize(("repository", "name"), TABLES["a_model_is_found_by_name_alias_and_repository_in_any_case"])
def test_a_model_is_found_by_name_alias_and_repository_in_any_case(repository: str, name: str) -> None:
    assert load_model(repository).name == name


def test_an_unknown_repository_brings_the_nearest_name() -> None:
    assert "qwen2.5-7b" in failure(load_model, "Qwen/Qwen2.6-VL-7B").hint


def test_a_yaml_is_read_as_a_config_is_and_says_all_that_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("num_hidden_layers: 2\nhidden_size: 4k\nnum_attention_heads: 32\nrms_norm_eps: 1e-5\n")
    error = failure(load_model, str(path))
    assert "vocab_size, intermediate_size: are missing" in error.message
    assert "--seq-length and --global-batch-size" in error.hint
    path.write_text(
        path.read_text() + "vocab_size: 32000\nintermediate_size: 11008\nhidden_act: silu\ntorch_dtype: bfloat16\n"
        "training: {seq_length: 8k, tokens_per_step: 16M}\n"
    )
    model = load_model(str(path))
    assert (model.hidden_size, model.norm_eps) == (4096, 1e-5)
    assert model.training is not None
    assert (model.training.seq_length, model.training.tokens_per_step) == (8192, 16_000_000)


def test_a_yaml_file_needs_no_name_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TINY)
    assert load_model(path).name == "mine"
    path.write_text(TINY + "name: other\n")
    assert load_model(str(path)).name == "other"


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(TINY)
    assert load_model(path).vocab_size == 100
    path.write_text(TINY.replace("100", "200"))
    assert load_model(path).vocab_size == 200


@pytest.mark.parametrize("name", ["config.json", "renamed.json"])
def test_a_config_json_is_read_as_hugging_face_means_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(LLAMA))
    assert load_model(path).num_key_value_heads == 4


def test_a_directory_holds_a_config_json_and_gives_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(folder).name == "my-model"


def test_a_model_in_our_words_may_be_json_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({key: value for key, value in LLAMA.items() if key != "model_type"}))
    assert load_model(path).name == "mine"


@pytest.mark.parametrize("text", [TINY, json.dumps(LLAMA)])
def test_a_dash_reads_a_model_from_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert load_model("-").num_hidden_layers == 2


def test_hardware_of_ones_own_works_like_ours(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    text = (shipped.folder("hardware") / "a100-sxm-80gb.yaml").read_text()
    path.write_text(text.replace("name: a100-sxm-80gb", "name: lab").replace("memory_gib: 79.15", "memory_gib: 60"))
    assert load_hardware(path).memory_gib == 60


def test_a_wrong_value_names_file_field_and_value(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(TINY.replace("layers: 2", "layers: -3"))
    assert failure(load_model, str(path)).message == f"{path}: num_hidden_layers: -3 must be greater than 0"
    path.write_text("architecture: hopper\nmemory: 80\n")
    assert failure(load_hardware, str(path)).message.startswith(f"{path}: memory: unknown key")


def test_a_hardware_directory_is_refused(tmp_path: Path) -> None:
    assert "is a directory" in failure(load_hardware, f"{tmp_path}/").message


def test_package_data_wins_where_the_wheel_brought_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "planner"
    (package / "specs").mkdir(parents=True)
    monkeypatch.setattr(shipped, "__file__", str(package / "specs" / "registry.py"))
    assert shipped.folder("model") == tmp_path / "model_specs"
    (package / "_data" / "model_specs").mkdir(parents=True)
    assert shipped.folder("model") == package / "_data" / "model_specs"


def test_loading_specs_needs_no_torch() -> None:
    code = (
        "import sys; from planner.specs.registry import load_model; load_model('405b'); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_cluster_takes_its_hardware_by_name_and_refuses_it_as_load_hardware_does() -> None:
    assert ClusterSpec(hardware="h200", num_gpus=8).hardware is load_hardware("h200")
    assert model_of("405b") is model_of(load_model("405b"))
    with refused("hardware: unknown 'h299'", "did you mean h20 or h200"):
        ClusterSpec(hardware="h299", num_gpus=8)


@pytest.mark.parametrize(
    "spec",
    [ClusterSpec, Efficiency, GemmEfficiency, AttentionEfficiency, HardwareSpec, LinkTier, MLASpec, ModelSpec, MoESpec,
     Parallelism, ReservedMemory, RuntimeSpec, SearchLimits, TrainingDefaults, TrainingSpec],
)  # fmt: skip
def test_the_docstring_below_a_field_is_its_description(spec: type[Spec]) -> None:
    schema = spec.model_json_schema()
    properties = schema.get("$defs", {}).get(spec.__name__, schema)["properties"]
    assert [name for name in spec.model_fields if not properties[name].get("description")] == []
