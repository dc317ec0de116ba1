"""The options that describe a job; `job_options` gives them to every command that plans or prices one.

    @job_options
    def plan_command(ctx: typer.Context, asked: SearchOptions, json: o.Json = False) -> None:

A command declares one parameter of one of these classes, and typer sees the fields of the class in its place. What was
not given is None, or False for a flag.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

from planner.cli import options as o

_PANELS = (o.JOB, o.FINETUNE, o.RUN, o.LAYOUT, o.SEARCH, o.ASSUMED, o.FOLLOW, o.OUTPUT)
"""The order of a command's headings in its help."""
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """A job: a model, the GPUs, the training, and the assumptions made otherwise."""

    model: o.Model = None
    gpus: o.Gpus = None
    nodes: o.Nodes = None
    hardware: o.Hardware = None
    gpus_per_node: o.GpusPerNode = None
    tier: o.Tier = None
    network: o.Network = None
    host: o.Host = None
    seq_length: o.SeqLength = None
    global_batch_size: o.GlobalBatchSize = None
    batch_tokens: o.BatchTokens = None
    images: o.Images = None
    dtype: o.Dtype = None
    runtime: o.Runtime = None
    finetune: o.Finetune = False
    lora: o.Lora = False
    qlora: o.Qlora = False
    lora_rank: o.LoraRank = None
    lora_targets: o.LoraTargets = None
    lora_dropout: o.LoraDropout = None
    base_bits: o.BaseBits = None
    optimizer: o.Optimizer = None
    objective: o.Objective = None
    reference: o.Reference = None
    example_lengths: o.ExampleLengths = None
    batching: o.Batching = None
    examples: o.Examples = None
    epochs: o.Epochs = None
    tokens: o.Tokens = None
    storage_gb_per_s: o.Storage = None
    failures_per_1000_gpu_days: o.Failures = None
    spares: o.Spares = None
    usd_per_gpu_hour: o.Price = None
    moe_imbalance: o.Imbalance = None
    straggler_fraction: o.Straggler = None
    assume: o.Assume = None
    calibration: o.Calibration = None
    no_history: o.NoHistory = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions(JobOptions):
    """A job whose layout is searched: axes pinned by comma lists, and how to search."""

    tp: o.Tps = None
    pp: o.Pps = None
    dp: o.Dps = None
    cp: o.Cps = None
    ep: o.Eps = None
    etp: o.Etps = None
    vpp: o.Vpps = None
    micro_batch_size: o.MicroBatchSizes = None
    schedule: o.Schedules = None
    zero_stage: o.ZeroStages = None
    shard_size: o.ShardSizes = None
    rank_order: o.RankOrders = None
    recompute: o.Recomputes = None
    switch: o.Switch = None
    allow: o.Allow = None
    top: o.Top = None
    time_limit: o.TimeLimit = None
    fastest: o.Fastest = False
    tp_across_nodes: o.TpAcrossNodes = False
    oom_risk: o.OomRisk = None
    memory_headroom: o.Headroom = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(SearchOptions):
    """A job whose layout is searched, or one that runs and goes on with other GPUs, or a run of phases."""

    from_: o.From = None
    keep: o.Keep = None
    phases: o.Phases = None
    days: o.Days = None
    usd: o.Usd = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions(JobOptions):
    """A job whose layout is given."""

    tp: o.Tp = None
    pp: o.Pp = None
    dp: o.Dp = None
    cp: o.Cp = None
    ep: o.Ep = None
    etp: o.Etp = None
    vpp: o.Vpp = None
    micro_batch_size: o.MicroBatchSize = None
    schedule: o.Schedule = None
    zero_stage: o.ZeroStage = None
    fsdp: o.Fsdp = None
    sequence_parallel: o.SequenceParallel = None
    rank_order: o.RankOrder = None
    recompute: o.Recompute = None
    recompute_modules: o.RecomputeModules = None
    recompute_num_layers: o.RecomputeLayers = None
    layers_per_stage: o.LayersPerStage = None
    layout: o.LayoutString = None
    switch: o.Described = None


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: its parameter of a class of options stands for the fields of that class."""
    own = inspect.signature(command, eval_str=True).parameters
    (name,) = (parameter.name for parameter in own.values() if is_dataclass(parameter.annotation))
    options_class = own[name].annotation
    hints, options = get_type_hints(options_class, include_extras=True), fields(options_class)
    shared = [
        inspect.Parameter(field.name, _KEYWORD, default=field.default, annotation=hints[field.name])
        for field in options
    ]
    rest = [parameter.replace(kind=_KEYWORD) for parameter in own.values()]
    at = [*own].index(name)

    @wraps(command)
    def run(**values: Any) -> None:
        asked = options_class(**{field.name: values.pop(field.name) for field in options})
        command(**values, **{name: asked})

    _declare(run, [*rest[:at], *shared, *rest[at + 1 :]])
    return run


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command of a job, with the headings of its help in one order, under each first the options that jobs share."""
    own, run = inspect.signature(command).parameters, with_options(command)
    parameters = inspect.signature(run).parameters.values()
    _declare(run, sorted(parameters, key=lambda parameter: (_panel(parameter), parameter.name in own)))
    run.is_of_a_job = True  # type: ignore[attr-defined]
    return run


def _declare(run: Callable[..., None], parameters: list[inspect.Parameter]) -> None:
    """Give a function the parameters that typer shall see."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def command_line(asked: JobOptions, command: str = "plan") -> str:
    """The words that give `command` these options; a shell takes them as they are."""
    hints, words = get_type_hints(type(asked), include_extras=True), command.split()
    for field in fields(asked):
        value = getattr(asked, field.name)
        if value is None or value is False:
            continue
        option = hints[field.name].__metadata__[0].default  # typer keeps an option's first name there
        words += [option] if value is True else [option, str(value)]
    return shlex.join(words)


def _panel(parameter: inspect.Parameter) -> int:
    """Place in the help of the heading that an option stands under; an argument stands before all."""
    options = getattr(parameter.annotation, "__metadata__", ())
    panels = (option.rich_help_panel for option in options)
    return max((_PANELS.index(panel) for panel in panels if panel in _PANELS), default=-1)
