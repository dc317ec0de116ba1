"""Megatron-LM and its kin: Megatron-Bridge, Primus, GPT-NeoX, Megatron-DeepSpeed, which print its line of an iteration.

As of Megatron core 0.19 (megatron/training/training.py, timers.py, utils.py; megatron/core/utils.py) and older forms
since 2021, of which `--log-straggler` printed milliwatts under a W.

Below the lines, the job that a log states: its dump of arguments, or NeMo's configuration, as a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import yaml

from planner.errors import SpecError
from planner.export.followed.shell_script import Script
from planner.export.import_run import read_configuration
from planner.export.imported_run import ImportedRun
from planner.export.megatron.deepspeed_options import DEEPSPEED_OPTIONS as DEEPSPEED_OPTIONS
from planner.export.megatron.deepspeed_options import as_megatron, read_zero
from planner.export.megatron.option_rows import options_of
from planner.export.megatron.script_reading import options_of_features, run_of
from planner.observe.observation import JobFacts
from planner.observe.record import MOST, FoundLine, RunRecord, Take, moment, named_parts, number, whole
from planner.specs.base import Fields, Texts
from planner.specs.reading import InputLimits, parse_yaml, shipped_table
from planner.specs.units import GB, GIB, MIB, is_count

_UNITS = {"ms": 1e-3, "GiB": GIB, "GB": GB}


@cache
def line_fields() -> dict[str, tuple[str, float, str]]:
    """Fields of the line by the trainers' own names: the quantity, its unit, and the trainer that alone prints it."""
    rows = shipped_table("observe/log_formats.yaml")["iteration"].items()
    return {name: (means, _UNITS.get(unit, 1.0), trainer) for name, (means, unit, trainer) in rows}


_MEMORY_KINDS = {
    "allocated": "allocated_bytes", "max allocated": "max_allocated_bytes", "max reserved": "max_reserved_bytes",
    "total device memory used": "device_bytes",
}  # fmt: skip
"""Words of the lines of memory, in mebibytes."""
_DEVICE_MEMORY = re.compile(r"(?:rocm|hip|cuda) mem usage/free/total/usage_ratio\S*: *([\d.]+) ?Gi?B")
_RANKS = re.compile(r"\[rank-\d{1,7}/(\d{1,7})\]")
_MEMORY = re.compile(r"\[Rank (\d{1,7})\] (?:\(after (\d{1,15}) iter)?[^|\[]{0,60}memory \(MB\)[^|\[]{0,20}\|([^\[]*)")
_OUTSIDE = {"save-checkpoint": "checkpoint", "evaluate": "evaluation", "eval-time": "evaluation"}
"""Timers of what happens between iterations, which say how long the gap before the next one was."""
_LAYOUT = (
    "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "virtual_pipeline_model_parallel_size", "micro_batch_size", "global_batch_size",
    "seq_length", "num_layers", "hidden_size",
)  # fmt: skip
"""Arguments that make another job of a run."""


def _iteration(record: RunRecord, line: FoundLine) -> None:
    text = line.match.string
    found = (named_parts(line.before) if "|" in line.before else {}) | named_parts(line.match[3])
    values: dict[str, float] = {}
    for name, (means, unit, trainer) in line_fields().items():
        if (said := found.get(name)) is not None:
            values.setdefault(means, number(said) * unit)
            # Primus prints now/average
            trainer = "primus" if means == "seconds" and "/" in said else trainer
            record.facts |= {"trainer": trainer} if trainer else {}
    seconds = values.pop("seconds", math.nan)
    covers = 0 if record.numbers else whole(record.arguments.get("log_interval")) or 0
    if "elapsed time per iteration" not in text or not record.step(
        int(line.match[1]), seconds, end_s=line.at_s, covers=covers, rank=line.rank
    ):
        return
    batch = values.get("global_batch_size", 0)
    if record.facts.get("global_batch_size", batch) != batch and batch and len(record.numbers) > 1:
        record.state["batch"] = "grows"
    if (used := _DEVICE_MEMORY.search(line.match[3])) is not None:
        values["device_bytes"] = number(used[1]) * GIB  # a GB of Primus is a GiB: an MI300X has 191.98
    if (ranks := _RANKS.search(line.before)) is not None:
        values["num_gpus"] = int(ranks[1])
    record.take({**values, "num_steps_asked": number(line.match[2])})  # a Megatron-RL job has `infinity`


def _memory(record: RunRecord, line: FoundLine) -> None:
    """A rank's memory; ranks that print at once leave several on a line."""
    for rank, step, text in _MEMORY.findall(line.match.string):
        found = named_parts(text)
        kinds = {kind: number(found[name]) * MIB for name, kind in _MEMORY_KINDS.items() if name in found}
        record.bytes_of(int(rank), whole(step), **kinds)


def _timer(record: RunRecord, name: str, low: str, high: str = "") -> None:
    low_s = number(low) * 1e-3
    high_s = number(high or low) * 1e-3
    if low_s >= 0:
        record.timer(name, low_s, high_s)
        if name in _OUTSIDE:
            record.mark(_OUTSIDE[name], high_s)


def _timers_on_a_line(record: RunRecord, line: FoundLine) -> None:
    for name, value in named_parts(line.match[1]).items():
        _timer(record, name, value)


def _dump_begins(record: RunRecord, line: FoundLine) -> None:
    record.state["dump"] = "yes"
    record.restart()


def _dump_ends(record: RunRecord, line: FoundLine) -> None:
    record.state.pop("dump", None)
    record.starts_with(" ".join(record.arguments.get(name, "") for name in _LAYOUT))


def _argument(record: RunRecord, line: FoundLine) -> None:
    """A line of the dump, else a timer whose greatest value alone is printed."""
    name, value = line.match.groups()
    if record.state.get("dump"):
        record.argument(name, value.strip())
    elif record.state.get("timers") and re.fullmatch(r"\d+\.\d+", value.strip()):
        _timer(record, name, value)


def _sizes(record: RunRecord, line: FoundLine) -> None:
    for name, size in re.findall(r"([\w-]+?)[- ]size: (\d{1,9})", line.match.string):
        record.argument({"world": "world_size"}.get(name, f"{name.replace('-', '_')}_size"), size)


_STRAGGLER_UNITS = {"ms": 1e-3, "us": 1e-6, "s": 1.0, "%": 1e-2}
STRAGGLER_NAMES = {
    "Rtt": "round_trip_s", "Pwr": "power_w", "Tmp": "temperature_c", "Utl": "utilization_fraction",
    "Clk": "clock_mhz", "DRtt": "data_s", "Etpt": "tflops",
}  # fmt: skip
"""The words of the line, and what they measure."""
_STRAGGLER_TIMERS = {"round_trip_s": "straggler-round-trip", "data_s": "straggler-get-batch"}
_VALUE = re.compile(r"\b(Mn|Mx)(D?Rtt|Pwr|Tmp|Utl|Clk|Etpt)/Rnk: *([\d.]{1,30}) ?([A-Za-z%]{1,4})/(\d{1,7})")
_MOST_WATTS = 1e4
"""No GPU takes more: such a number is in milliwatts, as NVML has it."""


def _straggler(record: RunRecord, line: FoundLine) -> None:
    """`MnRtt/Rnk: 3453.08ms/8 | MxRtt/Rnk: 3468.20ms/0 | …`: least and most, each with its rank."""
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for side, word, text, unit, rank in _VALUE.findall(line.match.string):
        value = number(text) * _STRAGGLER_UNITS.get(unit, 1.0)
        name = STRAGGLER_NAMES[word]
        value /= 1e3 if name == "power_w" and value > _MOST_WATTS else 1.0
        found.setdefault(name, {})[side] = (value, int(rank))
    for name, sides in found.items():
        if len(sides) == 2:
            record.spread(name, sides["Mn"], sides["Mx"])
            if name in _STRAGGLER_TIMERS:
                record.timer(_STRAGGLER_TIMERS[name], sides["Mn"][0], sides["Mx"][0])


def finish(record: RunRecord) -> None:
    """Take the facts that the arguments state."""
    if size := whole(record.arguments.get("world_size")):
        record.facts["num_gpus"] = size
    for name in ("seq_length", "global_batch_size"):
        if value := whole(record.arguments.get(name)):
            record.facts.setdefault(name, value)


TAKES: Mapping[str, Take] = {
    "iteration": _iteration, "memory": _memory, "timers_on_a_line": _timers_on_a_line, "argument": _argument,
    "timer": lambda record, line: _timer(record, *line.match.groups()), "dump_begins": _dump_begins,
    "datetime": lambda record, line: record.time(moment(line.match[1])), "dump_ends": _dump_ends, "sizes": _sizes,
    "straggler": _straggler,
}  # fmt: skip
"""The functions that rows of `log_formats.yaml` name."""


_NEGATED = {
    "add_bias_linear": "--disable-bias-linear",
    "bias_swiglu_fusion": "--no-bias-swiglu-fusion",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "check_for_nan_in_loss_and_grad": "--no-check-for-nan-in-loss-and-grad",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "bias_dropout_fusion": "--no-bias-dropout-fusion",
    "rope_fusion": "--no-rope-fusion",
    "async_tensor_model_parallel_allreduce": "--no-async-tensor-model-parallel-allreduce",
}
"""Arguments that are true unless an option switches them off."""
_RENAMED = {"fp8": "--fp8-format", "fp4": "--fp4-format", "multi_latent_attention": "--multi-latent-attention"}
_COUNTS = ("num_gpus", "seq_length", "global_batch_size")
_MOST_CHARACTERS, _ARGUMENT_LIMITS = 2**18, InputLimits(2**16, 1_000, 20)
_UNSET = ("None", "False", "[]", "")


def run_stated(record: RunRecord) -> ImportedRun | None:
    """The run in the arguments that a log dumps; None where it dumps none, or where they are no run."""
    with suppress(SpecError, KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        if record.grammar == "dllogger" and "num_layers" in record.arguments:
            return _of_nemo(record)
        if "num_layers" in record.arguments:
            return _of_megatron(record.arguments)
    return None


def _of_megatron(arguments: dict[str, str]) -> ImportedRun:
    """Every argument with its default stands in the dump; those that are unset are no options."""
    words: list[str] = []
    if "micro_batch_size" not in arguments:  # the name until 2021, which Megatron-DeepSpeed kept longer
        arguments = {"micro_batch_size": arguments.get("batch_size", "None"), **arguments}
    for name, value in arguments.items():
        if name in _NEGATED:
            words += [_NEGATED[name]] if value == "False" else []
        elif value == "True":
            words.append(_option(name))
        elif value not in _UNSET:
            words += [_option(name), *re.sub(r"[\[\]',]|\bAttnBackend\.", " ", value).split()]
    options = dict(options_of(words))
    for name in _defaults(arguments):
        options.pop(name, None)
    script = Script(variables={"WORLD_SIZE": [arguments["world_size"]]} if "world_size" in arguments else {})
    if arguments.get("deepspeed") == "True":
        imported = run_of(as_megatron(options), script, "megatron-deepspeed", DEEPSPEED_OPTIONS)
        imported.run["runtime"] = "megatron-deepspeed"
        read_zero(options, {}, imported)
    else:
        imported = run_of(options, script, "megatron")
    model = imported.run.get("model")
    if isinstance(model, dict) and is_count(arguments.get("padded_vocab_size", "")):
        model["vocab_size"] = int(arguments["padded_vocab_size"])
    return imported


def _option(name: str) -> str:
    return _RENAMED.get(name, f"--{name.replace('_', '-')}")


def _defaults(arguments: dict[str, str]) -> list[str]:
    """Options that a dump always has, and that mean something only where another one is set."""
    left_out = []
    if arguments.get("num_experts", "None") == "None":
        left_out += ["--expert-tensor-parallel-size", "--moe-token-dispatcher-type", "--moe-router-topk"]
    if arguments.get("group_query_attention") != "True":
        left_out += ["--num-query-groups"]
    if arguments.get("multi_latent_attention", "False") != "True":
        left_out += ["--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"]
    if arguments.get("recompute_granularity", "None") == "None":
        left_out += ["--recompute-modules", "--recompute-method", "--recompute-num-layers"]
    if arguments.get("use_megatron_fsdp", "False") != "True":
        left_out += ["--data-parallel-sharding-strategy"]
    if arguments.get("fp8", "None") == "None":
        left_out += ["--fp8-recipe"]
    if arguments.get("fp4", "None") == "None":
        left_out += ["--fp4-recipe"]
    if arguments.get("cuda_graph_impl", "none") == "none":
        left_out += ["--cuda-graph-impl", "--cuda-graph-scope"]
    if arguments.get("optimizer_cpu_offload", "False") != "True":
        left_out += ["--optimizer-offload-fraction"]
    if arguments.get("cross_entropy_loss_fusion", "False") != "True":
        left_out += ["--cross-entropy-fusion-impl"]
    if arguments.get("context_parallel_size", "1") == "1":
        left_out += ["--cp-comm-type"]
    if arguments.get("attention_backend", "").endswith("auto"):
        left_out += ["--attention-backend"]
    return left_out


def _of_nemo(record: RunRecord) -> ImportedRun:
    tree: Fields = {}
    if sum(map(len, record.arguments.values())) > _MOST_CHARACTERS:
        raise SpecError(f"the log's configuration has more than {_MOST_CHARACTERS:,} characters", "name its file")
    for path, text in record.arguments.items():
        *parents, name = path.split("/")[:20]
        owner = tree
        for parent in parents:
            inner = owner.setdefault(parent, {})
            owner = inner if isinstance(inner, dict) else {}
        owner[name] = parse_yaml(text, path, limits=_ARGUMENT_LIMITS, keeps_last=True)
    world = record.facts.get("num_gpus")
    trainer = {"num_nodes": 1, "devices": world} if world else {}
    return read_configuration(yaml.safe_dump({"name": "gpt", "trainer": trainer, "model": tree}), "nemo")


def _stated_switches(record: RunRecord, imported: ImportedRun) -> Texts:
    """The features of a run that its arguments name; a part of a dump, or an old one, names few of them."""
    features = imported.run.get("features") or {}
    if "num_layers" not in record.arguments or record.grammar == "dllogger":
        return tuple(features)
    known = options_of_features()
    named = {_NEGATED.get(name) or _option(name) for name in record.arguments}
    recompute = ("recompute",) if "recompute_granularity" in record.arguments else ()
    return (*(name for name in features if known.get(name, frozenset()) & named), *recompute)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 < value < MOST else None


def facts_of(record: RunRecord, trainer: str) -> JobFacts:
    """The facts of a record: those of single lines, and those of the run that it states."""
    stated = record.job_facts()
    imported = run_stated(record)
    run = {} if imported is None else {name: value for name, value in imported.run.items() if value is not None}
    counts = {name: getattr(stated, name) or _count(run.get(name)) for name in _COUNTS}
    model = run.get("model")
    found: Fields = {
        "trainer": stated.trainer or (trainer if imported is None or trainer != "megatron" else imported.source),
        "run": run,
        "stated_switches": () if imported is None else _stated_switches(record, imported),
        **counts,
        "model": stated.model or (model if isinstance(model, str) else None),
    }
    return stated.model_copy(update=found)
