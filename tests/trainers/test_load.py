"""A trainer's file: every number has a source, and what is wrong with one is said with file, field and nearest name.

A run is dated by what it uses: the oldest generation of its trainer that knows all of it.
The date of the calibration is data: no fitted number changes without a row that says when and by what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from tables import beside

import planner
from planner.errors import SpecError
from planner.layout.runs import parse_run
from planner.physics.compute import operator_seconds
from planner.physics.operators import Operator
from planner.specs.registry import hardware_names, load_hardware, load_model
from planner.specs.training import Parallelism
from planner.trainers import load
from planner.trainers.calibration import shipped_fits
from planner.trainers.generations import runtime_of_its_day
from planner.trainers.load import RUNTIMES, load_runtime, since_of, switches_of, versions_of
from planner.trainers.rules.recipe import export_rules_for, rules_for
from planner.trainers.shipped import calibration_date
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import ROWWISE, SWITCHES
from tools.calibrate.runs import COEFFICIENTS, Coefficient

TABLES = beside(__file__)

DEFAULTS = RuntimeSpec(name="defaults")


def written(folder: Path, text: str) -> Path:
    path = folder / "my-trainer.yaml"
    path.write_text(text)
    return path


def sources_of(name: str | Path) -> Any:
    """The source of each number of a trainer, by field."""
    return load._file(load._path(str(name))).sources


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


@pytest.mark.parametrize(("fields", "message", "hint"), TABLES["a_runtime_that_does_not_say_whose_rules_it_obeys"])
def test_a_runtime_that_does_not_say_whose_rules_it_obeys_is_refused(
    fields: dict[str, Any], message: str, hint: str
) -> None:
    with refused(message, hint):
        rules_for(RuntimeSpec(**fields))


@pytest.mark.parametrize(("text", "message", "hint"), TABLES["wrong_files"])
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, message: str, hint: str) -> None:
    path = written(tmp_path, text)
    with refused(f"{path}: {message}", hint):
        load_runtime(path)


def test_a_name_that_no_trainer_has() -> None:
    with refused("runtime: unknown 'megatorn'", "did you mean megatron"):
        load_runtime("megatorn")


@pytest.fixture
def versioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A trainer that ships with two versions: layer graphs of attention and a dispatcher came with the second."""
    text = TABLES["versioned"]
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


@pytest.mark.parametrize(("name", "message", "hint"), TABLES["a_version_that_is_unknown_is_named"])
def test_a_version_that_is_unknown_is_named(versioned: Path, name: str, message: str, hint: str) -> None:
    with refused(message, hint):
        load_runtime(name)


def test_a_trainer_without_versions_takes_none() -> None:
    with pytest.raises(SpecError, match="torch-eager has no version"):
        load_runtime("torch-eager@1")


@pytest.mark.parametrize(("lines", "message"), TABLES["wrong_versions"])
def test_a_file_with_wrong_versions_is_named(tmp_path: Path, lines: str, message: str) -> None:
    path = written(tmp_path, f"source: ours\nbase: torchtitan\n{lines}\n")
    with refused(message):
        load_runtime(path)


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
    assert switches_of(load_runtime("megatron@0.21")) == switches_of(load_runtime("megatron"))


def generation(name: str, architecture: str, **features: Any) -> str:
    model = load_model("gpt3-175b" if name == "megatron" else "llama3-8b")
    return runtime_of_its_day(name, architecture, model, Parallelism(tp=8), features).name


@pytest.mark.parametrize(("name", "architecture", "features", "expected"), TABLES["generations"])
def test_what_dates_a_run(name: str, architecture: str, features: dict[str, Any], expected: str) -> None:
    assert generation(name, architecture, **features) == expected


@pytest.mark.parametrize(
    ("hardware", "model", "features", "factor"), TABLES["racks_replay_routing_unless_a_run_says_otherwise"]
)
def test_racks_replay_routing_unless_a_run_says_otherwise(
    hardware: str, model: str, features: dict[str, Any], factor: float
) -> None:
    """Nor does the host prepare counts that are known before."""
    layout = {"tp": 1, "dp": 8, "micro_batch_size": 1}
    run = {"model": model, "hardware": hardware, "num_gpus": 8, "runtime": "megatron", "seq_length": 4096}
    run |= {"global_batch_size": 8, "dtype": "bf16", "parallelism": layout, "features": features}
    runtime = parse_run({"run": run}).runtime
    assert min(runtime.moe_host_factor, runtime.launched_fraction) == factor


def test_fp16_and_bf16_gradients_of_megatron_deepspeed() -> None:
    runtime = load_runtime("megatron-deepspeed")
    assert (runtime.gradient_bytes, runtime.kept_gradient_bytes) == (4, 2)
    half = runtime.in_dtype("fp16", "ampere")
    assert (half.gradient_bytes, half.kept_gradient_bytes) == (2, 0)
    assert half.in_dtype("fp16", "ampere") == half
    assert runtime.in_dtype("bf16", "ampere") is runtime
    kernels = {
        name: load_runtime(name).in_dtype("fp16", "volta").flash_attention for name in ("megatron", "hf", "torchtitan")
    }
    assert kernels == {"megatron": False, "hf": True, "torchtitan": True}


@pytest.mark.parametrize(
    ("features", "stage"), TABLES["runs_of_primus_with_deepep_fuse_routing_unless_they_say_otherwise"]
)
def test_runs_of_primus_with_deepep_fuse_routing_unless_they_say_otherwise(
    features: dict[str, Any], stage: int
) -> None:
    layout = {"tp": 1, "dp": 8, "ep": 8, "micro_batch_size": 1}
    run = {"model": "deepseek-v2-lite", "hardware": "mi355x", "num_gpus": 8, "runtime": "megatron", "seq_length": 4096}
    run |= {"global_batch_size": 8, "dtype": "bf16", "parallelism": layout, "features": features}
    assert SWITCHES["sync_free_moe"].value_of(parse_run({"run": run}).runtime) == stage
    dropless = run | {"features": {**features, "token_drop": False}}
    assert parse_run({"run": dropless}).runtime.moe_host_factor == parse_run({"run": run}).runtime.moe_host_factor


def test_only_amds_gpus_pay_for_products_that_rocm_leaves_untuned() -> None:
    """Torch takes the kernels that hipBLASLt proposes, in 16 bits as in 8."""
    slow = load_runtime("torchtitan")
    fast = slow.model_copy(update={"rocm_product_factor": 1.0})
    product = Operator(name="up", kind="gemm", m=8192, n=8192, k=8192)

    def seconds(gpu: str, runtime: RuntimeSpec, dtype: str = "bf16") -> float:
        return float(operator_seconds(product, load_hardware(gpu), dtype, runtime).forward_s)

    assert seconds("h100", slow) == seconds("h100", fast)
    assert seconds("mi300x", slow) == pytest.approx(slow.rocm_product_factor * seconds("mi300x", fast))
    assert seconds("mi300x", slow, "fp8") == seconds("mi300x", fast, "fp8")


def test_split_backwards_of_primus_hide_no_exchange_of_gradients() -> None:
    """Its pipeline engine asks for overlap_grad_reduce and overlap_param_gather off; other trainers' does not."""
    primus, megatron = load_runtime("primus-megatron"), load_runtime("megatron")
    assert primus.for_schedules(split_backward=True).gradient_overlap_fraction == 0
    assert primus.for_schedules(split_backward=False) is primus
    assert megatron.for_schedules(split_backward=True) is megatron


ROOT = Path(planner.__file__).parents[1]
WIDTHS_OF_HF = ("step_width", "memory_width", "host_factor")
"""The numbers that tools/finetune_widths reads from published runs."""


def part(of: Any, name: str) -> Any:
    if isinstance(of, dict):
        return of.get(name)
    return of[int(name)] if name.isdigit() else getattr(of, name)


def fitted_values() -> dict[str, Any]:
    """Every number that a fit chose, as it ships."""
    profiles = [load_hardware(name) for name in hardware_names()]
    values: dict[str, Any] = {
        profile.name: profile.efficiency.model_dump(exclude_defaults=True, exclude={"source", "evidence"})
        for profile in profiles
        if profile.efficiency.evidence != "spec_sheet"
    }
    for coefficient in COEFFICIENTS:
        load = load_hardware if coefficient.of == "hardware" else load_runtime
        for name in coefficient.names:
            values[f"{name} {coefficient.path}"] = reduce(part, coefficient.path.split("."), load(name))
    hf = load_runtime("hf")
    return values | {f"hf {name}": getattr(hf, name) for name in WIDTHS_OF_HF}


def digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def test_no_fitted_number_changes_without_a_row_that_dates_it() -> None:
    now = digest(fitted_values())
    assert shipped_fits().fingerprint == now, (
        f"fitted numbers changed: add a row with today's date to planner/trainers/fits.yaml, and fingerprint: {now}"
    )


def test_a_number_that_moves_changes_the_fingerprint() -> None:
    values = fitted_values()
    moved = {**values, "h100-sxm-80gb": {**values["h100-sxm-80gb"], "launch_us": 4.3}}
    assert digest(moved) != digest(values)
    assert len(values) > 60
    assert None not in values.values()


def test_fits_are_in_order_and_the_last_is_the_calibration() -> None:
    fits = shipped_fits().fits
    assert [fit.date for fit in fits] == sorted(fit.date for fit in fits)
    assert calibration_date() == fits[-1].date


def test_sources_name_commands_and_sections_that_exist() -> None:
    for fit in shipped_fits().fits:
        command, pages = fit.source.split("; ")
        page, _, section = pages.partition(", ")
        assert (ROOT / command.split()[0]).exists()
        assert f"## {section}\n" in (ROOT / page).read_text()
