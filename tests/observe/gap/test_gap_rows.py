"""Made runs with one thing wrong each: its row is shown with its place and seconds; a run without one shows none."""

from __future__ import annotations

from typing import Any

import pytest
from tables import beside

from planner.observe.accounts import STEP_TERMS, WALL_TERMS, GroupExchanges
from planner.observe.gap_rows import GAP_ROWS, GapRow, RunFiles
from planner.observe.judge import judged, shown_rows
from planner.observe.observation import (
    FailedAllocation,
    GapCause,
    HungCollective,
    JobFacts,
    MemorySeries,
    Observation,
    ObservedMemory,
    Outlier,
    Prediction,
    RankSpread,
    SourceFile,
    StepSeries,
    Timer,
)
from planner.observe.traces.events import CollectiveTime, FamilyTime, GroupTime, RankReport, TraceReport, TraceStep
from planner.observe.traces.recorded import Recorded
from planner.specs.units import GIB, MIB
from planner.trainers.switches import SWITCHES

TABLES = beside(__file__)

WALL_S = 1.0
COLLECTIVE = {"group": "dp", "collective": "all_reduce", "num_bytes": 10**9, "group_size": 4}


def step(number: int, compute_s: float = 0.76, shown_s: float = 0.2, gaps_s: float = 0.04, **more: Any) -> TraceStep:
    """A step that compute, communication and gaps fill; a thousandth of noise."""
    compute_s += 0.001 * (number % 3 - 1)
    families = [("gemm", 0.6), ("attention", 0.2), ("elementwise", 0.2)]
    return TraceStep(
        **{
            "number": number, "start_s": number * WALL_S, "wall_s": compute_s + shown_s + gaps_s, "warm_up": False,
            "compute_s": compute_s, "exposed_communication_s": shown_s, "copies_s": 0.0, "host_gaps_s": gaps_s,
            "dependencies_s": 0.0, "idle_s": 0.0,
            "families": tuple(
                FamilyTime(family=name, seconds=share * compute_s, share_fraction=share, num_kernels=3000)
                for name, share in families
            ),
            "groups": (GroupTime(group="dp", busy_s=shown_s, hidden_s=0.0, exposed_s=shown_s),),
            **more,
        }
    )  # fmt: skip


def report(rank: int, wait_s: float = 0.01, **more: Any) -> RankReport:
    """The trace of one of four ranks of one stage."""
    return RankReport(
        file=f"rank{rank}.json", rank=rank, stage=0, world_size=4, device="NVIDIA H100 80GB HBM3",
        steps=tuple(step(number, **more) for number in range(4)),
        collectives=(CollectiveTime(**COLLECTIVE, count=4, median_s=0.2, transfer_s=0.19, wait_s=wait_s),),
    )  # fmt: skip


def traced(*reports: RankReport) -> Recorded:
    return Recorded(traces=TraceReport(ranks=reports), kinds={one.file: "torch profiler trace" for one in reports})


def observed(**more: Any) -> Observation:
    return Observation(**{"sources": (SourceFile(path="a.log", format="megatron"),), "step_s": WALL_S, **more})


def named(recorded: Recorded | None = None, **more: Any) -> tuple[GapCause, ...]:
    return shown_rows(RunFiles(observed(**more), recorded))


HEALTHY = tuple(report(rank) for rank in range(4))


SLOW = {"compute_s": 0.912, "shown_s": 0.048}
LOADS = (("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0.2),)
LOADS_ALONE = (("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0.2),)


@pytest.mark.parametrize(
    ("ranks", "name", "where", "seconds"),
    [
        *TABLES["what_ranks_show_is_named_with_its_place"],
        ({key: {"compute_s": 0.6, "gaps_s": 0.25, "shown_s": 0.15} for key in range(4)}, "host_bound", "", None),
        ({key: {"gaps_s": 0.3, "long_gaps_s": 0.2, "waits": LOADS} for key in range(4)}, "data_stall", "", 0.2),
        ({3: {"gaps_s": 0.3, "shown_s": 0.0, "long_gaps_s": 0.2, "waits": LOADS_ALONE}}, "data_stall", "rank 3", None),
    ],
    ids=["alike", "computes longer", "stands still", "host", "loader", "loader of one rank"],
)
def test_what_ranks_show_is_named_with_its_place(
    ranks: dict[int, Any], name: str, where: str, seconds: float | None
) -> None:
    reports = [report(rank, **ranks[rank]) if rank in ranks else HEALTHY[rank] for rank in range(4)]
    causes = named(traced(*reports))
    assert causes == named(traced(*reports[::-1])), "whatever the order of files"
    assert [(one.name, one.where) for one in causes[:1]] == [(name, where)] * bool(name)
    assert seconds is None or causes[0].seconds == pytest.approx(seconds, abs=0.005)


def test_a_rank_of_another_stage_is_no_peer() -> None:
    assert named(traced(*HEALTHY[:3], report(3, **SLOW).model_copy(update={"stage": 1}))) == ()


def test_a_timer_of_batches_is_data() -> None:
    assert named(data_s=0.15)[0].name == "data_stall"
    assert named(data_s=0.005) == ()


def series(*sizes_gib: float) -> tuple[MemorySeries, ...]:
    return (
        MemorySeries(
            kind="allocated", rank=0, steps=tuple(range(0, 10 * len(sizes_gib), 10)),
            num_bytes=tuple(round(size * GIB) for size in sizes_gib),
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        *TABLES["memory_that_grows_to_the_end_is_a_leak"],
        ([20 + 0.2 * n for n in range(20)], ["leak"]),
        ([20 + 0.3 * (n % 3) for n in range(20)], []),
        ([12 + min(n, 6) for n in range(20)], []),
        ([24 - 0.2 * n for n in range(20)], []),
    ],
)
def test_memory_that_grows_to_the_end_is_a_leak(sizes: list[float], names: list[str]) -> None:
    assert [one.name for one in named(memory_series=series(*sizes))] == names


def test_a_rank_s_lower_clock_is_named_beside_what_is_priced() -> None:
    low = RankSpread(
        name="clock_mhz", low=1410, low_rank=3, low_share=0.9, high=1980, high_rank=0, high_share=0.2, num_values=9
    )
    assert [(one.name, one.where) for one in named(rank_spreads=(low,))] == [("clocks", "rank 3")]
    assert named(rank_spreads=(low.model_copy(update={"low": 1900}),)) == ()


@pytest.mark.parametrize(("name", "shares", "low", "where"), TABLES["a_rank_that_the_log_names_again_and_again"])
def test_a_rank_that_the_log_names_again_and_again(
    name: Any, shares: tuple[float, float], low: float, where: list[str]
) -> None:
    spread = RankSpread(
        name=name, low=low, low_rank=3, low_share=shares[0], high=300.0, high_rank=1, high_share=shares[1],
        num_values=20,
    )  # fmt: skip
    assert [one.where for one in named(rank_spreads=(spread,)) if one.name == "straggler_rank"] == where


@pytest.mark.parametrize(
    ("timed_s", "planned_s", "names"), TABLES["timers_of_gradients_beyond_what_was_planned_to_show"]
)
def test_timers_of_gradients_beyond_what_was_planned_to_show(
    timed_s: float, planned_s: float, names: list[str]
) -> None:
    expected = Prediction(
        source="plan.json", model="8b", hardware="h100", num_gpus=8, layout="", step_s=0.8, step_s_interval=(0.7, 0.9),
        tokens_per_s=1.0, mfu=0.4, peak_memory_bytes=GIB, breakdown={"exposed_dp_s": planned_s},
    )  # fmt: skip
    timers = (Timer(name="all-grads-sync", min_s=timed_s, max_s=2 * timed_s, num_values=9),)
    causes = shown_rows(RunFiles(observed(timers=timers), None, expected), "slow")
    assert [(one.name, one.seconds) for one in causes] == [(name, pytest.approx(timed_s - planned_s)) for name in names]


@pytest.mark.parametrize(("late_s", "seconds"), [((0.1, 0.08, 0.09), 0.08), ((0.1, 0.0, 0.1), None), ((0.1,), None)])
def test_experts_are_uneven_where_every_rank_waits(late_s: tuple[float, ...], seconds: float | None) -> None:
    class Exchanged(RunFiles):
        def exchanges(self, group: str) -> list[tuple[GroupExchanges, GroupExchanges]]:
            return [(GroupExchanges(0.4, 0.0, late), GroupExchanges(0.3, 0.1, 0.0)) for late in late_s]

    found = GAP_ROWS["expert_imbalance"].looks[0](Exchanged(RunFiles(observed())))
    assert (None if found is None else found.seconds) == seconds


def test_more_reserved_than_allocated_accuses_nobody() -> None:
    def memory(reserved_gib: float) -> tuple[ObservedMemory, ...]:
        return (ObservedMemory(rank=0, max_allocated_bytes=40 * GIB, max_reserved_bytes=round(reserved_gib * GIB)),)

    assert named(memory=memory(60)) == ()


def test_the_allocator_s_retries_are_fragments() -> None:
    assert [one.name for one in named(num_alloc_retries=40)] == ["fragmentation"]
    assert named(num_alloc_retries=0) == ()


@pytest.mark.parametrize(("kind", "likely", "name"), TABLES["slow_steps_that_the_log_explains"])
def test_slow_steps_that_the_log_explains(kind: Any, likely: str, name: str) -> None:
    rows = (Outlier(kind=kind, steps=(10, 20), num_steps=10, extra_s=12.0, period_steps=10, likely=likely),)
    steps = StepSeries(steps=tuple(range(100)), seconds=(1.0,) * 100)
    (cause,) = named(outliers=rows, series=steps, num_steps=100)
    assert (cause.name, cause.seconds, cause.remedy and cause.remedy.step_s) == (name, 0.12, None)


def test_a_slow_run_that_shows_no_cause_says_what_to_measure() -> None:
    before = judged(observed())
    slow = judged(observed(step_s=1.3), before, "before.json")
    assert (slow.verdict, slow.causes) == ("slow", ())
    assert "torch.profiler" in slow.next_test
    assert judged(observed(), before, "before.json").next_test == ""


def test_memory_that_ran_out_is_told_with_its_bytes() -> None:
    failed = FailedAllocation(rank=3, requested_bytes=2 * GIB, allocated_bytes=70 * GIB, unused_bytes=GIB)
    first = named(failed_allocations=(failed,))[0]
    assert (first.name, first.where) == ("out_of_memory", "rank 3")
    assert "2.00 GiB" in first.evidence
    for kept in ({"unused_bytes": 9 * GIB}, {"free_bytes": GIB}):
        causes = [one.name for one in named(failed_allocations=(failed.model_copy(update=kept),))]
        assert causes == ["fragmentation", "out_of_memory"], kept


def test_a_collective_that_a_watchdog_ended_is_a_hang() -> None:
    hung = tuple(HungCollective(rank=rank, sequence=7, collective="allreduce", seconds=600.0) for rank in (0, 3))
    ahead = HungCollective(rank=2, sequence=9, collective="broadcast")
    for others, says in (((), "number 7"), ((ahead,), "rank 2 in broadcast number 9")):
        assert [(one.name, says in one.evidence) for one in named(hung_collectives=hung + others)] == [("hang", True)]
    stuck = HungCollective(rank=6, sequence=0, seconds=480.0)
    assert [(one.name, "watchdog of rank 6" in one.evidence) for one in named(hung_collectives=(stuck,))] == [
        ("hang", True)
    ]


@pytest.mark.parametrize(
    ("found", "names"),
    [*TABLES["numbers_that_are_none_and_hosts_without_memory"],
        ({"not_numbers": (1, 0, 0), "series": StepSeries()}, ["not_a_number"])],
)  # fmt: skip
def test_numbers_that_are_none_and_hosts_without_memory(found: Any, names: list[str]) -> None:
    steps = StepSeries(steps=tuple(range(100)), seconds=(1.0,) * 100)
    assert [one.name for one in named(**{"series": steps, "num_steps": 100} | found)] == names


def test_a_full_gpu_is_not_in_fragments() -> None:
    """LLaMA-Factory 9510: 0.05 GiB refused, 77.9 held, 0.15 reserved beside them."""
    full = FailedAllocation(requested_bytes=56 * MIB, allocated_bytes=78 * GIB, unused_bytes=150 * MIB)
    assert [one.name for one in named(failed_allocations=(full,))] == ["out_of_memory"]
    # ChatGLM-Finetuning 28, Qwen2.5-Omni 240
    free = FailedAllocation(requested_bytes=128 * MIB, allocated_bytes=6 * GIB, free_bytes=37 * GIB)
    assert [one.name for one in named(failed_allocations=(free,), num_ooms=1)] == ["memory_limit"]
    sizes = {"requested": 125, "allocated": 25, "unused": 3, "free": 51, "total": 95}
    shared = FailedAllocation(**{f"{name}_bytes": size * GIB for name, size in sizes.items()})
    (one,) = named(failed_allocations=(shared,))
    assert "CUDA 16.0 GiB" in one.evidence
    assert "more than the GPU has (95.0 GiB)" in one.evidence


def test_rollouts_that_take_most_of_a_step_are_named() -> None:
    timers = (
        Timer(name="gen", min_s=6.0, max_s=6.9, num_values=3),
        Timer(name="actor", min_s=3.0, max_s=3.0, num_values=3),
    )
    (one,) = named(timers=timers, step_s=10.0, num_steps=3)
    assert (one.name, one.seconds) == ("rollouts", 6.9)
    assert named(timers=timers, step_s=20.0, num_steps=3) == ()


@pytest.mark.parametrize("row", GAP_ROWS.values())
def test_a_row_says_what_it_is_what_shows_it_and_what_helps(row: GapRow) -> None:
    assert set(row.terms) <= {*STEP_TERMS, *WALL_TERMS}
    assert set(row.switches) <= SWITCHES.keys()
    assert row.says
    assert row.record
    assert row.sees or row.switches or row.name == "recipe"
    assert row.helps or row.name == "recipe"


def test_passes_timed_further_apart_than_their_layers_are_a_slow_rank() -> None:
    facts = JobFacts(num_gpus=8, run={"parallelism": {"tp": 1, "pp": 1}})
    timers = tuple(
        Timer(name=f"{name}-compute", min_s=0.3, max_s=0.4, num_values=9) for name in ("forward", "backward")
    )
    (first,) = named(facts=facts, timers=timers)
    assert (first.name, first.seconds) == ("straggler_rank", pytest.approx(0.2))
    assert "33% longer" in first.evidence
