"""A plan as a torchtitan recipe: a Python file with one function that returns the trainer's configuration."""

from __future__ import annotations

from collections.abc import Iterator

from planner.answer import Plan
from planner.export.environment import Variable, node_environment, variables_of
from planner.export.refusal import Objections, broken_rules, hint_for
from planner.export.run_settings import FIRST_RUN_STEPS, run_settings
from planner.export.stages import (
    ORDER_FILE,
    VirtualStage,
    all_full,
    check_mixture,
    check_order,
    is_looped,
    order_of,
    recomputed_layers,
    virtual_stages,
)
from planner.export.stated_model import notes_on_model, stated
from planner.export.target_price import notes_on_price
from planner.export.torchtitan.model_source import balancing_rate, model_source
from planner.export.trainer_files import (
    ExportFile,
    LaunchCommand,
    Placeholder,
    Requirement,
    TrainerFiles,
    header,
    promise,
)
from planner.schedule.torch_csv import to_torch_csv
from planner.specs.model import ModelSpec
from planner.trainers.rules.common import BF16_ONLY
from planner.trainers.rules.torch import TORCH_CLASSES, TORCH_SCHEDULE_RULES, UNCOMPILED
from planner.trainers.rules.torchtitan import TORCHTITAN_LAYOUT_RULES, TORCHTITAN_RULES
from planner.trainers.rules.torchtitan_model import TORCHTITAN_MODEL_RULES

PLACEHOLDERS = (
    Placeholder(
        "HF_ASSETS_PATH",
        "folder with the model's tokenizer.json",
        default="./tests/assets/tokenizer",
        in_first_run=True,
    ),
    Placeholder("DATA_PATH", "data set at Hugging Face, or a folder in its format, with a column `text`"),
    Placeholder("CHECKPOINTS", "folder for checkpoints, which all nodes share", kind="new folder"),
)


def run_source(plan: Plan) -> str:
    """The function `run(config)`, which sets them; the first run reads torchtitan's own sample of text."""
    run = run_settings(plan)
    optimizer = run.optimizer
    factor = optimizer.min_learning_rate / optimizer.learning_rate
    ratio = None if optimizer.decay_fraction == 1 else optimizer.decay_fraction
    return f'''
FIRST_RUN = os.environ.get("MOCK") == "1"
STEPS = {FIRST_RUN_STEPS} if FIRST_RUN else {run.num_steps}


def data(config):
    path = os.environ.get("DATA_PATH")
    if FIRST_RUN or not path:
        return config.dataloader  # tests/assets/c4_test of a checkout of torchtitan
    try:
        from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

        return HuggingFaceTextDataLoader.Config(dataset="c4", dataset_path=path)
    except ImportError:  # after 0.3.0
        from dataclasses import replace

        from torchtitan.components.data import ConcatThenSplitPackingConfig, GrainDataLoader, HuggingFaceStreamingSource
        from torchtitan.hf_datasets.text_datasets import DATASETS

        source = HuggingFaceStreamingSource.Config(path=path, split="train")
        packed = ConcatThenSplitPackingConfig(dataset=replace(DATASETS["c4"], source=source))
        return GrainDataLoader.Config(dataset=packed, shuffle=False)


def run(config):
    config.hf_assets_path = os.environ.get("HF_ASSETS_PATH") or config.hf_assets_path
    config.dataloader = data(config)
    config.optimizer = default_adamw(
        lr={optimizer.learning_rate:g},
        betas=({optimizer.beta1:g}, {optimizer.beta2:g}),
        eps={optimizer.epsilon:g},
        weight_decay={optimizer.weight_decay:g},
    )
    config.lr_scheduler = LRSchedulersContainer.Config(
        warmup_steps={run.warmup_steps},
        total_steps={run.num_steps},
        decay_ratio={ratio},
        decay_type="{optimizer.decay_style}",
        min_lr_factor={factor:.4g},
    )
    config.dump_folder = os.environ.get("CHECKPOINTS") or config.dump_folder
    config.checkpoint.enable = not FIRST_RUN
    config.checkpoint.folder = "checkpoint"  # the latest in it is loaded
    config.checkpoint.interval = {run.save_interval_steps}
    config.checkpoint.async_mode = "async_with_pinned_mem"
    config.checkpoint.last_save_model_only = False
    config.metrics.log_freq = 1
    config.comm.init_timeout_seconds = {60 * run.init_timeout_minutes}
    config.comm.train_timeout_seconds = {60 * run.timeout_minutes}
    config.debug.moe_force_load_balance = FIRST_RUN
    config.validator.enable = False  # no other data is known
'''.lstrip("\n")


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


WRITTEN_FOR = "torchtitan 0.3.0 and main of August 2026"
RECIPE = "planned_recipe"
_ENVIRONMENT = (
    # as torchtitan's own run_train.sh has it; not every ROCm build of torch has such segments
    Variable("PYTORCH_ALLOC_CONF", "expandable_segments:True", lambda plan: not plan.cluster.hardware.is_amd),
)


def export_torchtitan(plan: Plan) -> TrainerFiles:
    """The recipe, and the command that names it. Raises Inexpressible where torchtitan cannot run the plan."""
    stages = virtual_stages(plan.best, plan.model.spec.num_hidden_layers)
    _check_expressible(plan, stages)
    notes = _notes(plan)
    comments = header(plan, WRITTEN_FOR, notes)
    files = [ExportFile(f"{RECIPE}.py", comments + recipe_source(plan, stages))]
    if has_order_of_its_own(plan):
        files.append(ExportFile(ORDER_FILE, to_torch_csv(order_of(plan.best))))
    command = LaunchCommand(
        program="-m torchtitan.train",
        arguments={"--module": RECIPE, "--config": "plan"},
        environment={**variables_of(_ENVIRONMENT, plan), **node_environment(plan)},
        placeholders=PLACEHOLDERS,
        requirements=tuple(_requirements(plan)),
        promise=promise(plan, "in the log: tps (tokens/s/GPU) and memory (GiB, max_memory_reserved) of each rank"),
        setup=('export MOCK="${MOCK:-0}" PYTHONPATH="$PLAN_DIR${PYTHONPATH:+:$PYTHONPATH}"',),
        comments=comments,
        files=tuple(files),
    )
    return TrainerFiles(WRITTEN_FOR, tuple(files), command, notes)


def _check_expressible(plan: Plan, stages: tuple[VirtualStage, ...]) -> None:
    """Raise Inexpressible, with every reason, where torchtitan cannot run the plan."""
    layout = plan.parallelism
    schedule_rules = TORCH_SCHEDULE_RULES.get(layout.schedule)
    layout_rules = TORCHTITAN_RULES if schedule_rules is None else (*TORCHTITAN_LAYOUT_RULES, *schedule_rules)
    rules = (*TORCHTITAN_MODEL_RULES, *layout_rules, BF16_ONLY)
    hint = hint_for(plan, "torchtitan", TORCHTITAN_MODEL_RULES)
    objections = Objections("torchtitan", broken_rules(rules, plan), hint)
    check_mixture(plan.best, objections)
    if layout.pp > 1:
        check_order(plan, stages, objections)
    objections.when(
        any(stage.is_empty for stage in stages), "empty_stage", "a stage without a module has nothing to run"
    )
    objections.when(
        layout.zero_stage == 1, "zero_stage", "its optimizer is sharded with gradients and weights (2, 3) or not at all"
    )
    objections.when(
        layout.zero_stage == 0 and layout.cp > 1,
        "zero_stage",
        f"it shards weights over the ranks of cp {layout.cp}, always",
    )
    if splits_backward(plan):
        # VarlenAttention has neither
        needs = "split backwards need VarlenAttention, which has no"
        objections.when(layout.cp > 1, "split_backward_with_cp", f"{needs} context parallelism")
        objections.when(plan.model.spec.attention_sinks, "split_backward_with_sinks", f"{needs} attention sinks")
    objections.raise_any()


def _requirements(plan: Plan) -> Iterator[Requirement]:
    """The packages that the recipe needs on every node."""
    yield Requirement("torch", "everything", "torch", "2.13", "pip install torch, or a nightly")
    yield Requirement("torchtitan", "the trainer", hint="pip install torchtitan")
    if plan.parallelism.cp > 1:
        yield Requirement("spmd_types", "context parallelism", hint="pip install spmd-types, and a torch nightly")
    if plan.model.spec.moe is not None and plan.parallelism.ep > 1 and plan.runtime_spec.sends_tokens_once:
        yield Requirement("deep_ep", "exchanges of experts by DeepEP", hint="install deepseek-ai/DeepEP")


def _notes(plan: Plan) -> tuple[str, ...]:
    """Placeholders, and differences between the plan and what torchtitan does."""
    model = plan.model.spec
    notes = [
        *run_settings(plan).notes,
        "initial weights are drawn with a plain std of 0.02",
    ]
    notes += [*notes_on_model(model), *_notes_on_balance(model)]
    if plan.parallelism.recompute == "selective":
        notes.append("SelectiveAC chooses operations itself: it recomputes others than the plan's modules")
    if splits_backward(plan):
        notes += [UNCOMPILED] if plan.runtime_spec.compiled else []
        notes.append(
            "backwards are split: VarlenAttention, since FlexAttention is compiled always and then has one backward "
            "(pytorch/torchtitan issue 3584); it takes FlashAttention 3 on Hopper and 4 on Blackwell"
        )
    notes += notes_on_price(plan)
    if plan.parallelism.cp > 1:
        notes.append("context parallelism needs spmd_types, and that a torch nightly")
    return tuple(notes)


def _notes_on_balance(model: ModelSpec) -> Iterator[str]:
    """The means that balance experts instead of a loss, which torchtitan does not have."""
    moe = stated(model).moe
    if moe is not None and moe.router_aux_loss_coef:
        rate = balancing_rate(model)
        instead = f", and balances by a bias that moves by {rate:g} a step" if rate else ""
        yield f"it has no load-balancing loss (the model's has weight {moe.router_aux_loss_coef:g}){instead}"
