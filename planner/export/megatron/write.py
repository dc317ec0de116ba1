"""Files that start Megatron-LM: options as YAML, and launchers that pass the same ones."""

from __future__ import annotations

from typing import Any

import yaml

from planner.answer import Plan
from planner.export.common.arguments import Arguments, ShellText
from planner.export.common.header import header
from planner.export.common.model import notes_on_model
from planner.export.common.promise import promise
from planner.export.common.run_settings import run_settings
from planner.export.common.target_price import notes_on_price
from planner.export.common.trainer_files import (
    ExportFile,
    LaunchCommand,
    Part,
    Placeholder,
    TrainerFiles,
    TrainerVersion,
)
from planner.export.megatron.arguments import NEWEST, megatron_arguments, written_for
from planner.export.megatron.environment import environment
from planner.export.megatron.requirements import requirements
from planner.export.megatron.run_options import PLACEHOLDERS, first_run_arguments, training_arguments
from planner.trainers.rules.megatron_core import NEW_QUERY_NORM_SINCE, norms_queries_twice

_OPTIONS_FILE = "megatron.yaml"
_CHECKOUT = Placeholder("MEGATRON_PATH", "checkout of Megatron-LM", default="$PWD", kind="folder", in_first_run=True)
LOG = (
    "in the log: elapsed time per iteration (ms), throughput per GPU (TFLOP/s/GPU), and after 2 iterations "
    "max allocated (MB) of the first rank of each stage"
)


def export_megatron(plan: Plan) -> TrainerFiles:
    """`MODEL_ARGS` and `ENV_VARS` as Megatron's own CI writes them, and the command that passes the same arguments.

    Raises Inexpressible where Megatron-LM cannot run the plan.
    """
    arguments = megatron_arguments(plan)
    notes = (*run_settings(plan).notes, *notes_on_options(plan))
    comments = header(plan, written_for(plan), notes)
    version = plan.runtime_spec.version
    training = Part(training_arguments(plan))
    command = LaunchCommand(
        program='"$MEGATRON_PATH"/pretrain_gpt.py',
        arguments=arguments,
        first_run=Part(first_run_arguments(plan)),
        training_run=training,
        placeholders=(_CHECKOUT, *PLACEHOLDERS),
        requirements=tuple(requirements(arguments, plan.cluster.hardware.is_amd)),
        trainer=TrainerVersion(
            "Megatron core",
            is_exactly=version,
            at_least="" if version else NEWEST,
            folder=_CHECKOUT.name,
            file="megatron/core/package_info.py",
        ),
        promise=promise(plan, LOG),
        environment=environment(plan),
        setup=('export PYTHONPATH="$MEGATRON_PATH${PYTHONPATH:+:$PYTHONPATH}"',),
        exit_minutes="--exit-duration-in-mins {}",
        comments=comments,
    )
    text = comments + _options_yaml(arguments | training.arguments, command.environment)
    return TrainerFiles(written_for(plan), (ExportFile(_OPTIONS_FILE, text),), command, notes)


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
    """A value as YAML has it: text of digits is a number, a tuple stands for its only word, a variable is `${NAME}`."""
    if isinstance(value, tuple):
        return value[0]
    if isinstance(value, ShellText):
        return value.unquoted
    return int(value) if isinstance(value, str) and value.isdigit() else value


def notes_on_options(plan: Plan) -> tuple[str, ...]:
    """Notes on the options of Megatron-LM, whoever passes them."""
    runtime, notes = plan.runtime_spec, notes_on_model(plan.model.spec)
    if norms_queries_twice(plan.model.spec, runtime.version):
        notes.append(
            f"since Megatron core {NEW_QUERY_NORM_SINCE} the layer's input is normed once more before queries that are "
            "not latent: a norm that the published model does not have"
        )
    if (
        plan.parallelism.zero_stage >= 1
        and runtime.parameter_overlap_fraction
        and not runtime.gradient_overlap_fraction
    ):
        notes.append("gathers of parameters were planned behind compute, which it does only where reductions are, too")
    if plan.parallelism.num_gpus_spare:
        notes.append(f"{plan.parallelism.num_gpus_spare} GPUs stay unused")
    return (*notes, *notes_on_price(plan))
