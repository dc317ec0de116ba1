"""The Python source of a torchtitan recipe: stages, recompute policy, and a function that returns the configuration."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.model import stated
from planner.export.common.recompute import all_full, recomputed_layers
from planner.export.common.run_settings import run_settings
from planner.export.common.stages import VirtualStage, is_looped, virtual_stages
from planner.export.torch.order import ORDER_FILE, order_of
from planner.export.torchtitan.model_source import model_source
from planner.export.torchtitan.run_source import run_source
from planner.trainers.rules.torch import TORCH_CLASSES

_CHECKPOINT_MODULE = "torchtitan.distributed.activation_checkpoint"
_CHECKPOINT = {"selective": "SelectiveAC", "full": "FullAC"}
_LOSS = ["from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss"]
_MTP_LOSS = ["from torchtitan.models.deepseek_v3.mtp import MTPLoss"]


def recipe_source(plan: Plan, stages: tuple[VirtualStage, ...]) -> str:
    """The recipe's text below its header."""
    layout = plan.parallelism
    attention = "varlen" if splits_backward(plan) else "flex"
    model_imports, model = model_source(plan.model.spec, plan.training.seq_length, attention)
    debug = "DebugConfig, " if plan.runtime_spec.deterministic else ""
    imports = [
        "import os",
        *(["from pathlib import Path"] if has_order_of_its_own(plan) else []),
        "from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw",
        f"from torchtitan.config import CompileConfig, {debug}ParallelismConfig, TrainingConfig",
        "from torchtitan.models.llama3.config_registry import llama3_debugmodel",
        "from torchtitan.trainer import Trainer",
        *([] if layout.recompute == "none" else [f"from {_CHECKPOINT_MODULE} import {_CHECKPOINT[layout.recompute]}"]),
        *(_MTP_LOSS if plan.model.spec.num_nextn_predict_layers else _LOSS),
        *(["from dataclasses import dataclass"] if _recomputes_some(plan) else []),
        *model_imports,
    ]
    torchtitan = sorted((line for line in imports if "torchtitan" in line), key=lambda line: line.split()[1])
    others = [line for line in imports if "torchtitan" not in line]
    split = _stages_source(stages) if layout.pp > 1 else ""
    if _recomputes_some(plan):
        split += _some_recomputed(plan, stages)
    parts = [model, split, run_source(plan), "", _function_source(plan)]
    return "\n".join([*_standard_first(others), "", *torchtitan, "", "", *parts])


def _recomputes_some(plan: Plan) -> bool:
    """Some layers are recomputed whole and others are not."""
    return plan.parallelism.recompute == "full" and not all_full(plan.best)


def _some_recomputed(plan: Plan, stages: tuple[VirtualStage, ...]) -> str:
    """A policy that checkpoints only the layers which the plan recomputes; torchtitan's own takes all or none."""
    counts = recomputed_layers(plan.best, stages)
    ranges = [
        f"range({stage.first_layer}, {stage.first_layer + count})"
        for stage, count in zip(stages, counts, strict=True)
        if count
    ]
    return f"""
RECOMPUTED = {{i for layers in ({", ".join(ranges)},) for i in layers}}


class PlannedAC(FullAC):
    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        pass

    def _wrap_block(self, module, *, base_fqn=None):
        recomputed = int(base_fqn.rsplit(".", 1)[1]) in RECOMPUTED
        return FullAC._wrap_block(self, module, base_fqn=base_fqn) if recomputed else module

"""


def _standard_first(lines: list[str]) -> list[str]:
    """Standard library, then torch after an empty line."""
    standard = sorted((line for line in lines if "torch" not in line), key=lambda line: (line[:4] == "from", line))
    torch = [line for line in lines if "torch" in line]
    return [*standard, "", *torch] if torch else standard


def _stages_source(stages: tuple[VirtualStage, ...]) -> str:
    """Module names of each stage, in model order."""
    rows = []
    for stage in stages:
        layers = f'*(f"layers.{{i}}" for i in range({stage.first_layer}, {stage.last_layer}))'
        names = [
            *(['"tok_embeddings"'] if stage.embedding else []),
            layers,
            *(['"norm"', '"lm_head"'] if stage.head else []),
        ]
        rows.append(f"    [{', '.join(names)}],")
    return "\n".join(["", "STAGES = [", *rows, "]", "", ""])


def _schedule_class(plan: Plan) -> str:
    """torch's class for the schedule; for an order of its own, a class that places the stages on the same ranks."""
    layout = plan.parallelism
    if layout.pp == 1:
        return "1F1B"
    if layout.schedule in TORCH_CLASSES:
        return TORCH_CLASSES[layout.schedule]
    if not is_looped(virtual_stages(plan.best, plan.model.spec.num_hidden_layers), layout.pp):
        return TORCH_CLASSES["zb-v"]
    return TORCH_CLASSES["interleaved-1f1b" if layout.vpp > 1 else "1f1b"]


def _compiled(plan: Plan) -> str:
    """Arguments of CompileConfig: layers and loss, the loss alone, or nothing."""
    runtime = plan.runtime_spec
    if runtime.fused_cross_entropy and (not runtime.compiled or splits_backward(plan)):
        return 'enable=True, components=["loss"]'
    overlaps = runtime.compiled and runtime.tp_overlap_fraction > 0
    return f"enable={runtime.compiled}{', enable_async_tensor_parallel=True' if overlaps else ''}"


def _function_source(plan: Plan) -> str:
    """The function `plan()`, which returns the trainer's configuration."""
    layout, training = plan.parallelism, plan.training
    shard = layout.shard_size // layout.cp if layout.zero_stage >= 2 else 1
    schedule = _schedule_class(plan)
    order = ""
    if has_order_of_its_own(plan):
        order = f'pipeline_parallel_schedule_csv=str(Path(__file__).with_name("{ORDER_FILE}")),\n        '
    loss = "CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)"
    loss_config = f"ChunkedLossWrapper.Config(loss_fn={loss})"
    if plan.model.spec.num_nextn_predict_layers:
        scale = stated(plan.model.spec).mtp_loss_scaling_factor
        loss_config = f"MTPLoss.Config(mtp_scale={scale}, global_vocab_size=spec.model.vocab_size)"
    debug = "config.debug = DebugConfig(deterministic=True)\n    " if plan.runtime_spec.deterministic else ""
    policy = "PlannedAC" if _recomputes_some(plan) else _CHECKPOINT.get(layout.recompute)
    checkpoint = f"{policy}.Config()" if policy else "None"
    return f'''
def plan() -> Trainer.Config:
    spec, config = model_spec(), llama3_debugmodel()
    parallelism = dict(
        pipeline_parallel_degree={layout.pp},
        pipeline_parallel_schedule="{schedule}",
        {order}module_fqns_per_model_part={"STAGES" if layout.pp > 1 else None},
        tensor_parallel_degree={layout.tp},
        enable_sequence_parallel={layout.sequence_parallel},
        context_parallel_degree={layout.cp},
        data_parallel_replicate_degree={layout.dp // shard},
        data_parallel_shard_degree={shard},
        fsdp_reshard_after_forward="{"never" if layout.zero_stage == 2 else "default"}",
        expert_parallel_degree={layout.ep},
        spmd_backend="{"partial_dtensor" if layout.cp == 1 else "spmd_types"}",
    )
    training = dict(steps=STEPS, disable_cuda_graphs=True, max_norm={run_settings(plan).optimizer.clip_grad:g})
    if hasattr(TrainingConfig(), "num_tokens_per_microbatch_per_dp_rank"):
        parallelism.update(num_pp_microbatches={layout.num_microbatches if layout.pp > 1 else 1})
        training.update(
            num_tokens_per_microbatch_per_dp_rank={layout.micro_batch_size * training.seq_length},
            num_tokens_per_train_step={training.tokens_per_step},
            max_context_length={training.seq_length},
        )
    else:  # up to 0.3.0 a batch is counted in sequences
        parallelism.update(pipeline_parallel_microbatch_size={layout.micro_batch_size})
        training.update(
            local_batch_size={layout.micro_batch_size * (layout.num_microbatches if layout.pp > 1 else 1)},
            global_batch_size={training.global_batch_size},
            seq_len={training.seq_length},
        )
    config.model_spec = spec
    config.loss = {loss_config}
    config.parallelism = ParallelismConfig(**parallelism)
    config.training = TrainingConfig(**training)
    config.activation_checkpoint = {checkpoint}
    config.compile = CompileConfig({_compiled(plan)})
    {debug}run(config)
    return config
'''.lstrip("\n")


def has_order_of_its_own(plan: Plan) -> bool:
    """torch has no class for the schedule, so that its runtime reads the order from a file."""
    return plan.parallelism.pp > 1 and plan.parallelism.schedule not in TORCH_CLASSES


def splits_backward(plan: Plan) -> bool:
    """The plan's schedule runs gradients of inputs and of weights apart."""
    return plan.parallelism.pp > 1 and order_of(plan.best).splits_backward
