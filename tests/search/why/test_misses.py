"""The nearest miss is a layout that can be typed, and lacks what `plan evaluate` says of it, to the byte."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from toys import MOE, case_of, toy_cluster, toy_model, toy_problem, toy_training

from planner.cli import main
from planner.errors import Infeasible
from planner.layout.evaluate import evaluate, price_given
from planner.search.case import Case
from planner.search.enumerate import scalar
from planner.search.search import search
from planner.search.why.misses import candidates_of, fitting_candidate, layout_of, nearest_miss, options_of, shapes_of
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, Recompute, SearchLimits, TrainingSpec
from planner.specs.units import GIB
from planner.trainers.load import RUNTIMES, load_runtime


def real_case(
    model: str, num_gpus: int, memory_gib: float | None = None, runtime: str = "megatron", **limits: Any
) -> Case:
    hardware = load_hardware("h100")
    if memory_gib is not None:
        hardware = hardware.model_copy(update={"memory_gib": memory_gib})
    training = TrainingSpec(seq_length=8192, global_batch_size=512)
    cluster = ClusterSpec(hardware=hardware, num_gpus=num_gpus)
    return Case(load_model(model), cluster, training, load_runtime(runtime), SearchLimits())


def evaluated_shortfall_bytes(case: Case, layout: Parallelism) -> float:
    stage = price_given(case.model, case.cluster, case.training, layout, case.runtime).worst_stage
    return stage.memory.total_bytes - (case.cluster.hardware.memory_bytes - case.headroom_bytes)


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    model = toy_model(rng.randint(3, 14), **({"moe": MOE} if rng.random() < 0.4 else {}))
    runtime = rng.choice(sorted(RUNTIMES))
    cluster = toy_cluster(rng.choice([1, 2, 4, 6, 8]), memory_gib=rng.uniform(0.1, 1.0))
    training = toy_training(rng.choice([4, 8, 24]), rng.choice([512, 2048]))
    limits = {
        "recompute": (None, ("none",), ("full",), ("none", "selective"))[rng.randrange(4)],
        "memory_headroom_gib": rng.choice([0.0, 0.3]),
        "schedule": rng.choice([None, load_runtime(runtime).schedules[:3]]),
    }
    if limits["recompute"] == ("none", "selective") and not load_runtime(runtime).has_sequence_parallel:
        limits["recompute"] = ("none",)
    return case_of(toy_problem(model, cluster, training, runtime, **limits))


@pytest.mark.thorough(3)
@pytest.mark.parametrize("seed", range(18))
def test_a_miss_lacks_what_evaluating_it_says(seed: int) -> None:
    case = random_case(seed)
    miss = nearest_miss(case)
    if miss is None:
        assert not len(shapes_of(case)[0].tp) or search(case).best.fits
        return
    assert miss.shortfall_bytes == evaluated_shortfall_bytes(case, miss.layout)
    stage = evaluate(case.model, case.cluster, case.training, miss.layout, runtime=case.runtime).best.worst_stage
    assert miss.stage == stage.stage


@pytest.mark.parametrize("seed", range(8))
def test_where_a_candidate_fits_the_search_finds_a_layout(seed: int) -> None:
    rng = random.Random(seed)
    case = random_case(seed)
    hardware = case.cluster.hardware.model_copy(update={"memory_gib": rng.uniform(1.0, 3.0)})
    case = replace(case.limited(top=1, time_limit_s=600.0), cluster=toy_cluster(case.cluster.num_gpus))
    case = replace(case, cluster=case.cluster.model_copy(update={"hardware": hardware}))
    candidate = fitting_candidate(case)
    if candidate is not None:
        assert candidate.fits
        assert search(case).best.fits


@pytest.mark.parametrize(
    ("model", "num_gpus", "memory_gib", "shortfall_gib"), [("405b", 96, None, 3.0), ("1b", 1, 24.0, 5.65)]
)
def test_the_message_and_evaluate_name_one_number(
    model: str, num_gpus: int, memory_gib: float | None, shortfall_gib: float
) -> None:
    case = real_case(model, num_gpus, memory_gib).filling
    miss = nearest_miss(case)
    assert miss.shortfall_bytes == evaluated_shortfall_bytes(case, miss.layout)
    assert miss.shortfall_bytes / GIB == pytest.approx(shortfall_gib, abs=0.05)
    assert f"lacks {miss.shortfall_bytes / GIB:.1f} GiB on stage {miss.stage}" in str(miss)


@pytest.mark.parametrize(
    "pins", ["", "--zero-stage 3 --shard-size 8 --tp 1 --pp 1 --runtime torchtitan", "--vpp 2 --pp 4"]
)
def test_the_options_can_be_typed(pins: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--model", "70b", "--gpus", "16", "-s", "8192", "-b", "64"]
    # a run that says nothing of its loss is taken to have Transformer Engine's, which the search may not choose
    trainer = ["--runtime", "torchtitan"] if "torchtitan" in pins else ["--switch", "cross_entropy_fusion=native"]
    case = real_case("70b", 16, runtime="torchtitan" if "torchtitan" in pins else "megatron")
    numbers = {k: (int(v),) for k, v in re.findall(r"--([a-z-]+) (\d+)", pins)}
    limits = SearchLimits(**{name.replace("-", "_"): value for name, value in numbers.items()})
    training = TrainingSpec(seq_length=8192, global_batch_size=64)
    miss = nearest_miss(Case(case.model, case.cluster, training, case.runtime, limits).filling)
    assert main(["evaluate", *job, *trainer, *options_of(miss.layout), "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["best"]["stages"]
    total = max(stage["memory"]["total_bytes"] for stage in stages)
    assert miss.shortfall_bytes == total - case.cluster.hardware.memory_bytes
    sizes = {name: value for name, value in miss.as_data.items() if name in Parallelism.model_fields}
    assert Parallelism(**sizes) == miss.layout
    assert miss.as_data["shortfall_gib"] == miss.shortfall_bytes / GIB


@pytest.mark.thorough(2)
@pytest.mark.parametrize("seed", range(4))
def test_no_shape_misses_by_less(seed: int) -> None:
    rng = random.Random(seed)
    moe = {"moe": MOE} if seed % 2 else {}
    problem = toy_problem(toy_model(rng.randint(6, 12), **moe), toy_cluster(4, memory_gib=0.4), toy_training(8))
    case = case_of(problem)
    miss = nearest_miss(case)
    everything = candidates_of(case, shapes_of(case)[0])
    assert miss.shortfall_bytes <= min(max(candidate.excess_bytes) for _, candidate in everything) * 1.02


def test_shapes_left_out_are_shown_by_one_that_lacks_what_evaluating_it_says() -> None:
    case = case_of(toy_problem(toy_model(12), toy_cluster(8, memory_gib=3.0), toy_training(32), top=1))
    example = search(case).rejection_examples["does_not_fit"]
    options, lacks = example.split(", lacks ")
    words = options.split()
    pairs = {option[2:].replace("-", "_"): value for option, value in zip(words[::2], words[1::2], strict=True)}
    layout = Parallelism(**{field: int(value) if value.isdigit() else value for field, value in pairs.items()})
    shortfall_gib = evaluated_shortfall_bytes(case, layout) / GIB
    assert lacks.startswith(f"{shortfall_gib:,.1f} GiB")
    assert shortfall_gib > 0


def test_a_miss_says_only_what_evaluate_would_not_take_by_itself() -> None:
    case = real_case("405b", 96)
    shape = scalar(shapes_of(case)[0], 0)
    told = {
        (): "--tp 8 --pp 12 --dp 1 --micro-batch-size 1",
        ("full",): "--recompute full",
        ("selective",): "--recompute selective --recompute-modules mlp",
        ("flat",): "--no-sequence-parallel",
        ("zero",): "--zero-stage 2",
        ("group",): "--zero-stage 3 --fsdp 4",
    }
    changes: dict[tuple[str, ...], dict[str, int]] = {
        ("flat",): {"sequence_parallel": 0}, ("zero",): {"zero_stage": 2},
        ("group",): {"dp": 8, "shard_size": 4, "zero_stage": 3},
    }  # fmt: skip
    shape = replace(shape, tp=8, cp=1, pp=12, dp=1, etp=8, micro_batch_size=1, sequence_parallel=1, shard_size=1)
    for change, words in told.items():
        mode: Recompute = "full" if "full" in change else "selective" if "selective" in change else "none"
        layout = layout_of(case, replace(shape, **changes.get(change, {})), "1f1b", mode)
        assert words in " ".join(options_of(layout))


def test_a_search_that_finds_nothing_names_no_miss_before_it_is_asked() -> None:
    with pytest.raises(Infeasible) as caught:
        search(case_of(toy_problem(toy_model(12), toy_cluster(4, memory_gib=0.3))))
    assert caught.value.nearest is None
    assert caught.value.remedy is None
    assert caught.value.rejections["does_not_fit"] > 0
