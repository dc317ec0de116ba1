"""The work of a search, counted: prices, bounds, programs and replays, so that it cannot creep back."""

from __future__ import annotations

from collections import Counter
from functools import wraps
from typing import Any

import numpy as np
import pytest

from planner.errors import Infeasible
from planner.layout import candidate
from planner.physics.passes import Passes
from planner.physics.pricing import Pricing
from planner.search import branch
from planner.search.case import Case
from planner.search.enumerate import Bar, enumerate_shapes
from planner.search.frontier import Nodes, bound_of_shapes_s
from planner.search.layouts import _least_work_s, _pricings
from planner.search.priced_shapes import priced_shapes
from planner.search.recipes import Recipes
from planner.search.search import plan
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import SearchLimits, TrainingSpec
from planner.trainers.load import RUNTIMES, load_runtime

MOST = {
    ("llama-3.1-405b", 2048, 8192, 2048): {"tables": 47, "bounds": 39, "programs": 0, "replays": 37},
    ("deepseek-v3", 2048, 4096, 15360): {"tables": 120, "bounds": 130, "programs": 0, "replays": 66},
    ("llama-3.1-8b", 8, 8192, 512): {"tables": 34, "bounds": 24, "programs": 0, "replays": 66},
}
"""Model, GPUs, tokens and batch of a job on H100, and the most of each kind of work that its search may do: about 1.3
times what it does."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kind of work is done."""
    count: Counter[str] = Counter()
    for owner, function, kind in (
        (Pricing, "table", "tables"),
        (Nodes, "bound_s", "bounds"),
        (branch, "solve", "programs"),
        (candidate, "pipeline_s", "replays"),
    ):
        original = getattr(owner, function)

        def counting(*arguments: Any, _original: Any = original, _kind: str = kind, **options: Any) -> Any:
            count[_kind] += 1
            return _original(*arguments, **options)

        monkeypatch.setattr(owner, function, wraps(original)(counting))
    return count


@pytest.mark.parametrize("job", MOST, ids=lambda job: job[0])
def test_a_search_does_no_more_than_this(job: tuple[str, int, int, int], counted: Counter[str]) -> None:
    name, num_gpus, seq_length, batch = job
    training = TrainingSpec(seq_length=seq_length, global_batch_size=batch)
    limits = SearchLimits(time_limit_s=1e6)
    answer = plan(load_model(name), ClusterSpec(hardware="h100", num_gpus=num_gpus), training, limits=limits)
    assert answer.search.outcome == "proven"
    assert {kind: counted[kind] for kind, most in MOST[job].items() if counted[kind] > most} == {}


@pytest.mark.parametrize("name", sorted(RUNTIMES))
def test_the_bar_of_a_kernel_is_never_above_the_bound_of_its_shapes(name: str) -> None:
    """Nothing that could win is passed over, under any bundle of any trainer."""
    training = TrainingSpec(seq_length=4096, global_batch_size=32)
    for model in ("deepseek-v2-lite", "llama-3.2-1b"):
        cluster = ClusterSpec(hardware="mi300x" if "primus" in name else "h100", num_gpus=16)
        case = Case(load_model(model), cluster, training, load_runtime(name), SearchLimits())
        for runtime in Recipes.of(case).starts()[:3]:
            tried = _pricings(case, [runtime])
            bar = Bar(np.inf, lambda kernels, tried=tried: _least_work_s(tried, kernels))  # type: ignore[misc]
            shapes, _ = enumerate_shapes(case.model, cluster, training, case.limits, case.runtime)
            if not tried or not np.size(shapes.tp):
                continue
            rows = np.stack([np.asarray(getattr(shapes, axis)) for axis in ("tp", "cp", "ep", "etp")], axis=1)
            sizes, which = np.unique(np.asarray(shapes.micro_batch_size), return_inverse=True)
            least_s = bar.least_step_s(rows, sizes.tolist(), training, 16, case.runtime.has_sequence_parallel)
            own_s = least_s[np.arange(len(which)), which] * 16 / np.asarray(shapes.num_ranks)
            for pricing, limits in tried:
                assert (own_s <= bound_of_shapes_s(priced_shapes(pricing, shapes), limits) * (1 + 1e-9)).all()


def test_a_refusal_by_bytes_prices_no_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the search nor what would help: other GPUs, adapters, shorter sequences, other cards."""
    monkeypatch.setattr(Passes, "seconds", None)
    gpus = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    with pytest.raises(Infeasible) as refused:
        plan("deepseek-v3", gpus, TrainingSpec(seq_length=4096, global_batch_size=15360))
    assert "it fits on 192 GPUs" in (refused.value.hint or "")
    assert "--qlora" in (refused.value.hint or "")
