"""The options of a fine-tuning: adapters, and what stands in for what such a job does not say."""

from __future__ import annotations

from planner.cli.job_options import JobOptions
from planner.errors import SpecError
from planner.specs.finetuning import OBJECTIVES, AdapterSpec, ObjectiveSpec
from planner.specs.problems import checked
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import Recipe, stated_switches

RUNTIME, SEQ_LENGTH, GLOBAL_BATCH_SIZE = "hf", 2048, 16
"""Trainer, tokens of a sequence and sequences of a step where a job with adapters does not say them."""
_FIELDS = {"rank": "lora_rank", "dropout": "lora_dropout", "base_bits": "base_bits"}


def read_optimizer(asked: JobOptions, runtime: RuntimeSpec) -> Recipe:
    """The switch that --optimizer pins. SpecError naming the option for one that the trainer does not have."""
    if asked.optimizer is None:
        return {}
    if "," in asked.optimizer:
        raise SpecError(f"--optimizer: {asked.optimizer[:60]!r} is more than one", "--optimizer adamw")
    try:
        stated = stated_switches(f"optimizer={asked.optimizer}", runtime, "--optimizer")
    except SpecError as error:
        error.hint = error.hint.replace("optimizer=", "--optimizer ")
        raise
    return stated if isinstance(stated, dict) else {}


def read_objective(asked: JobOptions, adapters: AdapterSpec | None) -> ObjectiveSpec:
    """The objective that the options ask for; its reference is the model without its adapters where it has any."""
    name, reference = asked.objective or "lm", asked.reference
    known = OBJECTIVES.get(name)
    if reference is not None and known is not None and not known.reference_forwards:
        raise SpecError(f"--reference: {name} has no reference model", "--objective dpo has one")
    if reference == "adapters" and adapters is None:
        raise SpecError("--reference adapters: no adapters are trained", "add --lora, or --reference model")
    values = {"name": name, "reference": reference or ("model" if adapters is None else "adapters")}
    return checked(ObjectiveSpec, values, spelling={"name": "--objective", "reference": "--reference"})


def read_adapters(asked: JobOptions) -> AdapterSpec | None:
    """The adapters that the options ask for; None where all weights are trained. SpecError names the option."""
    given = {field: value for field, name in _FIELDS.items() if (value := getattr(asked, name)) is not None}
    if asked.lora_targets is not None:
        given["targets"] = tuple(part.strip() for part in asked.lora_targets.split(",", 100))
    if asked.qlora:
        if given.get("base_bits", 4) != 4:
            raise SpecError(f"--qlora and --base-bits {given['base_bits']}: weights of 4 bits", "--lora")
        given["base_bits"] = 4
    if not (asked.lora or asked.qlora or given):
        return None
    spelling = {field: f"--{name.replace('_', '-')}" for field, name in (*_FIELDS.items(), ("targets", "lora_targets"))}
    return checked(AdapterSpec, given, spelling=spelling)
