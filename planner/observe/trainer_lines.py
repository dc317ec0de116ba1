"""The lines of Megatron-LM and its kin, of MLPerf training's log and of NeMo's dllogger; and the job that a log states.

Megatron-Bridge, Primus, GPT-NeoX and Megatron-DeepSpeed print Megatron's line of an iteration, as of core 0.19
(megatron/training/training.py, timers.py, utils.py; megatron/core/utils.py) and older forms since 2021, of which
`--log-straggler` printed milliwatts under a W. MLPerf's lines (mlcommons/training_results_v3.0 to v5.1) are JSON.

Below the lines, the job that a log states: its dump of arguments, or NeMo's configuration, as a run.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from typing import Any

import yaml

from planner.errors import SpecError
from planner.export.followed.shell_script import Script
from planner.export.import_run import read_configuration
from planner.export.imported_run import ImportedRun
from planner.export.megatron.deepspeed_options import DEEPSPEED_OPTIONS, as_megatron, read_zero
from planner.export.megatron.option_rows import options_of
from planner.export.megatron.script_reading import options_of_features, run_of
from planner.observe.observation import JobFacts
from planner.observe.record import (
    MAX_NAMES,
    MOST,
    UNITS,
    FoundLine,
    RunRecord,
    moment,
    named_parts,
    number,
    whole,
)
from planner.specs.base import Fields, Named, Texts, grouped, mapping
from planner.specs.reading import InputLimits, parse_json, parse_yaml, shipped_table
from planner.specs.units import GIB, MIB, is_count

TABLE: Fields = shipped_table("observe/log_formats.yaml")
"""The words that trainers print."""
_TIMES = ("train_step_time", "train_step_timing in s", "train_step_timing")


def json_object(text: str) -> Fields:
    """The object in a line; empty where there is none."""
    try:
        data = parse_json(text, "", keeps_last=True)
    except SpecError:
        return {}
    return mapping(data)


def mllog(record: RunRecord, line: FoundLine) -> None:
    data = json_object(line.match[1])
    key = data.get("key")
    value = data.get("value")
    metadata = mapping(data.get("metadata"))
    at_s = number(data.get("time_ms")) / 1e3
    if not isinstance(key, str) or not math.isfinite(at_s):
        record.note("some lines of MLPerf's log are cut off and were left out")
        return
    kind, _, side = key.rpartition("_")
    if key == "init_start":
        record.facts["num_gpus"] = int(record.facts.get("num_gpus", 0)) + 1
        record.time(at_s)
    elif kind in ("eval", "run", "block") and side == "start":
        record.state[kind] = str(at_s)
        record.state["tokens of a block"] = str(metadata.get("epoch_count", record.state.get("tokens of a block", "")))
        if kind == "eval":
            # all of 3.1 to 5.1 count here what was trained until then; at a block's ends they count different things
            trained = number(metadata.get("samples_count", metadata.get("epoch_num")))
            record.state["trained"] = f"{record.state.get('trained', '')} {trained:.0f}"
    elif side == "stop" and kind in record.state:
        record.activity({"eval": "evaluation"}.get(kind, kind), float(record.state.pop(kind)), at_s)
        if kind == "eval":
            record.mark("evaluation")
    elif key in TABLE["mlperf_facts"]:
        record.fact(TABLE["mlperf_facts"][key], value)
    elif key == "tracked_stats" and isinstance(value, dict):
        _tracked(record, value, metadata, at_s)


def _tracked(record: RunRecord, value: Fields, metadata: Fields, at_s: float) -> None:
    """A step's seconds, or the mean of a block of steps, which is no step: counted, it makes totals 2 to 3% too high.

    A block says its throughput (5.0), or only the samples and no step (5.1). `step` counts tokens in 4.1, samples in
    5.0 and steps in 5.1, which has `samples_count` beside.
    """
    if (name := next((name for name in value if name.startswith("validation_step_tim")), None)) is not None:
        record.state.setdefault("eval", str(at_s - number(value[name])))  # some runs print no eval_start
    if "max_memory_usage" in value:
        record.bytes_of(None, max_allocated_bytes=number(value["max_memory_usage"]) * GIB)
    name = next((name for name in value if name in _TIMES), None)
    counted = number(metadata.get("step"))
    if name is None or not math.isfinite(counted):
        return
    if "throughput" in value:
        if counted > 0 and len(record.means) < MAX_NAMES:
            record.means.append((counted, number(value[name]), at_s))
        return
    if "samples_count" in metadata:
        counted += 1  # the first step is 0
    elif (batch := int(record.facts.get("global_batch_size", 0))) > 0:
        counted /= batch * (int(record.facts.get("seq_length", 1)) if name == _TIMES[1] else 1)
    record.step(round(counted), number(value[name]), end_s=at_s, covers=1 if not record.numbers else 0)


def finish_mlperf(record: RunRecord) -> None:
    """Take means of stretches where no step is recorded: those that are recorded, or the time between evaluations."""
    if not record.numbers:
        ends = _in_steps(record, [counted for counted, _, _ in record.means])
        for before, step, (_, seconds, at_s) in zip((0, *ends), ends, record.means, strict=False):
            if step > before:
                record.step(step, seconds, end_s=at_s, covers=step - before)
        if record.numbers:
            record.note("no step is recorded: seconds are the means that the log has of stretches of steps")
    if not record.numbers:
        stretches = _stretches(record)
        ends = _ends_of_stretches(record, len(stretches))
        for before, step, (begin, end) in zip((0, *ends), ends, stretches, strict=False):
            if step > before:
                record.step(step, (end - begin) / (step - before), end_s=end, covers=step - before)
        if record.numbers:
            record.note("no step is recorded: seconds are means of the blocks between evaluations")
    if record.facts.get("num_gpus") in (0, 1):
        record.facts.pop("num_gpus")


def _stretches(record: RunRecord) -> list[tuple[float, float]]:
    """Begin and end of what was trained without a break: blocks, cut at the evaluations that are inside of them."""
    of_kind = grouped((kind, (begin, end)) for kind, begin, end in record.activities)
    evaluations = sorted(of_kind.get("evaluation", ()))
    found = []
    for begin, end in of_kind.get("block", ()):
        inside = [(start, stop) for start, stop in evaluations if begin < start and stop <= end]
        for start, stop in inside:  # what follows the last one is no whole stretch
            found.append((begin, start))
            begin = stop
        found += [] if inside else [(begin, end)]
    return sorted(found)


def _ends_of_stretches(record: RunRecord, count: int) -> list[int]:
    """The last step of each stretch; none where that is not stated."""
    per_step = int(record.facts.get("global_batch_size", 0)) * int(record.facts.get("seq_length", 0))
    tokens = number(record.state.get("tokens of a block"))
    if per_step and tokens >= per_step and tokens % per_step == 0:
        return [round(tokens / per_step) * block for block in range(1, count + 1)]
    trained = [float(text) for text in record.state.get("trained", "").split() if is_count(text)]
    return _in_steps(record, trained) if len(trained) == count else []


def _in_steps(record: RunRecord, counts: list[float]) -> list[int]:
    """Counts of tokens, else of samples, as steps; none where they are of no whole steps."""
    batch = int(record.facts.get("global_batch_size", 0))
    for per_step in (batch * int(record.facts.get("seq_length", 0)), batch):
        if per_step and counts and all(count % per_step == 0 for count in counts):
            return [round(count / per_step) for count in counts]
    return []


def dllogger(record: RunRecord, line: FoundLine) -> None:
    said = json_object(line.match[1])
    data = said.get("data")
    step = said.get("step")
    at_s = number(said.get("timestamp"))
    if not isinstance(data, dict):
        return
    if step == "PARAMETER":
        for name, value in list(data.items())[:MAX_NAMES]:
            if name.startswith("cfg/"):
                record.argument(name.removeprefix("cfg/"), json.dumps(value)[:4000])
        record.time(at_s)
        record.restart()
    elif isinstance(step, int) and _TIMES[1] in data:
        # the printed value is the mean of up to five last steps; the clock of the lines says each one
        said_s = number(data[_TIMES[1]])
        if record.clocked_step(step, at_s, said_s) and record.seconds[-1] != said_s:
            record.note("train_step_timing is a mean over the last steps: seconds are from the times of the lines")


_ELAPSED = re.compile(r"elapsed time per iteration \(m?s\): *[\d.]+(?:/[\d.]+)?(?!/?[\d.]*$)")
"""Not cut off within the number."""
_MEMORY = re.compile(r"\[Rank (\d{1,7})\] (?:\(after (\d{1,15}) iter)?[^|\[]{0,60}memory \(MB\)[^|\[]{0,20}\|([^\[]*)")


def iteration(record: RunRecord, line: FoundLine) -> None:
    text = line.match.string
    found = (named_parts(line.before) if "|" in line.before else {}) | named_parts(line.match[3])
    values = dict(line.numbers)
    for name, (means, unit, trainer) in TABLE["iteration"].items():
        if (said := found.get(name)) is not None:
            values.setdefault(means, number(said) * UNITS[unit])
            # Primus prints now/average
            trainer = "primus" if means == "seconds" and "/" in said else trainer
            record.facts |= {"trainer": trainer} if trainer else {}
    seconds = values.pop("seconds", math.nan)
    covers, number_of = 0 if record.numbers else whole(record.arguments.get("log_interval")) or 0, int(line.match[1])
    if not record.numbers and abs(line.at_s - record.last_s - number_of * seconds) < 0.1 * number_of * seconds:
        covers = number_of  # as the time since the trainer said that it begins tells
    if _ELAPSED.search(text) is None or not record.step(
        number_of, seconds, end_s=line.at_s, covers=covers, rank=line.rank
    ):
        return
    if 0 < (skipped := values.pop("num_skipped", 0.0)) < MOST:
        record.counts["num_skipped"] += int(skipped)
    batch = values.get("global_batch_size", 0)
    if record.facts.get("global_batch_size", batch) != batch and batch and len(record.numbers) > 1:
        record.state["batch"] = "grows"
    record.take(values)


def memory(record: RunRecord, line: FoundLine) -> None:
    """A rank's memory; ranks that print at once leave several on a line."""
    for rank, step, text in _MEMORY.findall(line.match.string):
        found = named_parts(text)
        kinds = {kind: number(found[name]) * MIB for name, kind in TABLE["memory_kinds"].items() if name in found}
        record.bytes_of(int(rank), whole(step), **kinds)


def timed(record: RunRecord, size: float, name: str, low: str, high: str = "") -> None:
    """Take what a timer shows over the ranks, and what happens between steps as a mark."""
    low_s, high_s = number(low) * size, number(high or low) * size
    if low_s >= 0:
        record.timer(name, low_s, high_s)
        if kind := TABLE["timers_outside"].get(name):
            record.mark(kind, high_s)


def dump_begins(record: RunRecord, line: FoundLine) -> None:
    record.state["dump"] = "yes"
    record.restart()


def dump_ends(record: RunRecord, line: FoundLine) -> None:
    record.state.pop("dump", None)
    record.starts_with(" ".join(record.arguments.get(name, "") for name in TABLE["layout_arguments"]))


def argument(record: RunRecord, line: FoundLine) -> None:
    """An argument, in the dump of them; elsewhere a timer of which only the slowest rank's value is printed."""
    name, value = line.match.groups()
    if record.state.get("dump"):
        record.argument(name, value.strip())
    elif record.state.get("timers") and re.fullmatch(r"\d+\.\d+", value.strip()):
        timed(record, 1e-3, name, value)


def sizes(record: RunRecord, line: FoundLine) -> None:
    for name, size in re.findall(r"([\w-]+?)[- ]size: (\d{1,9})", line.match.string):
        record.argument(f"{name.replace('-', '_')}_size", size)


_VALUE = re.compile(r"\b(Mn|Mx)(D?Rtt|Pwr|Tmp|Utl|Clk|Etpt)/Rnk: *([\d.]{1,30}) ?([A-Za-z%]{1,4})/(\d{1,7})")
_MOST_WATTS = 1e4
"""No GPU takes more: such a number is in milliwatts, as NVML has it."""


def straggler(record: RunRecord, line: FoundLine) -> None:
    """`MnRtt/Rnk: 3453.08ms/8 | MxRtt/Rnk: 3468.20ms/0 | …`: least and most, each with its rank."""
    words, found = TABLE["straggler"], dict[str, dict[str, tuple[float, int]]]()
    for side, word, text, unit, rank in _VALUE.findall(line.match.string):
        value = number(text) * words["units"].get(unit, 1.0)
        name = words["names"][word]
        value /= 1e3 if name == "power_w" and value > _MOST_WATTS else 1.0
        found.setdefault(name, {})[side] = (value, int(rank))
    for name, sides in found.items():
        if len(sides) == 2:
            record.spread(name, sides["Mn"], sides["Mx"])
            if timer_name := words["timers"].get(name):
                record.timer(timer_name, sides["Mn"][0], sides["Mx"][0])


def finish_arguments(record: RunRecord) -> None:
    """Take the facts that the arguments state; ranks are as many as they say, whatever single lines count."""
    for name, fact in TABLE["facts_of_arguments"].items():
        if name == "world_size" or fact not in record.facts:
            record.fact(fact, record.arguments.get(name))


def datetime(record: RunRecord, line: FoundLine) -> None:
    record.time(moment(line.match[1]))


_COUNTS = ("num_gpus", "seq_length", "global_batch_size")
_MOST_CHARACTERS, _ARGUMENT_LIMITS = 2**18, InputLimits(2**16, 1_000, 20)
_UNSET = ("None", "False", "[]", "")


def run_stated(record: RunRecord) -> ImportedRun | None:
    """The run in the arguments that a log dumps; None where it dumps none, or where they are no run."""
    with suppress(SpecError, KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        if "num_layers" in record.arguments:
            return _of_nemo(record) if record.grammar == "dllogger" else _of_megatron(record.arguments)
    return None


def _of_megatron(arguments: Named) -> ImportedRun:
    """Every argument with its default stands in the dump; those that are unset are no options."""
    words: list[str] = []
    if "micro_batch_size" not in arguments:  # the name until 2021, which Megatron-DeepSpeed kept longer
        arguments = {"micro_batch_size": arguments.get("batch_size", "None"), **arguments}
    for name, value in arguments.items():
        if off := TABLE["negated"].get(name):
            words += [off] if value == "False" else []
        elif value == "True":
            words.append(_option(name))
        elif value not in _UNSET:
            words += [_option(name), *re.sub(r"[\[\]',]|\bAttnBackend\.", " ", value).split()]
    options = dict(options_of(words))
    for argument, unset, *idle in TABLE["idle_options"]:
        if arguments.get(argument, unset).rpartition(".")[2] == unset:
            options = {name: value for name, value in options.items() if name not in idle}
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
    return str(TABLE["renamed"].get(name, f"--{name.replace('_', '-')}"))


def _of_nemo(record: RunRecord) -> ImportedRun:
    tree: Fields = {}
    if sum(map(len, record.arguments.values())) > _MOST_CHARACTERS:
        raise SpecError(f"the log's configuration has more than {_MOST_CHARACTERS:,} characters", "name its file")
    for path, text in record.arguments.items():
        *parents, name = path.split("/")[:20]
        owner = tree
        for parent in parents:
            owner = mapping(owner.setdefault(parent, {}))
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
    named = {TABLE["negated"].get(name) or _option(name) for name in record.arguments}
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
