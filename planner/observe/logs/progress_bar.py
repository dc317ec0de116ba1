"""Progress bars of tqdm, as Hugging Face's Trainer, TRL, axolotl, ms-swift, LLaMA-Factory and torchtune leave them.

A bar says whole seconds since its begin: a row is a stretch of bars of at least `LEAST_S`. Of several bars in a log the
training's is the one whose steps the trainer announces, else the one that runs longest.
"""

from __future__ import annotations

import re
from collections import defaultdict

from planner.observe.logs.grammar import Grammar, fact, line_row, number
from planner.observe.record import RunRecord

LEAST_S = 10.0
"""Seconds of a stretch whose step is then known to a twentieth; of a run of minutes, the median of many is."""
_MOST_BARS = 200_000
_TUNE = re.compile(r"^\s*\d{1,9}\|\d{1,12}\|Loss: ")
_NAMED = re.compile(r"[A-Za-z][\w -]{2,60}:?\s*$")
"""A description before a bar, of files that are loaded or sequences that are mapped."""


def _bar(record: RunRecord, match: re.Match[str]) -> None:
    """` 45%|████▌     | 450/1000 [12:34<15:21,  1.68s/it]`."""
    before = match.string[: match.start()]
    tune = _TUNE.match(before) is not None
    if len(record.means) >= _MOST_BARS or (_NAMED.search(before) and not tune):
        return
    if tune:
        record.facts["trainer"] = "torchtune"
    hours, minutes, seconds = (int(word or 0) for word in match.groups()[2:5])
    record.means.append((float(match[1]), 3600.0 * hours + 60.0 * minutes + seconds, float(match[2])))


def _summary(record: RunRecord, match: re.Match[str]) -> None:
    """`{'train_runtime': 512.3, 'train_samples_per_second': 25.0, 'train_steps_per_second': 0.195, …}`."""
    record.state["summary"] = f"{match[1]} {match[2]}"


def _finish(record: RunRecord) -> None:
    bars: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for step, elapsed_s, total in record.means:
        bars[total].append((step, elapsed_s))
    asked = float(record.facts.get("num_steps_asked", 0))
    longest = max(bars, key=lambda total: (total == asked, max(at for _, at in bars[total])), default=None)
    for step, seconds, covers in _stretches(bars[longest]) if longest is not None else ():
        record.step(step, seconds, covers=covers)
    if record.numbers:
        record.facts.setdefault("num_steps_asked", int(longest or 0))
        record.prints("precision_fraction", 0.5 / LEAST_S / max(1, len(record.numbers)))
        record.note("seconds are of stretches of a progress bar, which has whole seconds")
    elif "summary" in record.state:
        runtime_s, rate = (number(word) for word in record.state["summary"].split())
        if runtime_s > 0 and rate > 0 and (steps := round(runtime_s * rate)) > 1:
            record.step(steps, 1 / rate, covers=steps)
            record.note("the step is the mean of the whole run, its start and its evaluations among it")


def _stretches(bars: list[tuple[float, float]]) -> list[tuple[int, float, int]]:
    """Last step, seconds of a step and number of steps of each stretch; a bar that falls back begins anew."""
    found, (first, first_s) = [], bars[0]
    for step, at_s in bars[1:]:
        if step < first or at_s < first_s:
            first, first_s = step, at_s
        elif step > first and at_s - first_s >= LEAST_S:
            found.append((int(step), (at_s - first_s) / (step - first), int(step - first)))
            first, first_s = step, at_s
    return found


PROGRESS_BAR = Grammar(
    "progress bar",
    "hf",
    (
        line_row(
            "bar", "%|",
            r"\d{1,3}%\|[^|]{0,200}\| *(\d{1,12})/(\d{1,12}) \[(?:(\d{1,4}):)?(\d{1,2}):(\d\d)<[^,\]]{1,20}, *"
            r"[\d.]{1,12}(?:s/it|it/s)", _bar,
        ),
        line_row(
            "summary", "train_steps_per_second",
            r"train_runtime'?: '?([\d.]{1,20}).{0,200}?train_steps_per_second'?: '?([\d.]{1,20})", _summary,
        ),
        line_row(
            "steps", "Total optimization steps", r"Total optimization steps = ([\d,]{1,15})", fact("num_steps_asked")
        ),
        line_row(
            "batch", "Total train batch size", r"Total train batch size .{0,80}= ([\d,]{1,15})",
            fact("global_batch_size"),
        ),
    ),
    rank=2,
    finish=_finish,
)  # fmt: skip
"""As of transformers 4.30 to 5 (trainer.py), tqdm 4.67 and torchtune 0.6 (recipes/full_finetune_distributed.py)."""
