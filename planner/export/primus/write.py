"""Files that start AMD's Primus: an experiment in YAML, and launchers that hand it to `primus-cli`."""

from __future__ import annotations

import yaml

from planner.answer import Plan
from planner.export.common.arguments import ShellText
from planner.export.common.header import header, slug
from planner.export.common.promise import promise
from planner.export.common.run_settings import FIRST_RUN_STEPS, run_settings
from planner.export.common.trainer_files import (
    ExportFile,
    LaunchCommand,
    Part,
    Placeholder,
    TrainerFiles,
    TrainerVersion,
)
from planner.export.megatron.write import LOG
from planner.export.primus.environment import environment
from planner.export.primus.keys import Keys
from planner.export.primus.megatron import CORE, megatron_keys, notes_on_megatron

WRITTEN_FOR = "Primus 26.5"
_EXPERIMENT = "primus.yaml"
_CHECKOUT = Placeholder(
    "PRIMUS_PATH", "checkout of Primus, with its submodules", default="/workspace/Primus", kind="folder",
    in_first_run=True,
)  # fmt: skip
_DATA = Placeholder("TOKENIZED_DATA_PATH", "prefix of the tokenized data (PREFIX.bin and .idx)", kind="prefix")
_VALIDATION = Placeholder("VALIDATION_DATA_PATH", "prefix of the tokenized data for evaluation", kind="prefix")
_TOKENIZER = Placeholder("TOKENIZER", "folder of the model's tokenizer, or its name at Hugging Face")
_WORKSPACE = Placeholder("CHECKPOINTS", "folder for checkpoints, which all nodes share", kind="new folder")
_OUTPUT = f"${{{_WORKSPACE.name}:./output}}"
_WORK_GROUP, _USER = "planner", "plan"


def export_primus(plan: Plan) -> TrainerFiles:
    """The experiment, and the command that `primus-cli` takes it with.

    Raises Inexpressible where Primus cannot run the plan.
    """
    notes = (*run_settings(plan).notes, *notes_on_megatron(plan))
    comments = header(plan, WRITTEN_FOR, notes)
    file = ExportFile(_EXPERIMENT, comments + _yaml(plan, megatron_keys(plan) | _training_keys(plan)))
    command = LaunchCommand(
        program='bash "$PRIMUS_PATH"/runner/primus-cli direct -- train pretrain',
        starts_ranks=True,
        arguments={"--config": ShellText(f'"$PLAN_DIR"/{_EXPERIMENT}')},
        first_run=_first_run(plan),
        placeholders=(_CHECKOUT, _DATA, _VALIDATION, _TOKENIZER, _WORKSPACE),
        trainer=TrainerVersion(
            "Megatron core",
            is_exactly=CORE,
            folder=_CHECKOUT.name,
            file="third_party/Megatron-LM/megatron/core/package_info.py",
        ),
        promise=promise(plan, LOG),
        environment=environment(plan),
        exit_minutes="--exit_duration_in_mins {}",
        comments=comments,
        files=(file,),
    )
    return TrainerFiles(WRITTEN_FOR, (file,), command, notes)


def _experiment(plan: Plan) -> str:
    return slug(plan.model.name)


def _training_keys(plan: Plan) -> Keys:
    """Data, tokenizer and checkpoints, which Primus keeps in the experiment's folder and nowhere else."""
    folder = f"{_OUTPUT}/{_WORK_GROUP}/{_USER}/{_experiment(plan)}/checkpoints"
    return {
        "data_cache_path": f"{_OUTPUT}/data-cache",
        "train_data_path": f"${{{_DATA.name}:null}}",
        "valid_data_path": f"${{{_VALIDATION.name}:null}}",
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": f"${{{_TOKENIZER.name}:null}}",
        "save": folder,
        "load": folder,
    }


def _first_run(plan: Plan) -> Part:
    """Arguments of a short run on random tokens with balanced experts, which saves nothing."""
    arguments: Keys = {
        "--mock_data": "true",
        "--train_iters": FIRST_RUN_STEPS,
        "--eval_iters": 0,
        "--save": "None",
        "--load": "None",
    }
    if plan.model.spec.moe is not None:
        arguments["--moe_router_force_load_balancing"] = "true"
    return Part(arguments)


def _yaml(plan: Plan, overrides: Keys) -> str:
    """The experiment. Its model is the preset that all others extend; every field of the model is written out."""
    data = {
        "work_group": _WORK_GROUP,
        "user_name": _USER,
        "exp_name": _experiment(plan),
        "workspace": _OUTPUT,
        "modules": {
            "pre_trainer": {
                "framework": "megatron",
                "config": "pre_trainer.yaml",
                "model": "language_model.yaml",
                "overrides": overrides,
            }
        },
    }
    return yaml.safe_dump(data, sort_keys=False, width=10_000, default_flow_style=False)
