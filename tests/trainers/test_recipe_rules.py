"""Rules of recipes: each refuses the recipe that it is about, and takes the one next to it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

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
            tuple(self.layout.get("modules", ())),
        )

    def mend(self) -> Case:
        fields = {
            name: value for name, value in self.mended.items() if name in ("model", "hardware", "dtype", "layout")
        }
        switches = {name: value for name, value in self.mended.items() if name not in fields}
        return replace(self, switches=self.switches | switches, **fields)


OVERLAP: dict[str, Any] = {"ep_overlap": True}
ROUTER: dict[str, Any] = {"cuda_graph": "moe_router"}
SHARED: dict[str, Any] = {"shared_expert_overlap": True}
CASES = [Case(**case) for case in yaml.safe_load(Path(__file__).with_name("recipe_cases.yaml").read_text())]


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
