"""Remedies work when they are typed, are the smallest of their kind, and are looked for only while there is time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from toys import MOE, Problem, case_of, solved, toy_cluster, toy_model, toy_problem, toy_training

from planner.cli import main
from planner.cli.inputs import read_job, read_limits
from planner.cli.options import SearchOptions
from planner.errors import Infeasible
from planner.layout.candidate import Candidate
from planner.search.case import Case, Deadline
from planner.search.search import plan
from planner.search.why import remedy
from planner.search.why.misses import DOES_NOT_FIT, NothingFits, fitting_candidate
from planner.search.why.remedy import Trials, fewest_gpus, first_remedy, with_remedy

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
@pytest.mark.parametrize("memory_gib", [0.25, 0.5, 0.9])
def test_the_nearest_miss_is_named_in_gib(memory_gib: float) -> None:
    error = refusal(model=toy_model(12), cluster=toy_cluster(4, memory_gib=memory_gib))
    assert f"nothing fits in {memory_gib:g} GiB of 4 × toy-gpu" in error.message
    assert error.rejections["does_not_fit"] > 0
    # with so much more, it does
    enough = memory_gib + 1.25 * missing_gib(error) + 0.1
    assert solved(filling(toy_model(12), toy_cluster(4, memory_gib=enough), top=1)).fits


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
    ("pin", "freed", "memory_gib"),
    [
        ({"recompute": ("none",)}, "recompute", 1.06),
        ({"micro_batch_size": (8,), "zero_stage": (1,)}, "micro_batch_size", 1.3),
        ({"pp": (1,)}, "pp", 1.05),
        ({"tp": (1,)}, "tp", 1.1),
        ({"zero_stage": (0,), "dp": (4,)}, "dp", 1.2),
    ],
    ids=str,
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
@pytest.mark.parametrize(
    "typed",
    [
        "--model 70b --gpus 4 -s 4096 -b 8",
        "--model 8b --gpus 1 -s 4096 -b 8",
        "--model 70b --gpus 64 -s 4096 -b 64 --tp 1 --pp 1 --recompute none --zero-stage 1",
        "--model 8b --gpus 16 -s 4096 -b 64 --tp 16",
        "--model 8b --gpus 16 -s 4096 -b 64 --tp 8 --pp 4",
        "--model 8b --gpus 16 -s 4096 -b 64 --dp 3",
    ],
)
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
