"""A Megatron-LM launch script, argument list or MODEL_ARGS YAML as a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from planner.errors import SpecError
from planner.export.common.imported_run import ImportedRun
from planner.export.common.script import read_script
from planner.export.common.shell import Script
from planner.export.megatron.options import Options, number, options_of
from planner.export.megatron.read_features import FEATURE_OPTIONS, read_dtype, read_features, read_scales
from planner.export.megatron.read_layout import LAYOUT_OPTIONS, read_layout
from planner.export.megatron.read_model import MODEL_OPTIONS, read_model
from planner.export.megatron.unread_options import sort_unread
from planner.trainers.switches import SWITCHES

_READ = {"--global-batch-size", "--seq-length", *FEATURE_OPTIONS, *LAYOUT_OPTIONS, *MODEL_OPTIONS}


def read_megatron(text: str) -> ImportedRun:
    """The run that a script (or a list of arguments) starts. Raises SpecError for values that are no numbers."""
    script = read_script(text)
    words_of_variables = [word for values in script.variables.values() for word in values]
    options = options_of(script.words) or options_of(words_of_variables)
    if "--num-layers" not in options and "--tensor-model-parallel-size" not in options:
        raise SpecError("the script passes no Megatron-LM arguments", "give the script that calls pretrain_gpt.py")
    return run_of(options, script, "megatron")


def run_of(options: Options, script: Script, source: str) -> ImportedRun:
    """The run that Megatron-LM's options describe; a model that they do not name is left to the user."""
    model = read_model(options) if "--num-layers" in options else None
    layout = read_layout(options)
    imported = ImportedRun(
        source,
        {
            "model": model,
            "num_gpus": _num_gpus(options, script),
            "gpus_per_node": number(options, "--nproc-per-node"),
            "runtime": "megatron",
            "seq_length": number(options, "--seq-length"),
            "global_batch_size": number(options, "--global-batch-size"),
            "dtype": read_dtype(options),
            "precision_recipe": read_scales(options),
            "parallelism": layout,
            "features": read_features(options),
        },
    )
    imported.optimizer_instances = number(options, "--num-distributed-optimizer-instances", 1) or 1
    imported.notes += _assumptions(options)
    _complete_batch(imported, layout)
    sort_unread(options, _READ, imported)
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


def _num_gpus(options: Options, script: Script) -> int | None:
    """GPUs that torchrun or Slurm is asked for; None where neither gives a number."""
    per_node = _count(options.get("--nproc-per-node", [""])) or _count(
        [script.directives.get("gpus-per-node", ""), script.directives.get("gres", "").rpartition(":")[2]]
    )
    nodes = _count([value.rpartition(":")[2] for value in options.get("--nnodes", [])]) or _count(
        [script.directives.get("nodes", ""), script.directives.get("N", "")]
    )
    world = _count(script.variables.get("WORLD_SIZE", []))
    if per_node and nodes:
        return per_node * nodes
    return world or (per_node if per_node and "--nnodes" not in options else None)


def _count(values: Sequence[str]) -> int | None:
    """The first of the values that is a positive whole number."""
    return next((int(value) for value in values if value.isdigit() and int(value)), None)


def _complete_batch(imported: ImportedRun, layout: dict[str, Any]) -> None:
    """Fill in the global batch where only dp is known; leave out a number of GPUs that the grid does not divide."""
    gpus, ranks = imported.run["num_gpus"], layout["tp"] * layout["pp"] * layout["cp"]
    if gpus is not None and gpus % ranks:
        imported.notes.append(f"the script starts {gpus} GPUs, which tp·cp·pp ({ranks}) does not divide")
        gpus = imported.run["num_gpus"] = None
    if imported.run["global_batch_size"] is None and gpus is not None:
        imported.run["global_batch_size"] = layout["micro_batch_size"] * gpus // ranks
        imported.notes.append(
            "--global-batch-size is missing: one micro-batch per data-parallel rank, as Megatron does"
        )
