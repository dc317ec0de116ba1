"""torch accepts our CSV, and four processes that run it compute what one process computes."""

import random
import socket
from collections.abc import Sequence
from multiprocessing.forkserver import set_forkserver_preload
from pathlib import Path
from typing import Any

import pytest

from planner.errors import SpecError
from planner.schedule.builders import v_placement
from planner.schedule.graph import from_torch_csv, to_torch_csv
from planner.schedule.orders import SCHEDULES, Schedule, build_schedule
from planner.schedule.replay import Durations
from planner.schedule.synthesis import synthesize

torch = pytest.importorskip("torch")
schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

WIDTH = 8
RUNNABLE = sorted(set(SCHEDULES) - {"dualpipe", "chimera", "pipedream-2bw", "forward-only", "none"})


def synthesised(layers_per_stage: list[int], ranks: Sequence[int], num_microbatches: int) -> Schedule:
    """An order for stages as long as their layers, within the memory of 1F1B's first rank."""
    seconds = [float(layers) for layers in layers_per_stage]
    durations = Durations(seconds, seconds, seconds, activation_bytes=seconds)
    synthesis = synthesize(durations, ranks, num_microbatches, [1.2 * sum(seconds)] * (max(ranks) + 1))
    assert synthesis.schedule.name == "auto"
    return synthesis.schedule


@pytest.mark.parametrize("name", RUNNABLE)
def test_torch_validates_and_lowers_every_schedule_without_deadlock(name: str, tmp_path: Path) -> None:
    vpp = SCHEDULES[name].min_vpp
    schedule = build_schedule(name, 4, vpp, 8)
    text = to_torch_csv(schedule)
    rows = [line.split(",") for line in text.splitlines()]
    order = {rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    placement = schedules._validate_schedule(order, 4, 4 * vpp, 8)
    assert [placement[stage] for stage in range(4 * vpp)] == list(schedule.stage_to_rank)
    lowered = schedules._add_send_recv(order, lambda stage: placement[stage], 4 * vpp)
    if not schedule.overlapped:  # torch's dry run knows no overlapped pairs
        assert schedules._simulate_comms_compute(lowered, lambda stage: placement[stage], 4 * vpp)


@pytest.mark.parametrize("name", RUNNABLE)
def test_csv_reads_back(name: str) -> None:
    schedule = build_schedule(name, 4, SCHEDULES[name].min_vpp, 8)
    again = from_torch_csv(to_torch_csv(schedule))
    assert again.ranks == schedule.ranks
    assert again.stage_to_rank == schedule.stage_to_rank
    assert again.splits_backward == any(action.kind == "I" for actions in schedule.ranks for action in actions)
    assert again.overlapped == (schedule.overlapped if any(schedule.overlapped) else ())


def test_idle_cells_are_skipped_and_bad_ones_named() -> None:
    assert from_torch_csv("0F0,,0B0\n,1F0,1B0\n").stage_to_rank == (0, 1)
    with pytest.raises(SpecError, match="'0X0'"):
        from_torch_csv("0X0,0B0\n")
    with pytest.raises(SpecError, match="no actions for stage 1"):
        from_torch_csv("0F0,0B0\n2F0,2B0\n")
    with pytest.raises(SpecError, match="missing or stands twice"):
        from_torch_csv("0F0,0B0\n1F0\n")


@pytest.mark.parametrize("name", ["dualpipe", "chimera", "pipedream-2bw", "forward-only"])
def test_what_torch_cannot_run_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=name):
        to_torch_csv(build_schedule(name, 4, 1, 8))


def stage_module(stage: int, num_layers: int) -> Any:
    """The same weights in every process."""
    torch.manual_seed(stage)
    layers = [layer for _ in range(num_layers) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    return torch.nn.Sequential(*layers).double()


def batch(num_microbatches: int) -> tuple[Any, Any]:
    torch.manual_seed(100)
    shape = (2 * num_microbatches, WIDTH)
    return torch.randn(*shape, dtype=torch.double), torch.randn(*shape, dtype=torch.double)


def record(stage: Any, done: list[str]) -> None:
    """Append what the stage computes to `done`, as it does."""
    forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
    weight = stage.backward_weight_one_chunk

    def recorded_forward(microbatch: int, *args: Any, **kwargs: Any) -> Any:
        done.append(f"{stage.stage_index}F{microbatch}")
        return forward(microbatch, *args, **kwargs)

    def recorded_backward(microbatch: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        done.append(f"{stage.stage_index}{'B' if full_backward else 'I'}{microbatch}")
        backward(microbatch, *args, full_backward=full_backward, **kwargs)

    def recorded_weight(microbatch: int, *args: Any, **kwargs: Any) -> None:
        done.append(f"{stage.stage_index}W{microbatch}")
        weight(microbatch, *args, **kwargs)

    stage.forward_one_chunk, stage.backward_one_chunk = recorded_forward, recorded_backward
    stage.backward_weight_one_chunk = recorded_weight


def run_rank(rank: int, port: int, cases: list[tuple[str, list[int], tuple[int, ...], int]], out: str) -> None:
    """One of four processes: load each CSV, run one step, write losses, gradients and what was done in which order."""
    from torch.distributed.pipelining import PipelineStage

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    for number, (path, layers, placement, num_microbatches) in enumerate(cases):
        held = [stage for stage, holder in enumerate(placement) if holder == rank]
        modules = {stage: stage_module(stage, layers[stage]) for stage in held}
        stages = [PipelineStage(modules[stage], stage, len(layers), torch.device("cpu")) for stage in held]
        runtime = schedules._PipelineScheduleRuntime(stages, num_microbatches, loss_fn=torch.nn.functional.mse_loss)
        runtime._load_csv(path)
        done: list[str] = []
        for stage in stages:
            record(stage, done)
        inputs, targets = batch(num_microbatches)
        losses: list[Any] = []
        arguments = (inputs,) if 0 in held else ()
        if len(layers) - 1 in held:
            runtime.step(*arguments, target=targets, losses=losses)
        else:
            runtime.step(*arguments)
        gradients = {stage: [weight.grad for weight in modules[stage].parameters()] for stage in held}
        torch.save((losses, gradients, done), f"{out}/{number}-{rank}.pt")
    torch.distributed.destroy_process_group()


def one_process(layers: list[int], num_microbatches: int) -> tuple[list[Any], dict[int, list[Any]]]:
    modules = [stage_module(stage, num_layers) for stage, num_layers in enumerate(layers)]
    model = torch.nn.Sequential(*modules)
    losses = []
    for part, target in zip(*(half.chunk(num_microbatches) for half in batch(num_microbatches)), strict=True):
        loss = torch.nn.functional.mse_loss(model(part), target)
        (loss / num_microbatches).backward()
        losses.append(loss.detach())
    return losses, {s: [weight.grad for weight in module.parameters()] for s, module in enumerate(modules)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_four_processes_compute_what_one_does(tmp_path: Path) -> None:
    """A named schedule with several stages per rank, a V-shaped one, and two found for unequal stages."""
    rng = random.Random(1)
    uneven, uneven_v = [1, 3, 2, 2], [rng.randint(1, 3) for _ in range(8)]
    chosen = [
        (build_schedule("interleaved-1f1b", 4, 2, 8), [1] * 8), (build_schedule("zb-v", 4, 2, 8), [1] * 8),
        (build_schedule("dualpipe-v", 4, 2, 8), [1] * 8), (synthesised(uneven, range(4), 6), uneven),
        (synthesised(uneven_v, v_placement(4), 8), uneven_v),
    ]  # fmt: skip
    cases = []
    for number, (schedule, layers) in enumerate(chosen):
        path = tmp_path / f"{number}.csv"
        path.write_text(to_torch_csv(schedule))
        cases.append((str(path), layers, schedule.stage_to_rank, schedule.num_microbatches))
    set_forkserver_preload(["torch.distributed.pipelining"])  # imported once, not by each of the four
    torch.multiprocessing.start_processes(
        run_rank, (free_port(), cases, str(tmp_path)), nprocs=4, start_method="forkserver"
    )
    for number, (_, layers, _, num_microbatches) in enumerate(cases):
        losses, gradients = one_process(layers, num_microbatches)
        found: dict[int, list[Any]] = {}
        for rank in range(4):
            rank_losses, rank_gradients, done = torch.load(tmp_path / f"{number}-{rank}.pt")
            found |= rank_gradients
            assert done == [str(action) for action in chosen[number][0].ranks[rank]]
            if rank_losses:
                torch.testing.assert_close([loss.detach() for loss in rank_losses], losses)
        torch.testing.assert_close(found, gradients)
