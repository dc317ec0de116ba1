"""Megatron-DeepSpeed's options in the words of Megatron-LM, and configurations that train no GPT."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from planner.errors import SpecError
from planner.export.huggingface.deepspeed_files import name_sections
from planner.export.imported_run import ImportedRun
from planner.export.keyed_settings import table
from planner.export.megatron.model_options import PATTERNS
from planner.export.megatron.option_rows import Options, OptionWords, number, text
from planner.specs.base import Fields, Named

_ROW = table()["megatron-deepspeed"]
MARKS = {*_ROW["marks"].split()}
"""Options that Megatron-DeepSpeed alone has."""
_RENAMED: Named = _ROW["renamed"]
"""Options with another name and the same value."""
_POSITIONS = {"absolute": "learned_absolute", "learned": "learned_absolute", "rotary": "rope"}
_GATED = ("swiglu", "geglu", "reglu", "liglu")
DEEPSPEED_OPTIONS = MARKS | {*_RENAMED, *_ROW["read"].split()}
"""Options that are read here."""


def is_megatron_deepspeed(options: Options) -> bool:
    """The options are Megatron-DeepSpeed's: it, and no other, has one of them."""
    return any(name in options for name in MARKS)


def as_megatron(options: Options) -> Options:
    """The same options as Megatron-LM names them. SpecError for models that have no counterpart here."""
    translated = {_RENAMED.get(name, name): list(words) for name, words in options.items()}
    if "--num-key-value-heads" in options:
        translated["--group-query-attention"] = []
    if text(options, "--position-embedding-type") in _POSITIONS:
        translated["--position-embedding-type"] = [_POSITIONS[text(options, "--position-embedding-type")]]
    if text(options, "--glu-activation") in _GATED:
        translated["--swiglu"] = []
        translated.setdefault("--ffn-hidden-size", [str(4 * (number(options, "--hidden-size") or 0))])
    if text(options, "--normalization").lower() == "rmsnorm":
        translated["--normalization"] = ["RMSNorm"]
    if options.get("--num-experts") in (["1"], []):
        del translated["--num-experts"]
    translated |= _recompute(options) | _experts(translated) | _stages(options)
    if (ulysses := number(options, "--ds-sequence-parallel-size", 1) or 1) > 1:
        translated |= {"--context-parallel-size": [str(ulysses)], "--cp-comm-type": ["a2a"]}
    return translated


def _recompute(options: Options) -> OptionWords:
    """`--checkpoint-activations` recomputes whole layers; groups of several keep fewer inputs and no other thing."""
    method = text(options, "--activations-checkpoint-method")
    if "--checkpoint-activations" not in options and not method:
        return {}
    return {"--recompute-granularity": ["full"], "--recompute-method": [method or "uniform"]}


def _experts(options: Options) -> OptionWords:
    """DeepSpeed's experts stand in every second layer unless told, and are not split over tensor-parallel ranks."""
    words = options.get("--num-experts")
    if words is None:
        return {}
    if text(options, "--mlp-type") == "residual" or len(set(words)) > 1:
        raise SpecError(
            f"--num-experts: {' '.join(words)[:60]!r} with residual or growing experts has no counterpart here",
            "one number of experts, --mlp-type standard",
        )
    num_layers, every = number(options, "--num-layers", 0) or 0, number(options, "--expert-interval", 2) or 2
    pattern = ",".join("1" if (layer + 1) % every == 0 else "0" for layer in range(num_layers))
    experts = {"--moe-layer-freq": [f"([{pattern}])"], "--expert-tensor-parallel-size": ["1"]}
    return experts | ({} if "--moe-router-topk" in options else {"--moe-router-topk": ["1"]})


def _stages(options: Options) -> OptionWords:
    """Under `type:transformer|embedding` embedding and head count as a layer each (BLOOM)."""
    if "embedding" not in text(options, "--pp-partition-method"):
        return {}
    layers, pp = number(options, "--num-layers", 0) or 0, number(options, "--pipeline-model-parallel-size", 1) or 1
    if pp == 1 or (layers + 2) % pp:
        return {}
    return {"--account-for-embedding-in-pipeline-split": [], "--account-for-loss-in-pipeline-split": []}


def read_zero(options: Options, config: Fields, imported: ImportedRun) -> None:
    """The sharding and precision that DeepSpeed's own configuration and `--zero-stage` say."""
    run, zero = imported.run, config.get("zero_optimization") or {}
    stage = zero.get("stage") if isinstance(zero, dict) and isinstance(zero.get("stage"), int) else None
    if stage is None:
        stage = number(options, "--zero-stage") if "--zero-stage" in options else 0
    run["parallelism"]["zero_stage"] = min(stage or 0, 3)
    for dtype in ("bf16", "fp16"):
        section = config.get(dtype)
        if isinstance(section, dict) and section.get("enabled") is True:
            run["dtype"] = dtype
    if run["dtype"] == "bf16" and not stage and "--deepspeed" in options:
        run["parallelism"]["zero_stage"] = 1
        imported.notes.append(
            "ZeRO 0 in bf16: DeepSpeed's optimizer of bf16 shards its states all the same, as ZeRO-1 does"
        )
    if "--deepspeed" in options and not config and "--zero-stage" not in options:
        imported.notes.append("neither --zero-stage nor the DeepSpeed configuration could be read: ZeRO 0 is assumed")
    if "--cpu-optimizer" in options or _is_offloaded(zero):
        run["features"]["optimizer_offload"] = 1.0
    if isinstance(zero, dict) and (zero.get("offload_param") or {}).get("device") in ("cpu", "nvme"):
        imported.unknown["zero_optimization.offload_param"] = json.dumps(zero["offload_param"])
    name_sections(imported, config)
    if run["global_batch_size"] is None and isinstance(config.get("train_batch_size"), int):
        run["global_batch_size"] = config["train_batch_size"]


def _is_offloaded(zero: Any) -> bool:
    return isinstance(zero, dict) and (zero.get("offload_optimizer") or {}).get("device") == "cpu"


def check_is_gpt(words: Sequence[str], options: Options) -> None:
    """Raise SpecError where the program or its options are those of a model that is no GPT, or train nothing."""
    rows = table()["no_decoder"]
    started = [*words[:1], *(word for word, before in zip(words[1:], words, strict=False) if before == "-m")]
    programs = " ".join([*started, *(word for word in words if word.endswith((".py", ".sh")))])
    begun = " ".join(words[:3])
    if other := re.search(
        r"\b(swift|megatron|llamafactory-cli)\s+(infer|deploy|export|eval|sample|rollout|chat)", begun
    ):
        refuse_other(rows["commands"].get(other[2], "no training"), begun)
    for what, where in _others(words, options, programs):
        if not (what.startswith("Mamba") and any(name in options for name in PATTERNS)):
            refuse_other(what, where)


def _others(words: Sequence[str], options: Options, programs: str) -> Iterator[tuple[str, str]]:
    """Kinds of model by programs, options and their values, and the words that say them."""
    rows = table()["no_decoder"]
    for pattern, what in rows["programs"].items():
        if re.search(pattern, programs):
            yield what, next((word for word in words if re.search(pattern, word)), programs).strip().splitlines()[0]
    for pattern, what in rows["options"].items():
        if option := next((name for name in options if re.match(pattern, name)), None):
            yield what, option
    for option, marks in rows["values"].items():
        for pattern, what in marks.items():
            if re.search(pattern, " ".join(options.get(option, []))):
                yield what, option


def refuse_other(what: str, where: str) -> NoReturn:
    """Raise SpecError for what `where` says to be no training of a decoder."""
    raise SpecError(
        f"{where[:80]}: this is {what}",
        "only decoder-only transformers in training are planned; give the script of one",
    )
