"""Remedies work when they are typed, are the smallest of their kind, and are looked for only while there is time.

Where no shape is legal, the rule that left nothing over is named, counted, and answered with a hint that helps.
The nearest miss is a layout that can be typed, and lacks what `plan evaluate` says of it, to the byte.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tables import beside
from toys import MOE, Problem, case_of, solved, toy_cluster, toy_model, toy_problem, toy_training

from planner.cli import main
from planner.cli.inputs import read_job, read_limits
from planner.cli.options import SearchOptions
from planner.errors import Infeasible
from planner.layout.candidate import Candidate
from planner.layout.evaluate import evaluate, price_given
from planner.search.case import Case, Deadline
from planner.search.enumerate import enumerate_shapes, scalar
from planner.search.search import plan, search
from planner.search.why import remedy
from planner.search.why.misses import (
    DOES_NOT_FIT,
    NothingFits,
    candidates_of,
    fitting_candidate,
    layout_of,
    nearest_miss,
    options_of,
)
from planner.search.why.remedy import Trials, fewest_gpus, first_remedy, with_remedy
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import ObjectiveSpec, Parallelism, Recompute, SearchLimits, TrainingSpec
from planner.specs.units import GIB
from planner.trainers.load import RUNTIMES, load_runtime

TABLES = beside(__file__)

PATIENT_S = 600.0
"""More than any search here takes, also on a machine that does much else."""


def filling(*args: Any, **changes: Any) -> Problem:
    """A problem whose layouts may fill the GPU."""
    return toy_problem(*args, **{"memory_headroom_gib": 0.0} | changes)


def refusal(**changes: Any) -> Infeasible:
    with pytest.raises(Infeasible) as caught:
        solved(filling(**{"time_limit_s": PATIENT_S} | changes))
    return caught.value


def read_arguments(options: dict[str, str]) -> tuple[Any, ...]:
    """Model, cluster, training and limits of a job as it is typed."""
    short = {"-s": "seq_length", "-b": "global_batch_size"}
    numbers = {"gpus", "seq_length", "global_batch_size"}
    params: dict[str, Any] = {
        short.get(option, option.lstrip("-").replace("-", "_")): value for option, value in options.items()
    }
    params |= {name: int(params[name]) for name in numbers}
    asked = SearchOptions(**params)
    job = read_job(asked)
    return job.model, job.cluster, job.training, read_limits(asked, job)


def missing_gib(error: Infeasible) -> float:
    found = re.search(r"lacks ([\d.,]+) GiB", error.message)
    return float(found[1].replace(",", ""))


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("memory_gib", "objective"), [(0.5, "dpo"), (0.25, "lm"), (0.5, "lm"), (0.9, "lm")])
def test_the_nearest_miss_is_named_in_gib(memory_gib: float, objective: str) -> None:
    training = toy_training(objective=ObjectiveSpec(name=objective))
    error = refusal(model=toy_model(12), cluster=toy_cluster(4, memory_gib=memory_gib), training=training)
    assert f"nothing fits in {memory_gib:g} GiB of 4 × toy-gpu" in error.message
    assert error.rejections["does_not_fit"] > 0
    # with so much more, it does
    enough = memory_gib + 1.25 * missing_gib(error) + 0.1
    assert solved(filling(toy_model(12), toy_cluster(4, memory_gib=enough), training, top=1)).fits


@pytest.mark.thorough(2)
@pytest.mark.parametrize("model", [toy_model(12), toy_model(12, moe=MOE)], ids=["dense", "experts"])
def test_the_number_of_gpus_that_would_do_is_the_least_to_a_node(model: Any) -> None:
    error = refusal(model=model, cluster=toy_cluster(4, memory_gib=0.9))
    found = re.search(r"it fits on (\d+) GPUs", error.hint or "")
    num_gpus = int(found[1])
    assert solved(filling(model, toy_cluster(num_gpus, memory_gib=0.9), top=1)).fits
    assert num_gpus - 4 < 4 or refusal(model=model, cluster=toy_cluster(num_gpus - 4, memory_gib=0.9))


@pytest.mark.parametrize("node_size", [1, 4, 8])
@pytest.mark.parametrize("num_gpus", [1, 3, 8, 12, 16])
def test_the_fewest_gpus_are_the_least_of_all_that_are_allowed(num_gpus: int, node_size: int) -> None:
    allowed = [n for n in range(num_gpus + 1, 400) if n <= node_size or n % node_size == 0]
    for least in range(num_gpus + 1, 130):
        tried: list[int] = []

        def enough(number: int, least: int = least, tried: list[int] = tried) -> bool:
            tried.append(number)
            return number >= least

        assert fewest_gpus(num_gpus, node_size, enough) == next(n for n in allowed if n >= least)
        assert len(tried) == len(set(tried)) <= 16
    assert fewest_gpus(num_gpus, node_size, lambda number: False) is None


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("num_gpus", "memory_gib"), [(1, 1.2), (5, 0.9), (6, 0.6)])
def test_within_a_node_any_number_of_gpus_is_named_and_beyond_it_whole_nodes(num_gpus: int, memory_gib: float) -> None:
    error = refusal(model=toy_model(12), cluster=toy_cluster(num_gpus, memory_gib=memory_gib))
    option, words = error.remedy["options"]
    enough = int(words)
    assert option == "--gpus"
    assert enough % 4 == 0 or enough < 4
    assert solved(filling(toy_model(12), toy_cluster(enough, memory_gib=memory_gib), top=1)).fits
    fewer = enough - (4 if enough > 4 else 1)
    assert fewer <= num_gpus or refusal(model=toy_model(12), cluster=toy_cluster(fewer, memory_gib=memory_gib))


def toy_case(**changes: Any) -> Case:
    problem = toy_problem(**changes)
    return case_of(problem)


Counted = Callable[[int, int], tuple[Trials, list[Case]]]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Trials that have time for so many cases, of which a layout fits on enough GPUs."""

    def trials(enough_gpus: int, num_tries: int) -> tuple[Trials, list[Case]]:
        tried: list[Case] = []

        def stub(case: Case) -> Candidate | None:
            tried.append(case)
            return fits if case.cluster.num_gpus >= enough_gpus else None

        monkeypatch.setattr(remedy, "fitting_candidate", stub)
        return Trials(Deadline(num_tries, lambda: float(len(tried)))), tried

    fits = fitting_candidate(toy_case())
    assert fits is not None
    return trials


def test_without_time_nothing_is_tried_and_more_time_brings_the_number_down(counted: Counted) -> None:
    case = toy_case(cluster=toy_cluster(4, memory_gib=0.05))
    said = []
    for num_tries in range(14):
        trials, tried = counted(404, num_tries)
        found = first_remedy(case, DOES_NOT_FIT, trials)
        assert len(tried) <= num_tries
        if found is None:
            assert trials.cut_short
            continue
        said.append(int(found.options[1]))
        assert said[-1] >= 404
        assert ("no time to try" in found.says) == trials.cut_short
    assert said == sorted(said, reverse=True)
    assert len(set(said)) > 2
    assert said[-1] == 404


def test_a_refusal_without_time_for_a_remedy_says_what_was_not_tried(counted: Counted) -> None:
    case = toy_case(cluster=toy_cluster(4, memory_gib=0.01))
    trials, tried = counted(36, 0)
    error = with_remedy(NothingFits(case, {"does_not_fit": 3}), case, trials.deadline)
    assert not tried
    assert error.hint == "add GPUs"
    assert error.remedy is None
    assert error.nearest is not None


@pytest.mark.thorough(3)
@pytest.mark.parametrize(
    ("pin", "freed", "memory_gib"), TABLES["a_pin_in_the_way_is_named_and_freeing_it_helps_1"], ids=str
)
def test_a_pin_in_the_way_is_named_and_freeing_it_helps(pin: dict[str, Any], freed: str, memory_gib: float) -> None:
    problem = {"model": toy_model(6), "cluster": toy_cluster(8, memory_gib=memory_gib), "training": toy_training(32)}
    error = refusal(**problem, **pin)
    assert f"do not pin {freed.replace('_', '-')}" in (error.hint or "")
    assert solved(filling(**problem, **(pin | {freed: None}), top=1)).fits
    option, value = error.remedy["options"]
    assert option == f"--{freed.replace('_', '-')}"
    assert error.hint == error.remedy["says"]
    typed = value if freed == "recompute" else int(value)
    assert solved(filling(**problem, **(pin | {freed: (typed,)}), top=1)).fits


def test_a_headroom_in_the_way_is_named_and_giving_it_up_helps() -> None:
    problem = {"model": toy_model(6), "cluster": toy_cluster(8, memory_gib=2.0)}
    error = refusal(**problem, memory_headroom_gib=1.8)
    assert "lower --memory-headroom from 1.8 GiB to 0" in (error.hint or "")
    assert error.remedy["options"] == ["--memory-headroom", "0"]
    assert solved(filling(**problem, top=1)).fits


@pytest.mark.thorough(2)
@pytest.mark.parametrize("typed", TABLES["a_remedy_works_when_it_is_typed"])
def test_a_remedy_works_when_it_is_typed(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = typed.split()
    job = dict(zip(words[::2], words[1::2], strict=True))
    arguments = read_arguments(job)
    with pytest.raises(Infeasible) as caught:
        plan(*arguments[:3], limits=arguments[3].model_copy(update={"time_limit_s": PATIENT_S}))
    remedy = caught.value.remedy
    json.dumps(remedy)
    options = list(remedy["options"])
    job.pop(options[0], None)
    assert main([word for pair in job.items() for word in pair] + options + ["--top", "1", "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["fits"]


"""More than any search here takes, also on a machine that does much else."""


def refusal_of_refused(**changes: Any) -> Infeasible:
    with pytest.raises(Infeasible) as caught:
        solved(toy_problem(**{"time_limit_s": PATIENT_S} | changes))
    return caught.value


_LEARNED = toy_model(6, gated_mlp=False, max_position_embeddings=1024)
_SINKS = toy_model(6, attention_sinks=True, sliding_window=512)
_FEW = {"runtime": "torchtitan", "pp": (4,), "training": toy_training(4), "micro_batch_size": (1,)}


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("changes", "hint", "then"),
    [
        *TABLES["the_hint_is_of_the_rule_and_following_it_helps_1"],
        ({"model": _LEARNED}, "shorten the sequence", {"training": toy_training(8, 1024)}),
        ({"model": _SINKS, "cp": (2,)}, "cp 1, or --runtime torchtitan", {"runtime": "torchtitan"}),
        ({"model": _SINKS, "cp": (2,)}, "cp 1, or --runtime torchtitan", {"cp": (1,)}),
        ({**_FEW, "dp": (2,)}, "pin a smaller pp, dp", {"dp": (1,)}),
        ({"tp": (8,), "cp": (2,)}, "more GPUs", {"cluster": toy_cluster(16), "tp_across_nodes": True}),
    ],
)
def test_the_hint_is_of_the_rule_and_following_it_helps(changes: Any, hint: str, then: dict[str, Any]) -> None:
    assert hint in (refusal_of_refused(**changes).hint or "")
    assert solved(toy_problem(**changes | then, top=1)).fits


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *TABLES["one_reason_alone_is_the_only_one_counted"],
        ({"cluster": toy_cluster(4, memory_gib=0.2), "tp": (1,), "pp": (1,)}, "does_not_fit"),
    ],
)
def test_one_reason_alone_is_the_only_one_counted(changes: dict[str, Any], reason: str) -> None:
    error = refusal_of_refused(**({"cp": (1,)} | changes))
    assert set(error.rejections) == {reason}
    assert " × " not in error.message.replace(" × toy-gpu", "")


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
        assert not len(enumerate_shapes(case)[0].tp) or search(case).best.fits
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
    ("model", "num_gpus", "memory_gib", "shortfall_gib"), TABLES["the_message_and_evaluate_name_one_number"]
)
def test_the_message_and_evaluate_name_one_number(
    model: str, num_gpus: int, memory_gib: float | None, shortfall_gib: float
) -> None:
    case = real_case(model, num_gpus, memory_gib).filling
    miss = nearest_miss(case)
    assert miss.shortfall_bytes == evaluated_shortfall_bytes(case, miss.layout)
    assert miss.shortfall_bytes / GIB == pytest.approx(shortfall_gib, abs=0.05)
    assert f"lacks {miss.shortfall_bytes / GIB:.1f} GiB on stage {miss.stage}" in str(miss)


@pytest.mark.parametrize("pins", TABLES["the_options_can_be_typed"])
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
    everything = candidates_of(case, enumerate_shapes(case)[0])
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
    shape = scalar(enumerate_shapes(case)[0], 0)
    told = {
        (): "--tp 8 --pp 12 --dp 1 --micro-batch-size 1", ("full",): "--recompute full",
        ("selective",): "--recompute selective --recompute-modules mlp", ("flat",): "--no-sequence-parallel",
        ("zero",): "--zero-stage 2", ("group",): "--zero-stage 3 --fsdp 4",
    }  # fmt: skip
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
