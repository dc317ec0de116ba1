"""Saved probes are read back, and what they say of themselves is said briefly."""

from __future__ import annotations

import logging

import pytest

from planner.cli.measurements import doubt_device
from planner.probe.result import ProbeResult
from planner.specs.registry import load_hardware


def test_a_device_of_a_name_without_end_is_doubted_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    result = ProbeResult.model_construct(ranks=(None,), device="A" * 5000 + "\x1b[2J")
    with caplog.at_level(logging.WARNING):
        doubt_device(result, load_hardware("h100"), "probe.json")
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("probe.json: ran on ")
    assert len(message) < 400
    assert message.isprintable()
