"""A small job's room is exact, its changes are priced as if they were asked for, and what does not fit has a remedy."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from planner.answer import Change, LargestModel, Plan
from planner.cli.inputs import read_job, read_limits
from planner.cli.options import PlanOptions
from planner.errors import Infeasible
from planner.layout.variation import as_without_adapters
from planner.search.case import Case
from planner.search.search import plan
from planner.search.why import explain as explaining
from planner.search.why.remedy import lighter
from planner.search.why.room import (
    ROWS,
    SEQUENCE_STEP,
    batch_excess_bytes,
    candidate_of,
    changes_of,
    largest_models,
    most_within,
    sequence_excess_bytes,
    with_room,
)
from planner.specs.registry import load_model
from planner.specs.training import AdapterSpec, Bits, Recompute
from planner.trainers.load import load_runtime, switches_of
from planner.trainers.stated import switched

LORA = {"model": "llama-3.2-1b", "gpus": "1", "hardware": "l40s", "lora": "on"}
GIVES = {"lora": True, "qlora": True}


def case_of(**given: str) -> Case:
    numbers = ("gpus", "seq_length", "global_batch_size", "lora_rank", "base_bits", "top")
    options: dict[str, Any] = {
        name: GIVES.get(name, int(text) if name in numbers else text) for name, text in given.items()
    }
    asked = PlanOptions(**options)
    job = read_job(asked)
    return Case(job.model, job.cluster, job.training, job.runtime_spec, read_limits(asked, job))


def planned(case: Case) -> Plan:
    return plan(case.model, case.cluster, case.training, limits=case.limits, runtime=case.runtime)


@cache
def tuned() -> tuple[Case, Plan]:
    case = case_of(**LORA)
    return case, planned(case)


def of_kind(changes: tuple[Change, ...], kind: str) -> list[Change]:
    return [change for change in changes if change.kind == kind]


def test_the_largest_batch_and_sequence_fit_and_the_next_do_not() -> None:
    case, found = tuned()
    best, room = candidate_of(found, case), found.room
    assert room.micro_batch_size > 0
    sizes: tuple[tuple[int, Recompute | None], ...] = (
        (room.micro_batch_size, None),
        (room.checkpointed_micro_batch_size, "full"),
    )
    for size, mode in sizes:
        assert batch_excess_bytes(best, size, mode) <= 0 < batch_excess_bytes(best, size + 1, mode)
    lengths: tuple[tuple[int, Recompute], ...] = (
        (room.sequence.seq_length, "none"),
        (room.sequence.checkpointed_seq_length, "full"),
    )
    for length, mode in lengths:
        assert length % SEQUENCE_STEP == 0
        assert sequence_excess_bytes(best, length, mode) <= 0 < sequence_excess_bytes(best, length + 128, mode)
    assert room.checkpointed_micro_batch_size > room.micro_batch_size


def test_the_room_is_what_a_plan_of_its_own_finds() -> None:
    case, found = tuned()
    for more, fits in ((0, True), (SEQUENCE_STEP, False)):
        length = found.room.sequence.checkpointed_seq_length + more
        again = {**LORA, "seq_length": str(length), "global_batch_size": "1", "micro_batch_size": "1", "top": "1"}
        longer = case_of(**again).limited(memory_headroom_gib=case.headroom_bytes / 2**30, switches=found.best.recipe)
        if fits:
            assert planned(longer).fits
        else:
            with pytest.raises(Infeasible):
                planned(longer)


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 37, 1000])
@pytest.mark.parametrize("bend", [1, 2])
def test_the_search_for_the_most_ends_at_the_border(limit: int, bend: int) -> None:
    asked: list[int] = []

    def excess(number: int) -> float:
        asked.append(number)
        return float(number**bend - limit**bend) - 0.5

    assert most_within(excess, 1000) == limit
    assert len(asked) <= 24


def test_every_change_is_the_price_of_the_job_that_its_options_ask_for() -> None:
    plain = {**LORA, "switch": "default", "recompute": "none", "micro_batch_size": "4"}
    found = planned(case_of(**plain))
    for kind in ("bits", "adapters", "checkpointing"):
        change = next(change for change in of_kind(found.changes, kind) if change.fits)
        words = {option[2:].replace("-", "_"): text for option, text in zip(*[iter(change.options)] * 2, strict=True)}
        again = planned(case_of(**{**plain, "top": "1", **words}))
        assert again.best.worst_stage.memory.total_bytes == pytest.approx(change.total_bytes, rel=1e-6), change
        assert again.step.step_s == pytest.approx(change.step_s, rel=1e-6), change
        assert change.bytes == change.total_bytes - found.best.worst_stage.memory.total_bytes


def test_what_fits_is_ranked_by_seconds_and_what_does_not_by_bytes() -> None:
    case, found = tuned()
    gains = [change.seconds for change in found.changes if change.fits and change.seconds < 0]
    assert gains == sorted(gains)
    assert gains == [change.seconds for change in found.changes[: len(gains)]]
    assert [change.fits for change in found.changes] == sorted((c.fits for c in found.changes), reverse=True)
    best = candidate_of(found, case)
    least_bytes = min(change.total_bytes for change in found.changes) + 1
    headroom_bytes = case.cluster.hardware.memory_bytes - least_bytes
    tight = replace(best, pricing=replace(best.pricing, headroom_bytes=headroom_bytes))
    ranked = changes_of(tight)
    assert not tight.fits
    mended = [change.fits for change in ranked]
    assert any(mended)
    assert mended == sorted(mended, reverse=True)
    left = [change.bytes for change in ranked if not change.fits and change.bytes < 0]
    assert left == sorted(left)


def test_numerics_are_marked_and_checkpointing_is_not() -> None:
    _, found = tuned()
    assert {change.changes for change in of_kind(found.changes, "bits")} == {"numerics"}
    assert {change.changes for change in of_kind(found.changes, "checkpointing")} == {""}
    assert {change.changes for change in of_kind(found.changes, "trained")} == {"what is trained"}


def test_switches_of_a_trainer_are_changes_without_code_of_their_own() -> None:
    case = case_of(model="llama-3.2-1b", gpus="8", hardware="h100", runtime="torchtitan", seq_length="4096", top="2")
    found = planned(case)
    assert found.room is None  # a trainer with model parallelism has the other screen
    names = {change.change.partition("=")[0] for change in of_kind(changes_of(candidate_of(found, case)), "switch")}
    assert names <= set(switches_of(load_runtime("torchtitan")))
    assert names
    assert set(ROWS) >= {change.kind for change in changes_of(candidate_of(found, case))}


def test_a_job_on_many_gpus_and_one_of_many_points_have_no_room() -> None:
    case, found = tuned()
    assert with_room(found.model_copy(update={"room": None}), case.limited(top=1)).room is None
    assert with_room(found.model_copy(update={"room": None}), case.on_gpus(64)).room is None


@pytest.mark.thorough(0)
def test_the_largest_models_fit_and_are_larger_the_less_of_them_is_kept() -> None:
    case, _ = tuned()
    models: dict[str, LargestModel] = {model.method: model for model in largest_models(case)}
    assert models["qlora"].num_parameters > models["lora"].num_parameters > models["full"].num_parameters > 0
    for method, bits in (("qlora", "4"), ("lora", "16")):
        name = models[method].name
        assert name is not None
        assert load_model(name).name == name
        words = {"base_bits": bits, "micro_batch_size": "1", "top": "1"}
        assert planned(case_of(**{**LORA, "model": name, **words})).fits


TOO_LARGE = [
    {"model": "llama-3.1-8b", "gpus": "1", "hardware": "l40s", "runtime": "hf", "seq_length": "2048",
     "global_batch_size": "16"},
    {"model": "llama-3.1-8b", "gpus": "1", "hardware": "v100", "lora": "on"},
    {"model": "llama-3.1-70b", "gpus": "1", "hardware": "l40s", "lora": "on"},
    {"model": "llama-3.1-70b", "gpus": "1", "hardware": "l40s", "qlora": "on"},
]  # fmt: skip


@pytest.mark.thorough(2)
@pytest.mark.parametrize("asked", TOO_LARGE, ids=lambda asked: shlex.join(asked.values()))
def test_every_remedy_works_when_it_is_typed(asked: dict[str, str]) -> None:
    ways = list(lighter(case_of(**asked)))
    assert ways
    for options, says, _ in ways:
        words = iter([*options, "--"])
        typed, option = dict(asked), next(words)
        while option != "--":
            after = next(words)
            typed[option[2:].replace("-", "_")] = "on" if after.startswith("--") else after
            option = after if after.startswith("--") else next(words)
        assert " ".join(options) in says
        assert planned(case_of(**{**typed, "top": "1"})).fits, options


def test_the_error_names_them_and_the_first_is_the_remedy() -> None:
    with pytest.raises(Infeasible) as caught:
        planned(case_of(**TOO_LARGE[0]))
    assert caught.value.remedy["options"] == ["--lora"]
    assert "--lora" in caught.value.hint


@pytest.mark.thorough(0)
def test_explain_ranks_changes_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "largest_models", lambda case: ())
    case = case_of(**TOO_LARGE[1])
    answer = explaining.explain(case.model, case.cluster, case.training, limits=case.limits, runtime=case.runtime)
    assert answer.verdict == "does_not_fit"
    assert not answer.best.fits
    assert answer.job_changes[0].fits
    assert answer.job_changes[0].options == ("--base-bits", "4")
    assert answer.hint is not None
    assert answer.room.micro_batch_size == 0


@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "deepspeed"])
@pytest.mark.parametrize("bits", [4, 16])
def test_what_adapters_change_of_a_recipe_is_undone_as_the_recipe_had_it(sharding: str, bits: Bits) -> None:
    runtime, adapters = switched(load_runtime("hf"), {"sharding": sharding}), AdapterSpec(base_bits=bits)
    again = as_without_adapters(runtime.for_adapters(adapters), adapters)
    assert again.for_adapters(adapters) == runtime.for_adapters(adapters)
    bytes_each = [(one.weight_bytes, one.gradient_bytes, one.optimizer_bytes) for one in (again, runtime)]
    assert bytes_each[0] == bytes_each[1]
    assert (again.adapter_copies_input, again.adapter_weights_cast) == (
        runtime.adapter_copies_input,
        runtime.adapter_weights_cast,
    )
