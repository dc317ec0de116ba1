"""ZeRO-3 of a rank alone: it holds its rows, gathers a layer while the layer runs, and keeps its part of gradients."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import MOE

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")


from planner.probe.model.attention import AttentionTables  # noqa: E402
from planner.probe.model.chunk import Chunk, local  # noqa: E402
from planner.probe.rank.training import RankTrainer, batch_seed, synthetic_batch, trainer_alone  # noqa: E402
from planner.probe.run import ProbeRun  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_group_is_left")
DP = 4
RUNS: dict[str, dict[str, Any]] = {
    "dense": {"model": {"tie_word_embeddings": True}, "num_recomputed": 1},
    "tp2": {"tp": 2, "sequence_parallel": True, "model": {"qk_norm": True}},
    "ep2": {"ep": 2, "balanced_routing": True, "model": {"moe": MOE}},
    "cp2": {"dp": 2, "cp": 2, "seq_length": 4},
}


def alone(make_run: Any, order: tuple[str, int, int, int], **options: Any) -> tuple[ProbeRun, RankTrainer]:
    run = make_run(order, check=False, fully_sharded=True, **{"dp": DP, "layers": 2, **options})
    return run, trainer_alone(run, 0, "cpu")


@pytest.mark.thorough(2)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # nothing is added to it in place
@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_this_ranks_part_of_the_whole_models(name: str, make_run: Any) -> None:
    run, trainer = alone(make_run, ("none", 1, 1, 2), **RUNS[name])
    whole = Chunk(run.model, run.chunks[0], trainer.around).double()
    rows = {name: local(p).detach().clone() for name, p in trainer.chunks[0].named_parameters()}
    for name, parameter in whole.named_parameters():
        parameter.data = torch.cat([rows[name]] * (len(parameter) // len(rows[name])))
    tables = AttentionTables.of(run.model, run.whole_seq_length, trainer.around, trainer.empty())
    for number in range(run.num_microbatches):
        seed = batch_seed(run, 0, 0, number)
        tokens, labels = synthetic_batch(run.model, run.whole_seq_length, 1, seed, "cpu")
        (whole(None, tokens, labels, tables) / (run.num_microbatches * DP)).backward()
    found: dict[str, Any] = {}

    def keep() -> None:
        found.update((name, local(p.grad).clone()) for name, p in trainer.chunks[0].named_parameters())

    trainer.step(0, lambda at: None, keep)
    assert found.keys() == rows.keys()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad[: len(found[name])])
    assert sum(len(row) for row in rows.values()) < sum(len(p) for p in whole.parameters()) / 1.9


def test_a_rank_keeps_its_rows_with_their_moments(make_run: Any) -> None:
    _, trainer = alone(make_run, ("none", 1, 1, 2))
    (flat,) = trainer.flat
    held = sum(local(parameter).numel() for parameter in flat.parameters)
    assert held == trainer.num_parameters / DP
    moments = [local(state[name]) for state in flat.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert sum(moment.numel() for moment in moments) == 2 * held


@pytest.mark.parametrize(("pp", "gathered"), [(1, [False, True]), (2, [True, True])])
def test_a_layer_is_gathered_while_it_runs_and_in_a_pipeline_until_its_backward(
    pp: int, gathered: list[bool], make_run: Any
) -> None:
    order = ("none", 1, 1, 1) if pp == 1 else ("1f1b", 2, 1, 2)
    _, trainer = alone(make_run, order, **({"layers": 4} if pp == 2 else {}))
    layers = list(trainer.chunks[0].layers.values())
    seen: list[list[bool]] = []
    whole = [layer.mlp_norm.weight.shape for layer in layers]

    def look(*_: Any) -> None:
        weights = [layer.mlp_norm.weight for layer in layers]
        seen.append([local(weight).shape == shape for weight, shape in zip(weights, whole, strict=True)])

    layers[-1].mlp.register_forward_hook(look)
    trainer.step(0, lambda at: None)
    assert seen[0] == gathered
    assert not any(local(layer.mlp_norm.weight).shape == shape for layer, shape in zip(layers, whole, strict=True))
