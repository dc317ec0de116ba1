"""A run of Megatron-Bridge: the overrides of a recipe, as an exported bridge.json or the words of a launcher."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Any

from planner.errors import SpecError
from planner.export.bridge.fields import SAME
from planner.export.common.imported_run import ImportedRun
from planner.export.common.script import read_script
from planner.export.common.shell import Script
from planner.export.megatron.options import Options
from planner.export.megatron.read import run_of

_PATHS = {path: option for option, path in SAME.items()}
_WHEN: dict[str, dict[Any, str]] = {
    "model.sequence_parallel": {True: "--sequence-parallel"},
    "model.share_embeddings_and_output_weights": {False: "--untie-embeddings-and-output-weights"},
    "model.add_bias_linear": {False: "--disable-bias-linear"},
    "model.qk_layernorm": {True: "--qk-layernorm"},
    "model.gated_linear_unit": {True: "--swiglu"},
    "model.activation_func": {"squared_relu": "--squared-relu"},
    "model.gradient_accumulation_fusion": {False: "--no-gradient-accumulation-fusion"},
    "model.cross_entropy_loss_fusion": {True: "--cross-entropy-loss-fusion"},
    "ddp.use_distributed_optimizer": {True: "--use-distributed-optimizer"},
    "ddp.overlap_grad_reduce": {True: "--overlap-grad-reduce"},
    "ddp.overlap_param_gather": {True: "--overlap-param-gather"},
    "ddp.check_for_nan_in_grad": {False: "--no-check-for-nan-in-loss-and-grad"},
    "mixed_precision.fp16": {True: "--fp16"},
    "mixed_precision.bf16": {True: "--bf16"},
}
"""Fields that stand for a bare option, and the value that does."""
_VALUED = {
    "model.seq_length": "--seq-length",
    "model.vocab_size": "--vocab-size",
    "model.virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "model.recompute_modules": "--recompute-modules",
    "model.window_size": "--window-size",
    "mixed_precision.fp8": "--fp8-format",
    "mixed_precision.fp4": "--fp4-format",
}
_MOMENTS = {"bfloat16": "bf16", "float32": "fp32"}


def read_bridge(text: str) -> ImportedRun:
    """The run that a recipe's overrides describe; the recipe's own settings are not known.

    Raises SpecError for a text without overrides, and for values that are no numbers.
    """
    words, script = _words(text)
    fields = dict(_field(word) for word in words)
    if not fields:
        raise SpecError("the text overrides no field of a recipe", "give bridge.json, or the script that sets fields")
    imported = run_of(_options(fields), script, "bridge")
    read = {*_PATHS, *_WHEN, *_VALUED}
    imported.ignored |= {path: json.dumps(value) for path, value in fields.items() if path not in read}
    imported.notes.append("what the recipe sets beside these overrides is not read")
    return imported


def _words(text: str) -> tuple[list[str], Script]:
    """The overrides as words, with the variables around them."""
    if text.lstrip().startswith("{"):
        data = json.loads(text)
        world = {"WORLD_SIZE": [str(data["world_size"])]} if data.get("world_size") else {}
        return [str(word) for word in data.get("overrides", [])], Script(words=[], variables=world)
    script = read_script(text)
    return [word for word in script.words if re.match(r"[+a-z_]+(\.\w+)*=", word)], script


def _field(word: str) -> tuple[str, Any]:
    """An override's path and value."""
    path, _, value = word.partition("=")
    if value.startswith("{"):
        # Hydra writes keys without quotes
        value = re.sub(r"([{,])(\w+):", r'\1"\2":', value)
    try:
        return path.lstrip("+"), json.loads(value)
    except ValueError:
        return path.lstrip("+"), {"True": True, "False": False, "None": None}.get(value, value)


def _options(fields: dict[str, Any]) -> Options:
    """The fields as options of Megatron-LM."""
    precision = fields.get("mixed_precision")
    if isinstance(precision, dict):
        fields = {**fields, **{f"mixed_precision.{name}": value for name, value in precision.items()}}
    options: dict[str, list[str]] = {}
    for path, value in fields.items():
        name = _PATHS.get(path) or _VALUED.get(path)
        flag = None if isinstance(value, (list, dict)) else _WHEN.get(path, {}).get(value)
        if flag is not None:
            options[flag] = []
        elif name is not None and value is not None and value is not False:
            items = value if isinstance(value, list) else [] if value is True else [value]
            options[name] = [str(item) for item in items]
    return {**options, **_derived(fields, options)}


def _derived(fields: dict[str, Any], options: Options) -> Options:
    """Options whose meaning several fields take together."""
    derived: dict[str, list[str]] = {}
    if "--num-query-groups" in options:
        derived["--group-query-attention"] = []
    if fields.get("model.overlap_p2p_comm") is False and "--num-virtual-stages-per-pipeline-rank" in options:
        derived["--no-overlap-p2p-communication"] = []
    if "--num-experts" in options and isinstance(pattern := fields.get("model.moe_layer_freq"), list):
        runs = [f"[{has_experts}]*{len(list(run))}" for has_experts, run in groupby(pattern)]
        derived["--moe-layer-freq"] = [f"({'+'.join(runs)})"]
    if "--fp8-format" in options:
        derived["--fp8-recipe"] = [str(fields.get("mixed_precision.fp8_recipe", "tensorwise"))]
    if "--cross-entropy-loss-fusion" in options and "--cross-entropy-fusion-impl" not in options:
        derived["--cross-entropy-fusion-impl"] = ["te"]  # as its recipes have it
    in_fp32 = fields.get("mixed_precision.grad_reduce_in_fp32")
    if in_fp32 is not None and in_fp32 == ("--fp16" in options):
        derived["--accumulate-allreduce-grads-in-fp32" if in_fp32 else "--grad-reduce-in-bf16"] = []
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if dtype := fields.get(f"optimizer.{name}"):
            derived[f"--{name.replace('_', '-')}"] = [_MOMENTS.get(str(dtype), str(dtype))]
    if fields.get("model.bias_activation_fusion") is False and "--swiglu" in options:
        derived["--no-bias-swiglu-fusion"] = []
    return derived
