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

LLAMA = ModelSpec(
    name="llama", num_hidden_layers=126, hidden_size=16384, intermediate_size=53248, num_attention_heads=128,
    num_key_value_heads=8, vocab_size=128256,
)  # fmt: skip
DEEPSEEK = ModelSpec.model_validate(
    {
        "name": "deepseek", "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
        "num_attention_heads": 128, "vocab_size": 129280, "num_nextn_predict_layers": 1,
        "moe": {
            "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "shared_expert_intermediate_size": 2048, "first_k_dense_replace": 3,
        },
        "mla": {
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    },
)  # fmt: skip
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


PLAIN_DEEPSEEK = changed(DEEPSEEK, num_nextn_predict_layers=0)
"""Without multi-token prediction."""
NARROW_EXPERTS = changed(PLAIN_DEEPSEEK, moe={**PLAIN_DEEPSEEK.moe.model_dump(), "moe_intermediate_size": 1408})
"""FSDP cuts them over no more than 128 ranks: 1408 = 11·128."""
ODD_EXPERTS = changed(PLAIN_DEEPSEEK, moe={**PLAIN_DEEPSEEK.moe.model_dump(), "moe_intermediate_size": 1409})

MEGATRON_CASES = [
    ("heads_not_divisible_by_tp", changed(LLAMA, num_attention_heads=96), {"tp": 64}, "num_attention_heads 96"),
    ("kv_heads_not_divisible_by_tp", changed(LLAMA, num_attention_heads=96, num_key_value_heads=6), {"tp": 4}, "6"),
    ("delta_heads_not_divisible_by_tp_cp", load_model("qwen3-next-80b-a3b"), {"tp": 8, "cp": 4}, "num_key_heads 16"),
    ("scan_groups_not_divisible_by_tp", load_model("nemotron-3-nano"), {"tp": 16}, "mamba.n_groups 8"),
    ("scan_heads_not_divisible_by_tp_cp", load_model("nemotron-3-nano"), {"tp": 2, "cp": 64}, "mamba.num_heads 64"),
    ("scan_groups_not_divisible_by_tp_cp", load_model("nemotron-3-nano"), {"tp": 2, "cp": 6}, "8 and tp·cp 12"),
    ("cp_with_layer_kind", load_model("kimi-linear"), {"cp": 2}, "not of kimi_delta"),
    ("intermediate_size_not_divisible_by_tp", changed(LLAMA, intermediate_size=53244), {}, "53244"),
    (
        "shared_expert_not_divisible_by_tp",
        changed(DEEPSEEK, moe={**DEEPSEEK.moe.model_dump(), "shared_expert_intermediate_size": 2049}),
        {"tp": 2},
        "2049",
    ),
    ("moe_intermediate_size_not_divisible_by_etp", DEEPSEEK, {"etp": 3, "dp": 96}, "moe_intermediate_size 2048"),
    ("mtp_hidden_size_not_divisible_by_tp", changed(DEEPSEEK, hidden_size=7169), {"tp": 2}, "7169"),
    ("experts_not_divisible_by_ep", DEEPSEEK, {"ep": 3}, "num_experts 256"),
    ("experts_not_divisible_by_ep", LLAMA, {"ep": 2}, "the model has none"),
    ("experts_do_not_divide_ranks", DEEPSEEK, {"ep": 256}, "tp·cp·dp 128"),
    ("expert_bias_with_etp", changed(DEEPSEEK, mlp_bias=True), {"etp": 2, "ep": 32}, "etp 1"),
    ("moe_tp_without_sequence_parallel", DEEPSEEK, {"sequence_parallel": 0}, "tp 2"),
    ("seq_length_not_divisible_by_2cp", LLAMA, {"cp": 3}, "2·cp 6"),
    ("seq_length_not_divisible_by_tp_cp", LLAMA, {"seq_length": 8196}, "tp·cp 8"),
    (
        "seq_length_beyond_positions",
        changed(LLAMA, position_embedding="learned", max_position_embeddings=4096),
        {},
        "4096 learned",
    ),
    ("vpp_without_pp", LLAMA, {"vpp": 2, "pp": 1}, "vpp 2"),
    ("interleaving_too_few_microbatches", LLAMA, {"vpp": 2, "num_microbatches": 8}, "below pp 16"),
    ("interleaving_microbatches_no_multiple_of_pp", LLAMA, {"vpp": 2, "num_microbatches": 136}, "num_microbatches 136"),
    ("shard_size_not_dividing_dp_cp", LLAMA, {"shard_size": 6}, "shard_size 6"),
    ("expert_ranks_not_divisible_by_instances", DEEPSEEK, {"shard_size": 16}, "dp·cp / shard_size 4"),  # 2 replicas
    ("rank_order_with_experts", DEEPSEEK, {"dp_outermost": 1}, "is not tp·cp"),
    ("rank_order_with_fsdp", LLAMA, {"dp_outermost": 1, "zero_stage": 3}, "zero_stage 3"),
]


@pytest.mark.parametrize(("reason", "model", "fields", "words"), MEGATRON_CASES)
def test_megatron_refuses(reason: str, model: ModelSpec, fields: dict[str, int], words: str) -> None:
    shape = replace(DENSE if model.moe is None else SPARSE, **fields)
    rules = [rule for rule in MEGATRON_RULES if rule.reason == reason]
    rule = first_broken(rules, model, TRAINING, shape)
    assert rule is not None
    assert words in rule.message(model, TRAINING, shape)


def test_every_megatron_rule_has_a_case() -> None:
    assert {rule.reason for rule in MEGATRON_RULES} == {case[0] for case in MEGATRON_CASES}


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (LLAMA, DENSE),
        (LLAMA, replace(DENSE, vpp=2)),
        (LLAMA, replace(DENSE, tp=16)),  # key-value heads are copied
        (LLAMA, replace(DENSE, num_microbatches=4)),  # 1F1B runs with fewer micro-batches than stages
        (LLAMA, replace(DENSE, sequence_parallel=0, seq_length=8193)),
        (DEEPSEEK, SPARSE),
        (DEEPSEEK, replace(SPARSE, tp=1, sequence_parallel=0)),
        (DEEPSEEK, replace(SPARSE, shard_size=32)),
        (DEEPSEEK, replace(SPARSE, shard_size=16, zero_stage=0)),
    ],
)
def test_megatron_accepts(model: ModelSpec, shape: Shape) -> None:
    assert broken(MEGATRON_RULES, model, shape) is None


@pytest.mark.parametrize(
    ("kind", "model", "cp", "reason"),
    [
        ("a2a", LLAMA, 8, "kv_heads_not_divisible_by_tp_cp"),
        ("a2a", changed(LLAMA, num_attention_heads=8), 2, "heads_not_divisible_by_tp_cp"),
        ("a2a", changed(LLAMA, num_key_value_heads=64), 8, None),
        ("p2p", LLAMA, 8, None),
        ("p2p", changed(LLAMA, sliding_window=128), 8, "sliding_window_with_ring_cp"),
        ("p2p", changed(LLAMA, sliding_window=128), 1, None),
        ("all_gather", changed(LLAMA, sliding_window=128), 8, None),
        ("all_gather", changed(LLAMA, attention_sinks=True), 8, "attention_sinks_with_cp"),
    ],
)
def test_context_parallel_kinds(kind: str, model: ModelSpec, cp: int, reason: str | None) -> None:
    assert broken(MEGATRON_CP_RULES[kind], model, replace(DENSE, cp=cp)) == reason


IN_TORCH: dict[str, list[tuple[str | None, ModelSpec, dict[str, int]]]] = {
    "torchtitan": [
        ("kv_heads_not_divisible_by_tp", LLAMA, {"tp": 16}),
        (None, PLAIN_DEEPSEEK, {"tp": 16, "vpp": 1, "shard_size": 16}),
        ("mtp_with_pp_or_cp", DEEPSEEK, {}),
        ("mtp_with_pp_or_cp", DEEPSEEK, {"pp": 1, "vpp": 1, "cp": 2}),
        (None, DEEPSEEK, {"pp": 1, "vpp": 1}),
        ("tied_embeddings_with_pp", changed(LLAMA, tie_word_embeddings=True), {}),
        ("experts_do_not_divide_ranks", DEEPSEEK, {"shard_size": 16}),
        ("experts_do_not_divide_ranks", PLAIN_DEEPSEEK, {"zero_stage": 0}),  # replicas hold no experts for each other
        (None, PLAIN_DEEPSEEK, {"zero_stage": 0, "ep": 2}),
        ("experts_unevenly_sharded", NARROW_EXPERTS, {"dp": 1024, "shard_size": 1024, "ep": 8}),
        (None, NARROW_EXPERTS, {"dp": 1024, "shard_size": 1024, "ep": 16}),  # 128 ranks an expert
        (None, NARROW_EXPERTS, {"dp": 1024, "shard_size": 64, "ep": 2}),  # whole experts
        ("experts_unevenly_sharded", NARROW_EXPERTS, {"dp": 512, "shard_size": 512, "ep": 1, "etp": 2}),
        ("moe_intermediate_size_not_divisible_by_etp", ODD_EXPERTS, {"ep": 1, "etp": 2}),
        ("etp_not_expressible", DEEPSEEK, {"etp": 2}),
        ("etp_not_expressible", DEEPSEEK, {"ep": 1}),
        ("seq_length_not_divisible_by_tp_2cp", LLAMA, {"cp": 3, "shard_size": 48}),
        ("seq_length_not_divisible_by_tp_2cp", LLAMA, {"seq_length": 8196}),
        ("shard_size_not_dividing_dp_cp", LLAMA, {"shard_size": 6}),
        ("shard_size_no_multiple_of_cp", LLAMA, {"cp": 4, "shard_size": 2}),
        ("too_few_microbatches", LLAMA, {"num_microbatches": 8}),
        ("microbatches_no_multiple_of_rounds", LLAMA, {"vpp": 2, "num_microbatches": 37}),
        (None, LLAMA, {"vpp": 2, "num_microbatches": 8}),
        (None, LLAMA, {}),
        (None, PLAIN_DEEPSEEK, {}),
    ],
    "torch-eager": [
        ("kv_heads_not_divisible_by_tp", LLAMA, {"tp": 16}),
        ("experts_not_divisible_by_ep", DEEPSEEK, {"ep": 3, "dp": 96}),
        ("experts_do_not_divide_ranks", DEEPSEEK, {"dp": 24}),
        (None, DEEPSEEK, {"dp": 16, "cp": 2}),  # 64 ranks a stage, context-parallel ones among them
        ("etp_not_expressible", DEEPSEEK, {"etp": 2}),
        ("moe_tp_without_sequence_parallel", DEEPSEEK, {"sequence_parallel": 0}),
        ("attention_sinks_with_cp", changed(LLAMA, attention_sinks=True), {"cp": 2}),
        (None, changed(LLAMA, attention_sinks=True), {}),
        ("alibi_with_cp", changed(LLAMA, position_embedding="alibi"), {"cp": 2}),
        (None, changed(LLAMA, sliding_window=128), {"cp": 2}),
        ("zero_stage_not_expressible", LLAMA, {"zero_stage": 3}),
        ("shard_size_not_expressible", LLAMA, {"shard_size": 4}),
        (None, LLAMA, {"shard_size": 4, "zero_stage": 0}),
        ("seq_length_not_divisible_by_tp_cp", LLAMA, {"seq_length": 8193}),
        (None, LLAMA, {"seq_length": 8193, "sequence_parallel": 0}),
        (None, LLAMA, {"cp": 4, "seq_length": 8192 + 4 * 8}),  # tp is even: shards make up whole chunks
        ("seq_length_not_divisible_by_tp_cp", LLAMA, {"cp": 4, "seq_length": 8192 + 4 * 4}),
        (None, LLAMA, {"cp": 4, "seq_length": 8192 + 2 * 4, "sequence_parallel": 0}),
        ("seq_length_not_divisible_by_tp_cp", LLAMA, {"cp": 4, "seq_length": 8192 + 4, "sequence_parallel": 0}),
        ("vocab_size_not_divisible_by_tp", changed(LLAMA, vocab_size=128257), {}),
        (None, LLAMA, {"vpp": 2}),
        (None, DEEPSEEK, {}),
    ],
    "automodel": [
        ("kv_heads_not_divisible_by_tp", LLAMA, {"tp": 16}),
        ("tied_embeddings_with_pp", changed(LLAMA, tie_word_embeddings=True), {}),
        ("experts_with_tp", DEEPSEEK, {}),
        (None, DEEPSEEK, {"tp": 1}),
        (None, DEEPSEEK, {"tp": 1, "zero_stage": 1}),  # replicas of whole weights are FSDP's ranks too
        ("experts_do_not_divide_ranks", DEEPSEEK, {"tp": 1, "dp": 24, "shard_size": 24}),
        ("seq_length_not_divisible_by_2cp", LLAMA, {"cp": 3, "shard_size": 48}),
        ("shard_size_not_dividing_dp_cp", LLAMA, {"shard_size": 6}),
        ("too_few_microbatches", LLAMA, {"num_microbatches": 8}),
        ("microbatches_no_multiple_of_rounds", LLAMA, {"vpp": 2, "num_microbatches": 37}),
        (None, LLAMA, {}),
    ],
}
RULES_IN_TORCH = {"torchtitan": TORCHTITAN_RULES, "torch-eager": TORCH_EAGER_RULES, "automodel": AUTOMODEL_RULES}


@pytest.mark.parametrize(
    ("trainer", "reason", "model", "fields"), [(name, *case) for name, cases in IN_TORCH.items() for case in cases]
)
def test_trainers_in_torch(trainer: str, reason: str | None, model: ModelSpec, fields: dict[str, int]) -> None:
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
