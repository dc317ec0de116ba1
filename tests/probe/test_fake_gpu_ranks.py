"""Ranks of every kind of layer, schedule and grid on fake GPUs: from the handshake to the report, each call is made."""

from __future__ import annotations

from typing import Any

import pytest
from tables import beside
from tiny import GPT, MLA, MOE

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from exchanged import Exchange, Recorder, stuck  # noqa: E402
from fake_gpus import H200, Neighbours, fake_gpu, fake_group  # noqa: E402

from planner.probe.rank.groups import results_in  # noqa: E402
from planner.probe.rank.worker import Worker  # noqa: E402
from planner.probe.result import RankResult  # noqa: E402
from planner.probe.run import ProbeRun  # noqa: E402
from planner.schedule.orders import SCHEDULES  # noqa: E402

TABLES = beside(__file__)

pytestmark = [
    # torch 2.13 has new names for exchanges
    pytest.mark.filterwarnings("ignore:.torch.distributed.*is deprecated:FutureWarning")
]
EXPERTS = MOE | {"num_experts": 8}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {}, "tied": {"tie_word_embeddings": True}, "gpt": GPT | {"max_position_embeddings": 16},
    "gemma": {"qk_norm": True, "post_norms": True, "sliding_window": 4, "sliding_window_pattern": 2},
    "sinks": {"attention_sinks": True, "sliding_window": 4, "sliding_window_pattern": 2, "bias": True},
    "chunks": {"attention_chunk_size": 4, "sliding_window_pattern": 2},
    "alibi": {"position_embedding": "alibi", "embedding_norm": True},
    "mixture": {"moe": {**EXPERTS, "shared_expert_intermediate_size": 16}},
    "latent": {"mla": MLA, "moe": EXPERTS, "num_nextn_predict_layers": 1},
}  # fmt: skip
GRIDS: dict[str, dict[str, Any]] = TABLES["grids"]
RUNS = TABLES["runs"]
"""For each schedule the kind of layers and the grid that it runs with: all kinds and grids have their turn."""


def smallest(schedule: str) -> tuple[str, int, int, int]:
    """The name of a schedule with its smallest pp, vpp and number of micro-batches."""
    kind = SCHEDULES[schedule]
    pp = min(max(kind.min_pp, 2), kind.max_pp or 2)
    vpp = max(kind.min_vpp, 1)
    return schedule, pp, vpp, 2 * pp


def rank_of(run: ProbeRun, number: int, monkeypatch: pytest.MonkeyPatch) -> tuple[RankResult, Any]:
    """The report of one rank of a run, and its exchanges."""
    on_gpus = run.model_copy(update={"device": "cuda", "dtype": "bfloat16", "balanced_routing": True})
    recorder = Recorder()
    with monkeypatch.context() as patch:
        worker = Worker(on_gpus, number, number, Neighbours)
        with fake_gpu(H200, patch, num_gpus=16), fake_group(patch) as backends:
            recorder.record(patch)
            worker.main()
    assert backends == ["nccl"]
    return results_in(worker.store, [number])[0], recorder.calls


def test_all_have_their_turn() -> None:
    assert set(RUNS) == set(SCHEDULES)
    assert {kind for kind, _ in RUNS.values()} == set(KINDS)
    assert {grid for _, grid in RUNS.values()} == set(GRIDS)


@pytest.mark.thorough(4)
@pytest.mark.parametrize("schedule", RUNS)
def test_every_phase_of_a_rank(schedule: str, make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, grid = RUNS[schedule]
    run = make_run(smallest(schedule), check=False, num_steps=1, model=KINDS[kind], **GRIDS[grid])
    number = len(schedule + kind + grid) % run.world_size  # any of them, always the same
    rank, _ = rank_of(run, number, monkeypatch)
    assert [timed.action for timed in rank.actions] == list(run.ranks[rank.stage])
    assert [chunk.stage for chunk in rank.chunks] == list(run.stages_of(rank.stage))
    assert rank.memory is not None


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("order", "kind", "grid"),
    [(("1f1b", 2, 1, 2), "tied", "dp2"), (("dualpipe", 2, 1, 4), "dense", "one")],
    ids=["tied-dp2", "dualpipe"],
)
def test_no_rank_waits_for_another_in_a_circle(
    order: Any, kind: str, grid: str, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL makes a rank's exchanges in the order in which the rank asks for them: two ranks with another order hang."""
    run = make_run(order, check=False, num_steps=1, model=KINDS[kind], **GRIDS[grid])
    calls = [rank_of(run, number, monkeypatch)[1] for number in range(run.world_size)]
    assert all({"isend", "irecv", "wait", "all_reduce"} <= {call.name for call in of_rank} for of_rank in calls)
    assert stuck(calls) == []
    for rank in range(run.world_size):  # any call left out is found
        first = next(i for i, call in enumerate(calls[rank]) if call.name == "all_reduce")
        left_out = [*calls[:rank], [*calls[rank][:first], *calls[rank][first + 1 :]], *calls[rank + 1 :]]
        assert stuck(left_out) != []


def test_two_ranks_that_both_send_first_are_stuck() -> None:
    def both(first: str, second: str) -> list[list[Exchange]]:
        def calls(rank: int) -> list[Exchange]:
            channel = {"isend": (rank, 1 - rank), "irecv": (1 - rank, rank)}
            names = (first, second) if rank == 0 or first == second else (second, first)
            calls = []
            for name in names:
                calls.append(Exchange(name, channel[name], (1,), 1 - rank))
                calls.append(Exchange("wait", channel[name], (), 1 - rank, len(calls) - 1))
            return calls

        return [calls(0), calls(1)]

    assert stuck(both("isend", "irecv")) == []
    assert len(stuck(both("isend", "isend"))) == 2
