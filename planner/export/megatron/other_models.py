"""Configurations of Megatron-LM that train no GPT: named for what they are, and refused."""

from __future__ import annotations

import re
from collections.abc import Sequence

from planner.errors import SpecError
from planner.export.megatron.options import Options

_BY_PROGRAM = (
    (r"pretrain_bert|train_bert", "BERT, an encoder"),
    (r"pretrain_t5|_t5\b", "T5, an encoder with a decoder"),
    (r"pretrain_(ict|realm)|biencoder", "a retriever of two encoders"),
    (r"pretrain_retro", "Retro, which attends to retrieved chunks"),
    (r"pretrain_vision|pretrain_vit|vision/", "a vision model"),
    (r"pretrain_vlm|multimodal|train_vlm|llava", "a vision-language model"),
    (r"pretrain_(mamba|hybrid)|examples/mamba", "Mamba, a state-space model"),
    (r"preprocess_data|merge_datasets|analyze_data", "a preparation of data"),
    (r"text_generation|generate_|run_inference|inference_server|tools/run_|/inference/", "an inference server"),
    (r"checkpoint/convert|convert_checkpoint|hf2megatron|tools/checkpoint", "a conversion of checkpoints"),
    (r"tasks/main|evaluate\.py|evalharness|tasks/msdp", "an evaluation of a trained model"),
)
"""Programs and what they do."""
_BY_OPTION = (
    (
        r"--encoder-num-layers|--decoder-seq-length|--decoder-num-layers|--vocab-extra-ids",
        "T5, an encoder with a decoder",
    ),
    (r"--bert-|--mask-prob|--mask-factor", "BERT, an encoder"),
    (r"--retro-(?!no)|--retriever-", "Retro, which attends to retrieved chunks"),
    (
        r"--img-h|--vision-|--language-model-type|--patch-dim|--img-embed|--allow-missing-vision",
        "a vision-language model",
    ),
    (
        r"--hybrid-(override|layer)-pattern|--is-hybrid-model|--mamba-|--hybrid-(attention|mlp)-ratio",
        "Mamba, a state-space model",
    ),
    (r"--ict-|--biencoder", "a retriever of two encoders"),
)
"""Options that other models alone have."""
_BY_VALUE = {
    "--spec": (r"mamba|hybrid", "Mamba, a state-space model"),
    "--vocab-file": (r"\bbert-|vocab\.txt$", "BERT, an encoder"),
    "--data-path": (r"\bmy-bert", "BERT, an encoder"),
    "--tokenizer-type": (r"BertWordPiece", "BERT, an encoder"),
}
"""Options with values that other models alone have."""


def check_is_gpt(words: Sequence[str], options: Options) -> None:
    """Raise SpecError where the program or its options are those of a model that is no GPT, or train nothing."""
    programs = " ".join(
        word for word in words if word.endswith((".py", ".sh")) or ("." in word and not word.startswith("-"))
    )
    for pattern, what in _BY_PROGRAM:
        if re.search(pattern, programs):
            _refuse(what, next((word for word in words if re.search(pattern, word)), programs).strip().splitlines()[0])
    for pattern, what in _BY_OPTION:
        if option := next((name for name in options if re.match(pattern, name)), None):
            _refuse(what, option)
    for option, (pattern, what) in _BY_VALUE.items():
        if re.search(pattern, " ".join(options.get(option, []))):
            _refuse(what, option)


def _refuse(what: str, where: str) -> None:
    raise SpecError(
        f"{where[:80]}: this is {what}",
        "only decoder-only transformers in training are planned; give the script of one",
    )
