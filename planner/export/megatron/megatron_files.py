"""A plan as files that start Megatron-LM: its arguments, its refusals, options as YAML, and what launchers pass."""

from __future__ import annotations

import json
import math

import numpy as np

from planner.answer import Plan
from planner.export.launchers import megatron_environment
from planner.export.megatron.model_options import model_arguments
from planner.export.megatron.option_rows import holds, options_of, sections_of, table
from planner.export.megatron.plan_options import (
    GRID,
    KERNELS,
    RECOMPUTE,
    SWITCH_OPTIONS,
    has_published_scales,
    is_fsdp,
    precision,
    switch_arguments,
)
from planner.export.refusal import notes_on_price
from planner.export.run_settings import notes_on_model, run_settings
from planner.export.spelling import broken_rules_of_recipe, recipe_of, unspelled
from planner.export.stages import check_expressible, virtual_stages
from planner.export.trainer_files import (
    IMAGE_OF_AMD,
    Arguments,
    ExportFile,
    LaunchCommand,
    Requirement,
    RunPart,
    TrainerFiles,
    TrainerVersion,
    argv,
    as_yaml,
    header,
    notes_of,
    placeholders_of,
    plain,
    promise,
    requirements_of,
)
from planner.specs.base import Named, Texts
from planner.trainers.load import since_of
from planner.trainers.rules.facts import is_hybrid, norms_queries_twice, release
from planner.trainers.rules.recipe import rules_for
from planner.trainers.rules.rule_rows import Rule, rules_of

_RUN = sections_of("run", {})


def _of_run(plan: Plan, *names: str) -> Arguments:
    """The arguments of sections of the run's options."""
    run = run_settings(plan)
    rows: Arguments = {}
    for name in names:
        rows |= _RUN[name].written(run, plan.runtime_spec.version)
    return rows


def run_arguments(plan: Plan) -> Arguments:
    """The options of every run: optimizer, schedule of its rate, logs, timeouts."""
    at_once = run_settings(plan).optimizer.decay_fraction == 1
    return _of_run(plan, "schedule", "falls_at_once" if at_once else "falls_at_the_end", "every_run")


def training_arguments(plan: Plan) -> Arguments:
    """The options that only training has: length, data, checkpoints, evaluation."""
    multiple = plan.runtime_spec.vocab_divisible_by * plan.parallelism.tp
    # a tokenizer with fewer words would make a smaller embedding
    rows = {"--padded-vocab-size": multiple * math.ceil(plan.model.spec.vocab_size / multiple)}
    return _of_run(plan, "training", *([] if is_fsdp(plan) else ["asynchronous_saves"])) | rows


def first_run_arguments(plan: Plan) -> Arguments:
    """The options of a short run on random tokens with balanced experts, as the plan prices them."""
    return _of_run(plan, "first_run", *([] if plan.model.spec.moe is None else ["balanced"]))


def _texts_of_a_run(plan: Plan) -> tuple[Arguments, Arguments]:
    """Options of a first run and of training on packed texts: lengths as planned, and the tokenizer of conversations.

    Its older dataset of texts (`--sft`) has conversations alone.
    """
    if plan.runtime_spec.dynamic_cp == "texts":
        return {}, {"--tokenizer-type": "SFTTokenizer", "--sft-tokenizer-prompt-format": "default"}
    texts = plan.training.document_lengths if plan.runtime_spec.dynamic_cp else None
    if not texts:
        return {}, {}
    lengths, shares = [text.length for text in texts], [text.share for text in texts]
    mean, square = (np.average(np.power(lengths, power, dtype=float), weights=shares) for power in (1, 2))
    spread = {
        "mode": "distribution",
        "type": "lognormal",
        "lognormal_sigma": round(math.log(square / mean**2) ** 0.5, 3),
    }
    drawn = {**spread, "min_seq_len": min(lengths), "max_seq_len": max(lengths), "mean_seq_len": round(mean)}
    return {"--varlen-mock-dataset-config-json": json.dumps(drawn)}, {}


NEWEST = "0.20"
_SCHEDULES = ("1f1b", "interleaved-1f1b", "none")
_RECOMPUTABLE = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


def written_for(plan: Plan) -> str:
    """Megatron-LM and the version that the arguments are for."""
    return f"Megatron-LM core {plan.runtime_spec.version or _least_version(plan) + '.0'}"


def megatron_arguments(
    plan: Plan,
    target: str = "megatron",
    of_model: tuple[Rule, ...] | None = None,
    own_schedules: Texts = (),
) -> Arguments:
    """All arguments of `pretrain_gpt.py` or `pretrain_hybrid.py` but for data, length and checkpoints.

    Another target puts them into its own words, under its own rules, and says by itself what its own schedules need.

    Raises Inexpressible with every reason where Megatron-LM cannot run the plan as it is.
    """
    stages = virtual_stages(plan)
    named = "export bridge" if target == "bridge" else "export megatron"
    rules = rules_of(named, runtime=plan.runtime_spec) if of_model is None else of_model
    runtime = plan.runtime_spec
    check_expressible(
        plan, target, rules, rules_for(runtime), stages, rows="megatron",
        more=broken_rules_of_recipe(plan) + unspelled(plan, SWITCH_OPTIONS, "Megatron core"),
        written_for=written_for(plan), schedules=(*_SCHEDULES, *own_schedules), own_schedules=own_schedules,
        recomputable=_RECOMPUTABLE,
    )  # fmt: skip
    return {
        **model_arguments(plan.model.spec, plan.training.seq_length, runtime.vocab_divisible_by, runtime.dropout),
        **GRID.written(plan),
        **precision(plan),
        **RECOMPUTE.written(plan),
        **KERNELS.written(plan),
        **switch_arguments(plan),
        **run_arguments(plan),
    }


def requirements(arguments: Arguments, is_amd: bool = False) -> tuple[Requirement, ...]:
    """The packages that the options need; on AMD GPUs they are builds for ROCm under the same names."""
    options, engine = options_of(argv(arguments)), table()["transformer_engine"]
    asked = [clause for clause in engine if all(holds(part, options) for part in clause.split(" and "))]
    newest = max(asked, key=lambda clause: release(engine[clause]), default="")
    names = {"arguments": arguments, "is_amd": is_amd, "image": IMAGE_OF_AMD}
    return requirements_of("megatron", None, engine=newest, engine_release=engine.get(newest), **names)


def _least_version(plan: Plan) -> str:
    """The version that the options are read from, or a later one with which a value of a switch came."""
    came = (since_of(plan.runtime_spec, *choice) for choice in recipe_of(plan, SWITCH_OPTIONS).items())
    return max(NEWEST, *came, key=release)


_OPTIONS_FILE = "megatron.yaml"
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
    of_first_run, of_training = _texts_of_a_run(plan)
    training = RunPart(training_arguments(plan) | of_training)
    command = LaunchCommand(
        program=f'"$MEGATRON_PATH"/pretrain_{"hybrid" if is_hybrid(plan.model.spec) else "gpt"}.py',
        arguments=arguments,
        first_run=RunPart(first_run_arguments(plan) | of_first_run),
        training_run=training,
        placeholders=placeholders_of("megatron"),
        requirements=requirements(arguments, plan.cluster.hardware.is_amd),
        trainer=TrainerVersion(
            "Megatron core",
            is_exactly=version,
            at_least="" if version else _least_version(plan),
            folder="MEGATRON_PATH",
            file="megatron/core/package_info.py",
        ),
        promise=promise(plan, LOG),
        environment=megatron_environment(plan),
        setup=('export PYTHONPATH="$MEGATRON_PATH${PYTHONPATH:+:$PYTHONPATH}"',),
        exit_minutes="--exit-duration-in-mins {}",
        comments=comments,
    )
    text = comments + _options_yaml(arguments | training.arguments, command.environment)
    return TrainerFiles(written_for(plan), (ExportFile(_OPTIONS_FILE, text),), command, notes)


def _options_yaml(arguments: Arguments, variables: Named) -> str:
    """Options as `ENV_VARS:` and `MODEL_ARGS:`; a bare flag is true, several words are a list."""
    data = {
        "ENV_VARS": {name: plain(value) for name, value in variables.items()},
        "MODEL_ARGS": {
            option: value[0] if isinstance(value, tuple) and len(value) == 1 else plain(value)
            for option, value in arguments.items()
        },
    }
    return as_yaml(data)


def notes_on_options(plan: Plan) -> Texts:
    """Notes on the options of Megatron-LM, whoever passes them."""
    names = {"norms_queries_twice": norms_queries_twice, "has_published_scales": has_published_scales(plan)}
    notes = [*notes_on_model(plan.model.spec), *notes_of("megatron", plan, **names)]
    return (*notes, *notes_on_price(plan))
