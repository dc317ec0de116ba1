"""The phases of a training run as a file states them, and the lengths of documents as people state them.

Phases come one after the other, each with its tokens and what changes. Lengths are a list, a lognormal, or percentiles.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from statistics import NormalDist
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from planner.errors import SpecError
from planner.specs.base import NonNegativeFloat, PositiveFloat, PositiveInt, Spec
from planner.specs.problems import checked
from planner.specs.reading import CSV, kind_of, label, load_yaml, read_text
from planner.specs.training import DocumentLength, Dtype
from planner.specs.units import parse_count

_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?|100)")
_LEAST_SHARE, _STEP = 1e-9, 0.125
_NUM_QUANTILES = 200
_FORMS = "a list of {length, share}, or {mean, sigma}, or percentiles {p10, p50, p90, …}"


class LogNormal(Spec):
    """Lengths whose logarithms are normal."""

    mean: PositiveFloat = Field(ge=1, le=2**31)
    """Mean length in tokens."""
    sigma: PositiveFloat = Field(le=5)
    """Standard deviation of the natural logarithm."""

    def lengths(self) -> tuple[DocumentLength, ...]:
        """The distribution in steps of an eighth of sigma, as far as tokens are found: a token's length is lognormal
        too, sigma² further up."""
        middle, last = math.log(self.mean) - self.sigma**2 / 2, 6 + self.sigma
        normal, edges = NormalDist(), [-6 + _STEP * step for step in range(math.ceil((last + 6) / _STEP) + 1)]
        shares: dict[int, float] = {}
        for low in edges[:-1]:
            length = max(1, round(math.exp(middle + self.sigma * (low + _STEP / 2))))
            shares[length] = shares.get(length, 0.0) + normal.cdf(low + _STEP) - normal.cdf(low)
        kept = [(length, share) for length, share in shares.items() if share * length > _LEAST_SHARE * self.mean]
        return tuple(DocumentLength(length=min(length, 2**31), share=share) for length, share in kept)


def of_percentiles(lengths: Mapping[float, float]) -> tuple[DocumentLength, ...]:
    """Lengths whose logarithm is straight between percentiles, and no shorter or longer than the outermost ones."""
    points = sorted((percent / 100, math.log(length)) for percent, length in lengths.items())
    shares: dict[int, float] = {}
    for step in range(_NUM_QUANTILES):
        at = (step + 0.5) / _NUM_QUANTILES
        above = next((i for i, (fraction, _) in enumerate(points) if fraction >= at), len(points))
        low, high = points[max(above - 1, 0)], points[min(above, len(points) - 1)]
        along = (at - low[0]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
        length = round(math.exp(low[1] + along * (high[1] - low[1])))
        shares[length] = shares.get(length, 0.0) + 1 / _NUM_QUANTILES
    return tuple(DocumentLength(length=length, share=share) for length, share in shares.items())


def read_lengths(given: Any, where: str) -> Any:
    """A stated distribution as a list of lengths and shares; lists are left as they are. SpecError naming `where`."""
    if not isinstance(given, dict):
        if not isinstance(given, list):
            raise SpecError(f"{where}: {given!r:.60} is {kind_of(given)}, no distribution", f"give {_FORMS}")
        return given
    if not given or not all(isinstance(key, str) and _PERCENTILE.fullmatch(key) for key in given):
        if {"mean", "sigma"} & given.keys():
            return [entry.model_dump() for entry in checked(LogNormal, given, where).lengths()]
        raise SpecError(f"{where}: is no distribution", f"give {_FORMS}")
    percentiles = {}
    for key, length in given.items():
        if type(length) not in (int, float) or not 1 <= length <= 2**31:
            raise SpecError(f"{where}.{key}: {length!r:.60} is no length in tokens", f"write {key}: 1000")
        percentiles[float(key[1:])] = float(length)
    ordered = [percentiles[percent] for percent in sorted(percentiles)]
    if ordered != sorted(ordered):
        raise SpecError(f"{where}: a lower percentile is longer than a higher one", "let lengths grow with percentiles")
    return [entry.model_dump() for entry in of_percentiles(percentiles)]


_HISTOGRAM = re.compile(r"(\d{1,10})(?:[:,\s]+(\d{1,15}(?:\.\d+)?))?")
_BINS_PER_OCTAVE = 24
"""Bins of a doubling of the lengths that are listed: 41 doublings fill fewer than a training may have."""


def listed_lengths(rows: list[str], where: str) -> tuple[DocumentLength, ...]:
    """Lengths in rows, each with the number of texts that have it behind it; bins have the mean of theirs."""
    bins: dict[int, tuple[float, float]] = {}
    for row in rows:
        match = _HISTOGRAM.fullmatch(row.strip())
        length, count = (int(match[1]), float(match[2] or 1)) if match else (0, 0.0)
        if not 1 <= length <= 2**31 or not count:
            raise SpecError(f"{where}: {row.strip()[:60]!r} is no length in tokens", "--example-lengths 512:40,4096:9")
        key = round(_BINS_PER_OCTAVE * math.log2(length))
        tokens, texts = bins.get(key, (0.0, 0.0))
        bins[key] = tokens + length * count, texts + count
    return tuple(DocumentLength(length=round(tokens / texts), share=texts) for tokens, texts in bins.values())


_MAX_QUANTILE = 3.09
"""Standard deviations above the middle that 99.9% of a normal distribution are below: MAX of MEAN:MAX."""


def lengths_in(text: str, where: str) -> tuple[DocumentLength, ...]:
    """The lengths of a file, of `512:40,4096:9`, of `400`, or of `400:2048`; SpecError naming `where`."""
    if os.path.sep in text or text.lower().endswith((".yaml", ".yml", ".json", ".txt", ".csv")):
        rows = [row for row in read_text(text, CSV.num_bytes).splitlines() if row.strip()]
        if rows and rows[0].strip()[0].isdigit():
            return listed_lengths(rows, f"{where} {text}")
        data = load_yaml(text)
        given = read_lengths(data.get("lengths", data), f"{where} {text}")
        return tuple(DocumentLength.model_validate(entry) for entry in given)
    if "," in text:
        return listed_lengths(text.split(","), where)
    mean_text, _, most_text = text.partition(":")
    try:
        mean = float(mean_text)
        most = float(most_text) if most_text else mean
    except ValueError:
        mean = most = math.nan
    if not 1 <= mean <= most <= 2**31:
        raise SpecError(f"{where}: {text[:60]!r} is no file, and no MEAN:MAX in tokens", f"{where} 400:2048")
    if most == mean:
        return (DocumentLength(length=round(mean), share=1.0),)
    # the logarithm of MAX is its mean, ln(MEAN) - σ²/2, and _MAX_QUANTILE·σ
    sigma = _MAX_QUANTILE - math.sqrt(max(_MAX_QUANTILE**2 - 2 * math.log(most / mean), 0.0))
    drawn = LogNormal(mean=mean, sigma=max(sigma, 1e-3)).lengths()
    return tuple(entry.model_copy(update={"length": min(entry.length, round(most))}) for entry in drawn)


MOST_PHASES = 100


def _count(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return parse_count(value)
        except (ValueError, OverflowError):
            raise PydanticCustomError("count", "no count") from None
    if isinstance(value, float) and value == value // 1:
        return int(value)
    return value


Count = Annotated[PositiveInt, BeforeValidator(_count)]
"""A number of tokens or samples, such as 15T, 252M or 1048576."""


class Rampup(Spec):
    """A batch that grows: `from` sequences, by `by` more each time, spread evenly over `tokens` or `samples`."""

    start: PositiveInt = Field(alias="from", le=2**31)
    by: PositiveInt = Field(le=2**31)
    to: PositiveInt | None = Field(default=None, le=2**31)
    """Sequences at the end, which are the phase's batch; given none, the phase's batch says."""
    tokens: Count | None = None
    samples: Count | None = None

    def batches(self, last: int) -> range:
        """The batches before the last one: each trains as many sequences, as Megatron-LM's --rampup-batch-size does."""
        return range(self.start, last, self.by)


class PhaseSpec(Spec):
    """One phase: how long it is, and what the command line's options are for it. What it leaves out is as given there,
    or as the model was published."""

    name: str = Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    tokens: Count | None = None
    """Tokens of the phase; either these or `steps`."""
    steps: PositiveInt | None = None
    """Optimizer steps of the phase."""
    global_batch_size: PositiveInt | None = Field(default=None, le=2**31)
    """Sequences of a step."""
    batch_tokens: str | PositiveInt | None = None
    """About as many tokens, such as 16M."""
    seq_length: PositiveInt | None = Field(default=None, le=2**27)
    dtype: Dtype | None = None
    gpus: PositiveInt | None = None
    rampup: Rampup | None = None
    lengths: tuple[DocumentLength, ...] | None = Field(default=None, min_length=1, max_length=1000)
    """Documents that are packed into a sequence."""
    allow: str | None = None
    """Switches that change numerics and may be chosen, as in --allow."""
    switch: str | None = None
    """Switches that are pinned, as in --switch."""


class PhasesFile(Spec):
    """A file of phases."""

    phases: tuple[PhaseSpec, ...] = Field(min_length=1, max_length=MOST_PHASES)
    reshard_hours: NonNegativeFloat = Field(default=0.0, le=1000)
    """Hours that a changed layout costs beside the restart: a checkpoint rewritten, first steps watched."""


def read_phases(path: str) -> PhasesFile:
    """The phases of a YAML or JSON file, `-` for stdin; SpecError naming file, phase and field."""
    where, data = label(path), load_yaml(path)
    given = data.get("phases")
    if isinstance(given, list):
        data = {**data, "phases": [_with_lengths(phase, f"{where}: phases[{i}]") for i, phase in enumerate(given)]}
    file = checked(PhasesFile, data, where)
    seen: set[str] = set()
    for number, phase in enumerate(file.phases):
        for field, problem, hint in _problems(phase):
            raise SpecError(f"{where}: phases[{number}] ({phase.name}): {field}: {problem}", hint)
        if phase.name.lower() in seen:
            raise SpecError(
                f"{where}: phases[{number}].name: {phase.name} is a phase before it too", "name it otherwise"
            )
        seen.add(phase.name.lower())
    return file


def _with_lengths(phase: Any, where: str) -> Any:
    if not isinstance(phase, Mapping) or phase.get("lengths") is None:
        return phase
    return {**phase, "lengths": read_lengths(phase["lengths"], f"{where}.lengths")}


def _problems(phase: PhaseSpec) -> Iterator[tuple[str, str, str]]:
    """Field, problem and hint of what a phase contradicts itself in."""
    if (phase.tokens is None) == (phase.steps is None):
        given = "neither is given" if phase.tokens is None else "both are given"
        yield "tokens and steps", given, "write tokens: 1T, or steps: 1000"
    if phase.global_batch_size is not None and phase.batch_tokens is not None:
        yield "global_batch_size and batch_tokens", "both are given", "give one of them"
    if phase.batch_tokens is not None and not isinstance(_tried(phase.batch_tokens), int):
        yield "batch_tokens", f"{phase.batch_tokens!r:.60} is {kind_of(phase.batch_tokens)}, no count", "write 16M"
    ramp = phase.rampup
    if ramp is None:
        return
    if phase.steps is not None:
        yield "steps", "a batch that grows has steps of many sizes", "say tokens in place of steps"
    if (ramp.tokens is None) == (ramp.samples is None):
        given = "neither is given" if ramp.tokens is None else "both are given"
        yield "rampup: tokens and samples", given, "write tokens: 469B, or samples: 114M"
    stated = phase.batch_tokens if phase.batch_tokens is not None else phase.global_batch_size
    if ramp.to is not None and stated is not None and ramp.to != phase.global_batch_size:
        yield "rampup.to", f"{ramp.to:,} is not the phase's batch, {stated}", "leave one of them out"


def _tried(value: str | int) -> Any:
    try:
        return _count(value)
    except PydanticCustomError:
        return None
