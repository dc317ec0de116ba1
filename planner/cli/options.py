"""Options that several commands share, each declared once; defaults stand in brackets in their help.

No option has a default here: a command must be able to tell what was given from what was not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

import typer

from planner.errors import SpecError
from planner.rank_orders import RANK_ORDERS
from planner.specs.shipped import DEFAULT_HARDWARE as DEFAULT_HARDWARE
from planner.specs.shipped import hardware_names, model_names
from planner.specs.units import EXAMPLE, UNITS, parse_number, parse_whole, unit_of
from planner.trainers.shipped import RUNTIMES

DEFAULT_RUNTIME = "megatron"
JOB, LAYOUT, SEARCH, ASSUMED, OUTPUT = "What to train, on what", "Layout", "Search", "Assumptions", "Output"
FINETUNE = "Fine-tuning"
RUN = "The whole run, with --tokens"
FOLLOW = "A log that grows, with --follow"
SECTIONS = (
    "sure", "seconds", "alternatives", "robust", "room", "changes", "memory", "timeline", "recipe", "months",
    "rejected", "proof", "corrections", "assumptions", "warnings",
)  # fmt: skip
"""Sections of an answer, for --show."""


def starting_with(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """A shell completion that offers those of `names` that begin as the word does."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def completing_list(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """The same for the last word of a comma list."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


def _with_aliases(names: Callable[[], dict[str, tuple[str, ...]]]) -> Callable[[], list[str]]:
    return lambda: [name for canonical, aliases in names().items() for name in (canonical, *aliases)]


def complete_switch(incomplete: str) -> list[str]:
    """Switches for the last word of a comma list, and after its = the values of the switch."""
    from planner.trainers.switches import SWITCHES, written

    before, comma, last = incomplete.rpartition(",")
    name, is_named, value = last.partition("=")
    if is_named:
        values = SWITCHES[name].values if name in SWITCHES else ()
        words = [f"{name}={written(each)}" for each in values if written(each).startswith(value)]
    else:
        words = [f"{each}=" for each in SWITCHES if each.startswith(last)] + ["default"] * "default".startswith(last)
    return [f"{before}{comma}{word}" for word in words]


DTYPES = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
SCHEDULES = (
    "none", "gpipe", "1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min",
    "dualpipe", "dualpipe-v", "chimera", "pipedream-2bw", "forward-only", "auto",
)  # fmt: skip
"""The words that shells complete for --dtype and --schedule: those of `Dtype` and the schedules, which load longer."""
complete_model = starting_with(_with_aliases(model_names))
complete_hardware = starting_with(_with_aliases(hardware_names))


def text(panel: str, names: str, metavar: str | None, what: str, **more: Any) -> Any:
    """An option that takes text that is not empty, or a flag where `metavar` is None."""
    if metavar is not None and "parser" not in more:
        more["parser"] = partial(_not_empty, names.split()[0])
    return typer.Option(*names.split(), metavar=metavar, help=what, show_default=False, rich_help_panel=panel, **more)


def _not_empty(name: str, word: str) -> str:
    """An empty word is a variable of a script that was never set, and means no default."""
    if not word:
        raise SpecError(f"{name}: is empty", f"give it a value, or leave {name} out")
    return word


def number(
    panel: str, names: str, what: str, metavar: str = "N", convert: Callable[[str], Any] = int, unit: str = ""
) -> Any:
    """An option that takes one number, written as `planner.specs.units` has it."""
    name, kind = names.split()[0], "whole number" if convert is int else "number"
    unit = unit or unit_of(name.removeprefix("--").replace("-", "_"))

    def parse(word: Any) -> Any:
        if not isinstance(word, str):  # the default of an option that was not given
            return word
        try:
            if convert is int:
                return parse_whole(word, unit)
            return float(parse_number(word, unit)) if convert is float else convert(word)
        except (ValueError, OverflowError):
            example = UNITS[unit][1] if convert in (int, float) else "1"
            raise SpecError(f"{name}: {word[:60]!r} is not a {kind}", f"write {name} {example}") from None

    return text(panel, names, metavar, what, parser=parse)


PlanFile = Annotated[
    str, typer.Argument(metavar="PLAN.json", help="A plan saved with -o; - is stdin.", show_default=False)
]
"""The plan that a command reads."""

Model = Annotated[
    str | None,
    text(
        JOB, "--model -m", "NAME|FILE", "`plan models` lists them; or a YAML, or a Hugging Face config.json.",
        autocompletion=complete_model,
    ),
]  # fmt: skip
Gpus = Annotated[int | None, number(JOB, "--gpus -g", "GPUs in all.")]
Nodes = Annotated[int | None, number(JOB, "--nodes", "Nodes in all, in place of --gpus.")]
From = Annotated[
    str | None, text(JOB, "--from", "PLAN.json", "The plan of a running job, which goes on with other --gpus.")
]
Keep = Annotated[
    str | None, text(JOB, "--keep", "AXIS,…", "With --from, axes to keep, such as tp,pp. [as its checkpoint asks]")
]
Hardware = Annotated[
    str | None,
    text(
        JOB, "--hardware", "NAME|FILE", f"`plan hardware` lists it; or a YAML. [{DEFAULT_HARDWARE}]",
        autocompletion=complete_hardware,
    ),
]  # fmt: skip
GpusPerNode = Annotated[int | None, number(JOB, "--gpus-per-node", "GPUs of a node. [the hardware's]")]
Tier = Annotated[
    str | None,
    text(JOB, "--tier", "NAME:GPUS:GB/S[:Nx],…", f"The network outside NVLink, such as {EXAMPLE}. [the hardware's]"),
]
Network = Annotated[
    str | None, text(JOB, "--network", "KIND", "Between nodes: ib, roce, efa, slingshot or tcp. [the hardware's]")
]
Host = Annotated[
    str | None, text(JOB, "--host", "NAME", "The CPU, such as xeon-8480c, or a rented instance's. [the hardware's]")
]
SeqLength = Annotated[int | None, number(JOB, "--seq-length -s", "Tokens of a sequence. [the model's]")]
GlobalBatchSize = Annotated[
    int | None, number(JOB, "--global-batch-size -b", "Sequences of an optimizer step. [the model's]")
]
BatchTokens = Annotated[
    str | None,
    text(
        JOB,
        "--batch-tokens",
        "COUNT",
        "About as many tokens, such as 16M: the nearest batch that the GPUs divide well.",
    ),
]
Dtype = Annotated[
    str | None,
    text(
        JOB,
        "--dtype",
        "NAME",
        f"What matrix products compute in: {', '.join(DTYPES)}. [bf16]",
        autocompletion=starting_with(lambda: DTYPES),
    ),
]
Runtime = Annotated[
    str | None,
    text(
        JOB, "--runtime", "NAME[@VERSION]", f"The trainer: {', '.join(RUNTIMES)}, or a YAML. [{DEFAULT_RUNTIME}]",
        autocompletion=starting_with(lambda: RUNTIMES),
    ),
]  # fmt: skip
Tokens = Annotated[
    str | None, text(JOB, "--tokens", "COUNT", "Of the whole training run, such as 15T: adds days and cost.")
]

Days = Annotated[
    float | None, number(RUN, "--days", "How many tokens so many days train, such as 30.", "N", float, "days")
]
Usd = Annotated[float | None, number(RUN, "--usd", "How many tokens so many dollars train, such as 5M.", "X", float)]
Finetune = Annotated[
    bool, typer.Option("--finetune", help="Train all weights of a trained model.", rich_help_panel=FINETUNE)
]
Lora = Annotated[bool, typer.Option("--lora", help="Train adapters beside frozen weights.", rich_help_panel=FINETUNE)]
Qlora = Annotated[
    bool, typer.Option("--qlora", help="Train adapters beside frozen weights of 4 bits.", rich_help_panel=FINETUNE)
]
LoraRank = Annotated[int | None, number(FINETUNE, "--lora-rank", "Rank of the adapters. [16]")]
LoraTargets = Annotated[
    str | None,
    text(FINETUNE, "--lora-targets", "NAME,…", "Products with one: all-linear, attention, q_proj, … [all-linear]"),
]
LoraDropout = Annotated[
    float | None, number(FINETUNE, "--lora-dropout", "Share of an adapter's inputs dropped. [0]", "X", float)
]
BaseBits = Annotated[int | None, number(FINETUNE, "--base-bits", "Bits of a frozen weight: 4, 8 or 16. [16]")]

Optimizer = Annotated[
    str | None,
    text(FINETUNE, "--optimizer", "NAME", "adamw, adamw-8bit, paged-adamw, adafactor, … as --switch has it."),
]

Objective = Annotated[str | None, text(FINETUNE, "--objective", "NAME", "The loss: lm, dpo, kto or orpo. [lm]")]
Reference = Annotated[
    str | None,
    text(FINETUNE, "--reference", "KIND", "Reference of dpo and kto: model, adapters (without them), precomputed."),
]

Images = Annotated[
    str | None,
    text(JOB, "--images", "N[xTOKENS][:trained]", "Images of a sequence, for a model that sees; 0: text alone. [1]"),
]
ExampleLengths = Annotated[
    str | None,
    text(FINETUNE, "--example-lengths", "LENGTHS", "Tokens of an example: FILE, MEAN or MEAN:MAX. [a sequence]"),
]
Batching = Annotated[
    str | None, text(FINETUNE, "--batching", "KIND", "packed, or padded to the longest of a micro-batch. [padded]")
]
Examples = Annotated[
    str | None, text(FINETUNE, "--examples", "COUNT", "Examples, such as 50k, in place of --tokens: time and cost.")
]
Epochs = Annotated[float | None, number(FINETUNE, "--epochs", "Times that each example is seen. [1]", "X", float)]

Phases = Annotated[
    str | None, text(JOB, "--phases", "FILE", "Phases of a run, one after the other, with a plan of each.")
]

Storage = Annotated[
    float | None, number(RUN, "--storage-gb-per-s", "All ranks together write checkpoints. [0.12 a GPU]", "X", float)
]
Failures = Annotated[
    float | None,
    number(RUN, "--failures-per-1000-gpu-days", "Unplanned interruptions. [the GPU generation's]", "X", float),
]
Spares = Annotated[
    int | None, number(RUN, "--spares", "Nodes kept to replace those that fail. [the cluster's pool has one]")
]
Price = Annotated[
    float | None, number(RUN, "--usd-per-gpu-hour", "Price of a GPU for an hour. [the profile's]", "X", float, "usd")
]

Tps = Annotated[str | None, text(LAYOUT, "--tp", "N,N…", "Tensor parallel.")]
Pps = Annotated[str | None, text(LAYOUT, "--pp", "N,N…", "Pipeline stages.")]
Dps = Annotated[str | None, text(LAYOUT, "--dp", "N,N…", "Data parallel.")]
Cps = Annotated[str | None, text(LAYOUT, "--cp", "N,N…", "Context parallel.")]
Eps = Annotated[str | None, text(LAYOUT, "--ep", "N,N…", "Expert parallel.")]
Etps = Annotated[str | None, text(LAYOUT, "--etp", "N,N…", "Tensor parallel inside an expert.")]
Vpps = Annotated[str | None, text(LAYOUT, "--vpp", "N,N…", "Chunks of a stage (interleaving).")]
MicroBatchSizes = Annotated[str | None, text(LAYOUT, "--micro-batch-size", "N,N…", "Sequences of a micro-batch.")]
ZeroStages = Annotated[str | None, text(LAYOUT, "--zero-stage", "N,N…", "ZeRO, 0 to 3.")]
ShardSizes = Annotated[str | None, text(LAYOUT, "--shard-size", "N,N…", "Ranks that ZeRO shards over (HSDP).")]
Schedules = Annotated[
    str | None,
    text(
        LAYOUT,
        "--schedule",
        "NAME,…",
        "Pipeline schedules, such as 1f1b.",
        autocompletion=completing_list(lambda: SCHEDULES),
    ),
]
RankOrders = Annotated[
    str | None, text(LAYOUT, "--rank-order", "ORDER,…", f"Orders of the ranks: {', '.join(RANK_ORDERS)}.")
]
Recomputes = Annotated[str | None, text(LAYOUT, "--recompute", "MODE,…", "Of none, selective and full.")]

Tp = Annotated[int | None, number(LAYOUT, "--tp", "Tensor parallel. [1]")]
Pp = Annotated[int | None, number(LAYOUT, "--pp", "Pipeline stages. [1]")]
Dp = Annotated[int | None, number(LAYOUT, "--dp", "Data parallel. [all the GPUs]")]
Cp = Annotated[int | None, number(LAYOUT, "--cp", "Context parallel. [1]")]
Ep = Annotated[int | None, number(LAYOUT, "--ep", "Expert parallel. [1]")]
Etp = Annotated[int | None, number(LAYOUT, "--etp", "Tensor parallel inside an expert. [tp; 1 for MoE]")]
Vpp = Annotated[int | None, number(LAYOUT, "--vpp", "Chunks of a stage (interleaving). [1]")]
MicroBatchSize = Annotated[int | None, number(LAYOUT, "--micro-batch-size", "Sequences of a micro-batch. [1]")]
ZeroStage = Annotated[int | None, number(LAYOUT, "--zero-stage", "ZeRO, 0 to 3. [1]")]
Schedule = Annotated[
    str | None,
    text(LAYOUT, "--schedule", "NAME", "Pipeline schedule. [1f1b]", autocompletion=starting_with(lambda: SCHEDULES)),
]
RankOrder = Annotated[
    str | None, text(LAYOUT, "--rank-order", "ORDER", f"Order of the ranks, or {RANK_ORDERS[1]}. [{RANK_ORDERS[0]}]")
]
Recompute = Annotated[str | None, text(LAYOUT, "--recompute", "MODE", "none, selective or full. [none]")]
RecomputeModules = Annotated[
    str | None, text(LAYOUT, "--recompute-modules", "NAME,…", "What `selective` recomputes. [core_attn]")
]
RecomputeLayers = Annotated[
    int | None, number(LAYOUT, "--recompute-num-layers", "Layers of each stage that `full` recomputes. [all]")
]
Fsdp = Annotated[
    str | None,
    text(LAYOUT, "--fsdp", "N|all", "Shard weights (or as --zero-stage says) over groups of N ranks, or all."),
]
SequenceParallel = Annotated[
    bool | None, text(LAYOUT, "--sequence-parallel/--no-sequence-parallel", None, "[on where tp > 1]")
]
LayersPerStage = Annotated[
    str | None, text(LAYOUT, "--layers-per-stage", "N,N…", "Layers of each stage, or of each chunk. [as trainers cut]")
]
LayoutString = Annotated[str | None, text(LAYOUT, "--layout", "TEXT", "Megatron's --pipeline-model-parallel-layout.")]

Switch = Annotated[
    str | None,
    text(
        LAYOUT,
        "--switch",
        "NAME=VALUE,…|default",
        "Pin switches of the trainer, or leave all at its own values. [chosen]",
        autocompletion=complete_switch,
    ),
]
Described = Annotated[
    str | None,
    text(
        LAYOUT,
        "--switch",
        "NAME=VALUE,…|default",
        "Switches of the run; default: none but the trainer's. [likely]",
        autocompletion=complete_switch,
    ),
]
Allow = Annotated[
    str | None,
    text(SEARCH, "--allow", "NAME,…", "Switches, or fp8, that change numerics and may be chosen. [none]"),
]

Top = Annotated[int | None, number(SEARCH, "--top", "Alternatives to show. [5]")]
TimeLimit = Annotated[float | None, number(SEARCH, "--time-limit", "Seconds to search at most. [30]", "S", float, "s")]
Fastest = Annotated[
    bool, text(SEARCH, "--fastest", None, "The fastest first, even where one within 1% is simpler or more robust.")
]
TpAcrossNodes = Annotated[bool, text(SEARCH, "--tp-across-nodes", None, "Tensor parallelism may leave a node.")]
OomRisk = Annotated[
    float | None,
    number(SEARCH, "--oom-risk", "Highest risk of running out of memory to accept. [0.1]", "X", float, "fraction"),
]
Headroom = Annotated[
    float | None,
    number(SEARCH, "--memory-headroom", "To leave free on every GPU, in place of that rule.", "GIB", float, "gib"),
]


def _imbalance(word: str) -> float | str:
    """A number, or a histogram as TrainingSpec reads it."""
    return word if ":" in word else float(word)


Imbalance = Annotated[
    str | None,
    number(
        ASSUMED, "--moe-imbalance", "Tokens of the fullest expert rank over the mean; or shares: 1.2:0.8,2:0.2. [1]",
        "X|X:SHARE,…", _imbalance,
    ),
]  # fmt: skip
Straggler = Annotated[
    float | None, number(ASSUMED, "--straggler-fraction", "How much slower the slowest rank computes. [0]", "X", float)
]

Assume = Annotated[
    str | None,
    text(ASSUMED, "--assume", "NAME=X,…", "The runtime's …overlap… fields, network_gb_per_s, host_us, or switches."),
]

Calibration = Annotated[
    str | None,
    text(ASSUMED, "--calibration", "FILE", "What `plan probe -o` or `plan observe -o` saved corrects the hardware."),
]

NoHistory = Annotated[
    bool, text(ASSUMED, "--no-history", None, "Leave out the runs of yours that `plan validate --add` keeps.")
]

Json = Annotated[bool, text(OUTPUT, "--json", None, "The answer as JSON.")]
Full = Annotated[bool, text(OUTPUT, "--full", None, "All that is known, not one screen of it.")]
Show = Annotated[
    str | None,
    text(
        OUTPUT, "--show", "SECTION,…", f"These sections in full: {', '.join(SECTIONS)}.",
        autocompletion=completing_list(lambda: SECTIONS),
    ),
]  # fmt: skip
Output = Annotated[
    str | None, text(OUTPUT, "--output -o", "FILE", "Save the plan for other commands to read; - is stdout.")
]
Force = Annotated[bool, text(OUTPUT, "--force", None, "Let -o replace a file.")]
