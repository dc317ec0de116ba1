"""A plan in the keys of Primus' Megatron backend: Megatron-LM's arguments by its parser's names, and Primus' own."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from planner.answer import Plan
from planner.export.megatron.megatron_files import megatron_arguments, notes_on_options, training_arguments
from planner.export.megatron.option_rows import all_rows
from planner.export.refusal import Objections, Reason, hint_for
from planner.export.stages import VirtualStage, is_even, virtual_stages
from planner.export.target_price import unstretched
from planner.export.trainer_files import ShellText, Value
from planner.specs.reading.python_text import literal, parse_expression
from planner.specs.units import is_count

Keys = dict[str, Any]
"""Keys of `overrides:` and their values."""

_KEYS = {row.name: row.primus for row in all_rows() if row.primus}
NEGATED = {option: key.removeprefix("not ") for option, key in _KEYS.items() if key.startswith("not ")}
"""Options that set a value to false."""
_PATTERNS = ("--no-rope-freq", "--window-attn-skip-freq", "--window-size")
"""Options whose text the parser evaluates; Primus does so itself for `moe_layer_freq` alone."""

MEGATRON_DEFAULTS: Keys = {
    "add_bias_linear": True,
    "add_position_embedding": True,
    "dataloader_type": None,
    "exit_on_missing_checkpoint": False,
    "finetune": False,
    "mscale_all_dim": 0.0,
    "num_query_groups": 1,
    "override_opt_param_scheduler": False,
    "sequence_parallel": False,
    "swiglu": False,
    "untie_embeddings_and_output_weights": False,
    "use_distributed_optimizer": False,
    # the preset's true ends every deterministic run
    "use_flash_attn": False,
}
"""Arguments that Primus' presets `pre_trainer.yaml` and `language_model.yaml` set otherwise than Megatron-LM's parser,
and that decide what is trained; they stand at the parser's values wherever a plan says nothing else."""


def key_of(option: str) -> str:
    """The name under which Primus knows an option of Megatron-LM."""
    return NEGATED.get(option) or _KEYS.get(option) or option.removeprefix("--").replace("-", "_")


def keys_of(arguments: Mapping[str, Value]) -> Keys:
    """Arguments of Megatron-LM as keys of Primus and their values."""
    return {key_of(option): _value(option, value) for option, value in arguments.items()}


def _value(option: str, value: Value) -> Any:
    if option in NEGATED:
        return False
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, ShellText):
        return value.unquoted
    if option in _PATTERNS and isinstance(value, str):
        return _evaluated(value)
    return int(value) if isinstance(value, str) and is_count(value) else value


def _evaluated(text: str) -> Any:
    """The list that an expression such as `([0]*3+[1]*58)` or `(127,0)` stands for."""
    tree = parse_expression(text)
    return list(_items(tree)) if not isinstance(tree, ast.Constant) else tree.value


def _items(tree: ast.expr) -> list[int]:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        return _items(tree.left) + _items(tree.right)
    if isinstance(tree, ast.BinOp):
        return _items(tree.left) * int(literal(tree.right))
    items: tuple[int, ...] | list[int] = literal(tree)
    return list(items)


class _Schedule(NamedTuple):
    algorithm: str
    """The value of `pp_algorithm`."""
    least_microbatches: Callable[[int], int]
    """The fewest micro-batches, by pp, for which its table is whole."""
    held: Callable[[int], int] | None = None
    """Micro-batches that the fullest rank holds (`pp_max_mem`), by pp, where the algorithm asks for them."""


_SCHEDULES = {
    "zb-h1": _Schedule("zero-bubble", lambda pp: pp),
    "zb-h2": _Schedule("zero-bubble-heuristic", lambda pp: 2 * pp, lambda pp: 2 * pp - 1),
    "zb-v": _Schedule("zbv-formatted", lambda pp: 2 * pp - 1),
    "v-half": _Schedule("v-half", lambda pp: 1),
    "v-min": _Schedule("v-min", lambda pp: 1),
}
OWN_SCHEDULES = tuple(_SCHEDULES)
"""Schedules that Megatron-LM does not have; its own it runs itself, without a key."""
ALGORITHMS = {"1f1b": "1f1b", "1f1b-interleaved": "interleaved-1f1b"} | {
    schedule.algorithm: name for name, schedule in _SCHEDULES.items()
}
"""Values of `pp_algorithm`, and the schedules that they are."""
_WITH_TABLES: Keys = {
    "patch_primus_pipeline": True,
    "no_persist_layer_norm": True,
    "create_attention_mask_in_dataloader": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "eval_iters": 0,
}
"""Arguments that go with schedules from tables, which reduce and gather after the last backward, as they are priced
(`overlaps_split_backwards`), and have no forward alone."""


def schedule_keys(plan: Plan) -> Keys:
    """The keys of a schedule that Megatron-LM does not have; none for the others."""
    layout = plan.parallelism
    schedule = _SCHEDULES.get(layout.schedule)
    if schedule is None:
        return {}
    held = {} if schedule.held is None else {"pp_max_mem": schedule.held(layout.pp)}
    return {**_WITH_TABLES, "pp_algorithm": schedule.algorithm, **held}


def objections_to_schedule(plan: Plan, stages: tuple[VirtualStage, ...]) -> list[Reason]:
    """The reasons why a schedule from a table cannot run the plan."""
    layout, runtime = plan.parallelism, plan.runtime_spec
    schedule = _SCHEDULES.get(layout.schedule)
    if schedule is None:
        return []
    least, name = schedule.least_microbatches(layout.pp), layout.schedule
    wrong = {
        "num_microbatches": (
            layout.num_microbatches < least,
            f"{name} at pp {layout.pp} needs {least}, not {layout.num_microbatches}",
        ),
        "uneven_stages": (not is_even(stages), f"{name} takes stages of equally many layers"),
        "recompute": (layout.recompute != "none", f"{name} splits backwards, which keep the inputs of every layer"),
        "fused_grad_accumulation": (not runtime.fused_grad_accumulation, f"{name} needs it"),
    }
    return [Reason(name, message) for name, (is_wrong, message) in wrong.items() if is_wrong]


_EP_OVER_NODES, _UNITS_OVER_NODES = 16, 32
"""Expert parallelism from which exchanges of experts take no more compute units (Primus, rocm_arg_validation.py)."""


def turbo_keys(plan: Plan, keys: Keys) -> Keys:
    """The keys of Megatron-LM with Primus-Turbo's own, which stand for DeepEP, sync-free experts and their products."""
    if plan.model.spec.moe is None:
        return keys
    recipe, own = plan.best.recipe, Keys()
    if keys.get("moe_flex_dispatcher_backend") == "deepep" or keys.get("moe_enable_deepep"):
        keys = {name: value for name, value in keys.items() if name not in _FLEX}
        most = _UNITS_OVER_NODES if plan.parallelism.ep >= _EP_OVER_NODES else plan.runtime_spec.deepep_sms
        units = min(most, plan.runtime_spec.deepep_sms)
        # its patch makes the dispatcher flex, after Megatron-LM has looked at it
        own |= {"moe_token_dispatcher_type": "alltoall", "use_turbo_deepep": True, "turbo_deepep_num_cu": units}
    if recipe.get("sync_free_moe"):
        own["turbo_sync_free_moe_stage"] = recipe["sync_free_moe"]
    own |= _GROUPED.get(str(recipe.get("grouped_gemm")), {})
    is_turbo = any(name.startswith(("use_turbo", "turbo_")) for name in own)
    return {**keys, **own, **({"enable_primus_turbo": True} if is_turbo else {})}


_GROUPED: dict[str, Keys] = {
    "legacy": {"moe_use_legacy_grouped_gemm": True},
    "turbo": {"moe_use_legacy_grouped_gemm": False, "use_turbo_grouped_gemm": True},
}
_FLEX = ("moe_flex_dispatcher_backend", "moe_enable_deepep")


def objections_to_recipe(plan: Plan) -> list[Reason]:
    """The switches that name what only NVIDIA's GPUs have."""
    is_hybrid = plan.model.spec.moe is not None and plan.runtime_spec.dispatcher == "hybridep"
    return [Reason("dispatcher", "hybridep is NVIDIA's, deepep is what Primus-Turbo has")] if is_hybrid else []


CORE = "0.16"
"""Megatron core of the commit that Primus v26.5 pins (third_party/Megatron-LM at d3528a21)."""
_LEFT_OUT = ("data_path", "split", "tokenizer_type", "tokenizer_model", "save", "load", "async_strategy")
"""Arguments of training that Primus has other means for."""


def megatron_keys(plan: Plan) -> Keys:
    """The overrides of a plan, but for data, tokenizer and checkpoints. Raises Inexpressible."""
    plan, _ = with_core(plan)
    stages = virtual_stages(plan.best, plan.model.spec.num_hidden_layers)
    reasons = [*objections_to_schedule(plan, stages), *objections_to_recipe(plan)]
    objections = Objections("primus", reasons, hint_for(plan, "primus-megatron"))
    objections.raise_any()
    keys = keys_of(megatron_arguments(plan, "primus", own_schedules=OWN_SCHEDULES) | training_arguments(plan))
    keys = {name: value for name, value in keys.items() if name not in _LEFT_OUT}
    return turbo_keys(plan, MEGATRON_DEFAULTS | keys | schedule_keys(plan))


def notes_on_megatron(plan: Plan) -> tuple[str, ...]:
    """Notes on the arguments."""
    pinned, note = with_core(plan)
    return (*notes_on_options(pinned), *([note] if note else []))


def with_core(plan: Plan) -> tuple[Plan, str]:
    """The plan for the version of Megatron core that Primus pins, and a note where that stretches no positions."""
    runtime = plan.runtime_spec.model_copy(update={"version": CORE})
    return unstretched(plan.model_copy(update={"runtime_spec": runtime}), plan.runtime)
