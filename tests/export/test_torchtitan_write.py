"""The recipe is Python that cuts the model where the plan cuts it; torchtitan builds it where it is installed.

Recipes, TOML files and command lines of torchtitan become the run they are.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import TEXTS, layout_of
from tables import beside

from planner.answer import Plan
from planner.export.export import bundle_of
from planner.export.import_run import read, read_configuration
from planner.export.refusal import Inexpressible
from planner.export.stages import virtual_stages
from planner.export.torchtitan_files import RECIPE, export_torchtitan
from planner.schedule.graph import to_torch_csv
from planner.schedule.orders import build_schedule
from planner.specs.model import ModelSpec

TABLES = beside(__file__)

Planned = Callable[..., Plan]


def titan(planned: Planned, model: str = "llama-3.1-8b", gpus: int = 64, **options: Any) -> Plan:
    return planned(model, gpus, **{"runtime": "torchtitan", **options})


def source_of(plan: Plan) -> str:
    exported = export_torchtitan(plan)
    assert [file.name for file in exported.files] == [f"{RECIPE}.py"]
    return exported.files[0].text


def assigned(source: str, name: str) -> Any:
    """The value of a top-level assignment."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return eval(compile(ast.Expression(node.value), RECIPE, "eval"))
    raise AssertionError(f"{name} is not assigned")


def stage_modules(plan: Plan) -> list[list[str]]:
    """The modules of every virtual stage, in model order."""
    return [
        [
            *(["tok_embeddings"] if stage.embedding else []),
            *(f"layers.{layer}" for layer in range(stage.first_layer, stage.last_layer)),
            *(["norm", "lm_head"] if stage.head else []),
        ]
        for stage in virtual_stages(plan)
    ]


def call_arguments(source: str, function: str) -> dict[str, Any]:
    """Literal keywords of every call of `function`."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
            for keyword in node.keywords:
                if keyword.arg and isinstance(keyword.value, ast.Constant):
                    found[keyword.arg] = keyword.value.value
    return found


def test_interleaved_stages_come_in_model_order(planned: Planned) -> None:
    plan = titan(planned, pp=4, vpp=2, layers_per_stage=(1, 5, 4, 4, 4, 5, 5, 4))
    stages = assigned(source_of(plan), "STAGES")
    assert [len([name for name in stage if "layers" in name]) for stage in stages] == [1, 5, 4, 4, 4, 5, 5, 4]
    assert stages == stage_modules(plan)
    assert "STAGES" not in source_of(titan(planned))


@pytest.mark.parametrize(("options", "expected"), TABLES["degrees"])
def test_degrees(planned: Planned, options: dict[str, Any], expected: dict[str, Any]) -> None:
    plan = titan(planned, **options)
    given = call_arguments(source_of(plan), "dict")
    layout = plan.parallelism
    assert given["data_parallel_shard_degree"] == expected["dp_shard"]
    assert given["data_parallel_replicate_degree"] == expected["dp_replicate"]
    assert given["pipeline_parallel_schedule"] == expected["schedule"]
    ranks = 1
    for axis in ("pipeline", "tensor", "context"):
        ranks *= given[f"{axis}_parallel_degree"]
    assert ranks * given["data_parallel_shard_degree"] * given["data_parallel_replicate_degree"] == 64
    assert given["spmd_backend"] == ("partial_dtensor" if layout.cp == 1 else "spmd_types")


def test_batch_in_both_ways_of_counting(planned: Planned) -> None:
    source = source_of(titan(planned, tp=2, pp=4, micro_batch_size=2, num_microbatches=8, seq_length=4096))
    now, before = call_arguments(source, "training.update"), call_arguments(source, "parallelism.update")
    assert now["num_tokens_per_microbatch_per_dp_rank"] == 2 * 4096
    assert now["num_tokens_per_train_step"] == 2 * 8 * 8 * 4096
    assert now["local_batch_size"] == 16
    assert now["global_batch_size"] == 128
    assert before == {"num_pp_microbatches": 8, "pipeline_parallel_microbatch_size": 2}


@pytest.mark.parametrize(("recompute", "line"), TABLES["activation_checkpointing"])
def test_activation_checkpointing(planned: Planned, recompute: str, line: str) -> None:
    assert f"config.activation_checkpoint = {line}" in source_of(titan(planned, recompute=recompute))


def test_some_layers_are_recomputed_by_name(planned: Planned) -> None:
    plan = titan(planned, pp=4, recompute="full", recompute_num_layers=3)
    source = source_of(plan)
    assert assigned(source, "RECOMPUTED") == {8 * stage + layer for stage in range(4) for layer in range(3)}
    assert "config.activation_checkpoint = PlannedAC.Config()" in source
    first = plan.stages[0].model_copy(update={"recompute": {"full": 6, "none": 2}, "num_recomputed": ((6,),)})
    best = plan.best.model_copy(update={"stages": (first, *plan.stages[1:])})
    by_stage = plan.model_copy(update={"best": best})
    assert assigned(source_of(by_stage), "RECOMPUTED") == {*range(6), *range(8, 11), *range(16, 19), *range(24, 27)}


def refused(plan: Plan) -> list[str]:
    with pytest.raises(Inexpressible) as caught:
        export_torchtitan(plan)
    return [reason.name for reason in caught.value.reasons]


def test_several_tokens_are_predicted_by_latent_attention_only(planned: Planned) -> None:
    plan = titan(planned, "llama-3.1-8b")
    spec = plan.model.spec.model_copy(update={"num_nextn_predict_layers": 1})
    model = plan.model.model_copy(update={"spec": spec})
    assert refused(plan.model_copy(update={"model": model})) == ["num_nextn_predict_layers"]


@pytest.mark.parametrize("schedule", ["gpipe", "breadth-first"])
def test_orders_without_rounds_take_any_number_of_micro_batches(planned: Planned, schedule: str) -> None:
    plan = titan(planned, gpus=16, pp=4, num_microbatches=3, schedule=schedule)
    assert call_arguments(source_of(plan), "parallelism.update")["num_pp_microbatches"] == 3
    assert refused(titan(planned, gpus=16, pp=4, num_microbatches=3, schedule="1f1b")) == ["too_few_microbatches"]


@pytest.mark.parametrize(("schedule", "vpp", "compiled"), TABLES["layers_whose_backward_is_split_are_not_compiled"])
def test_layers_whose_backward_is_split_are_not_compiled(
    planned: Planned, schedule: str, vpp: int, compiled: str
) -> None:
    """A compiled layer computes its whole backward for its input and again for its weights."""
    plan = titan(planned, gpus=16, pp=4, vpp=vpp, num_microbatches=8, schedule=schedule)
    assert f"config.compile = CompileConfig({compiled})" in source_of(plan)
    assert plan.runtime_spec.compiled == (schedule == "1f1b"), "what runs is what is priced"
    assert not any("uncompiled" in words for words in (*plan.warnings, *export_torchtitan(plan).notes))


def test_attention_whose_backward_comes_apart(planned: Planned) -> None:
    """FlexAttention is compiled always; VarlenAttention has neither context parallelism nor sinks."""
    whole, split = (titan(planned, gpus=16, pp=4, num_microbatches=8, schedule=name) for name in ("1f1b", "zb-h1"))
    assert 'get_attention_config("flex")' in source_of(whole)
    assert 'get_attention_config("varlen")' in source_of(split)
    assert any("3584" in note for note in export_torchtitan(split).notes)
    assert not any("3584" in note for note in export_torchtitan(whole).notes)
    assert refused(titan(planned, gpus=16, pp=4, cp=2, num_microbatches=8, schedule="zb-h1")) == [
        "split_backward_with_cp"
    ]
    sinks = planned("gpt-oss-20b", gpus=16, pp=4, num_microbatches=8, schedule="zb-h1", runtime="torchtitan")
    assert "split_backward_with_sinks" in refused(sinks)


def test_an_order_that_was_priced_compiled_is_noted(planned: Planned) -> None:
    """As plans were that had been searched among schedules of both kinds, and saved, before each was priced alone."""
    plan = titan(planned, gpus=16, pp=4, num_microbatches=8, schedule="1f1b")
    layout = plan.parallelism.model_copy(update={"schedule": "zb-h1"})
    plan = plan.model_copy(update={"best": plan.best.model_copy(update={"parallelism": layout})})
    exported = export_torchtitan(plan)
    assert any("uncompiled" in note for note in exported.notes)
    assert 'CompileConfig(enable=True, components=["loss"])' in exported.files[0].text


def test_v_shaped_schedules_are_expressible(planned: Planned) -> None:
    plan = titan(planned, gpus=16, pp=4, vpp=2, schedule="zb-v", runtime="torch-eager", zero_stage=0)
    source = source_of(plan)
    assert call_arguments(source, "dict")["pipeline_parallel_schedule"] == "ZBVZeroBubble"
    assert len(assigned(source, "STAGES")) == 8


@pytest.mark.parametrize(("schedule", "vpp", "placed_like"), TABLES["orders_without_a_class_are_read_from_a_file"])
def test_orders_without_a_class_are_read_from_a_file(
    planned: Planned, schedule: str, vpp: int, placed_like: str
) -> None:
    plan = titan(planned, gpus=16, pp=4, vpp=vpp, num_microbatches=8, schedule=None if schedule == "auto" else schedule)
    if schedule == "auto":
        order = build_schedule("zb-h1", 4, 2, 8)
        layout = plan.parallelism.model_copy(update={"schedule": schedule})
        rows = tuple(" ".join(map(str, actions)) for actions in order.ranks)
        best = plan.best.model_copy(update={"actions": rows, "parallelism": layout})
        plan = plan.model_copy(update={"best": best})
    else:
        order = build_schedule(schedule, 4, vpp, 8)
    exported = export_torchtitan(plan)
    recipe, csv = exported.files
    assert csv.text == to_torch_csv(order)
    assert f'pipeline_parallel_schedule_csv=str(Path(__file__).with_name("{csv.name}")),' in recipe.text
    assert call_arguments(recipe.text, "dict")["pipeline_parallel_schedule"] == placed_like
    assert exported.command is not None
    assert csv in exported.command.files


def test_names_cannot_leave_the_comment(planned: Planned, hostile_name: str) -> None:
    plan = titan(planned)
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"name": hostile_name})})
    source = source_of(plan)
    ast.parse(source)
    assert not [line for line in source.splitlines() if "pwned" in line and not line.startswith("#")]


class NoKernels(types.ModuleType):
    """Stands in for a module of triton kernels."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@pytest.fixture(scope="module")
def torchtitan() -> Iterator[Any]:
    """Its trainer; without triton, which torch's CPU wheel lacks, also without its own kernels."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = pytest.importorskip("torchtitan", reason="torchtitan is not installed")
        root = Path(package.__path__[0])
        for path in root.rglob("*.py") if importlib.util.find_spec("triton") is None else ():
            if re.search(r"^(import|from) triton\b", path.read_text(), re.MULTILINE):
                name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
                patch.setitem(sys.modules, name, NoKernels(name))
        yield importlib.import_module("torchtitan.trainer")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "options"), TABLES["torchtitan_builds_the_configuration"])
def test_torchtitan_builds_the_configuration(
    planned: Planned, torchtitan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, options: Any
) -> None:
    plan = titan(planned, model, **options)
    (tmp_path / f"{RECIPE}.py").write_text(source_of(plan))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, RECIPE, raising=False)
    config = importlib.import_module(RECIPE).plan()
    monkeypatch.delitem(sys.modules, RECIPE)
    at, parallel, spec = plan.parallelism, config.parallelism, plan.model.spec
    assert isinstance(config, torchtitan.Trainer.Config)
    assert parallel.pipeline_parallel_degree == at.pp
    assert parallel.expert_parallel_degree == at.ep
    assert len(config.model_spec.model.layers) == spec.num_hidden_layers
    assert [layer.moe is not None for layer in config.model_spec.model.layers if hasattr(layer, "moe")] in (
        [],
        [kind.mlp == "moe" for kind in spec.layers],
    )
    if at.pp > 1:
        assert parallel.module_fqns_per_model_part == stage_modules(plan)


def test_stages_of_our_own_recipe_come_back(planned: Planned) -> None:
    counts = (1, 5, 4, 4, 4, 5, 5, 4)
    plan = planned("llama-3.1-8b", 64, runtime="torchtitan", tp=2, pp=4, vpp=2, layers_per_stage=counts)
    layout = layout_of(read_configuration(bundle_of(plan, ["torchtitan"]).files[0].text))
    assert (layout["vpp"], layout["layers_per_stage"]) == (2, list(counts))


def test_what_a_recipe_compiles(planned: Planned) -> None:
    features = {}
    for schedule in ("1f1b", "zb-h1"):
        plan = planned("llama-3.1-8b", 64, runtime="torchtitan", pp=4, num_microbatches=8, schedule=schedule)
        features[schedule] = read_configuration(bundle_of(plan, ["torchtitan"]).files[0].text).run["features"]
    today = {
        "async_tp": False,
        "memory_policy": "eager",
        "deterministic": False,
        "cross_entropy_fusion": True,
        "flex_attention": True,
    }
    assert features["1f1b"] == {"compile": True, **today}
    assert features["zb-h1"] == {"compile": False, **today}


def test_layers_recomputed_by_name_are_counted(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 64, runtime="torchtitan", pp=4, recompute="full", recompute_num_layers=3)
    text = bundle_of(plan, ["torchtitan"]).files[0].text
    assert len(layout_of(read_configuration(text))["recompute_layers"]) == 12
    assert "RECOMPUTED = {i for layers in (range(0, 3)" in text
    fewer = text.replace("RECOMPUTED = {i for layers in (range(0, 3)", "RECOMPUTED = {i for layers in (range(0, 1)")
    assert layout_of(read_configuration(fewer))["recompute_layers"] == [0, 8, 9, 10, 16, 17, 18, 24, 25, 26]


TOML = TEXTS["torchtitan toml"]


def test_torchtitan_toml() -> None:
    imported = read_configuration(TOML)
    assert imported.source == "torchtitan"
    assert imported.run["model"] == "llama-3.1-70b"
    assert imported.run["num_gpus"] == 256
    assert imported.complete(hardware="h100")["global_batch_size"] == 8 * 32
    assert layout_of(imported)["fsdp"] == 16
    assert layout_of(imported)["recompute"] == "full"
    assert imported.unknown == {"parallelism.surprising_degree": "3"}
    assert "job.dump_folder" in imported.ignored


def test_torchtitan_overrides() -> None:
    imported = read_configuration(TABLES["torchtitan_overrides"])
    layout = layout_of(imported)
    assert imported.run["model"] == "llama-3.1-405b"
    assert imported.run["num_gpus"] == 64
    assert (layout["pp"], layout["tp"], layout["vpp"], layout["schedule"]) == (8, 8, 2, "zb-v")
    assert layout["sequence_parallel"] is False
    assert (layout["micro_batch_size"], imported.run["global_batch_size"]) == (2, 256)


def test_a_recipe_with_values_that_only_a_run_knows() -> None:
    imported = read_configuration(TABLES["a_recipe_with_values_that_only_a_run_knows"])
    assert layout_of(imported)["tp"] == 4
    assert imported.run["model"] == "llama-3.1-8b"
    assert imported.run["seq_length"] == 8192
    assert imported.unknown == {"parallelism.expert_parallel_degree": "pick"}


@pytest.mark.parametrize(("options", "noun"), TABLES["what_torchtitan_refuses_is_told"])
def test_what_torchtitan_refuses_is_told(options: str, noun: str) -> None:
    """A launch that names its TOML says the model by its path alone, where the file is not beside it."""
    text = (
        'CONFIG_FILE="./torchtitan/models/llama3/train_configs/llama3_70b.toml" ./run_train.sh '
        "--parallelism.pipeline_parallel_degree 4 --parallelism.pipeline_parallel_schedule Interleaved1F1B "
    )
    assert read_configuration(text).refused == []
    found = read_configuration(text + options)
    assert found.run["model"] == "llama-3.1-70b"
    assert [noun in reason for reason in found.refused] == [True]


REGISTRY = TEXTS["torchtitan models"]


def test_a_model_of_a_trees_own_registry_is_followed(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text(REGISTRY)
    recipe = tmp_path / "config_registry.py"
    recipe.write_text(
        "from . import model_registry\ndef mine_small():\n    return Trainer.Config(model_spec=model_registry('small'),"
        " training=TrainingConfig(seq_len=2048), parallelism=ParallelismConfig(tensor_parallel_degree=2))\n"
    )
    model = ModelSpec.model_validate(read(recipe).complete(num_gpus=8, hardware="h100")["model"])
    assert (model.num_hidden_layers, model.hidden_size, model.head_dim, model.num_key_value_heads) == (6, 256, 16, 4)
    assert (model.attention_bias, model.sliding_window, model.layer_types) == ("qkv", 128, ("sliding", "full") * 3)
    assert model.moe is not None
    assert (
        model.moe.num_experts_per_tok, model.moe.moe_intermediate_size, model.moe.first_k_dense_replace,
    ) == (2, 96, 2)  # fmt: skip
    (tmp_path / "__init__.py").write_text(REGISTRY.replace("Attention.Config(", "Attention.Config(\n o_gate=1,"))
    assert read(recipe).run["model"] is None


GRAPHS = TABLES["graphs"]


@pytest.mark.parametrize(("recipe", "more", "expected"), TABLES["a_step_is_captured_unasked"])
def test_a_step_is_captured_unasked(recipe: str, more: str, expected: list[object]) -> None:
    run = read_configuration(GRAPHS.replace("{more}", more), "torchtitan", recipe=recipe).run
    assert [run["features"].get(name) for name in ("memory_policy", "cuda_graph", "compile")] == expected
    assert run["parallelism"]["recompute"] == "selective"
