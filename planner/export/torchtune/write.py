"""A plan for torchtune: the YAML of one of its recipes, which `tune run` starts as it is."""

from __future__ import annotations

from typing import Any

import yaml

from planner.answer import Plan
from planner.export.common.environment import node_environment
from planner.export.common.header import header
from planner.export.common.promise import promise
from planner.export.common.recompute import all_full
from planner.export.common.refusal import Objections, broken_rules, hint_for
from planner.export.common.target_price import notes_on_price
from planner.export.common.trainer_files import ExportFile, LaunchCommand, Placeholder, Requirement, TrainerFiles
from planner.export.launch.nodes import nodes_of
from planner.export.torchtune.names import MODULES, OPTIMIZERS, builder_of
from planner.specs.finetuning.adapters import MLP
from planner.trainers.rules.common import BF16_ONLY
from planner.trainers.rules.of_trainer import rules_for
from planner.trainers.rules.torchtune import TORCHTUNE_MODEL_RULES

WRITTEN_FOR = "torchtune, main of April 2026"
RECIPE_FILE = "torchtune.yaml"
PLACEHOLDERS = (
    Placeholder("MODEL", "folder with the model's safetensors and tokenizer (tune download)", kind="folder"),
    Placeholder("LAST_SHARD", "number in the name of the last safetensors file, such as 00004"),
    Placeholder("DATASET", "a .json or .jsonl file with the columns input and output", kind="file"),
    Placeholder("CHECKPOINTS", "folder for what is trained", kind="new folder"),
)
_FULL_RATE, _ADAPTER_RATE = 2e-5, 3e-4
"""Learning rates of torchtune's own recipes of Llama 3.1 8B, full and LoRA."""
_LOG = "in logs/*.txt below CHECKPOINTS: tokens_per_second_per_gpu and peak_memory_alloc (GiB)"


def export_torchtune(plan: Plan) -> TrainerFiles:
    """The recipe's YAML, and the command that starts it. Raises Inexpressible for what its recipes cannot run."""
    _check_expressible(plan)
    rate = _FULL_RATE if plan.training.adapters is None else _ADAPTER_RATE
    notes = [
        f"learning rate {rate:g}, as in torchtune's own recipes of Llama 3.1 8B, is a first value: it costs no time",
        f"sequences are packed to {plan.training.seq_length:,} tokens (dataset.packed), as they were priced",
        *notes_on_price(plan),
    ]
    comments = header(plan, WRITTEN_FOR, notes)
    text = yaml.safe_dump(recipe_of_plan(plan), sort_keys=False, width=118, allow_unicode=True)
    file = ExportFile(RECIPE_FILE, comments + text)
    command = LaunchCommand(
        program=f'tune run{_ranks(plan)} {_recipe(plan)} --config "$PLAN_DIR"/{RECIPE_FILE}',
        starts_ranks=True,
        arguments={},
        placeholders=tuple(_needed_at_once(place) for place in PLACEHOLDERS),
        requirements=(
            Requirement("torch", "everything", "torch", "2.6"),
            Requirement("torchao", "packed weights", "torchao", "0.9", "pip install torchao"),
            Requirement("torchtune", "the trainer", hint="pip install torchtune"),
        ),
        environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **node_environment(plan)},
        comments=comments + "".join(f"# {line}\n" for line in promise(plan, _LOG)),
        files=(file,),
    )
    return TrainerFiles(WRITTEN_FOR, (file,), command, tuple(notes))


def _needed_at_once(place: Placeholder) -> Placeholder:
    """torchtune has no made-up data, so that every run needs every value."""
    return Placeholder(place.name, place.meaning, kind=place.kind, in_first_run=True)


def _check_expressible(plan: Plan) -> None:
    layout = plan.parallelism
    rules = (*TORCHTUNE_MODEL_RULES, BF16_ONLY, *rules_for(plan.runtime_spec))
    objections = Objections("torchtune", broken_rules(rules, plan), hint_for(plan, "torchtune", TORCHTUNE_MODEL_RULES))
    objections.when(
        builder_of(plan.model.name) is None, "model", f"it has no builder of {plan.model.name} that is known here"
    )
    objections.when(
        layout.recompute == "selective", "recompute_selective", "enable_activation_checkpointing is of whole layers"
    )
    objections.when(
        layout.recompute == "full" and not all_full(plan.best), "recompute_some_layers", "it recomputes all or none"
    )
    name = plan.best.recipe.get("optimizer", "adamw")
    objections.when(name not in OPTIMIZERS, "optimizer", f"no class for {name} is known here")
    share = plan.runtime_spec.optimizer_offload_fraction
    objections.when(share > 0, "optimizer_offload", f"its recipes keep all states or none on the host, not {share:g}")
    _, gpus, last = nodes_of(plan)
    objections.when(gpus != last, "num_gpus", f"tune run starts equally many ranks on each node, not {last}")
    objections.raise_any()


def recipe_of_plan(plan: Plan) -> dict[str, Any]:
    """The fields of the recipe; `${oc.env:…}` are OmegaConf's, which reads them from the environment."""
    layout, training, runtime = plan.parallelism, plan.training, plan.runtime_spec
    known = builder_of(plan.model.name)
    assert known is not None
    family, _ = known
    has_adapters = training.adapters is not None
    offloads = runtime.offloaded_layers > 0
    recipe: dict[str, Any] = {
        "output_dir": "${oc.env:CHECKPOINTS}",
        "tokenizer": {
            "_component_": f"torchtune.models.{family.tokenizer}",
            "path": f"${{oc.env:MODEL}}/{family.tokenizer_file}",
            **({"merges_file": f"${{oc.env:MODEL}}/{family.merges_file}"} if family.merges_file else {}),
            "max_seq_len": training.seq_length,
        },
        "model": _model(plan),
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": "${oc.env:MODEL}",
            "checkpoint_files": {
                "filename_format": "model-{}-of-{}.safetensors",
                "max_filename": "${oc.env:LAST_SHARD}",
            },
            "recipe_checkpoint": None,
            "output_dir": "${output_dir}",
            "model_type": family.model_type,
        },
        "resume_from_checkpoint": False,
        **({"save_adapter_weights_only": False} if has_adapters else {}),
        "dataset": {
            "_component_": "torchtune.datasets.instruct_dataset",
            "source": "json",
            "data_files": "${oc.env:DATASET}",
            "split": "train",
            "packed": True,
        },
        "seed": None,
        "shuffle": True,
        "batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches,
        "epochs": 1,
        "max_steps_per_epoch": _steps(plan),
        **_optimizer(plan),
        "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
        "clip_grad_norm": None,
        "compile": runtime.compiled,
        "device": "cuda",
        "dtype": "bf16",
        "enable_activation_checkpointing": layout.recompute == "full",
        "enable_activation_offloading": offloads,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": "${output_dir}/logs",
        },
        "log_every_n_steps": 1,
        "log_peak_memory_stats": True,
        "log_level": "INFO",
    }
    if layout.dp > 1:
        recipe["fsdp_reshard_after_forward"] = layout.zero_stage == 3
        recipe["data_parallel_replicate_dim"] = layout.dp // layout.shard_size
        recipe["data_parallel_shard_dim"] = layout.shard_size
    elif not has_adapters:
        recipe["optimizer_in_bwd"] = False
    return recipe


def _optimizer(plan: Plan) -> dict[str, Any]:
    """The optimizer; recipes with adapters want the schedule of its rate too."""
    name = str(plan.best.recipe.get("optimizer", "adamw"))
    has_adapters = plan.training.adapters is not None
    optimizer: dict[str, Any] = {
        "_component_": OPTIMIZERS[name],
        "lr": _ADAPTER_RATE if has_adapters else _FULL_RATE,
        **({"fused": True} if name == "adamw" else {}),
    }
    if not has_adapters:
        return {"optimizer": optimizer}
    schedule = {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 100,
    }
    return {"optimizer": optimizer, "lr_scheduler": schedule}


def _steps(plan: Plan) -> int | None:
    tokens = plan.training.tokens
    return None if tokens is None else max(1, round(tokens / plan.training.tokens_per_step))


def _model(plan: Plan) -> dict[str, Any]:
    """The builder of the model, with its adapters."""
    known, adapters = builder_of(plan.model.name), plan.training.adapters
    assert known is not None
    family, builder = known
    if adapters is None:
        return {"_component_": f"torchtune.models.{family.folder}.{builder}"}
    kind = "qlora_" if adapters.base_bits == 4 else "lora_"
    return {
        "_component_": f"torchtune.models.{family.folder}.{kind}{builder}",
        "lora_attn_modules": [theirs for name, theirs in MODULES.items() if name in adapters.modules],
        "apply_lora_to_mlp": set(MLP) <= adapters.modules,
        # models whose head is the embedding have no adapter there
        **({"apply_lora_to_output": "lm_head" in adapters.modules} if not plan.model.spec.tie_word_embeddings else {}),
        "lora_rank": adapters.rank,
        "lora_alpha": 2 * adapters.rank,
        "lora_dropout": adapters.dropout,
    }


def _recipe(plan: Plan) -> str:
    kind = "full" if plan.training.adapters is None else "lora"
    return f"{kind}_finetune_{'single_device' if plan.parallelism.dp == 1 else 'distributed'}"


def _ranks(plan: Plan) -> str:
    """Options of torchrun, which `tune run` hands on; it stands alone where no address of others is given."""
    nodes, gpus, _ = nodes_of(plan)
    if plan.parallelism.dp == 1:
        return ""
    if nodes == 1:
        return f" --nproc_per_node {gpus}"
    address = '--rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR":"$MASTER_PORT"'
    return f" --nnodes {nodes} --nproc_per_node {gpus} {address}"
