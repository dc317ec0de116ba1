"""Our orders are torch's own, action by action, for each schedule class that torch has."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from planner.schedule.builders import zb_h1
from planner.schedule.orders import Schedule, build_schedule, interleaved_one_f_one_b

torch = pytest.importorskip("torch")
schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


@pytest.fixture
def fake_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Joins a fake process group as one rank of many; leaves it at the end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def leave() -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def join(rank: int, world_size: int) -> None:
        leave()
        torch.distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield join
    leave()


def stage(index: int, num_stages: int) -> Any:
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage(torch.nn.Linear(2, 2), index, num_stages, torch.device("cpu"))


def flat(row: list[Any]) -> list[str]:
    """Compute actions in torch's spelling, overlapped pairs opened, idle steps and gradient reductions dropped."""
    actions = [leaf for action in row if action is not None for leaf in (action.sub_actions or (action,))]
    return [str(action) for action in actions if action.computation_type != schedules.REDUCE_GRAD]


def spelled(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in schedule.ranks]


def torch_order(class_name: str, join: Callable[[int, int], None], pp: int, vpp: int, num_microbatches: int) -> Any:
    join(0, pp)
    stages = [0, 2 * pp - 1] if class_name in ("ZBVZeroBubble", "DualPipeV") else list(range(0, pp * vpp, pp))
    made = schedules.get_schedule_class(class_name)(
        [stage(index, pp * vpp) for index in stages], num_microbatches, loss_fn=torch.nn.functional.mse_loss
    )
    return [flat(made.pipeline_order[rank]) for rank in range(pp)]


LOOPED, V = [(2, 2, 4), (4, 2, 8), (4, 3, 4), (3, 4, 12), (8, 2, 24)], [(2, 2, 4), (4, 2, 8), (4, 2, 11), (8, 2, 24)]
CLASSES = {
    ("Interleaved1F1B", "interleaved-1f1b"): LOOPED,
    ("LoopedBFS", "breadth-first"): LOOPED,
    ("InterleavedZeroBubble", "zb-h1"): [*LOOPED, (2, 1, 6), (4, 1, 8), (4, 1, 10)],
    # also with fewer micro-batches than fill the pipeline
    ("ZBVZeroBubble", "zb-v"): [*V, (6, 2, 13), (4, 2, 3)],
    ("DualPipeV", "dualpipe-v"): [*V, (6, 2, 13)],
}
"""torch's class, our name, and ranks, chunks a rank and micro-batches."""


@pytest.mark.parametrize(
    ("class_name", "name", "sizes"), [(*names, sizes) for names, all_sizes in CLASSES.items() for sizes in all_sizes]
)
def test_orders_are_torchs(
    fake_rank: Callable[[int, int], None], class_name: str, name: str, sizes: tuple[int, int, int]
) -> None:
    assert spelled(build_schedule(name, *sizes)) == torch_order(class_name, fake_rank, *sizes)


@pytest.mark.parametrize(("pp", "num_microbatches", "group"), [(4, 10, 5), (4, 3, 3), (3, 8, 4)])
def test_torch_rounds_are_a_group_size(
    fake_rank: Callable[[int, int], None], pp: int, num_microbatches: int, group: int
) -> None:
    """torch takes counts that pp does not divide by making rounds of more or fewer micro-batches."""
    expected = torch_order("Interleaved1F1B", fake_rank, pp, 2, num_microbatches)
    assert spelled(interleaved_one_f_one_b(pp, 2, num_microbatches, group)) == expected
    expected = torch_order("InterleavedZeroBubble", fake_rank, pp, 2, num_microbatches)
    assert spelled(zb_h1(pp, 2, num_microbatches, group)) == expected


def recorded_loop(made: Any, own_stage: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the schedule's loop really runs: its stage's computations, without communication."""
    done: list[str] = []

    def forward(microbatch: int, *args: Any, **kwargs: Any) -> Any:
        done.append(f"{own_stage.stage_index}F{microbatch}")
        return torch.zeros(1, 2)

    def backward(microbatch: int, *args: Any, **kwargs: Any) -> None:
        done.append(f"{own_stage.stage_index}B{microbatch}")

    monkeypatch.setattr(schedules, "_batch_p2p", lambda ops, desc=None: [])
    monkeypatch.setattr(made, "_initialize_stage", lambda *args, **kwargs: None)
    monkeypatch.setattr(made, "_maybe_get_loss", lambda *args: None)
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        monkeypatch.setattr(own_stage, name, lambda microbatch: [])
    monkeypatch.setattr(own_stage, "forward_one_chunk", forward)
    monkeypatch.setattr(own_stage, "backward_one_chunk", backward)
    monkeypatch.setattr(own_stage, "perform_reduce_grad", lambda scale: None)
    count = made._n_microbatches
    made._step_microbatches([()] * count, [{}] * count, [torch.zeros(1, 2)] * count)
    return done


@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 2), (4, 8), (5, 7)])
@pytest.mark.parametrize(("class_name", "name"), [("GPipe", "gpipe"), ("1F1B", "1f1b")])
def test_single_stage_loops(
    fake_rank: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    class_name: str,
    name: str,
    pp: int,
    num_microbatches: int,
) -> None:
    """The printed order of Schedule1F1B is wrong on the last rank, so its loop is recorded instead."""
    order = spelled(build_schedule(name, pp, 1, num_microbatches))
    for rank in range(pp):
        fake_rank(rank, pp)
        own_stage = stage(rank, pp)
        made = schedules.get_schedule_class(class_name)(
            own_stage, num_microbatches, loss_fn=torch.nn.functional.mse_loss
        )
        assert recorded_loop(made, own_stage, monkeypatch) == order[rank]
