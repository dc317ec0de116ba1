"""Splits: layout strings in Megatron's grammar, counts per stage or per chunk, and what each stage then costs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml
from toys import MOE, toy_model, toy_problem

from planner.errors import SpecError
from planner.layout.candidate import Split, even_counts, held_parts, parse_layout, splits_from_counts, stage_costs
from planner.shape import Shape

TABLES = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())


@pytest.mark.parametrize(("layout", "num_layers", "num_stages", "counts"), TABLES["layouts"])
def test_layout_strings(layout: str, num_layers: int, num_stages: int, counts: list[int]) -> None:
    assert parse_layout(layout, toy_model(num_layers), num_stages).counts == tuple(counts)


@pytest.mark.parametrize(("layout", "stage"), [("Ett|tmL", 1), ("Ettt|m|L", 1), ("Ett|tm|L", 1)])
def test_prediction_blocks_go_where_the_layout_puts_them(layout: str, stage: int) -> None:
    model = toy_model(3, num_nextn_predict_layers=1)
    split = parse_layout(layout, model, layout.count("|") + 1)
    assert split.mtp_stage == stage


@pytest.mark.parametrize(("layout", "num_stages", "says"), TABLES["wrong_layouts"])
def test_layout_strings_that_are_none(layout: str, num_stages: int, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_layout(layout, toy_model(6), num_stages)
    assert says in f"{caught.value.message} {caught.value.hint}"
    assert repr(layout) in caught.value.message


def test_a_layout_written_out_is_read_back() -> None:
    rng = random.Random(0)
    for _ in range(100):
        counts = [rng.randint(0, 5) for _ in range(rng.randint(1, 6))]
        text = "E" + "|".join(f"t*{n}" if rng.random() < 0.5 and n else "t" * n for n in counts) + "L"
        if sum(counts):
            assert parse_layout(text, toy_model(sum(counts)), len(counts)).counts == tuple(counts)


@pytest.mark.parametrize("num_layers", range(1, 30, 4))
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 8])
def test_even_counts_differ_by_one_and_leave_nothing_out(num_layers: int, num_stages: int) -> None:
    counts = even_counts(num_layers, num_stages)
    assert (len(counts), sum(counts)) == (num_stages, num_layers)
    assert max(counts) - min(counts) <= 1
    # the embedding and the head stand on the ends
    assert max(counts[0], counts[-1]) == min(counts) or num_layers % num_stages in (0, num_stages - 1)


def test_counts_per_stage_or_per_chunk() -> None:
    model = toy_model(10)
    assert splits_from_counts((3, 3, 2, 2), model, range(4)) == (3, 3, 2, 2)
    assert splits_from_counts((3, 3, 2, 2), model, (0, 1, 0, 1)) == (3, 3, 2, 2)
    # one number per stage is shared out over its chunks
    assert sum(splits_from_counts((6, 4), model, (0, 1, 0, 1))) == 10
    assert splits_from_counts((7, 3), model, (0, 1, 1, 0)) == (4, 2, 1, 3)
    per_chunk = splits_from_counts((6, 4), model, (0, 1, 0, 1))
    assert (per_chunk[0] + per_chunk[2], per_chunk[1] + per_chunk[3]) == (6, 4)


@pytest.mark.parametrize("counts", [(5, 4), (6, 5), (10, 1)])
def test_counts_must_add_up_to_the_model(counts: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match=rf"{sum(counts)} layers, toy has 10"):
        splits_from_counts(counts, toy_model(10), range(2))


def test_modes_and_chunks_of_a_split() -> None:
    model = toy_model(6, moe=MOE | {"first_k_dense_replace": 2})
    dense, moe = model.kinds
    split = Split((3, 2, 1), "selective", ((2, 0), (0, 1), (0, 0)))
    assert split.chunks == ((0, 3), (3, 5), (5, 6))
    assert split.modes(model) == [
        {(dense, "full"): 2, (moe, "selective"): 1},
        {(moe, "full"): 1, (moe, "selective"): 1},
        {(moe, "selective"): 1},
    ]
    assert Split((6, 0), "none").modes(model) == [{(dense, "none"): 2, (moe, "none"): 4}, {}]


def test_stages_cost_their_layers_and_what_they_hold() -> None:
    problem = toy_problem(toy_model(5, num_nextn_predict_layers=1, tie_word_embeddings=True))
    table = problem.pricing.table(Shape(tp=2, pp=3, dp=1, seq_length=2048, num_microbatches=6, sequence_parallel=1))
    (kind,) = problem.model.kinds
    layer, full = table.layers[kind, "none"], table.layers[kind, "full"]
    split = Split((2, 3, 0), "none", ((1,), (0,), (0,)))
    assert table.mtp is not None
    first, middle, last = stage_costs(table, problem.model, split, (0, 1, 2))
    for quantity in ("total_s", "static_bytes", "live_bytes", "parameters"):
        of = lambda part, quantity=quantity: float(getattr(part, quantity))  # noqa: E731
        assert of(first) == pytest.approx(of(layer) + of(full) + of(table.embedding))
        assert of(middle) == pytest.approx(3 * of(layer))
        assert of(last) == pytest.approx(of(table.head) + of(table.mtp))
    assert first.transient_bytes == max(full.transient_bytes, table.embedding.transient_bytes)


def test_who_holds_embedding_head_and_prediction_blocks() -> None:
    problem = toy_problem(toy_model(4, num_nextn_predict_layers=1, tie_word_embeddings=True))
    table = problem.pricing.table(Shape(pp=2, seq_length=2048))

    def names(split: Split, folded: bool = False) -> list[list[str]]:
        return [[name for name, _ in held_parts(table, split, j, folded)] for j in range(len(split.counts))]

    assert names(Split((2, 2))) == [["embedding"], ["mtp", "head"]]
    assert names(Split((2, 2), mtp_stage=0)) == [["embedding", "mtp"], ["head"]]
    assert names(Split((4,))) == [["embedding", "mtp", "head"]]
    # a rank that has both ends keeps one copy of tied weights
    apart, together = (dict(held_parts(table, Split((2, 2)), 1, folded))["head"] for folded in (False, True))
    assert apart.parameters > together.parameters


@pytest.mark.parametrize(
    ("split", "mode"),
    [
        (Split((2, 2)), "none"),
        (Split((2, 2), "selective"), "selective"),
        (Split((2, 2), "none", ((2,), (1,))), "none"),
        (Split((2, 2), "none", ((2,), (2,))), "full"),
        (Split((2, 2), "none", ((1, 1), (2, 0))), "full"),
    ],
)
def test_multi_token_prediction_is_recomputed_whole_where_all_layers_are(split: Split, mode: str) -> None:
    assert split.mtp_mode == mode
