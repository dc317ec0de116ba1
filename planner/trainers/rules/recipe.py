"""Rules of recipes, the values of switches that do not go with a model, a GPU or each other; and those of a runtime.

A rule about the layout is plain arithmetic on a `Shape`, so that one call judges one shape or an array of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.errors import SpecError
from planner.shape import RANK_ORDERS, Shape, all_of
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.problems import check_names
from planner.specs.training import Recompute, TrainingSpec
from planner.trainers.load import RUNTIMES, load_runtime, switches_of
from planner.trainers.rules.common import LAYER_KIND_RULES, PAIRS, Rule
from planner.trainers.rules.megatron import bridge_model_rules, megatron_model_rules
from planner.trainers.rules.named import EXPORT_RULES, RULES
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SHARDED_STAGES, SWITCHES, Value

BEFORE_018 = ("0.14", "0.15", "0.16", "0.17")
"""Versions of Megatron core before 0.18; no other trainer here has versions."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The things that rules of recipes look at: a job, a runtime with its switches, and a layout if there is one."""

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    runtime: RuntimeSpec
    shape: Shape | None = None
    recompute: Recompute = "none"
    modules: tuple[str, ...] = ()
    """Modules that are recomputed by themselves."""

    def value(self, name: str) -> Value:
        """The value of a switch."""
        return SWITCHES[name].value_of(self.runtime)

    @property
    def overlaps_experts(self) -> bool:
        return self.runtime.overlaps_experts

    @property
    def has_shared_experts(self) -> bool:
        moe = self.model.moe
        return moe is not None and bool(moe.shared_expert_intermediate_size)


@dataclass(frozen=True, slots=True)
class RecipeRule:
    """One constraint on the value of a switch."""

    switch: str
    """The switch that gives way: the search leaves it at another value."""
    says: str
    """The constraint in words, as the answer shows it."""
    holds: Callable[[Setting], Any]
    """True where the recipe is legal; an array of truths if the setting's shape is of arrays."""
    is_about_layout: bool = False
    """True for a rule that needs a shape or knows what is recomputed."""
    is_about_model: bool = False
    """True for a rule that the model alone decides; no answer needs to say that it holds."""


def _job(switch: str, says: str, holds: Callable[[Setting], Any]) -> RecipeRule:
    return RecipeRule(switch, says, holds)


def _model(switch: str, says: str, holds: Callable[[Setting], Any]) -> RecipeRule:
    return RecipeRule(switch, says, holds, is_about_model=True)


def _shape(switch: str, says: str, holds: Callable[[Setting, Shape], Any]) -> RecipeRule:
    """A rule about the shape; without a shape it holds."""
    return RecipeRule(switch, says, lambda s: True if s.shape is None else holds(s, s.shape), is_about_layout=True)


RECIPE_RULES: tuple[RecipeRule, ...] = (
    _model("ep_overlap", "needs experts", lambda s: s.model.moe is not None or not s.overlaps_experts),
    _job(
        "ep_overlap", "takes one multi-token-prediction block at most",
        lambda s: s.model.num_nextn_predict_layers <= 1 or not s.overlaps_experts,
    ),
    _job(
        "ep_overlap", "does not go with shared_expert_overlap",
        lambda s: not (s.overlaps_experts and s.runtime.overlaps_shared_experts),
    ),
    _job(
        "ep_overlap", "needs a dispatcher other than allgather",
        lambda s: not (s.overlaps_experts and s.runtime.dispatcher == "allgather"),
    ),
    _job(
        "ep_overlap", "delayed does not go with graphs of an attention with biases",
        lambda s: not (
            s.runtime.delays_weight_gradients and "attn" in s.runtime.graphed_modules and s.model.attention_bias
        ),
    ),
    _shape(
        "ep_overlap", "needs ep above 1",
        lambda s, shape: (np.asarray(shape.ep) > 1) | (not s.overlaps_experts),
    ),
    _shape(
        "ep_overlap", "needs interleaving (vpp above 1) where pp is above 1",
        lambda s, shape: (np.asarray(shape.pp) == 1) | (np.asarray(shape.vpp) > 1) | (not s.overlaps_experts),
    ),
    RecipeRule(
        "ep_overlap", "does not go with recomputing whole layers or experts",
        lambda s: not s.overlaps_experts or _is_recomputable(s), is_about_layout=True,
    ),
    _shape(
        "ep_overlap", "needs pp above 1 beside multi-token prediction in Megatron core 0.16 and 0.17",
        lambda s, shape: (np.asarray(shape.pp) > 1) | _predicts_without_pipeline(s),
    ),
    _model(
        "cuda_graph", "of the router needs experts",
        lambda s: s.model.moe is not None or "moe_router" not in s.runtime.graphed_modules,
    ),
    RecipeRule(
        "cuda_graph", "of a layer's modules does not go with recomputing whole layers or experts",
        lambda s: not s.runtime.graphed_modules or _is_recomputable(s), is_about_layout=True,
    ),
    _shape(
        "cuda_graph", "of a layer's modules does not go with sharded weights",
        lambda s, shape: (np.asarray(shape.zero_stage) < 2) | (not s.runtime.graphed_modules),
    ),
    _job(
        "cuda_graph", "full_iteration needs nan_checks=false",
        lambda s: not (_is_whole_graph(s) and s.runtime.checks_nan),
    ),
    _job(
        "cuda_graph", "full_iteration of a mixture needs fused_experts=true and dispatcher=hybridep",
        lambda s: not (_is_whole_graph(s) and s.model.moe is not None)
        or (s.runtime.fuses_experts and s.runtime.dispatcher in ("hybridep", "")),
    ),
    _job(
        "fused_experts", "needs experts, in mxfp8 or nvfp4 on Blackwell",
        lambda s: not s.runtime.fuses_experts
        or (
            s.model.moe is not None
            and s.training.dtype in ("mxfp8", "nvfp4")
            and s.cluster.hardware.architecture == "blackwell"
        ),
    ),
    _model(
        "dispatcher", "needs experts",
        lambda s: s.model.moe is not None or s.runtime.dispatcher == "",
    ),
    _job(
        "tp_comm_overlap", "needs GPUs that reach each other's memory, which these do only through their host's",
        lambda s: not s.cluster.hardware.is_through_host
        or s.runtime.tp_overlap_fraction == 0
        or "tp_comm_overlap" not in switches_of(s.runtime),
    ),
    _job(
        "dispatcher", "deepep knows no NVLink between nodes",
        lambda s: s.runtime.dispatcher != "deepep" or not s.cluster.is_rack,
    ),
    _job(
        "dispatcher", "deepep and hybridep need Ampere or newer GPUs of NVIDIA; deepep on AMD's is Primus'",
        lambda s: s.runtime.dispatcher not in ("deepep", "hybridep")
        or s.cluster.hardware.architecture in ("ampere", "hopper", "blackwell")
        or (s.cluster.hardware.is_amd and s.runtime.dispatcher == "deepep" and _has_sync_free(s)),
    ),
    _job(
        "cuda_graph", "is not of AMD's GPUs: no trainer's configurations for training have graphs there",
        lambda s: not s.cluster.hardware.is_amd or not (s.runtime.cuda_graphs or s.runtime.graphed_modules),
    ),
    _job(
        "tp_comm_overlap", "is not of AMD's GPUs: Transformer Engine's user buffers are CUDA's",
        lambda s: not s.cluster.hardware.is_amd
        or s.runtime.tp_overlap_fraction == 0
        or "tp_comm_overlap" not in switches_of(s.runtime),
    ),
    _job(
        "sync_free_moe", "2 needs dispatcher=deepep and grouped_gemm=turbo",
        lambda s: not (_has_sync_free(s) and s.value("sync_free_moe") == 2)
        or (s.runtime.dispatcher == "deepep" and s.runtime.groups_products),
    ),
    _model(
        "sync_free_moe", "needs experts",
        lambda s: s.model.moe is not None or not _has_sync_free(s) or s.value("sync_free_moe") == 0,
    ),
    _job(
        "shared_expert_overlap", "does not go with Primus' dispatcher=deepep",
        lambda s: not (s.runtime.overlaps_shared_experts and s.runtime.dispatcher == "deepep" and _has_sync_free(s)),
    ),
    _job(
        "token_drop", "needs dispatcher=alltoall",
        lambda s: s.runtime.awaits_token_counts or not s.runtime.sends_tokens_once or _has_sync_free(s),
    ),
    _model(
        "shared_expert_overlap", "needs shared experts",
        lambda s: s.has_shared_experts or not s.runtime.overlaps_shared_experts,
    ),
    _job(
        "shared_expert_overlap", "needs dispatcher=alltoall before Megatron core 0.18",
        lambda s: not (
            s.runtime.overlaps_shared_experts
            and s.runtime.sends_tokens_once
            and s.runtime.version in BEFORE_018
        ),
    ),
    RecipeRule(
        "shared_expert_overlap", "does not go with recomputing shared experts",
        lambda s: not (s.runtime.overlaps_shared_experts and "shared_experts" in s.modules), is_about_layout=True,
    ),
    _shape(
        "shared_expert_overlap", "needs ep above 1",
        lambda s, shape: (np.asarray(shape.ep) > 1) | (not s.runtime.overlaps_shared_experts),
    ),
    _job(
        "async_tp", "needs compile=true",
        lambda s: s.runtime.compiled or s.runtime.family != "torchtitan" or not s.value("async_tp"),
    ),
    _job(
        "overlap_param_gather", "needs overlap_grad_reduce=true",
        lambda s: s.runtime.gradient_overlap_fraction > 0 or s.runtime.parameter_overlap_fraction == 0,
    ),
    _job(
        "cross_entropy_fusion", "must be false beside deterministic=true",
        lambda s: not (_is_deterministic_megatron(s) and s.runtime.fused_cross_entropy),
    ),
    _job(
        "tp_comm_overlap", "must be false beside deterministic=true",
        lambda s: not (_is_deterministic_megatron(s) and s.runtime.tp_overlap_fraction > 0),
    ),
    _job(
        "deterministic", "takes no attention sinks",
        lambda s: not (s.runtime.deterministic and s.model.attention_sinks),
    ),
    _shape(
        "p2p_overlap", "must be true where pp is 2 and stages interleave",
        lambda s, shape: (np.asarray(shape.pp) != 2) | (np.asarray(shape.vpp) == 1) | s.runtime.interleaved_p2p_overlap,
    ),
    _job(
        "optimizer", "must be adamw beside optimizer_offload",
        lambda s: s.runtime.optimizer == "adamw" or s.runtime.optimizer_offload_fraction == 0,
    ),
    _job(
        "optimizer", "must be adamw beside bf16_moments=true",
        lambda s: s.runtime.optimizer == "adamw" or "bf16_moments" not in switches_of(s.runtime)
        or s.value("bf16_moments") is False,
    ),
    _job(
        "optimizer", "muon takes no fp16",
        lambda s: not s.runtime.optimizer_row.newton_schulz_steps or s.training.dtype != "fp16",
    ),
    _shape(
        "optimizer", "muon does not go with sharded gradients or weights (Megatron-FSDP)",
        lambda s, shape: (np.asarray(shape.zero_stage) < 2) | (not s.runtime.optimizer_row.newton_schulz_steps),
    ),
    _shape(
        "optimizer", "adafactor needs whole matrices, not the shards of ZeRO-2 and 3",
        lambda s, shape: (np.asarray(shape.zero_stage) < 2) | (np.asarray(shape.shard_size) == 1)
        | (s.runtime.optimizer != "adafactor"),
    ),
    _shape(
        "sharding", "ddp is ZeRO-0, fsdp ZeRO-2 or 3, deepspeed ZeRO-1, 2 or 3",
        lambda s, shape: (np.asarray(shape.dp * shape.cp) == 1) | _has_stage(s, shape),
    ),
    _shape(
        "sharding", "is ddp on one GPU, unless the optimizer's states go to the host",
        lambda s, shape: (np.asarray(shape.dp * shape.cp) > 1)
        | (s.runtime.sharding in ("", "ddp") or s.runtime.optimizer_offload_fraction > 0),
    ),
    _job(
        "optimizer_offload", "needs sharding=deepspeed in Hugging Face's Trainer",
        lambda s: s.runtime.sharding in ("", "deepspeed") or s.runtime.optimizer_offload_fraction == 0,
    ),
    _shape(
        "optimizer_offload", "needs a sharded optimizer (ZeRO-1 and above)",
        lambda s, shape: (np.asarray(shape.zero_stage) >= 1) | (s.runtime.optimizer_offload_fraction == 0),
    ),
    _shape(
        "optimizer_offload", "of a part of the states needs ZeRO-3 in DeepSpeed",
        lambda s, shape: (np.asarray(shape.zero_stage) == 3)
        | (s.runtime.family != "deepspeed" or s.runtime.optimizer_offload_fraction in (0, 1)),
    ),
    _job(
        "optimizer_offload", "does not go with weights of 8 bits (--fp8-param-gather)",
        lambda s: s.runtime.optimizer_offload_fraction == 0
        or not (s.runtime.narrow_parameters and s.training.dtype in ("fp8", "mxfp8")),
    ),
    RecipeRule(
        "activation_offload", "does not go with recomputing whole layers",
        lambda s: not s.runtime.offload_modules or s.recompute != "full", is_about_layout=True,
    ),
    _job(
        "activation_offload", "beside CUDA graphs needs Megatron core 0.18",
        lambda s: not s.runtime.offload_modules
        or not (s.runtime.cuda_graphs or s.runtime.graphed_modules)
        or s.runtime.version not in BEFORE_018,
    ),
    _job(
        "activation_offload", "of moe_act does not go with full_iteration, which stashes what experts keep",
        lambda s: "moe_act" not in s.runtime.offload_modules or not _is_whole_graph(s),
    ),
    _job(
        "optimizer_offload", "frees nothing where GPU and host have one memory",
        lambda s: not s.cluster.hardware.host.is_shared or s.runtime.optimizer_offload_fraction == 0,
    ),
    _job(
        "activation_offload", "frees nothing where GPU and host have one memory",
        lambda s: not s.cluster.hardware.host.is_shared or not s.runtime.offload_modules,
    ),
    _model(
        "activation_offload", "moe_act needs experts",
        lambda s: s.model.moe is not None or "moe_act" not in s.runtime.offload_modules,
    ),
)  # fmt: skip


_EFFECTS: dict[str, Callable[[Setting, Shape], Any]] = {
    "ep_overlap": lambda s, shape: s.model.moe is not None and shape.ep > 1,
    "dispatcher": lambda s, shape: s.model.moe is not None and shape.ep * shape.etp > 1,
    "shared_expert_overlap": lambda s, shape: s.has_shared_experts and shape.ep > 1,
    "fused_experts": lambda s, shape: s.model.moe is not None,
    "token_drop": lambda s, shape: s.model.moe is not None,
    "sync_free_moe": lambda s, shape: s.model.moe is not None,
    "grouped_gemm": lambda s, shape: s.model.moe is not None,
    "tp_comm_overlap": lambda s, shape: shape.tp > 1 and shape.sequence_parallel > 0 and s.model.mla is None,
    "async_tp": lambda s, shape: shape.tp > 1,
    "cp_comm_type": lambda s, shape: shape.cp > 1,
    "overlap_grad_reduce": lambda s, shape: shape.dp * shape.cp > 1 or _has_more_experts(s, shape),
    "overlap_param_gather": lambda s, shape: (
        shape.zero_stage >= 1 and (shape.shard_size > 1 or _has_more_experts(s, shape))
    ),
    "p2p_overlap": lambda s, shape: shape.pp > 1 and shape.vpp > 1,
    "packed_documents": lambda s, shape: (
        s.runtime.document_kernels > 0 and s.runtime.packs_documents is None and is_tuning(s.training)
    ),
}
"""The layouts on which a switch has an effect, for switches that have none on some."""


TUNING_TOKENS = 2**18
"""Tokens of a step up to which a run is likely fine-tuning: Megatron-Bridge's recipes of it have 65k to 262k, those of
pre-training 1M and more."""


def is_tuning(training: TrainingSpec) -> bool:
    """True for a training of so few tokens a step that it is likely a fine-tuning."""
    return training.global_batch_size * training.seq_length <= TUNING_TOKENS


def _has_more_experts(setting: Setting, shape: Shape) -> bool:
    """True where tensor-parallel ranks hold copies of experts, since these are split less than attention is."""
    return setting.model.moe is not None and bool(shape.tp > shape.etp * shape.ep)


def has_effect(switch: str, setting: Setting) -> bool:
    """True if the switch changes anything in the setting's layout."""
    acts = _EFFECTS.get(switch)
    return acts is None or setting.shape is None or bool(acts(setting, setting.shape))


def _is_recomputable(setting: Setting) -> bool:
    """True if the layout recomputes nothing that the recipe keeps it from recomputing."""
    may = set(setting.runtime.recomputable_modules)
    return (setting.recompute != "full" or setting.runtime.recomputes_layers) and set(setting.modules) <= may


def _predicts_without_pipeline(setting: Setting) -> bool:
    """True where a model without a pipeline may overlap its exchanges, as far as its multi-token prediction goes."""
    has_mtp = setting.model.num_nextn_predict_layers > 0
    return not (has_mtp and setting.overlaps_experts and setting.runtime.version in ("0.16", "0.17"))


def _has_stage(setting: Setting, shape: Shape) -> Any:
    """True where the trainer's sharding has the shape's ZeRO stage, if there is a choice of one."""
    sharding = setting.runtime.sharding
    return not sharding or np.isin(shape.zero_stage, SHARDED_STAGES[sharding])


def _is_deterministic_megatron(setting: Setting) -> bool:
    """True where --deterministic-mode refuses what is fused or overlapped (megatron/training/determinism.py)."""
    return setting.runtime.deterministic and setting.runtime.family == "megatron"


def _has_sync_free(setting: Setting) -> bool:
    """True for a trainer with Primus-Turbo's expert layers."""
    return "sync_free_moe" in switches_of(setting.runtime)


def _is_whole_graph(setting: Setting) -> bool:
    return setting.runtime.cuda_graphs


def broken_recipe_rules(setting: Setting) -> Iterator[RecipeRule]:
    """The rules that a recipe breaks; those about a layout only if the setting has one (one shape, no arrays)."""
    return (rule for rule in RECIPE_RULES if not all_of(rule.holds(setting)))


def takes_shapes(setting: Setting) -> Any:
    """True for each of the setting's shapes that the recipe's rules on layouts allow."""
    legal: Any = True
    for rule in RECIPE_RULES:
        if rule.is_about_layout:
            legal = legal & rule.holds(setting)
    return legal


def rules_for(runtime: RuntimeSpec) -> tuple[Rule, ...]:
    """The hard constraints that layouts of `runtime` obey.

    Raises SpecError where it names rules or a trainer that are unknown, or neither.
    """
    if not (runtime.rules or runtime.trainer or runtime.name in RUNTIMES):
        raise SpecError(
            f"runtime {runtime.name}: names neither its trainer nor its rules",
            f"give trainer, one of {', '.join(RUNTIMES)}, or rules, of {', '.join(RULES)}",
        )
    names = runtime.rules or _trainer_of(runtime).rules
    check_names(f"runtime {runtime.name}", "rules", names, RULES)
    return (*LAYER_KIND_RULES, *_switch_rules(runtime), *(rule for name in names for rule in RULES[name](runtime)))


def export_rules_for(runtime: RuntimeSpec) -> tuple[Rule, ...]:
    """The rules that the export of `runtime` sets to models and dtypes; software of the past is not exported to."""
    if runtime.year is not None:
        return ()
    names = runtime.export_rules or _trainer_of(runtime).export_rules
    check_names(f"runtime {runtime.name}", "export_rules", names, EXPORT_RULES)
    version = runtime.version
    sets = EXPORT_RULES | {"megatron": megatron_model_rules(version), "bridge": bridge_model_rules(version)}
    return tuple(rule for name in names for rule in sets[name])


def _trainer_of(runtime: RuntimeSpec) -> RuntimeSpec:
    """The shipped trainer that `runtime` is a kind of; itself where it names none."""
    if runtime.trainer:
        check_names(f"runtime {runtime.name}", "trainer", (runtime.trainer,), RUNTIMES)
    return load_runtime(runtime.family) if runtime.family in RUNTIMES else runtime


def _switch_rules(runtime: RuntimeSpec) -> tuple[Rule, ...]:
    """The rules that follow from what the runtime's switches leave out."""
    return (
        Rule(
            "model_parallel_not_expressible",
            lambda m, t, s: (s.tp * s.cp * s.pp * s.ep == 1) | runtime.has_model_parallel,
            lambda m, t, s: (
                f"tp {s.tp}, cp {s.cp}, pp {s.pp}, ep {s.ep}: {runtime.name} shards weights alone (ZeRO, FSDP)"
            ),
        ),
        Rule(
            "cp_not_expressible",
            lambda m, t, s: (s.cp == 1) | runtime.has_context_parallel,
            lambda m, t, s: f"cp {s.cp}: {runtime.name} knows no context parallelism",
        ),
        Rule(
            "rank_order_not_expressible",
            lambda m, t, s: (np.asarray(s.dp_outermost) == 0) | (RANK_ORDERS[1] in runtime.rank_orders),
            lambda m, t, s: f"rank_order {s.rank_order}: {runtime.name} has {', '.join(runtime.rank_orders)}",
        ),
        PAIRS,
        Rule(
            "zero_stage_not_expressible",
            lambda m, t, s: np.isin(s.zero_stage, runtime.zero_stages),
            lambda m, t, s: f"zero_stage {s.zero_stage}: {runtime.name} has {', '.join(map(str, runtime.zero_stages))}",
        ),
        Rule(
            "shard_size_not_expressible",
            lambda m, t, s: (
                (np.asarray(s.zero_stage) == 0)
                | (np.asarray(s.shard_size) == s.dp * s.cp)
                | np.isin(s.zero_stage, runtime.grouped_zero_stages)
            ),
            lambda m, t, s: (
                f"shard_size {s.shard_size}: ZeRO-{s.zero_stage} of {runtime.name} shards over all of dp·cp "
                f"({s.dp * s.cp})"
            ),
        ),
        Rule(
            "zero_stage_with_pp",
            lambda m, t, s: (np.asarray(s.zero_stage) < 2) | (np.asarray(s.pp) == 1) | runtime.shards_pipelines,
            lambda m, t, s: f"zero_stage {s.zero_stage} at pp {s.pp}: {runtime.name} shards models without a pipeline",
        ),
    )
