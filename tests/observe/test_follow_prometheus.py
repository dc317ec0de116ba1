"""Prometheus' text format, by a strict reader of its rules (exposition format 0.0.4)."""

from __future__ import annotations

import math
import re

from planner.observe.follow.prometheus import COUNTERS, GAUGES, exposition
from planner.observe.follow.state import Standing
from planner.observe.observation import Cause

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SAMPLE = re.compile(rf"({_NAME})\{{(.*)\}} (\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')


def parsed(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The samples by metric and labels; AssertionError for what breaks a rule."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    helped, kinds, current = set(), {}, ""
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in helped, "one HELP of each metric"
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind in ("gauge", "counter")
            assert name in helped
            assert name not in kinds, "one TYPE of each metric, before its samples"
            assert (kind == "counter") == name.endswith("_total")
            kinds[name], current = kind, name
        else:
            match = _SAMPLE.fullmatch(line)
            assert match is not None, line
            assert match[1] == current, "samples of one metric stand together"
            labels = tuple((name, _unescaped(value)) for name, value in _LABEL.findall(match[2]))
            assert _LABEL.sub("", match[2]) == "", line
            assert len(dict(labels)) == len(labels)
            samples = found.setdefault(match[1], {})
            assert labels not in samples, "each sample once"
            samples[labels] = float(match[3])
    assert set(kinds) == set(found) == helped
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], text)


def value(text: str, name: str, **labels: str) -> float:
    return next(number for known, number in parsed(text)[name].items() if labels.items() <= dict(known).items())


STANDING = Standing(
    source="train.log", step=40, step_s=9.25, window_step_s=9.1, band_s=(8.5, 9.5), place="in band", mfu=0.412,
    tokens_per_s=1.5e6, peak_memory_bytes=70 * 2**30, eta_s=3600.0, num_restarts=1, num_steps=52, allowed_steps=20,
)  # fmt: skip


def test_the_numbers_of_a_standing() -> None:
    text = exposition(STANDING)
    assert value(text, "planner_step_seconds", log="train.log") == 9.25
    assert value(text, "planner_predicted_step_seconds", bound="low") == 8.5
    assert value(text, "planner_predicted_step_seconds", bound="high") == 9.5
    assert value(text, "planner_mfu_ratio") == 0.412
    assert value(text, "planner_memory_bytes") == 70 * 2**30
    assert value(text, "planner_in_band") == 1
    assert value(text, "planner_eta_seconds") == 3600
    assert value(text, "planner_restarts_total") == 1
    assert value(text, "planner_alarm") == 0


def test_what_is_not_known_has_no_sample() -> None:
    assert "planner_drift_ratio" not in parsed(exposition(STANDING))
    assert "planner_in_band" not in parsed(exposition(STANDING.model_copy(update={"band_s": None})))
    empty = parsed(exposition(Standing(source="train.log")))
    assert {"planner_alarm", "planner_silent_seconds", "planner_steps_total"} <= empty.keys()


def test_out_of_the_band() -> None:
    text = exposition(STANDING.model_copy(update={"place": "above", "rings": True, "out_steps": 20}))
    assert (value(text, "planner_in_band"), value(text, "planner_alarm")) == (0, 1)
    assert value(text, "planner_out_of_band_steps") == 20


def test_labels_of_any_text_stay_labels() -> None:
    hostile = 'a"b\\c\nplanner_in_band 0 é'
    causes = tuple(Cause(name=name, likelihood=0.5, evidence="", where=hostile) for name in ("straggler", "straggler"))
    text = exposition(STANDING.model_copy(update={"source": hostile, "causes": causes}))
    assert value(text, "planner_in_band", log=hostile) == 1
    assert value(text, "planner_cause_likelihood", cause="straggler", where=hostile) == 0.5


def test_every_number_is_a_field_and_every_name_has_its_unit() -> None:
    for name, attribute, text in (*GAUGES, *COUNTERS):
        assert attribute in Standing.model_fields
        assert re.fullmatch(_NAME, name)
        assert text.endswith(".")
    full = STANDING.model_copy(update={attribute: 2.0 for _, attribute, _ in (*GAUGES, *COUNTERS)})
    assert all(math.isfinite(number) for samples in parsed(exposition(full)).values() for number in samples.values())
