"""Rules of recipes: each refuses the recipe that it is about, and takes the one next to it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import TrainingSpec
from planner.trainers.load import load_runtime
from planner.trainers.rules.recipe import Setting, broken_recipe_rules, recipe_rules, takes_shapes
from planner.trainers.stated import switched


@dataclass(frozen=True)
class Case:
    """A recipe that a rule refuses, and the change after which it does not."""

    switch: str
    says: str
    switches: dict[str, Any]
    mended: dict[str, Any]
    """Switches, or other fields of this class, that mend it."""
    model: str = "deepseek-v3"
    hardware: str = "h100"
    dtype: str = "bf16"
    trainer: str = "megatron"
    layout: dict[str, Any] = field(default_factory=dict)

    def setting(self) -> Setting:
        runtime = switched(load_runtime(self.trainer), {"dispatcher": "deepep"} | self.switches)
        if self.trainer != "megatron" or load_model(self.model).moe is None:
            runtime = switched(load_runtime(self.trainer), self.switches)
        sizes = {"ep": 8, "pp": 4, "vpp": 2, "dp": 8, "zero_stage": 1, "shard_size": 8, "num_microbatches": 8}
        known = {name: value for name, value in self.layout.items() if name not in ("recompute", "modules")}
        return Setting(
            load_model(self.model),
            ClusterSpec(hardware=load_hardware(self.hardware), num_gpus=256),
            TrainingSpec(seq_length=4096, global_batch_size=256, dtype=self.dtype),  # type: ignore[arg-type]
            runtime,
            Shape.of(**(sizes | known)),
            self.layout.get("recompute", "none"),
            self.layout.get("modules", ()),
        )

    def mend(self) -> Case:
        fields = {
            name: value for name, value in self.mended.items() if name in ("model", "hardware", "dtype", "layout")
        }
        switches = {name: value for name, value in self.mended.items() if name not in fields}
        return replace(self, switches=self.switches | switches, **fields)


OVERLAP: dict[str, Any] = {"ep_overlap": True}
ROUTER: dict[str, Any] = {"cuda_graph": "moe_router"}
WHOLE: dict[str, Any] = {"cuda_graph": "full_iteration", "nan_checks": False}
SAME_BITS: dict[str, Any] = {"deterministic": True}
SHARED: dict[str, Any] = {"shared_expert_overlap": True}
PLAIN: dict[str, Any] = {"ep_overlap": False}
TURBO: dict[str, Any] = {"dispatcher": "deepep", "grouped_gemm": "turbo"}
CASES = [
    Case("ep_overlap", "needs experts", OVERLAP, PLAIN, model="70b"),
    Case("ep_overlap", "does not go with shared_expert_overlap", OVERLAP | SHARED, {"shared_expert_overlap": False}),
    Case("ep_overlap", "needs a dispatcher other than allgather", OVERLAP | {"dispatcher": "allgather"},
         {"dispatcher": "alltoall"}),
    Case("ep_overlap", "delayed does not go with graphs of an attention with biases",
         {"ep_overlap": "delayed", "cuda_graph": "attn+moe_router"}, OVERLAP, model="gpt-oss-120b"),
    Case("ep_overlap", "needs ep above 1", OVERLAP, {"layout": {"ep": 8}}, layout={"ep": 1}),
    Case("ep_overlap", "needs pp above 1 beside multi-token prediction", OVERLAP, {"layout": {"pp": 4}},
         trainer="megatron@0.16", layout={"pp": 1, "vpp": 1}),
    Case("ep_overlap", "needs interleaving", OVERLAP, {"layout": {"vpp": 1, "pp": 1}}, layout={"vpp": 1}),
    Case("ep_overlap", "does not go with recomputing whole layers or experts", OVERLAP,
         {"layout": {"recompute": "selective", "modules": ("moe_act",)}}, layout={"recompute": "full"}),
    Case("ep_overlap", "does not go with recomputing whole layers or experts", OVERLAP, PLAIN,
         layout={"recompute": "selective", "modules": ("moe",)}),
    Case("cuda_graph", "of the router needs experts", ROUTER, {"cuda_graph": "none"}, model="70b"),
    Case("cuda_graph", "of a layer's modules does not go with recomputing whole layers or experts", ROUTER,
         {"layout": {}}, layout={"recompute": "full"}),
    Case("cuda_graph", "of a layer's modules does not go with sharded weights", ROUTER, {"cuda_graph": "none"},
         layout={"zero_stage": 3, "pp": 1, "vpp": 1}),
    Case("cuda_graph", "full_iteration needs nan_checks=false", {"cuda_graph": "full_iteration"},
         {"nan_checks": False}, model="70b"),
    Case("cuda_graph", "full_iteration of a mixture needs fused_experts=true and dispatcher=hybridep", WHOLE,
         {"fused_experts": True, "dispatcher": "hybridep"}, hardware="b200", dtype="mxfp8"),
    Case("fused_experts", "needs experts, in mxfp8 or nvfp4 on Blackwell", {"fused_experts": True},
         {"hardware": "b200", "dtype": "mxfp8"}),
    Case("dispatcher", "needs experts", {"dispatcher": "deepep"}, {"model": "deepseek-v3"}, model="70b"),
    Case("dispatcher", "deepep knows no NVLink between nodes", {"dispatcher": "deepep"}, {"dispatcher": "hybridep"},
         hardware="gb200"),
    Case("dispatcher", "deepep and hybridep need", {"dispatcher": "hybridep"}, {"dispatcher": "alltoall"},
         hardware="mi300x"),
    Case("dispatcher", "deepep and hybridep need", {"dispatcher": "deepep"}, {"dispatcher": "alltoall"},
         hardware="mi355x"),
    Case("cuda_graph", "is not of AMD's GPUs", ROUTER, {"cuda_graph": "none"}, hardware="mi355x"),
    Case("tp_comm_overlap", "is not of AMD's GPUs", {"tp_comm_overlap": True}, {"hardware": "h100"}, model="70b",
         hardware="mi300x"),
    Case("tp_comm_overlap", "needs GPUs that reach each other's memory", {"tp_comm_overlap": True},
         {"hardware": "rtx-6000-ada"}, model="70b", hardware="4090"),
    Case("sync_free_moe", "2 needs dispatcher=deepep", {"sync_free_moe": 2}, TURBO, hardware="mi355x",
         trainer="primus-megatron"),
    Case("sync_free_moe", "needs experts", {"sync_free_moe": 1}, {"sync_free_moe": 0}, model="70b",
         hardware="mi355x", trainer="primus-megatron"),
    Case("shared_expert_overlap", "does not go with Primus", SHARED | {"dispatcher": "deepep"},
         {"shared_expert_overlap": False}, hardware="mi355x", trainer="primus-megatron"),
    Case("token_drop", "needs dispatcher=alltoall", {"token_drop": True, "dispatcher": "deepep"},
         {"token_drop": False, "dispatcher": "deepep"}),
    Case("shared_expert_overlap", "needs shared experts", SHARED, {"model": "deepseek-v3"}, model="qwen3-30b"),
    Case("shared_expert_overlap", "does not go with recomputing shared experts", SHARED,
         {"layout": {"recompute": "selective", "modules": ("moe_act",)}},
         layout={"recompute": "selective", "modules": ("shared_experts",)}),
    Case("shared_expert_overlap", "needs ep above 1", SHARED, {"layout": {"ep": 2}}, layout={"ep": 1}),
    Case("shared_expert_overlap", "needs dispatcher=alltoall before", SHARED | {"dispatcher": "deepep"},
         {"dispatcher": "alltoall"}, trainer="megatron@0.17"),
    Case("cross_entropy_fusion", "must be false beside deterministic", SAME_BITS | {"cross_entropy_fusion": "native"},
         {"cross_entropy_fusion": False}, model="70b"),
    Case("tp_comm_overlap", "must be false beside deterministic", SAME_BITS | {"tp_comm_overlap": True},
         {"tp_comm_overlap": False}, model="70b"),
    Case("deterministic", "takes no attention sinks", SAME_BITS | {"cross_entropy_fusion": False},
         {"deterministic": False}, model="gpt-oss-120b"),
    Case("p2p_overlap", "must be true where pp is 2", {"p2p_overlap": False}, {"p2p_overlap": True}, layout={"pp": 2}),
    Case("async_tp", "needs compile=true", {"async_tp": True, "compile": False}, {"compile": True}, model="70b",
         trainer="torchtitan", layout={"ep": 1}),
    Case("overlap_param_gather", "needs overlap_grad_reduce=true", {"overlap_grad_reduce": False},
         {"overlap_param_gather": False}),
    Case("optimizer_offload", "needs a sharded optimizer", {"optimizer_offload": 0.5},
         {"layout": {"zero_stage": 1}}, layout={"zero_stage": 0}),
    Case("optimizer_offload", "of a part", {"optimizer_offload": 0.5}, {"layout": {"ep": 1, "pp": 1, "zero_stage": 3}},
         model="llama-3.1-8b", trainer="deepspeed", layout={"ep": 1, "pp": 1}),
    Case("optimizer_offload", "does not go with weights of 8 bits", {"optimizer_offload": 0.5}, {"dtype": "bf16"},
         dtype="fp8"),
    Case("optimizer_offload", "frees nothing where GPU and host have one memory", {"optimizer_offload": 0.5},
         {"hardware": "gh200"}, hardware="spark"),
    Case("activation_offload", "frees nothing where GPU and host have one memory",
         {"activation_offload": "core_attn+attn_proj"}, {"hardware": "gh200"}, hardware="spark"),
    Case("optimizer", "must be adamw beside optimizer_offload", {"optimizer": "muon", "optimizer_offload": 0.5},
         {"optimizer_offload": 0.0}),
    Case("optimizer", "must be adamw beside bf16_moments=true", {"optimizer": "muon", "bf16_moments": True},
         {"bf16_moments": False}),
    Case("optimizer", "muon takes no fp16", {"optimizer": "muon"}, {"dtype": "bf16"}, dtype="fp16"),
    Case("optimizer", "muon does not go with sharded", {"optimizer": "muon"},
         {"layout": {"ep": 1, "pp": 1, "zero_stage": 1}}, layout={"ep": 1, "pp": 1, "zero_stage": 3}),
    Case("optimizer", "adafactor needs whole matrices", {"optimizer": "adafactor"},
         {"layout": {"ep": 1, "pp": 1, "zero_stage": 0}}, model="8b", trainer="hf",
         layout={"ep": 1, "pp": 1, "zero_stage": 3}),
    Case("sharding", "ddp is ZeRO-0", {"sharding": "ddp"}, {"sharding": "deepspeed"}, model="llama-3.1-8b",
         trainer="hf", layout={"ep": 1, "pp": 1, "vpp": 1}),
    Case("sharding", "is ddp on one GPU", {"sharding": "deepspeed"}, {"optimizer_offload": 1.0}, model="llama-3.1-8b",
         trainer="hf", layout={"ep": 1, "pp": 1, "vpp": 1, "dp": 1, "shard_size": 1}),
    Case("optimizer_offload", "needs sharding=deepspeed", {"optimizer_offload": 1.0, "sharding": "fsdp"},
         {"sharding": "deepspeed"}, model="llama-3.1-8b", trainer="hf",
         layout={"ep": 1, "pp": 1, "vpp": 1, "zero_stage": 2}),
    Case("activation_offload", "does not go with recomputing whole layers",
         {"activation_offload": "core_attn+attn_proj"}, {"layout": {}}, layout={"recompute": "full"}),
    Case("activation_offload", "beside CUDA graphs needs Megatron core 0.18",
         {"activation_offload": "core_attn+attn_proj", "cuda_graph": "moe_router"}, {"cuda_graph": "none"},
         trainer="megatron@0.17"),
    Case("activation_offload", "of moe_act does not go with full_iteration", WHOLE | {"activation_offload": "moe_act"},
         {"activation_offload": "core_attn+attn_proj"}),
    Case("activation_offload", "moe_act needs experts", {"activation_offload": "moe_act"},
         {"activation_offload": "none"}, model="70b"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.switch} {case.says}"[:60])
def test_a_rule_refuses_what_it_is_about_and_nothing_beside_it(case: Case) -> None:
    broken = [(rule.switch, rule.says) for rule in broken_recipe_rules(case.setting())]
    assert any(switch == case.switch and says.startswith(case.says) for switch, says in broken), broken
    mended = [(rule.switch, rule.says) for rule in broken_recipe_rules(case.mend().setting())]
    assert not any(switch == case.switch and says.startswith(case.says) for switch, says in mended), mended


def test_every_rule_has_a_case() -> None:
    covered = {(case.switch, case.says) for case in CASES}
    missing = [
        (rule.switch, rule.says)
        for rule in recipe_rules()
        if not any(rule.switch == switch and rule.says.startswith(says) for switch, says in covered)
    ]
    assert missing in ([], [("ep_overlap", "takes one multi-token-prediction block at most")])


def test_several_blocks_of_multi_token_prediction_take_no_overlap() -> None:
    case = Case("ep_overlap", "", OVERLAP, {})
    several = load_model("deepseek-v3").model_copy(update={"num_nextn_predict_layers": 2})
    assert any("multi-token" in rule.says for rule in broken_recipe_rules(replace(case.setting(), model=several)))
    assert not any(broken_recipe_rules(case.setting()))


def test_shapes_in_arrays_are_judged_as_shapes_alone() -> None:
    setting = Case("ep_overlap", "", OVERLAP | {"cuda_graph": "moe_router"}, {}).setting()
    eps, vpps, pps, zeros = (a.ravel() for a in np.meshgrid([1, 8], [1, 2], [1, 4], [1, 3], indexing="ij"))
    shapes = Shape.of(ep=eps, vpp=vpps, pp=pps, zero_stage=zeros, dp=np.full(16, 8), shard_size=np.full(16, 8))
    together = takes_shapes(replace(setting, shape=shapes))
    alone = [bool(takes_shapes(replace(setting, shape=shapes.take(np.array(row))))) for row in range(16)]
    assert together.tolist() == alone
    assert 0 < sum(alone) < 16


def test_what_a_recipe_cannot_recompute_is_what_its_rules_refuse() -> None:
    """The search reads the runtime's properties where the rules judge a finished layout."""
    for switches in (OVERLAP, ROUTER, SHARED, {}):
        setting = Case("ep_overlap", "", switches, {}).setting()
        runtime = setting.runtime
        full = replace(setting, recompute="full")
        assert any(broken_recipe_rules(full)) != runtime.recomputes_layers
        for module in runtime.selective_recompute_modules:
            alone = replace(setting, recompute="selective", modules=(module,))
            assert any(broken_recipe_rules(alone)) != (module in runtime.recomputable_modules)


@pytest.mark.parametrize(("version", "is_legal"), [("0.15", True), ("0.16", False), ("0.17", False), ("0.18", True)])
def test_two_versions_overlap_no_exchanges_beside_prediction_without_a_pipeline(version: str, is_legal: bool) -> None:
    case = Case("ep_overlap", "", OVERLAP, {}, trainer=f"megatron@{version}", layout={"pp": 1, "vpp": 1})
    broken = [rule.says for rule in broken_recipe_rules(case.setting()) if "multi-token" in rule.says]
    assert (not broken) == is_legal
