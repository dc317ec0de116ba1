"""A rank's step: what is rehearsed before it, and that nothing of that is left."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import MLA, MOE

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

import faulty  # noqa: E402
import torch.distributed as dist  # noqa: E402

from planner.probe.launch.launcher import launch  # noqa: E402
from planner.probe.model.chunk import local  # noqa: E402
from planner.probe.rank.training import synthetic_batch, trainer_alone  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_group_is_left")
RUNS: dict[str, tuple[tuple[str, int, int, int], dict[str, Any]]] = {
    "interleaved-tp2": (("interleaved-1f1b", 2, 2, 4), {"tp": 2, "sequence_parallel": True}),
    "zb-h1-moe-mla": (("zb-h1", 2, 1, 4), {"model": {"moe": MOE, "mla": MLA}}),
    "fsdp2-pp2": (("1f1b", 2, 1, 3), {"dp": 2, "fully_sharded": True}),
}


@pytest.mark.thorough(2)
@pytest.mark.parametrize("pp_rank", [0, 1])
@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_left_of_a_rehearsal(name: str, pp_rank: int, make_run: Any) -> None:
    order, options = RUNS[name]
    run = make_run(order, check=False, **options)

    def trained(rehearsed: bool) -> list[Any]:
        trainer = trainer_alone(run, run.rank(run.place(0)._replace(pp=pp_rank)), "cpu")
        torch.manual_seed(1)  # of what neighbours send
        if rehearsed:
            trainer.rehearse(str)
        losses = []
        for step in range(2):
            _, seconds = trainer.step(step, lambda at: None)
            losses.append((seconds.loss, seconds.gradient_norm))
        weights = [local(parameter).clone() for flat in trainer.flat for parameter in flat.parameters]
        if dist.is_initialized():
            dist.destroy_process_group()
        return [losses, weights]

    (losses, weights), (expected_losses, expected_weights) = trained(True), trained(False)
    assert losses == expected_losses
    assert all(map(torch.equal, weights, expected_weights))


def test_operands_of_a_stage_alone_stay_as_they_were_drawn(make_run: Any) -> None:
    trainer = trainer_alone(make_run(("1f1b", 2, 1, 3), check=False), 0, "cpu")
    before = [parameter.detach().clone() for flat in trainer.flat for parameter in flat.parameters]
    norms = [trainer.step(step, lambda at: None)[1].gradient_norm for step in range(20)]
    after = [parameter for flat in trainer.flat for parameter in flat.parameters]
    assert max(float((a.detach() - b).abs().max()) for a, b in zip(after, before, strict=True)) < 1e-6
    assert norms[-1] < 2 * norms[0], "ones through AdamW at 1e-3 made it a million times as large"


def test_a_stage_alone_looks_all_tokens_up_in_its_own_rows(make_run: Any) -> None:
    """Zeros for a peer's tokens stay zeros, and every norm multiplies their gradient, until it is no number."""
    options: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "dtype": "bfloat16", "check": False}
    trainer = trainer_alone(make_run(("1f1b", 2, 1, 3), **options), 0, "cpu")
    embedded = trainer.chunks[0].embedding(torch.arange(trainer.run.model.vocab_size).flip(0).unsqueeze(1))
    assert (embedded.abs().sum(-1) > 0).all()


def test_all_chunks_are_rehearsed_before_a_receive_is_under_way(make_run: Any) -> None:
    run = make_run(("interleaved-1f1b", 2, faulty.NUM_CHUNKS, 4), check=False, num_steps=1)
    assert len(launch(run, faulty.refusing_the_unrehearsed).ranks) == 2


def test_clocks_start_when_there_are_batches(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    def batch(*arguments: Any) -> Any:
        happened.append("batch")
        return synthetic_batch(*arguments)

    trainer = trainer_alone(make_run(("none", 1, 1, 2), check=False), 0, "cpu")
    monkeypatch.setattr("planner.probe.rank.training.synthetic_batch", batch)

    def start() -> None:
        happened.append("start")
        trainer.clock.start()

    trainer.step(0, happened.append, start=start)
    assert happened[:4] == ["batch", "batch", "start", "0F0 (waiting)"]
