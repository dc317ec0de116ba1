"""DeepSpeed's configuration adds up, and its pipeline is cut where the plan cuts."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from planner.answer import Plan
from planner.export.export import bundle_of
from planner.export.huggingface.deepspeed_files import CONFIG_FILE, PIPELINE_FILE, TRAINING_FILE, export_deepspeed
from planner.export.import_run import read_configuration
from planner.export.refusal import Inexpressible
from planner.layout.given import given_layout
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.load import load_runtime
from planner.trainers.rules.recipe import rules_for

Planned = Callable[..., Plan]


def dense(planned: Planned, gpus: int = 64, **options: Any) -> Plan:
    return planned("llama-3.1-8b", gpus, **{"sequence_parallel": False, **options})


def files_of(plan: Plan) -> dict[str, str]:
    return {file.name: file.text for file in export_deepspeed(plan).files}


@pytest.mark.parametrize(
    "options", [{"pp": 4}, {"pp": 4, "tp": 2, "micro_batch_size": 2}, {"zero_stage": 3}, {"dtype": "fp16"}]
)
def test_batch_sizes_multiply(planned: Planned, options: dict[str, Any]) -> None:
    plan = dense(planned, **options)
    config = json.loads(files_of(plan)[CONFIG_FILE])
    per_step = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == per_step * plan.parallelism.dp == plan.training.global_batch_size
    assert config["zero_optimization"]["stage"] == plan.parallelism.zero_stage
    assert config[plan.training.dtype] == {"enabled": True}


@pytest.mark.parametrize(("model", "scheduler"), [("llama-2-7b", "WarmupCosineLR"), ("opt-175b", "WarmupDecayLR")])
def test_the_rate_follows_the_published_schedule(planned: Planned, model: str, scheduler: str) -> None:
    plan = planned(model, 512, tp=8, pp=8, tokens=3e11, runtime="deepspeed", sequence_parallel=False)
    found = json.loads(files_of(plan)[CONFIG_FILE])["scheduler"]
    assert found["type"] == scheduler
    assert found["params"]["warmup_type"] == "linear"
    assert found["params"]["warmup_num_steps"] == 2000
    assert found["params"].get("cos_min_ratio", 0.1) == 0.1


class PipelineModule:
    """DeepSpeed's, as far as partitioning goes."""

    def __init__(self, layers: list[Any], topology: Any, partition_method: str, **options: Any) -> None:
        self._layer_specs, self._topo, self.options = layers, topology, options
        self.global_rank = topology.rank
        self._partition_layers(partition_method)

    def _partition_layers(self, method: str) -> None:
        raise NotImplementedError(method)

    def _set_bounds(self, start: int, stop: int) -> None:
        self.held = self._layer_specs[start:stop]


class Topology:
    """Coordinates of the rank under test."""

    rank = 0

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        self.sizes = (num_pp, num_mp, num_dp)

    def get_coord(self, rank: int) -> Any:
        return types.SimpleNamespace(pipe=rank)


@pytest.fixture
def pipeline_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Plan], dict[str, Any]]:
    """The exported module, with stand-ins for what it takes from DeepSpeed."""
    modules: dict[str, dict[str, Any]] = {
        "deepspeed": {}, "deepspeed.pipe": {"PipelineModule": PipelineModule}, "deepspeed.runtime": {},
        "deepspeed.runtime.pipe": {},
        "deepspeed.runtime.pipe.topology": {"PipeModelDataParallelTopology": Topology},
    }  # fmt: skip
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)

    def load(plan: Plan) -> dict[str, Any]:
        namespace: dict[str, Any] = {}
        exec(files_of(plan)[PIPELINE_FILE], namespace)
        return namespace

    return load


@pytest.mark.parametrize("counts", [(8, 8, 8, 8), (5, 10, 9, 8), (0, 11, 11, 10), (11, 11, 10, 0)])
def test_every_stage_holds_the_planned_layers(
    planned: Planned, pipeline_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    plan = dense(planned, pp=4, tp=2, layers_per_stage=counts)
    module = pipeline_of(plan)
    layers = ["embedding", *range(32), "norm", "head"]
    held = []
    for rank in range(4):
        monkeypatch.setattr(Topology, "rank", rank)
        stage = module["pipeline"](layers)
        assert stage._topo.sizes == (4, 2, 8)
        held.append(stage.held)
    assert [item for stage in held for item in stage] == layers
    assert [sum(isinstance(item, int) for item in stage) for stage in held] == list(counts)
    with pytest.raises(ValueError, match="the plan cuts 35"):
        module["pipeline"](layers[1:])


def test_recompute_leaves_the_embedding_alone(planned: Planned, pipeline_of: Callable[..., Any]) -> None:
    class Block:
        pass

    layers = ["embedding", *(Block() for _ in range(32)), "norm", "head"]
    options = pipeline_of(dense(planned, pp=4, recompute="full"))["pipeline"](layers).options
    assert options == {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Block"]}
    assert pipeline_of(dense(planned, pp=4))["pipeline"](layers).options == {"activation_checkpoint_interval": 0}


def test_without_a_pipeline_a_program_trains(planned: Planned) -> None:
    files = files_of(dense(planned, tp=2))
    assert list(files) == [CONFIG_FILE, TRAINING_FILE]
    compile(files[TRAINING_FILE], TRAINING_FILE, "exec")
    assert "deepspeed.tp_model_init(network, 2, torch.bfloat16)" in files[TRAINING_FILE]
    assert 'del CONFIG["train_batch_size"]' in files[TRAINING_FILE]
    recomputed = files_of(dense(planned, recompute="full", dtype="fp16"))[TRAINING_FILE]
    assert "gradient_checkpointing_enable()" in recomputed
    assert "dtype=torch.float16" in recomputed
    assert "tp_model_init" not in recomputed
    assert "del CONFIG" not in recomputed
    assert json.loads(files[CONFIG_FILE])["tensor_parallel"] == {"autotp_size": 2}


def test_without_zero_nothing_sums_in_fp32(planned: Planned) -> None:
    """DeepSpeed 0.19.8 ends with `unsupported mix of model_dtype and grad_accum_dtype`."""
    with pytest.raises(Inexpressible, match="--zero-stage 1 sums them in fp32"):
        bundle_of(planned("llama-3.2-1b", 2, runtime="deepspeed", zero_stage=0), "deepspeed")
    alone = bundle_of(planned("llama-3.2-1b", 1, runtime="deepspeed", zero_stage=0), "deepspeed")
    assert json.loads(alone.files[0].text)["zero_optimization"]["stage"] == 1, "of one rank, which shards nothing"


@pytest.mark.parametrize(
    ("compiles", "stage", "switch", "refused"),
    [
        (True, 1, "autosp", ()),
        (True, 3, "autosp", ("autosp_beside_other_splits",)),
        (False, 3, True, ()),
    ],
)
def test_sequences_are_split_by_the_engine_or_by_its_compiler(
    compiles: bool, stage: int, switch: object, refused: tuple[str, ...]
) -> None:
    config: dict[str, object] = {"zero_optimization": {"stage": stage}, "sequence_parallel_size": 4}
    config |= {"compile": {"deepcompile": True, "passes": ["autosp"]}} if compiles else {}
    imported = read_configuration(json.dumps(config), "deepspeed")
    run = imported.run
    assert (run["parallelism"]["cp"], run["features"]["ulysses"]) == (4, switch)
    assert "compile" not in imported.unknown
    runtime = load_runtime("deepspeed").with_features(run["features"])[0]
    shape = Shape.of(cp=4, dp=2, zero_stage=stage, seq_length=32768)
    model, training = load_model("llama-3.1-8b"), TrainingSpec(seq_length=32768, global_batch_size=8)
    broken = [rule.reason for rule in rules_for(runtime) if not rule.holds(model, training, shape)]
    assert tuple(broken) == refused
    pricing = Pricing(
        model=model, training=training, cluster=ClusterSpec(hardware=load_hardware("h100"), num_gpus=8), runtime=runtime
    )
    wanted = Parallelism(cp=4, dp=2, zero_stage=stage, micro_batch_size=4)
    assert given_layout(pricing, wanted).split.base == ("selective" if compiles else "none"), (
        "its compiler repeats unasked"
    )
    layer = pricing.recomputing(runtime.selective_default).table(shape).layers
    plain, again = layer[model.kinds[0], "none"], layer[model.kinds[0], "selective"]
    # heads of queries, keys, values and outputs change places, forward and backward
    assert plain.cp_forward_s > 0
    assert plain.live_bytes - again.live_bytes > (8192 * 2 * 14336 * 2 if compiles else 0)
