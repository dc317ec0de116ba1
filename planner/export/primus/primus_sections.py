"""A plan in the sections of Primus' torchtitan backend: settings of torchtitan 0.2.2, with Primus-Turbo's converter."""

from __future__ import annotations

from typing import Any

from planner.answer import Plan
from planner.export.primus.primus_keys import Keys
from planner.export.refusal import Objections, broken_rules, hint_for
from planner.export.run_settings import run_settings
from planner.export.stages import VirtualStage, all_full, check_mixture, is_looped, virtual_stages
from planner.export.stated_model import notes_on_model
from planner.export.target_price import notes_on_price
from planner.export.torchtitan.recipe_settings import FLAVORS
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model
from planner.trainers.rules.common import BF16_ONLY
from planner.trainers.rules.torch import TORCH_CLASSES, TORCH_SCHEDULE_RULES
from planner.trainers.rules.torchtitan import TORCHTITAN_LAYOUT_RULES, TORCHTITAN_RULES

_RELEASE = "torchtitan 0.2.2, which Primus v26.5 pins,"
_PRESETS = {
    "llama3": "llama3.1_8B.yaml",
    "deepseek_v3": "deepseek_v3_16b.yaml",
    "qwen3": "qwen3_8b.yaml",
    "gpt_oss": "gpt_oss_20b.yaml",
}
"""A preset of each family that Primus has; name, flavor and converters are written out."""
_SPLIT = ("zb-h1", "zb-v", "dualpipe-v")
"""Schedules that split backwards, which compiled layers and FlexAttention cannot."""


def model_preset(plan: Plan) -> str:
    """The preset that the experiment names."""
    module, _ = _flavor(plan.model.spec) or ("llama3", "")
    return _PRESETS[module]


def _flavor(model: ModelSpec) -> tuple[str, str] | None:
    """The family and flavor of torchtitan's registry that is this model; None where none has all of its fields."""
    unsaid = {"training", "source", "rope_scaling", "max_position_embeddings"}
    for names, published in FLAVORS.items():
        if published == model.name and load_model(published).model_dump(exclude=unsaid) == model.model_dump(
            exclude=unsaid
        ):
            return names
    return None


def torchtitan_keys(plan: Plan) -> Keys:
    """The sections of a plan, but for tokenizer, data and checkpoints. Raises Inexpressible."""
    stages = virtual_stages(plan.best, plan.model.spec.num_hidden_layers)
    _check_expressible(plan, stages)
    run, layout, training = run_settings(plan), plan.parallelism, plan.training
    optimizer, deterministic = run.optimizer, plan.runtime_spec.deterministic
    in_pipeline = layout.num_microbatches if layout.pp > 1 else 1
    module, flavor = _flavor(plan.model.spec) or ("", "")
    return {
        "model": {"name": module, "flavor": flavor, "converters": ["primus_turbo"]},
        "training": {
            "local_batch_size": layout.micro_batch_size * in_pipeline,
            "global_batch_size": training.global_batch_size,
            "seq_len": training.seq_length,
            "steps": run.num_steps,
            "max_norm": optimizer.clip_grad,
        },
        "parallelism": _parallelism(plan, stages),
        "activation_checkpoint": {"mode": layout.recompute, "selective_ac_option": "op"},
        "compile": _compiled(plan),
        "optimizer": {
            "name": "AdamW",
            "lr": optimizer.learning_rate,
            "beta1": optimizer.beta1,
            "beta2": optimizer.beta2,
            "eps": optimizer.epsilon,
            "weight_decay": optimizer.weight_decay,
        },
        "lr_scheduler": {
            "warmup_steps": run.warmup_steps,
            "decay_ratio": None if optimizer.decay_fraction == 1 else optimizer.decay_fraction,
            "decay_type": optimizer.decay_style,
            "min_lr_factor": round(optimizer.min_learning_rate / optimizer.learning_rate, 4),
        },
        "metrics": {"log_freq": 1},
        "comm": {
            "init_timeout_seconds": 60 * run.init_timeout_minutes,
            "train_timeout_seconds": 60 * run.timeout_minutes,
        },
        "debug": {"deterministic": deterministic},
        "checkpoint": {
            "enable": True,
            "interval": run.save_interval_steps,
            "last_save_model_only": False,
            "async_mode": "async_with_pinned_mem",
        },
        "validation": {"enable": False},
    }


def notes_on_torchtitan(plan: Plan) -> tuple[str, ...]:
    """Notes on the settings."""
    return (
        *notes_on_model(plan.model.spec),
        *notes_on_price(plan),
        "rotary frequencies are those of torchtitan's flavor of the model",
    )


def _parallelism(plan: Plan, stages: tuple[VirtualStage, ...]) -> Keys:
    layout = plan.parallelism
    shard = layout.shard_size // layout.cp if layout.zero_stage >= 2 else 1
    keys: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp // shard,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "never" if layout.zero_stage == 2 else "default",
        "tensor_parallel_degree": layout.tp,
        "enable_async_tensor_parallel": plan.runtime_spec.compiled and plan.runtime_spec.tp_overlap_fraction > 0,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
        "expert_tensor_parallel_degree": layout.etp if layout.ep > 1 else 1,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.pp > 1:
        keys |= {
            "pipeline_parallel_schedule": TORCH_CLASSES[layout.schedule],
            "pipeline_parallel_microbatch_size": layout.micro_batch_size,
            "module_fqns_per_model_part": [_modules(stage) for stage in stages],
        }
    return keys


def _modules(stage: VirtualStage) -> list[str]:
    """Names of a stage's modules."""
    layers = [f"layers.{i}" for i in range(stage.first_layer, stage.last_layer)]
    return [*(["tok_embeddings"] if stage.embedding else []), *layers, *(["norm", "output"] if stage.head else [])]


def _compiled(plan: Plan) -> Keys:
    """Layers and loss, the loss alone, or nothing."""
    runtime = plan.runtime_spec
    layers = runtime.compiled and plan.parallelism.schedule not in _SPLIT
    components = [*(["model"] if layers else []), *(["loss"] if runtime.fused_cross_entropy else [])]
    return {"enable": bool(components), "components": components or ["model", "loss"]}


def _check_expressible(plan: Plan, stages: tuple[VirtualStage, ...]) -> None:
    """Raise Inexpressible, with every reason, where Primus' torchtitan cannot run the plan."""
    layout, model = plan.parallelism, plan.model.spec
    schedule_rules = TORCH_SCHEDULE_RULES.get(layout.schedule)
    rules = TORCHTITAN_RULES if schedule_rules is None else (*TORCHTITAN_LAYOUT_RULES, *schedule_rules)
    objections = Objections("primus", broken_rules((*rules, BF16_ONLY), plan), hint_for(plan, "primus-torchtitan"))
    objections.when(
        _flavor(model) is None, "model", f"{_RELEASE} has no flavor that is {model.name}, one of {_published()}"
    )
    check_mixture(plan.best, objections)
    objections.when(
        layout.recompute == "full" and not all_full(plan.best),
        "recompute",
        f"{_RELEASE} recomputes all layers, or none",
    )
    objections.when(
        layout.pp > 1 and layout.schedule not in TORCH_CLASSES,
        "schedule",
        f"{layout.schedule} is none of {', '.join(TORCH_CLASSES)}",
    )
    is_placed = is_looped(stages, layout.pp) or layout.schedule in ("zb-v", "dualpipe-v")
    objections.when(not is_placed, "placement", "virtual stage j must be on rank j mod pp")
    objections.when(any(stage.is_empty for stage in stages), "empty_stage", "a stage without a module runs nothing")
    objections.when(
        layout.tp > 1 and not layout.sequence_parallel, "sequence_parallel", f"{_RELEASE} has it at every tp above 1"
    )
    objections.when(
        layout.zero_stage == 1, "zero_stage", "its optimizer is sharded with gradients and weights (2, 3) or not at all"
    )
    objections.when(
        layout.zero_stage == 0 and layout.cp > 1, "zero_stage", f"it shards weights over the ranks of cp {layout.cp}"
    )
    objections.raise_any()


def _published() -> str:
    return ", ".join(name for (module, _), name in FLAVORS.items() if module in _PRESETS)
