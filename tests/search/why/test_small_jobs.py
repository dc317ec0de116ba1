"""A small job's room is exact, its changes are priced as if they were asked for, and what does not fit has a remedy.

Changed assumptions: what is unchanged prices as it was, and each change reaches the prices.
"""

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
from planner.layout.evaluate import evaluate
from planner.layout.variation import Variation, as_without_adapters
from planner.search.case import Case
from planner.search.search import plan, search
from planner.search.why import explain as explaining
from planner.search.why.explain import other_assumptions, other_limits, outcome
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
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import AdapterSpec, Bits, Parallelism, Recompute, SearchLimits, TrainingSpec
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


@pytest.mark.parametrize(("objective", "each"), [("lm", 1), ("dpo", 2)])
def test_the_largest_batch_and_sequence_fit_and_the_next_do_not(objective: str, each: int) -> None:
    case = case_of(**LORA, objective=objective)
    found = planned(case)
    best, room = candidate_of(found, case), found.room
    assert room.micro_batch_size > 0
    sizes: tuple[tuple[int, Recompute | None], ...] = (
        (room.micro_batch_size, None),
        (room.checkpointed_micro_batch_size, "full"),
    )
    for size, mode in sizes:
        assert batch_excess_bytes(best, size, mode) <= 0 < batch_excess_bytes(best, size + each, mode)
    lengths: tuple[tuple[int, Recompute], ...] = (
        (room.sequence.seq_length, "none"),
        (room.sequence.checkpointed_seq_length, "full"),
    )
    for length, mode in lengths:
        assert length % SEQUENCE_STEP == 0
        assert sequence_excess_bytes(best, length, mode, each) <= 0
        assert sequence_excess_bytes(best, length + 128, mode, each) > 0
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
    assert found.best.recipe["optimizer_offload"] == 0.0  # a host's optimizer saves no seconds
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
    {"model": "qwen3-14b", "gpus": "1", "hardware": "l40s", "runtime": "hf", "seq_length": "2048",
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
    # ZeRO-Offload would leave 33 GiB on the GPU, and 220 on a host of 192
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


def _case(model: str = "8b", runtime: str = "megatron", num_gpus: int = 16) -> Case:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=num_gpus)
    training = TrainingSpec(seq_length=4096, global_batch_size=64)
    return Case(
        load_model(model), cluster, training, load_runtime(runtime),
        SearchLimits(top=1, time_limit_s=60.0, switches="default"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def now() -> Plan:
    return search(_case())


def test_nothing_changed_keeps_the_choice_and_its_price(now: Plan) -> None:
    then = outcome(_case(), Variation("nothing changes", ()), now)
    assert then.kept_s == pytest.approx(now.step.step_s, rel=1e-9)
    assert then.kept_fits
    assert not then.moves(now.best, 0.005)


def test_a_choice_that_splits_backwards_keeps_its_price() -> None:
    """It was priced without the compiled layers that the trainer has otherwise."""
    case = _case(runtime="torchtitan").limited(schedule=("zb-v",), pp=(4,), tp=(1,), cp=(1,))
    chosen = search(case)
    assert outcome(case, Variation("nothing changes", ()), chosen).kept_s == pytest.approx(chosen.step.step_s)


def test_pins_can_be_dropped_and_are_named() -> None:
    pinned = _case().limited(tp=(8,), recompute=("full",))
    assert pinned.pins == {"tp": (8,), "recompute": ("full",)}
    assert pinned.free().pins == {}


@pytest.mark.thorough(0)
def test_a_slower_network_reaches_the_prices_of_the_choice(now: Plan) -> None:
    case = _case()
    slow = ClusterSpec(hardware=case.cluster.hardware, num_gpus=16, network_gb_per_s=5.0)
    then = outcome(case, Variation("a slow network", (), cluster=slow), now)
    assert then.kept_s > now.step.step_s
    assert then.chosen.step.step_s <= then.kept_s * 1.005


def test_a_choice_without_room_is_replaced(now: Plan) -> None:
    free_gib = now.cluster.hardware.memory_gib - now.best.worst_stage.memory.total_bytes / 2**30
    then = outcome(_case(), Variation("less room", (), limits={"memory_headroom_gib": free_gib + 1}), now)
    assert not then.kept_fits
    assert then.moves(now.best, 0.005)


def test_twice_the_batch_takes_the_choice_about_twice_as_long(now: Plan) -> None:
    (twice,) = (other for other in other_limits(_case()) if other.name == "batch")
    assert outcome(_case(), twice, now).kept_s == pytest.approx(2 * now.step.step_s, rel=0.1)


def test_limits_are_moved_in_the_cluster_itself() -> None:
    moved = {other.name: _case().under(other) for other in other_limits(_case())}
    assert moved["domain"].cluster.tiers[0].num_gpus == 16
    assert moved["domain"].cluster.node_size == 8
    assert moved["memory"].cluster.hardware.memory_gib == pytest.approx(1.1 * 79.1)
    assert "domain" not in {other.name for other in other_limits(_case(num_gpus=8))}


def test_only_assumptions_that_a_job_makes_are_changed() -> None:
    dense = {other.name for other in other_assumptions(_case())}
    sparse = {other.name for other in other_assumptions(_case("deepseek-v2-lite"))}
    eager = {other.name for other in other_assumptions(_case(runtime="torch-eager"))}
    assert sparse - dense == {"moe_imbalance"}
    assert "data_parallel_overlap" not in eager
    assert "network" not in {other.name for other in other_assumptions(_case(num_gpus=8))}
    assert "host" in dense
    replayed = replace(_case(), runtime=load_runtime("megatron").model_copy(update={"cuda_graphs": True}))
    assert "host" not in {other.name for other in other_assumptions(replayed)}


def test_waits_for_the_host_are_told_where_layers_are_small() -> None:
    layout = Parallelism(tp=8, micro_batch_size=1)
    for name, seq_length, waits in (("llama-3.2-1b", 2048, True), ("llama-3.1-405b", 8192, False)):
        cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
        plan = evaluate(load_model(name), cluster, TrainingSpec(seq_length=seq_length, global_batch_size=8), layout)
        told = [line for line in plan.assumptions if "--switch cuda_graph=full_iteration,nan_checks=false" in line]
        assert bool(told) == waits, name
        assert all(line.startswith("-") for line in told)


@pytest.mark.thorough(0)
def test_changes_have_the_same_outcomes_in_any_order(now: Plan) -> None:
    """What was worked out for one change is not taken for another."""
    changes = list(other_limits(_case()))[:2]
    alone = [outcome(_case(), change, now) for change in changes]
    assert len(alone) == len(changes) > 1
    assert [outcome(_case(), change, now) for change in changes[::-1]] == alone[::-1]
    assert len({one.kept_s for one in alone}) > 1
