"""The job that a log states: Megatron-LM's dump of arguments, or NeMo's configuration, as a run."""

from __future__ import annotations

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
from planner.observe.line_formats import MOST
from planner.observe.observation import JobFacts
from planner.observe.record import RunRecord
from planner.specs.reading import Limits, parse_yaml
from planner.specs.units import is_count

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
_MOST_CHARACTERS, _VALUE = 2**18, Limits(2**16, 1_000, 20)
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
        owner[name] = parse_yaml(text, path, limits=_VALUE, keeps_last=True)
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
