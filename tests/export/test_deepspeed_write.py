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
from planner.export.refusal import Inexpressible

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
