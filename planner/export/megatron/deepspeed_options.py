"""Megatron-DeepSpeed's options in the words of Megatron-LM, and configurations that train no GPT."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NoReturn

from planner.errors import SpecError
from planner.export.huggingface.deepspeed_files import name_sections
from planner.export.imported_run import ImportedRun
from planner.export.keyed_settings import readings, table
from planner.export.megatron.model_options import PATTERNS
from planner.export.megatron.option_rows import Options, OptionWords, reading
from planner.specs.base import Fields, Named

_ROW = table()["megatron-deepspeed"]
MARKS = {*_ROW["marks"].split()}
"""Options that Megatron-DeepSpeed alone has."""
_RENAMED: Named = _ROW["renamed"]
"""Options with another name and the same value."""
DEEPSPEED_OPTIONS = MARKS | {*_RENAMED, *_ROW["read"].split()}
"""Options that are read here."""


def is_megatron_deepspeed(options: Options) -> bool:
    """The options are Megatron-DeepSpeed's: it, and no other, has one of them."""
    return any(name in options for name in MARKS)


def as_megatron(options: Options) -> Options:
    """The same options as Megatron-LM names them. SpecError for models that have no counterpart here."""
    translated: OptionWords = {_RENAMED.get(name, name): list(words) for name, words in options.items()}
    if options.get("--num-experts") in (["1"], []):
        del translated["--num-experts"]
    said: OptionWords = readings("megatron-deepspeed", options, **reading(options), renamed=translated)["options"]
    return translated | said


def read_zero(options: Options, config: Fields, imported: ImportedRun) -> None:
    """The sharding and precision that DeepSpeed's own configuration and `--zero-stage` say."""
    known = {"dtype": imported.run["dtype"], "batch": imported.run["global_batch_size"], "written": json.dumps}
    imported.put(readings("megatron-zero", config, **reading(options), **known))
    name_sections(imported, config)


def check_is_gpt(words: Sequence[str], options: Options) -> None:
    """Raise SpecError where the program or its options are those of a model that is no GPT, or train nothing."""
    check_trains(words)
    started = [*words[:1], *(word for word, before in zip(words[1:], words, strict=False) if before == "-m")]
    programs = " ".join([*started, *(word for word in words if word.endswith((".py", ".sh")))])
    for what, where in _others(words, options, programs):
        if not (what.startswith("Mamba") and any(name in options for name in PATTERNS)):
            refuse_other(what, where)


def check_trains(words: Sequence[str]) -> None:
    """Raise SpecError where a launch is one of a trainer's other commands."""
    begun = " ".join(words[:3])
    if other := re.search(
        r"\b(swift|megatron|llamafactory-cli)\s+(infer|deploy|export|eval|sample|rollout|chat)", begun
    ):
        refuse_other(table()["no_decoder"]["commands"].get(other[2], "no training"), begun)
    if program := next((word for word in words if re.fullmatch(r"lm[-_]eval|lighteval|evalplus", word)), None):
        refuse_other("an evaluation of a trained model", program)


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
