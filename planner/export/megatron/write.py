"""Files that start Megatron-LM: options as YAML, and launchers that pass the same ones."""

from __future__ import annotations

from typing import Any

import yaml

from planner.answer import Plan
from planner.export.common.arguments import Arguments
from planner.export.common.header import header
from planner.export.common.target_price import notes_on_price
from planner.export.common.trainer_files import ExportFile, LaunchCommand, TrainerFiles
from planner.export.megatron.arguments import megatron_arguments, written_for
from planner.export.megatron.model import ROTARY_BASE, rotary_base
from planner.export.megatron.recipe import environment

_OPTIONS_FILE = "megatron.yaml"


def export_megatron(plan: Plan) -> TrainerFiles:
    """`MODEL_ARGS` and `ENV_VARS` as Megatron's own CI writes them, and the command that passes the same arguments.

    Raises Inexpressible where Megatron-LM cannot run the plan.
    """
    arguments = megatron_arguments(plan)
    notes = (
        "data (--mock-data), learning rate and number of steps are placeholders: append yours to the launcher",
        "MEGATRON_PATH names a checkout of Megatron-LM; without it the current folder is one",
        *notes_on_options(plan),
    )
    comments = header(plan, written_for(plan), notes)
    command = LaunchCommand(
        program='"$MEGATRON_PATH"/pretrain_gpt.py',
        arguments=arguments,
        environment=environment(plan),
        setup=('export MEGATRON_PATH="${MEGATRON_PATH:-$PWD}"', *_version_check(plan.runtime_spec.version)),
        comments=comments,
    )
    file = ExportFile(_OPTIONS_FILE, comments + _options_yaml(arguments, command.environment))
    return TrainerFiles(written_for(plan), (file,), command, notes)


def _version_check(version: str) -> tuple[str, ...]:
    """A shell line that ends the launch where the checkout is of another version than the one asked for."""
    if not version:
        return ()
    code = (
        "import runpy, sys; "
        'found = runpy.run_path(sys.argv[1])["__version__"]; '
        f'sys.exit(None if found.startswith("{version}.") else '
        f'f"the options are for Megatron core {version}, MEGATRON_PATH holds {{found}}")'
    )
    return (f"NO_VCS_VERSION=1 python3 -c '{code}' \"$MEGATRON_PATH\"/megatron/core/package_info.py",)


def _options_yaml(arguments: Arguments, variables: dict[str, str]) -> str:
    """Options as `ENV_VARS:` and `MODEL_ARGS:`; a bare flag is true, several words are a list."""
    data: dict[str, Any] = {
        "ENV_VARS": {name: _scalar(value) for name, value in variables.items()},
        "MODEL_ARGS": {
            option: list(value) if isinstance(value, tuple) and len(value) > 1 else _scalar(value)
            for option, value in arguments.items()
        },
    }
    return yaml.safe_dump(data, sort_keys=False, width=10_000, default_flow_style=False)


def _scalar(value: Any) -> Any:
    """A value as YAML has it: text of digits is a number, a tuple stands for its only word."""
    if isinstance(value, tuple):
        return value[0]
    return int(value) if isinstance(value, str) and value.isdigit() else value


def notes_on_options(plan: Plan) -> tuple[str, ...]:
    """Notes on the options of Megatron-LM, whoever passes them."""
    runtime, notes = plan.runtime_spec, []
    if plan.model.spec.position_embedding == "rope" and rotary_base(plan.model.spec) is None:
        notes.append(f"the model spec states no rope_theta: --rotary-base {ROTARY_BASE} is Megatron's default")
    if (
        plan.parallelism.zero_stage >= 1
        and runtime.parameter_overlap_fraction
        and not runtime.gradient_overlap_fraction
    ):
        notes.append("gathers of parameters were planned behind compute, which it does only where reductions are, too")
    if plan.parallelism.num_gpus_spare:
        notes.append(f"{plan.parallelism.num_gpus_spare} GPUs stay unused")
    return (*notes, *notes_on_price(plan))
