"""Files that start AMD's Primus: an experiment in YAML, and launchers that hand it to `primus-cli`."""

from __future__ import annotations

from typing import NamedTuple

import yaml

from planner.answer import Plan
from planner.export.environment import primus_environment
from planner.export.megatron.megatron_files import LOG
from planner.export.primus.primus_keys import CORE, Keys, megatron_keys, notes_on_megatron
from planner.export.primus.primus_sections import model_preset, notes_on_torchtitan, torchtitan_keys
from planner.export.run_settings import FIRST_RUN_STEPS, run_settings
from planner.export.trainer_files import (
    Arguments,
    ExportFile,
    LaunchCommand,
    Placeholder,
    RunPart,
    ShellText,
    TrainerFiles,
    TrainerVersion,
    header,
    promise,
    slug,
)

WRITTEN_FOR = "Primus 26.5"
_EXPERIMENT = "primus.yaml"
_CHECKOUT = Placeholder(
    "PRIMUS_PATH", "checkout of Primus, with its submodules", default="/workspace/Primus", kind="folder",
    in_first_run=True,
)  # fmt: skip
_DATA = Placeholder("TOKENIZED_DATA_PATH", "prefix of the tokenized data (PREFIX.bin and .idx)", kind="prefix")
_VALIDATION = Placeholder("VALIDATION_DATA_PATH", "prefix of the tokenized data for evaluation", kind="prefix")
_TOKENIZER = Placeholder("TOKENIZER", "folder of the model's tokenizer, or its name at Hugging Face")
_ASSETS = Placeholder(
    "HF_ASSETS_PATH", "folder with the model's tokenizer.json, or its name at Hugging Face, with HF_TOKEN",
    in_first_run=True,
)  # fmt: skip
_DATASET = Placeholder("DATASET_PATH", "data set at Hugging Face, or a folder in its format, with a column `text`")
_WORKSPACE = Placeholder("CHECKPOINTS", "folder for checkpoints, which all nodes share", kind="new folder")
_OUTPUT = f"${{{_WORKSPACE.name}:./output}}"
_WORK_GROUP, _USER = "planner", "plan"


def export_primus(plan: Plan) -> TrainerFiles:
    """The experiment, and the command that `primus-cli` takes it with.

    Raises Inexpressible where Primus cannot run the plan.
    """
    backend = _torchtitan(plan) if plan.runtime_spec.family == "torchtitan" else _megatron(plan)
    notes = (*run_settings(plan).notes, *backend.notes)
    comments = header(plan, WRITTEN_FOR, notes)
    file = ExportFile(_EXPERIMENT, comments + _yaml(plan, backend))
    command = LaunchCommand(
        program='bash "$PRIMUS_PATH"/runner/primus-cli direct -- train pretrain',
        starts_ranks=True,
        arguments={"--config": ShellText(f'"$PLAN_DIR"/{_EXPERIMENT}')},
        first_run=RunPart(backend.first_run),
        placeholders=(_CHECKOUT, *backend.placeholders, _WORKSPACE),
        trainer=backend.version,
        promise=promise(plan, backend.log),
        environment=primus_environment(plan),
        exit_minutes=backend.exit_minutes,
        comments=comments,
        files=(file,),
    )
    return TrainerFiles(WRITTEN_FOR, (file,), command, notes)


class _Backend(NamedTuple):
    """The parts of an experiment that its backend decides."""

    framework: str
    model: str
    overrides: Keys
    first_run: Arguments
    """Arguments of a short run on random tokens with balanced experts, which saves nothing."""
    placeholders: tuple[Placeholder, ...]
    log: str
    notes: tuple[str, ...]
    version: TrainerVersion = TrainerVersion()
    exit_minutes: str = ""


def _megatron(plan: Plan) -> _Backend:
    folder = f"{_OUTPUT}/{_WORK_GROUP}/{_USER}/{_experiment(plan)}/checkpoints"
    # Primus saves in the experiment's folder and nowhere else
    run: Keys = {
        "data_cache_path": f"{_OUTPUT}/data-cache",
        "train_data_path": f"${{{_DATA.name}:null}}",
        "valid_data_path": f"${{{_VALIDATION.name}:null}}",
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": f"${{{_TOKENIZER.name}:null}}",
        "save": folder,
        "load": folder,
    }
    first: Arguments = {
        "--mock_data": "true", "--train_iters": FIRST_RUN_STEPS, "--eval_iters": 0, "--save": "None", "--load": "None",
    }  # fmt: skip
    if plan.model.spec.moe is not None:
        first["--moe_router_force_load_balancing"] = "true"
    return _Backend(
        framework="megatron",
        # the preset that all others extend: every field of the model is written out
        model="language_model.yaml",
        overrides=megatron_keys(plan) | run,
        first_run=first,
        placeholders=(_DATA, _VALIDATION, _TOKENIZER),
        log=LOG,
        notes=notes_on_megatron(plan),
        version=TrainerVersion(
            "Megatron core",
            is_exactly=CORE,
            folder=_CHECKOUT.name,
            file="third_party/Megatron-LM/megatron/core/package_info.py",
        ),
        exit_minutes="--exit_duration_in_mins {}",
    )


def _torchtitan(plan: Plan) -> _Backend:
    keys = torchtitan_keys(plan)
    keys["model"] |= {"hf_assets_path": f"${{{_ASSETS.name}:./assets}}"}
    keys["training"] |= {"mock_data": False, "dataset": "c4", "dataset_path": f"${{{_DATASET.name}:null}}"}
    keys["job"] = {"dump_folder": f"{_OUTPUT}/{_WORK_GROUP}/{_USER}/{_experiment(plan)}"}
    first: Arguments = {
        "--training.mock_data": "true", "--training.steps": FIRST_RUN_STEPS, "--checkpoint.enable": "false",
    }  # fmt: skip
    if plan.model.spec.moe is not None:
        first["--debug.moe_force_load_balance"] = "true"
    return _Backend(
        framework="torchtitan",
        model=model_preset(plan),
        overrides=keys,
        first_run=first,
        placeholders=(_ASSETS, _DATASET),
        log="in the log: tps (tokens/s/GPU) and memory (GiB, max_memory_reserved) of each rank",
        notes=notes_on_torchtitan(plan),
    )


def _experiment(plan: Plan) -> str:
    return slug(plan.model.name)


def _yaml(plan: Plan, backend: _Backend) -> str:
    """The experiment."""
    data = {
        "work_group": _WORK_GROUP,
        "user_name": _USER,
        "exp_name": _experiment(plan),
        "workspace": _OUTPUT,
        "modules": {
            "pre_trainer": {
                "framework": backend.framework,
                "config": "pre_trainer.yaml",
                "model": backend.model,
                "overrides": backend.overrides,
            }
        },
    }
    return yaml.safe_dump(data, sort_keys=False, width=10_000, default_flow_style=False)
