"""The table of export targets: what each is called on the command line, who writes it and who reads it.

A new target is a module beside this file and a row here. Writers and readers are named as `module:function` and loaded
when they are used, so that help and completion can list the targets at no cost.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from planner.record import record

if TYPE_CHECKING:
    from planner.answer import Plan
    from planner.export.imported_run import ConfigFile, ImportedRun
    from planner.export.trainer_files import ExportFile, LaunchCommand, TrainerFiles
    from planner.specs.base import Texts


@record
class TrainerTarget:
    """A trainer whose files are written, and for some read."""

    name: str
    """The name that `--to` and `--from` take."""
    writer: str | None
    """(plan) → TrainerFiles; raises Inexpressible for a plan that the trainer cannot run. None: it is only read."""
    reader: str | None = None
    """(ConfigFile) → ImportedRun; raises SpecError for a text that is no configuration of the trainer."""
    mark: str | None = None
    """Regular expression that the trainer's configurations match and no other's do."""
    runtimes: Texts = ()
    """Names of the runtimes that are this trainer: plans of others are priced under one of them again, and a launcher
    that is exported alone starts their own plans with it."""
    recomputes: Texts | None = None
    """The modules that it can recompute by themselves; None for those that its runtime has."""

    def write(self, plan: Plan) -> TrainerFiles:
        assert self.writer is not None
        from planner.export.refusal import unstretched, with_note

        plan, note = unstretched(plan, self.runtime_for(plan))
        files: TrainerFiles = _load(self.writer)(plan)
        return with_note(files, note)

    def runtime_for(self, plan: Plan) -> str:
        """The runtime under which a plan is priced: its own, one of its family, or the first."""
        from planner.trainers.load import load_runtime

        families = {load_runtime(name).family: name for name in reversed(self.runtimes)}
        return (
            plan.runtime if plan.runtime in self.runtimes else families.get(plan.runtime_spec.family, self.runtimes[0])
        )

    def read(self, config: ConfigFile) -> ImportedRun:
        assert self.reader is not None
        imported: ImportedRun = _load(self.reader)(config)
        return imported

    def recognises(self, text: str) -> bool:
        """The text bears the mark of this trainer's configurations."""
        return self.mark is not None and re.search(self.mark, text, re.MULTILINE) is not None


@record
class LauncherTarget:
    """A program that starts a trainer on every node."""

    name: str
    """The name that `--to` takes."""
    writer: str
    """(plan, command) → ExportFile."""

    def write(self, plan: Plan, command: LaunchCommand) -> ExportFile:
        file: ExportFile = _load(self.writer)(plan, command)
        return file


def _load(reference: str) -> Callable[..., Any]:
    module, _, name = reference.partition(":")
    function: Callable[..., Any] = getattr(import_module(f"planner.export.{module}"), name)
    return function


_TRAINERS = (
    TrainerTarget(
        "megatron", "megatron.megatron_files:export_megatron", "megatron.script_reading:read_megatron",
        runtimes=("megatron",),
    ),
    TrainerTarget(
        "primus", "primus_files:export_primus", "primus_reading:read_primus",
        mark=r"^modules:\s*$(?s:.*)^  (pre|post)_trainer:\s*$|\bprimus-cli (direct|slurm|container)\b"
        r"|^\s*(export )?EXP=\S+\.ya?ml",
        runtimes=("primus-megatron", "primus-torchtitan"),
    ),
    TrainerTarget(
        "bridge", "megatron.bridge_files:export_bridge", "megatron.bridge_reading:read_bridge",
        mark=r'"overrides": \[|run_recipe\.py|run_script\.py|setup_experiment\.py|megatron\.bridge|ConfigContainer'
        r"|cfg\.model\.tensor_model_parallel"
        r"|\A(?s:(?!.*^  (model|train)_path:).*)^train:\s*$(?s:.*)^  (train_iters|global_batch_size):",
        runtimes=("bridge",),
    ),
    TrainerTarget(
        "nemo-rl", None, "automodel_reading:read_nemo_rl",
        mark=r"^policy:\s*$|\bpolicy\.(megatron_cfg|dtensor_cfg|train_(global|micro)|max_total)|nemo_rl",
    ),
    TrainerTarget(
        "automodel", None, "automodel_reading:read_automodel",
        mark=r"nemo_automodel\.|^step_scheduler:|--step_scheduler\.|\bautomodel (finetune|pretrain)\b"
        r"|examples/llm_(finetune|pretrain)/",
    ),
    TrainerTarget(
        "openrlhf", None, "huggingface.trainer_reading:read_openrlhf",
        mark=r"openrlhf\.cli\.train_|\btrain_(ppo(_ray)?|sft|dpo|rm|kto|kd)\.py\b(?s:.*)--pretrain\b",
    ),
    TrainerTarget(
        "verl", None, "verl_reading:read_verl",
        mark=r"actor_rollout_ref\.|verl\.trainer(?!\.main\b)|^actor_rollout_ref:|fsdp_sft_trainer|^  partial_pretrain:",
    ),
    TrainerTarget(
        "nemo", None, "megatron.nemo_reading:read_nemo",
        mark=r"nemo_run|MegatronStrategy|trainer\.(strategy(?![:=] ?fsdp)|num_nodes|devices)"
        r"|\A(?!(?s:.*)\bclass_path:)((?s:.*)^trainer:\s*$(?s:.*)^model:\s*$|(?s:.*)^model:\s*$(?s:.*)^trainer:\s*$)",
    ),
    TrainerTarget(
        "torchtitan", "torchtitan_files:export_torchtitan", "torchtitan_reading:read_torchtitan",
        mark=r"ParallelismConfig\([^)]*_degree|torchtitan|--parallelism\.|^\[(parallelism|activation_checkpoint)\]",
        runtimes=("torchtitan",),
    ),
    TrainerTarget(
        "roll", None, "verl_reading:read_roll", mark=r"^(actor_train|sft_train):|^    strategy_name: *\w+_train\b",
    ),
    TrainerTarget(
        "ms-swift", None, "megatron.keyed_reading:read_swift",
        mark=r"(^|\s)megatron\s+(sft|pt|rlhf)\b|swift/cli/_megatron/|Megatron\w*Arguments\(|megatron_\w+_main"
        r"|\A(?s:(?=.*^(tuner_type|max_length|recompute_granularity):)(?=.*^(micro|global)_batch_size:)(?=.*^model:))",
    ),
    TrainerTarget(
        "slime", None, "megatron.keyed_reading:read_slime", mark=r"--(rollout-\w|actor-num-\w|prompt-data\b)",
    ),
    TrainerTarget(
        "neox", None, "megatron.keyed_reading:read_neox",
        mark=r"[\"'](pipe[-_]parallel[-_]size|model[-_]parallel[-_]size|pos[-_]emb|rotary[-_]pct)[\"']\s*:"
        r"|^(pipe_parallel_size|gpt_j_residual|rotary_pct|no_weight_tying):",
    ),
    TrainerTarget(
        "torch", "torch_runner:export_torch", "torch_runner:read_torch",
        mark=r"^stage_to_rank:", runtimes=("torch-eager",), recomputes=("core_attn", "mlp", "moe", "shared_experts"),
    ),
    TrainerTarget(
        "hf", "huggingface.trl_files:export_hf", "huggingface.trainer_reading:read_trainer", runtimes=("hf",),
    ),
    TrainerTarget(
        "torchtune", None, "huggingface.trainer_reading:read_torchtune",
        mark=r"_component_: torchtune\.|^[^#\n]*\btune run\b",
    ),
    TrainerTarget(
        "accelerate", None, "huggingface.tuning_settings:read_accelerate",
        mark=r"^(compute_environment|distributed_type):",
    ),
    TrainerTarget(
        "huggingface", None, "huggingface.trainer_reading:read_trainer",
        mark=r"per[_-]device[_-]train[_-]batch[_-]size|^(model_class|finetuning_type|infer_backend|export_dir):|TrainingArguments\("
        r"|(SFT|DPO|KTO|ORPO|CPO|GRPO|RLOO|Reward)(Config|Trainer)\(|--model_name_or_path|^base_model:|Fast(Language|Vision)?Model\."
        r"|accelerate launch|\"peft_type\":|\b(swift|trl)\s+(sft|pt|rlhf|dpo|grpo|kto)\b"
        r"|llamafactory-cli train|swift/cli/|\baxolotl(\.cli\.train| train)\b",
    ),
    TrainerTarget(
        "deepspeed", "huggingface.deepspeed_files:export_deepspeed", "huggingface.deepspeed_files:read_deepspeed",
        mark=r'\A\s*\{(?s:.*)"(zero_optimization|train_micro_batch_size_per_gpu|train_batch_size)"',
        runtimes=("deepspeed",),
    ),
)  # fmt: skip
_LAUNCHERS = (
    LauncherTarget("torchrun", "launchers:torchrun_script"),
    LauncherTarget("slurm", "launchers:slurm_script"),
    LauncherTarget("kubernetes", "launchers:kubernetes_manifest"),
    LauncherTarget("kubernetes-jobset", "launchers:jobset_manifest"),
)

TRAINERS = {trainer.name: trainer for trainer in _TRAINERS if trainer.writer is not None}
LAUNCHERS = {launcher.name: launcher for launcher in _LAUNCHERS}
TARGETS = (*TRAINERS, *LAUNCHERS)
"""Names for `--to`."""
ALSO_CALLED = {
    **dict.fromkeys(("trl", "huggingface", "transformers", "accelerate"), "hf"),
    **dict.fromkeys(("nemo", "megatron-bridge"), "bridge"), "megatron-lm": "megatron",
}  # fmt: skip
"""Trainers around a target, or its name in full, and the target."""
READERS = {trainer.name: trainer for trainer in _TRAINERS if trainer.reader is not None}
SOURCES = tuple(READERS)
"""Names for `--from`."""
UNMARKED = "megatron"
"""The trainer of a configuration without a mark: a launch script of Megatron-LM has nothing that others lack."""
