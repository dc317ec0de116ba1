"""The options of examples: how long they are, how many, how often each is seen, packed or padded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

from planner.cli.job_options import JobOptions
from planner.errors import SpecError
from planner.specs.finetuning import ObjectiveSpec
from planner.specs.reading import load_yaml
from planner.specs.training import DocumentLength

_MAX_QUANTILE = 3.09
"""Standard deviations above the middle that 99.9% of a normal distribution are below: MAX of MEAN:MAX."""


def read_batches(
    asked: JobOptions, seq_length: int, objective: ObjectiveSpec, count_of: Callable[[str, str], int]
) -> dict[str, Any]:
    """The fields of a training that the options of examples say; SpecError names the option."""
    if asked.batching not in (None, "packed", "padded"):
        raise SpecError(f"--batching: {asked.batching[:60]!r} is none of packed and padded", "--batching packed")
    if asked.epochs is not None and asked.examples is None:
        raise SpecError("--epochs: without --examples, nothing says how long one is", "add --examples 50k")
    if asked.examples is not None and asked.tokens is not None:
        raise SpecError("--examples and --tokens: both given", "leave --tokens out")
    if asked.example_lengths is None:
        if asked.batching == "padded":
            raise SpecError("--batching padded: nothing says how long examples are", "add --example-lengths 400:2048")
        fields: dict[str, Any] = {}
        mean = float(seq_length)
    else:
        lengths = _lengths(asked.example_lengths)
        is_padded = asked.batching != "packed"
        fields = {"document_lengths": lengths, "batching": "padded" if is_padded else "packed"}
        if is_padded:
            # no batch is longer than its longest example
            fields["seq_length"] = seq_length = min(seq_length, max(entry.length for entry in lengths))
        total = sum(entry.share for entry in lengths)
        mean = sum(min(entry.length, seq_length) * entry.share for entry in lengths) / total
    if asked.examples is None:
        return fields
    examples, epochs = count_of("examples", asked.examples), 1.0 if asked.epochs is None else asked.epochs
    if not 0 < epochs <= 1e6:
        raise SpecError(f"--epochs: {epochs:g} is not between 0 and 1,000,000", "--epochs 3")
    tokens = examples * objective.row.num_sequences * mean * epochs
    return fields | {"examples": examples, "epochs": epochs, "tokens": tokens}


def _lengths(text: str) -> tuple[DocumentLength, ...]:
    """The lengths of a file, of `400`, or of `400:2048`."""
    from planner.specs.documents import LogNormal, read_lengths

    if os.path.sep in text or text.lower().endswith((".yaml", ".yml", ".json")):
        data = load_yaml(text)
        given = read_lengths(data.get("lengths", data), f"--example-lengths {text}")
        return tuple(DocumentLength.model_validate(entry) for entry in given)
    mean_text, _, most_text = text.partition(":")
    try:
        mean = float(mean_text)
        most = float(most_text) if most_text else mean
    except ValueError:
        mean = most = math.nan
    if not 1 <= mean <= most <= 2**31:
        raise SpecError(
            f"--example-lengths: {text[:60]!r} is no file, and no MEAN:MAX in tokens", "--example-lengths 400:2048"
        )
    if most == mean:
        return (DocumentLength(length=round(mean), share=1.0),)
    # the logarithm of MAX is its mean, ln(MEAN) - σ²/2, and _MAX_QUANTILE·σ
    sigma = _MAX_QUANTILE - math.sqrt(max(_MAX_QUANTILE**2 - 2 * math.log(most / mean), 0.0))
    drawn = LogNormal(mean=mean, sigma=max(sigma, 1e-3)).lengths()
    return tuple(entry.model_copy(update={"length": min(entry.length, round(most))}) for entry in drawn)
