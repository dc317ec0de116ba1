"""Each rule judges the shape that the trainer judged: measured verdicts, one broken and one legal shape per rule.

Rules of recipes: each refuses the recipe that it is about, and takes the one next to it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tables import beside

from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.expressions import names_in
from planner.specs.hardware import HardwareSpec
from planner.specs.model import ModelSpec
from planner.specs.model_parts import MoESpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import TrainingSpec
from planner.trainers.load import load_runtime
from planner.trainers.rules.facts import FACTS, TORCH_CLASSES
from planner.trainers.rules.recipe import Setting, broken_recipe_rules, recipe_rules, takes_shapes
from planner.trainers.rules.rule_rows import SIZES, Rule, first_broken, rule_table, rules_of
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import switched

TABLES = beside(__file__)

MEGATRON_RULES = rules_of("megatron")
MEGATRON_CP_RULES = {
    kind: rules_of("megatron_cp", runtime=RuntimeSpec(name="mine", cp_comm_type=kind))
    for kind in ("p2p", "all_gather", "a2a")
}
TORCHTITAN_RULES, TORCH_EAGER_RULES, AUTOMODEL_RULES = (
    rules_of(f"layout {name}") for name in ("torchtitan", "torch-eager", "automodel")
)
TORCH_SCHEDULE_RULES = {
    name.removeprefix("torch:"): rules_of(name) for name in rule_table()["sets"] if name.startswith("torch:")
}

LLAMA, DEEPSEEK = (ModelSpec.model_validate(TABLES["models"][name]) for name in ("llama", "deepseek"))
TRAINING = TrainingSpec(seq_length=8192, global_batch_size=2048)
DENSE = Shape(
    tp=8, pp=16, vpp=1, dp=16, num_microbatches=128, seq_length=8192, sequence_parallel=1, shard_size=16, etp=8
)
SPARSE = Shape(
    tp=2, pp=8, vpp=4, dp=64, ep=64, num_microbatches=16, seq_length=4096, sequence_parallel=1, shard_size=64
)


def broken(rules: Sequence[Rule], model: ModelSpec, shape: Shape) -> str | None:
    rule = first_broken(rules, model, TRAINING, shape)
    return rule.reason if rule else None


def changed(model: ModelSpec, **fields: object) -> ModelSpec:
    return ModelSpec.model_validate({**model.model_dump(), **fields})


def model_of(name: str, fields: dict[str, Any]) -> ModelSpec:
    """One of the two models above or of those that ship, with fields changed, in its experts too."""
    base = {"llama": LLAMA, "deepseek": DEEPSEEK}.get(name) or load_model(name)
    experts = {"moe": {**base.moe.model_dump(), **fields["moe"]}} if base.moe and "moe" in fields else {}
    return changed(base, **{**fields, **experts})


@pytest.mark.parametrize(("reason", "name", "changes", "fields", "words"), TABLES["megatron_refuses"])
def test_megatron_refuses(reason: str, name: str, changes: dict[str, Any], fields: dict[str, int], words: str) -> None:
    model = model_of(name, changes)
    shape = replace(DENSE if model.moe is None else SPARSE, **fields)
    rules = [rule for rule in MEGATRON_RULES if rule.reason == reason]
    rule = first_broken(rules, model, TRAINING, shape)
    assert rule is not None
    assert words in rule.message(model, TRAINING, shape)


@pytest.mark.parametrize(("positions", "reason"), [(4096, "seq_length_beyond_positions"), (8192, None)])
def test_learned_positions_bound_the_sequence_under_every_trainer(positions: int, reason: str | None) -> None:
    model = changed(LLAMA, position_embedding="learned", max_position_embeddings=positions)
    assert broken(rules_of("layer_kinds"), model, DENSE) == reason


def test_every_megatron_rule_has_a_case() -> None:
    assert {rule.reason for rule in MEGATRON_RULES} == {case[0] for case in TABLES["megatron_refuses"]}


@pytest.mark.parametrize(("name", "fields"), TABLES["megatron_accepts"])
def test_megatron_accepts(name: str, fields: dict[str, int]) -> None:
    model, shape = (LLAMA, DENSE) if name == "llama" else (DEEPSEEK, SPARSE)
    assert broken(MEGATRON_RULES, model, replace(shape, **fields)) is None


@pytest.mark.parametrize(("kind", "changes", "cp", "reason"), TABLES["context_parallel_kinds"])
def test_context_parallel_kinds(kind: str, changes: dict[str, Any], cp: int, reason: str | None) -> None:
    assert broken(MEGATRON_CP_RULES[kind], changed(LLAMA, **changes), replace(DENSE, cp=cp)) == reason


RULES_IN_TORCH = {"torchtitan": TORCHTITAN_RULES, "torch-eager": TORCH_EAGER_RULES, "automodel": AUTOMODEL_RULES}


@pytest.mark.parametrize(("trainer", "reason", "name", "changes", "fields"), TABLES["trainers_in_torch"])
def test_trainers_in_torch(
    trainer: str, reason: str | None, name: str, changes: dict[str, Any], fields: dict[str, int]
) -> None:
    model = model_of(name, changes)
    shape = DENSE if model.moe is None else SPARSE
    if trainer == "torch-eager":
        shape = replace(shape, **fields)
        shape = replace(shape, shard_size=fields.get("shard_size", shape.dp * shape.cp))
    else:
        shape = replace(shape, **{"zero_stage": 3, **fields})
    assert broken(RULES_IN_TORCH[trainer], model, shape) == reason


@pytest.mark.parametrize(("schedule", "reason", "pp", "vpp", "num_microbatches"), TABLES["torch_schedules"])
def test_torch_schedules(schedule: str, reason: str | None, pp: int, vpp: int, num_microbatches: int) -> None:
    shape = replace(DENSE, pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    assert broken(TORCH_SCHEDULE_RULES[schedule], LLAMA, shape) == reason


def test_torch_knows_the_schedules_we_name() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch is not installed")
    for name, torch_name in TORCH_CLASSES.items():
        assert name in TORCH_SCHEDULE_RULES
        assert schedules.get_schedule_class(torch_name)


@pytest.mark.parametrize(
    "rules",
    [
        MEGATRON_RULES, TORCHTITAN_RULES, TORCH_EAGER_RULES, AUTOMODEL_RULES, *MEGATRON_CP_RULES.values(),
        *TORCH_SCHEDULE_RULES.values(),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK])
def test_arrays_give_what_scalars_give(rules: tuple[Rule, ...], model: ModelSpec) -> None:
    rng = np.random.default_rng(0)
    axes = {
        name: rng.choice([1, 2, 3, 4, 8, 64], 200)
        for name in ("tp", "cp", "ep", "etp", "pp", "vpp", "dp", "num_microbatches", "seq_length", "shard_size")
    }
    axes["sequence_parallel"] = rng.integers(0, 2, 200)
    together = Shape(**axes)
    for rule in rules:
        whole = np.broadcast_to(rule.holds(model, TRAINING, together), 200)
        for i in range(200):
            shape = Shape(**{name: int(values[i]) for name, values in axes.items()})
            assert bool(rule.holds(model, TRAINING, shape)) == whole[i]
            assert whole[i] or rule.message(model, TRAINING, shape)


OWNERS: dict[str, Any] = {
    "model": ModelSpec, "moe": MoESpec, "training": TrainingSpec, "runtime": RuntimeSpec, "cluster": ClusterSpec,
    "hardware": HardwareSpec,
}  # fmt: skip


def test_expressions_name_fields_that_exist() -> None:
    table = rule_table()
    rows = [
        row for rows in table["sets"].values() for row in rows if isinstance(row, dict) and "set" not in row
    ] + table["recipes"]
    keys = ("unless", "holds", "refuses", "stretched", "where")
    texts = [row[key] for row in rows for key in keys if key in row] + [*table["effects"].values()]
    texts += [row[key].rpartition(" = ")[2] for row in rows for key in ("multiple", "of") if key in row]
    texts += [f'f"""{row["says"]}"""' for row in rows if "says" in row and "switch" not in row]
    for text in texts:
        known = {*SIZES, *FACTS, *OWNERS, "value", "recompute", "modules", "switches"}
        assert names_in(text) <= known, text
        for node in ast.walk(ast.parse(text, mode="eval")):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = OWNERS[node.value.id]
                assert node.attr in owner.model_fields or hasattr(owner, node.attr), text


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
