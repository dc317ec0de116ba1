"""The rules of a runtime: those of its own switches, and those that it or its trainer names."""

from __future__ import annotations

import numpy as np

from planner.errors import SpecError
from planner.shape import RANK_ORDERS
from planner.specs.problems import check_names
from planner.trainers.load import RUNTIMES, load_runtime
from planner.trainers.rules.common import PAIRS, Rule
from planner.trainers.rules.megatron_model import bridge_model_rules, megatron_model_rules
from planner.trainers.rules.model_fields import LAYER_KIND_RULES
from planner.trainers.rules.named import EXPORT_RULES, RULES
from planner.trainers.spec import RuntimeSpec


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
