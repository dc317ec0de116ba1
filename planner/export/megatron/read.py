"""A Megatron-LM launch script, argument list or MODEL_ARGS YAML as a run; Megatron-DeepSpeed's scripts, too."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from planner.errors import SpecError
from planner.export.common.config_file import ConfigFile
from planner.export.common.imported_run import ImportedRun
from planner.export.common.markup import json_of
from planner.export.common.spelling import unexplained
from planner.export.megatron.deepspeed_options import READ as DEEPSPEED_OPTIONS
from planner.export.megatron.deepspeed_options import as_megatron, is_megatron_deepspeed, read_zero
from planner.export.megatron.model.read import MODEL_OPTIONS, read_model
from planner.export.megatron.options import Options, number, options_of, text
from planner.export.megatron.other_models import check_is_gpt
from planner.export.megatron.read_features import FEATURE_OPTIONS, read_dtype, read_features, read_scales
from planner.export.megatron.read_layout import LAYOUT_OPTIONS, read_layout
from planner.export.megatron.switches import SWITCH_OPTIONS
from planner.export.megatron.unread_options import sort_unread
from planner.export.scripts.script import read_script
from planner.export.scripts.shell import Script
from planner.specs.units import is_count
from planner.trainers.switches import SWITCHES

READ = frozenset({"--global-batch-size", "--seq-length", *FEATURE_OPTIONS, *LAYOUT_OPTIONS, *MODEL_OPTIONS})
"""The options that are read."""
_SIZES = ("--num-layers", "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--model-parallel-size")


def read_megatron(config: ConfigFile) -> ImportedRun:
    """The run that a script (or a list of arguments) starts. Raises SpecError for values that are no numbers."""
    script = read_script(config.text, config.beside)
    words = _words(script)
    options = dict(options_of(words))
    check_is_gpt(words, options)
    for name in ("TOKENIZER_MODEL", "TOKENIZER", "HF_MODEL_CKPT"):
        if name in script.variables and not text(options, "--tokenizer-model"):
            options["--tokenizer-model"] = script.variables[name]
    if not any(name in options for name in _SIZES):
        raise SpecError("the script passes no Megatron-LM arguments", "give the script that calls pretrain_gpt.py")
    if not is_megatron_deepspeed(options):
        return run_of(options, script, "megatron")
    imported = run_of(as_megatron(options), script, "megatron-deepspeed", DEEPSPEED_OPTIONS)
    imported.run["runtime"] = "megatron-deepspeed"
    read_zero(options, _deepspeed_config(options, script, config), imported)
    if "--embed-layernorm" in options and imported.run["model"] is not None:
        imported.run["model"]["embedding_norm"] = True
    return imported


def _words(script: Script) -> list[str]:
    """The words of the launch; where a file only sets variables, those of all of them that hold options."""
    if any(word.startswith("--") for word in script.words):
        return script.words
    return [word for words in script.variables.values() for text in words for word in _split(text)]


def _split(text: str) -> list[str]:
    return text.split() if re.match(r"\s*--\w", text) else [text]


def _deepspeed_config(options: Options, script: Script, config: ConfigFile) -> dict[str, Any]:
    """DeepSpeed's own configuration: written by the script, or a file beside it; empty where there is none."""
    name = text(options, "--deepspeed_config") or text(options, "--deepspeed-config")
    source = script.files.get(name) or config.beside(name)
    if source is None and len(script.files) == 1:
        source = next(iter(script.files.values()))
    try:
        data = json_of(source or "{}", "")
    except SpecError:
        return {}
    return data if isinstance(data, dict) else {}


def run_of(
    options: Options,
    script: Script,
    source: str,
    also_read: Sequence[str] | set[str] = (),
    num_layers: int | None = None,
) -> ImportedRun:
    """The run that Megatron-LM's options describe; a model that they do not name is left to the user.

    `num_layers` is that of a model that the configuration names and does not describe.
    """
    model = read_model(options) if "--num-layers" in options and num_layers is None else None
    if num_layers is not None:
        options = {**options, "--num-layers": [str(num_layers)]}
    imported = ImportedRun(
        source,
        {
            "model": model,
            "num_gpus": num_gpus(options, script),
            "gpus_per_node": number(options, "--nproc-per-node") or count([script.directives.get("gpus-per-node", "")]),
            "runtime": "megatron",
            "seq_length": number(options, "--seq-length") or number(options, "--max-position-embeddings"),
            "global_batch_size": number(options, "--global-batch-size"),
            "dtype": read_dtype(options),
            "precision_recipe": read_scales(options),
            "parallelism": read_layout(options),
            "features": read_features(options),
        },
    )
    if (
        model is not None
        and not source.startswith("megatron")
        and not {"--vocab-size", "--tokenizer-type"} & {*options}
    ):
        # GPT-2's vocabulary is what Megatron-LM alone takes unasked
        model["vocab_size"] = None
    imported.optimizer_instances = number(options, "--num-distributed-optimizer-instances", 1) or 1
    imported.microbatches_per_rank = 1
    imported.notes += _assumptions(options)
    unsaid = unexplained(SWITCH_OPTIONS, {name: words or True for name, words in options.items()})
    sort_unread(options, {*READ, *also_read} - unsaid, imported)
    return imported


def _assumptions(options: Options) -> Iterator[str]:
    """Notes on options that mean something else in another version, or that no plan has a word for."""
    if "--use-megatron-fsdp" in options and "--data-parallel-sharding-strategy" not in options:
        yield (
            "--use-megatron-fsdp shards optimizer, gradients and weights where --data-parallel-sharding-strategy is "
            "not given, as Megatron core 0.18 and later do; before it sharded nothing"
        )
    scales = read_scales(options)
    if scales is not None and not SWITCHES["precision_recipe"].fields_of(scales):
        recipe = scales.removeprefix("fp8-")
        yield f"--fp8-recipe {recipe}: its scales are not modelled, and priced as one for a tensor (tensorwise)"
    if "--bf16" not in options and "--fp16" not in options:
        yield "neither --bf16 nor --fp16 is given, so that it trains in fp32: priced as bf16"
    if "--seq-length" not in options and "--max-position-embeddings" in options:
        yield "--seq-length is missing: as long as --max-position-embeddings"


def num_gpus(options: Options, script: Script) -> int | None:
    """GPUs that torchrun, DeepSpeed's launcher or Slurm is asked for; None where none gives a number."""
    directives, variables = script.directives, script.variables
    tasks = directives.get("ntasks-per-node", "")
    per_node = (
        _first(options, "--nproc-per-node", "--num-gpus", "--ntasks-per-node")
        or count(
            [directives.get("gpus-per-node", "").rpartition(":")[2], directives.get("gres", "").rpartition(":")[2]]
        )
        or count([word for name in ("GPUS_PER_NODE", "NPROC_PER_NODE") for word in variables.get(name, [])])
        or (count([tasks]) if tasks != "1" else None)
    )
    nodes = _first(options, "--nnodes", "--num-nodes", "--nodes") or count(
        [directives.get("nodes", ""), directives.get("N", "")]
    )
    world = count([word for name in ("WORLD_SIZE", "NUM_GPUS", "NGPUS", "N_GPUS") for word in variables.get(name, [])])
    if per_node and nodes:
        return per_node * nodes
    is_counted = any(name in options for name in ("--nnodes", "--num-nodes"))
    return world or (per_node if per_node and not is_counted else None)


def _first(options: Options, *names: str) -> int | None:
    return count([options[name][0].rpartition(":")[2] for name in names if options.get(name)])


def count(values: Sequence[str]) -> int | None:
    """The first of the values that is a positive whole number."""
    return next((int(value) for value in values if is_count(value) and 0 < int(value) < 10**7), None)
