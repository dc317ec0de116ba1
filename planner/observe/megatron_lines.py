"""Megatron-LM and its kin: Megatron-Bridge, Primus, GPT-NeoX, Megatron-DeepSpeed, which print its line of an iteration.

As of Megatron core 0.19 (megatron/training/training.py, timers.py, utils.py; megatron/core/utils.py) and older forms
since 2021, of which `--log-straggler` printed milliwatts under a W.

Below the lines, the job that a log states: its dump of arguments, or NeMo's configuration, as a run.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
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
from planner.observe.line_formats import (
    MOST,
    Grammar,
    fact,
    fields,
    line_row,
    mark,
    moment,
    number,
    rank_of,
    step_row,
    take_beside,
    whole,
)
from planner.observe.observation import JobFacts
from planner.observe.record import RunRecord
from planner.specs.reading import InputLimits, parse_yaml
from planner.specs.units import GB, GIB, MIB, is_count

_MS = 1e-3
LINE_FIELDS = {
    "elapsed time per iteration (ms)": ("seconds", _MS, ""),
    "elapsed time per iteration (s)": ("seconds", 1.0, "megatron-deepspeed"),
    "throughput per GPU (TFLOP/s/GPU)": ("tflops", 1.0, ""),
    "throughput (TFLOP/s/GPU)": ("tflops", 1.0, ""),
    "compute per GPU (TFLOP/s/GPU)": ("tflops", 1.0, "primus"),
    "TFLOPs": ("tflops", 1.0, ""),
    "tokens per GPU (tokens/s/GPU)": ("tokens_per_s_per_gpu", 1.0, "primus"),
    "tokens-per-second-per-gpu": ("tokens_per_s_per_gpu", 1.0, ""),
    "global batch size": ("global_batch_size", 1.0, ""),
    "samples per second": ("samples_per_s", 1.0, ""),
    "samples/sec": ("samples_per_s", 1.0, "gpt-neox"),
    "power per GPU (W/GPU)": ("watts_per_gpu", 1.0, ""),
    "memory(GiB)": ("max_reserved_bytes", GIB, ""),
    "mem-allocated-gigabytes": ("allocated_bytes", GB, ""),
    "mem-max-allocated-gigabytes": ("max_allocated_bytes", GB, ""),
    "mem-max-reserved-gigabytes": ("max_reserved_bytes", GB, ""),
}
"""Fields of the line by the trainers' own names: the quantity, its unit, and the trainer that alone prints it."""
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


def _iteration(record: RunRecord, match: re.Match[str]) -> None:
    begin = match.string[: match.start()]
    found = (fields(begin) if "|" in begin else {}) | fields(match[3])
    values: dict[str, float] = {}
    for name, (means, unit, trainer) in LINE_FIELDS.items():
        if (text := found.get(name)) is not None:
            values.setdefault(means, number(text) * unit)
            # Primus prints now/average
            trainer = "primus" if means == "seconds" and "/" in text else trainer
            record.facts |= {"trainer": trainer} if trainer else {}
    seconds, rank = values.pop("seconds", math.nan), rank_of(record)
    covers = whole(record.arguments.get("log_interval")) if not record.numbers else 0
    if "elapsed time per iteration" not in match.string or not record.step(
        int(match[1]), seconds, end_s=moment(begin), covers=covers or 0, rank=rank
    ):
        return
    batch = values.get("global_batch_size", 0)
    if record.facts.get("global_batch_size", batch) != batch and batch and len(record.numbers) > 1:
        record.state["batch"] = "grows"
    if (used := _DEVICE_MEMORY.search(match[3])) is not None:
        values["device_bytes"] = number(used[1]) * GIB  # a GB of Primus is a GiB: an MI300X has 191.98
    if (ranks := _RANKS.search(begin)) is not None:
        values["num_gpus"] = int(ranks[1])
    take_beside(record, {**values, "num_steps_asked": number(match[2])})  # a Megatron-RL job has `infinity`


def _memory(record: RunRecord, match: re.Match[str]) -> None:
    """A rank's memory; ranks that print at once leave several on a line."""
    for rank, step, text in _MEMORY.findall(match.string):
        found = fields(text)
        kinds = {kind: number(found[name]) * MIB for name, kind in _MEMORY_KINDS.items() if name in found}
        record.bytes_of(int(rank), whole(step), **kinds)


def _timer(record: RunRecord, name: str, low: str, high: str = "") -> None:
    low_s, high_s = number(low) * _MS, number(high or low) * _MS
    if low_s >= 0:
        record.timer(name, low_s, high_s)
        if name in _OUTSIDE:
            record.mark(_OUTSIDE[name], high_s)


def _timers_on_a_line(record: RunRecord, match: re.Match[str]) -> None:
    for name, value in fields(match[1]).items():
        _timer(record, name, value)


def _dump_begins(record: RunRecord, match: re.Match[str]) -> None:
    record.state["dump"] = "yes"
    record.restart()


def _dump_ends(record: RunRecord, match: re.Match[str]) -> None:
    record.state.pop("dump", None)
    record.starts_with(" ".join(record.arguments.get(name, "") for name in _LAYOUT))


def _argument(record: RunRecord, match: re.Match[str]) -> None:
    """A line of the dump, else a timer whose greatest value alone is printed."""
    if record.state.get("dump"):
        record.argument(match[1], match[2].strip())
    elif record.state.get("timers") and re.fullmatch(r"\d+\.\d+", match[2].strip()):
        _timer(record, match[1], match[2])


def _sizes(record: RunRecord, match: re.Match[str]) -> None:
    for name, size in re.findall(r"([\w-]+?)[- ]size: (\d{1,9})", match.string):
        record.argument({"world": "world_size"}.get(name, f"{name.replace('-', '_')}_size"), size)


def _bridge_step(record: RunRecord, match: re.Match[str]) -> None:
    record.facts["trainer"] = "megatron-bridge"
    record.prints("tflops", number(match[1]))


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


def _straggler(record: RunRecord, match: re.Match[str]) -> None:
    """`MnRtt/Rnk: 3453.08ms/8 | MxRtt/Rnk: 3468.20ms/0 | …`: least and most, each with its rank."""
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for side, word, text, unit, rank in _VALUE.findall(match.string):
        value, name = number(text) * _STRAGGLER_UNITS.get(unit, 1.0), STRAGGLER_NAMES[word]
        value /= 1e3 if name == "power_w" and value > _MOST_WATTS else 1.0
        found.setdefault(name, {})[side] = (value, int(rank))
    for name, sides in found.items():
        if len(sides) == 2:
            record.spread(name, sides["Mn"], sides["Mx"])
            if name in _STRAGGLER_TIMERS:
                record.timer(_STRAGGLER_TIMERS[name], sides["Mn"][0], sides["Mx"][0])


_NAME = r"([A-Za-z][\w/-]{0,80})"
_ROWS = (
    line_row("iteration", r"iteration\s+(\d{1,15})\s*/\s*(\d{1,15}|infinity)\s*\|(.*)", _iteration),
    line_row("memory (MB)", r"\[Rank \d", _memory),
    line_row("time (ms) |", r"^\s*(?:\[.{0,40}\] )?time \(ms\) \|(.*)", _timers_on_a_line),
    line_row("across ranks (ms)", r"\((min), max\) time|(max) time|times across",
             lambda record, match: record.state.update({"timers": match[1] or match[2] or "all"})),
    line_row(": (", rf"^\s*{_NAME} \.*: \((\d[\d.]{{0,20}}), (\d[\d.]{{0,20}})\)",
             lambda record, match: _timer(record, *match.groups())),
    line_row("- arguments -", r"-{5,} arguments -{5,}", _dump_begins),
    line_row("- end of ", r"-{5,} end of arguments -{5,}", _dump_ends),
    line_row(" ..", r"^\s+([A-Za-z][\w/-]{0,80}) \.{2,60}:? (.{0,4000})$", _argument),
    line_row("datetime: ", r"datetime: (\d{4}-.{10,40})", lambda record, match: record.time(moment(match[1]))),
    line_row("using world size", r"using world size: (\d+)", _sizes),
    line_row("/Rnk", r"M[nx](?:Rtt|Etpt)/Rnk", _straggler),
    line_row("saving checkpoint", r"saving checkpoint at iteration", mark("checkpoint")),
    line_row("saved checkpoint", r"successfully saved checkpoint", mark("checkpoint")),
    line_row("validation loss at", r"validation loss at iteration", mark("evaluation")),
    line_row("Step Time : ", r"Step Time : [\d.]+ ?s GPU utilization: ([\d.]+)", _bridge_step),
    line_row("train_batch_size", r":print\] +train_batch_size \.{2,80} (\d{1,9})\s*$", fact("global_batch_size")),
    line_row("total number of parameters", r"total number of parameters:? *(\d+)", fact("num_parameters")),
)  # fmt: skip


def _finish(record: RunRecord) -> None:
    if size := whole(record.arguments.get("world_size")):
        record.facts["num_gpus"] = size
    for name in ("seq_length", "global_batch_size"):
        if value := whole(record.arguments.get(name)):
            record.facts.setdefault(name, value)


MEGATRON = Grammar("megatron", "megatron", _ROWS, finish=_finish)
BRIDGE = Grammar(
    "megatron-bridge",
    "megatron-bridge",
    (
        step_row(
            "Step Time : ", r"Step Time : (?P<s><N>) ?s GPU utilization", {"tflops": (r"utilization: ([\d.]+)", 1.0)}
        ),
    ),
    rank=1,
    finish=lambda record: record.note("the lines have no step numbers: they are counted as they come"),
)
"""The output of rank 0 alone, which has no line of an iteration."""


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
    tree: dict[str, Any] = {}
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


def _stated_switches(record: RunRecord, imported: ImportedRun) -> tuple[str, ...]:
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
    found: dict[str, Any] = {
        "trainer": stated.trainer or (trainer if imported is None or trainer != "megatron" else imported.source),
        "run": run,
        "stated_switches": () if imported is None else _stated_switches(record, imported),
        **counts,
        "model": stated.model or (model if isinstance(model, str) else None),
    }
    return stated.model_copy(update=found)
