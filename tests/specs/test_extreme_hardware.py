"""A profile whose numbers are at the ends of their ranges is priced; one with numbers beyond is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from refusals import refused
from tables import beside

from planner import ClusterSpec, Parallelism, TrainingSpec, evaluate, load_model
from planner.errors import SpecError
from planner.specs.hardware import HardwareSpec
from planner.specs.problems import checked
from planner.specs.registry import load_hardware

H100: dict[str, Any] = load_hardware("h100").model_dump(exclude={"corrections"})


def _numbers(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Places of all numbers in nested data."""
    if isinstance(data, dict | list | tuple):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from _numbers(value, (*path, key))
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield path


def _with(path: Sequence[str | int], value: float) -> dict[str, Any]:
    profile: dict[str, Any] = json.loads(json.dumps(H100))
    inner: Any = profile
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return profile


@pytest.mark.parametrize("path", list(_numbers(H100)), ids=lambda path: ".".join(map(str, path)))
def test_no_number_of_a_profile_is_without_end(path: tuple[str | int, ...]) -> None:
    for value in (1e300, float("inf"), float("nan"), -1.0, True):
        with refused(str(next(part for part in reversed(path) if isinstance(part, str)))):
            checked(HardwareSpec, _with(path, value), "x.yaml")


@pytest.mark.parametrize(("path", "value"), beside(__file__)["a_profile_at_the_end_of_a_range_is_priced"])
def test_a_profile_at_the_end_of_a_range_is_priced(path: list[str | int], value: float) -> None:
    cluster = ClusterSpec(hardware=checked(HardwareSpec, _with(path, value), "x.yaml"), num_gpus=16)
    training = TrainingSpec(seq_length=1024, global_batch_size=16, tokens=1e9)
    priced = evaluate(load_model("1b"), cluster, training, Parallelism(dp=16, micro_batch_size=1))
    assert priced.best is not None
    assert 0 < priced.best.step.step_s < math.inf


def test_a_network_without_speed_is_refused() -> None:
    with pytest.raises(SpecError, match="network_gb_per_s"):
        checked(ClusterSpec, {"hardware": "h100", "num_gpus": 16, "network_gb_per_s": 1e-300}, "x")


def test_a_family_of_kernels_that_nobody_knows_is_refused() -> None:
    with pytest.raises(SpecError, match=r"family_fraction\.nrom") as refused:
        checked(HardwareSpec, _with(("efficiency", "family_fraction", "nrom"), 0.5), "x.yaml")
    assert "norm" in refused.value.hint
