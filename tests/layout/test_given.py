"""Layouts that someone states: what is filled in, refused or warned about, and textbook ones priced."""

import random
from typing import Any

import pytest
from refusals import refused
from tables import beside
from toys import MOE, toy_cluster, toy_model, toy_problem, toy_training

from planner.answer import Plan
from planner.errors import SpecError
from planner.layout.candidate import Candidate, Split, even_counts, held_parts, parse_layout, splits_from_counts
from planner.layout.evaluate import evaluate, trade, within
from planner.layout.given import default_counts
from planner.layout.price import reprice
from planner.schedule.orders import SCHEDULES
from planner.search.search import plan
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.specs.units import GIB

TABLES = beside(__file__)


def given(runtime: str = "megatron", model: Any = None, num_gpus: int = 16, batch: int = 32, **layout: Any) -> Plan:
    cluster = toy_cluster(num_gpus)
    return evaluate(model or toy_model(8), cluster, toy_training(batch), Parallelism(**layout), runtime=runtime)


@pytest.mark.parametrize(("runtime", "layout", "filled"), TABLES["what_is_left_out_is_filled_in"])
def test_what_is_left_out_is_filled_in(runtime: str, layout: dict[str, Any], filled: dict[str, Any]) -> None:
    chosen = given(runtime, **layout).parallelism
    assert {name: getattr(chosen, name) for name in filled} == filled
    assert {name: getattr(chosen, name) for name in layout if name != "fsdp"} == {
        name: value for name, value in layout.items() if name != "fsdp"
    }


def test_etp_costs_nothing_without_experts() -> None:
    assert given(tp=4, etp=1).step == given(tp=4).step


def test_spare_ranks_are_counted() -> None:
    chosen = given(num_gpus=16, dp=4, tp=2).parallelism
    assert (chosen.num_gpus_used, chosen.num_gpus_spare) == (8, 8)


@pytest.mark.parametrize(("changes", "layout", "says"), TABLES["contradictions_are_refused_by_number"])
def test_contradictions_are_refused_by_number(changes: dict[str, Any], layout: dict[str, Any], says: list[str]) -> None:
    model = toy_model(changes.get("layers", 8), moe=MOE if "experts" in changes else None)
    with pytest.raises(SpecError) as caught:
        given(model=model, batch=changes.get("batch", 32), **layout)
    for text in says:
        assert text in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.hint


def test_what_only_the_trainer_refuses_is_a_warning() -> None:
    ring = given(model=toy_model(8, sliding_window=256), cp=2)
    assert any("megatron refuses this layout" in line and "sliding window" in line for line in ring.warnings)
    tied = given("torchtitan", model=toy_model(8, tie_word_embeddings=True), pp=2, dp=2)
    assert any("tied embeddings" in line for line in tied.warnings)
    assert given(pp=2, dp=2).warnings == ()


@pytest.mark.parametrize(("runtime", "layout", "says"), TABLES["what_the_trainer_has_no_option_for_is_a_warning"])
def test_what_the_trainer_has_no_option_for_is_a_warning(runtime: str, layout: dict[str, Any], says: str) -> None:
    (warning,) = given(runtime, **layout).warnings
    assert warning.startswith(f"{runtime} refuses this layout: ")
    assert says in warning


@pytest.mark.parametrize(("runtime", "layout"), TABLES["what_the_trainer_has_options_for_is_none"])
def test_what_the_trainer_has_options_for_is_none(runtime: str, layout: dict[str, Any]) -> None:
    assert given(runtime, **layout).warnings == ()


def test_a_layout_that_does_not_fit_is_priced_all_the_same() -> None:
    model, cluster = toy_model(8), toy_cluster(1, memory_gib=0.5)
    answer = evaluate(model, cluster, toy_training(4), Parallelism())
    assert not answer.fits
    assert answer.step.step_s > 0
    assert answer.search is None
    assert answer.best.worst_stage.memory.total_bytes > cluster.hardware.memory_bytes


def test_recompute_of_some_layers_of_each_stage() -> None:
    answer = given(pp=4, dp=4, recompute="full", recompute_num_layers=1)
    assert [stage.recompute for stage in answer.stages] == [{"full": 1, "none": 1}] * 4
    whole, none = given(pp=4, dp=4, recompute="full"), given(pp=4, dp=4)
    assert [stage.recompute for stage in whole.stages] == [{"full": 2}] * 4
    memory = [plan.stages[0].memory.activations_bytes for plan in (whole, answer, none)]
    assert memory == sorted(memory)
    steps = [plan.step.step_s for plan in (none, answer, whole)]
    assert steps == sorted(steps)


def test_splits_and_layouts_say_the_same() -> None:
    counts = given(pp=4, dp=2, layers_per_stage=(1, 3, 3, 1))
    layout = given(pp=4, dp=2, layout="Et|ttt|ttt|tL")
    assert counts.stages == layout.stages
    assert counts.step == layout.step
    assert [stage.num_layers for stage in counts.stages] == [1, 3, 3, 1]


@pytest.mark.parametrize(("num_layers", "num_stages", "counts"), TABLES["default_splits"])
def test_default_splits(num_layers: int, num_stages: int, counts: list[int] | None) -> None:
    found = default_counts(toy_model(num_layers), num_stages)
    assert (sum(found), len(found)) == (num_layers, num_stages)
    assert max(found) - min(found) <= 1
    assert counts is None or list(found) == counts


@pytest.mark.parametrize(("num_layers", "num_stages", "counts"), TABLES["what_is_left_stands_beside_the_block"])
def test_what_is_left_stands_beside_the_block(num_layers: int, num_stages: int, counts: list[int]) -> None:
    """The first four are layouts that Megatron-Bridge's recipes write for DeepSeek-V3."""
    assert list(default_counts(toy_model(num_layers, num_nextn_predict_layers=1), num_stages)) == counts


def test_more_stages_than_layers_have_a_head_of_their_own() -> None:
    assert default_counts(toy_model(5, num_nextn_predict_layers=1), 8) == even_counts(5, 8)


@pytest.mark.parametrize("num_stages", range(2, 61))
def test_stages_before_a_prediction_block_differ_by_one(num_stages: int) -> None:
    *before, last = default_counts(toy_model(61, num_nextn_predict_layers=1), num_stages)
    assert sum(before) + last == 61
    assert max(before) - min(before) <= 1
    assert 0 <= last < max(before)


@pytest.mark.parametrize(("num_gpus", "vpp", "batch", "mfu"), TABLES["the_textbook_layouts_of_llama_405b"])
def test_the_textbook_layouts_of_llama_405b(num_gpus: int, vpp: int, batch: int, mfu: float) -> None:
    """Llama Team 2024, section 3.3 and table 4: TP 8, PP 16, DP 128, 8,192 tokens, 16 M a step; 41% on 16,384 H100."""
    model, dp = load_model("405b"), num_gpus // 128
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=num_gpus)
    training = TrainingSpec(seq_length=8192, global_batch_size=batch)
    answer = evaluate(model, cluster, training, Parallelism(tp=8, pp=16, dp=dp, vpp=vpp))
    steps = batch // dp
    assert answer.parallelism.num_microbatches == steps
    # embedding and head count as layers: 128 equal shares
    assert [stage.num_layers for stage in answer.stages] == [7, *[8] * 14, 7]
    assert [stage.holds for stage in answer.stages] == [("embedding",), *[()] * 14, ("head",)]
    chunks = sorted(chunk for stage in answer.stages for chunk in stage.chunks)
    assert [last - first for first, last in chunks] == ([7, *[8] * 14, 7] if vpp == 1 else [0, *[1] * 126, 0])
    if vpp == 1:
        assert [stage.in_flight_microbatches for stage in answer.stages] == [min(steps, 16 - r) for r in range(16)]
        # 15 of M + 15 rounds idle, but for what unequal ends add
        assert answer.step.bubble_fraction == pytest.approx(15 / (steps + 15), rel=0.1)
    peaks = [stage.memory.total_bytes / 2**30 for stage in answer.stages]
    assert 60 < max(peaks) < 100
    assert max(peaks) == max(peaks[:3])
    assert answer.step.mfu == pytest.approx(mfu, rel=0.12)
    assert sum(seconds for _, seconds in answer.step.breakdown) == pytest.approx(answer.step.step_s)


def test_what_more_replicas_cost_llama_405b() -> None:
    """Llama Team 2024, table 4: 430 TFLOP/s on 8,192 GPUs, 400 on 16,384 with half as many micro-batches each."""
    model, hardware = load_model("405b"), load_hardware("h100")
    training = TrainingSpec(seq_length=8192, global_batch_size=2048)
    layouts = {dp: Parallelism(tp=8, pp=16, dp=dp, vpp=8) for dp in (64, 128)}
    tflops = {
        dp: evaluate(model, ClusterSpec(hardware=hardware, num_gpus=128 * dp), training, layout).step
        for dp, layout in layouts.items()
    }
    lost = tflops[64].model_tflops_per_gpu / tflops[128].model_tflops_per_gpu
    assert lost == pytest.approx(430 / 400, abs=0.01)


@pytest.mark.parametrize("schedule", ["dualpipe", "chimera", "pipedream-2bw", "forward-only"])
def test_what_trains_no_single_copy_is_refused(schedule: str) -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=16)
    training = TrainingSpec(seq_length=8192, global_batch_size=64)
    with pytest.raises(SpecError, match=f"{schedule} trains no single copy"):
        evaluate(load_model("8b"), cluster, training, Parallelism(pp=4, dp=4, schedule=schedule))


def test_schedules_that_are_offered_are_priced() -> None:
    with pytest.raises(SpecError, match="unknown 'bogus'") as caught:
        given(pp=4, schedule="bogus")
    for schedule in caught.value.hint.removeprefix("one of ").split(", "):
        kind = SCHEDULES[schedule]
        answer = given(pp=min(4, kind.max_pp), vpp=kind.min_vpp, schedule=schedule)
        assert answer.parallelism.schedule == schedule


def test_the_dp_to_lower_to_suits_the_batch() -> None:
    with refused("60 ranks", "lower dp to 4, or give 60 GPUs"):
        given(batch=32, pp=3, dp=20)
    assert given(batch=32, pp=3, dp=4).parallelism.dp == 4


def test_layers_of_ranks_are_those_of_both_chunks_of_a_v() -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=4)
    layout = Parallelism(pp=4, vpp=2, schedule="zb-v", layers_per_stage=(5, 9, 9, 9))
    answer = evaluate(load_model("8b"), cluster, TrainingSpec(seq_length=4096, global_batch_size=8), layout)
    assert [stage.num_layers for stage in answer.stages] == [5, 9, 9, 9]


def test_a_layout_that_only_counts_recomputed_layers_states_those_that_it_is_priced_with() -> None:
    """Its chunks share them; the first chunk is not filled before the second."""
    plan = given(pp=2, vpp=2, recompute="full", model=toy_model(12))
    stages = [
        stage.model_copy(update={"recompute": {"full": 4, "none": 2}, "num_recomputed": ()})
        for stage in plan.best.stages
    ]
    layout = plan.best.model_copy(update={"stages": tuple(stages)})
    assert layout.stated.recompute_layers == (0, 1, 3, 4, 6, 7, 9, 10)
    split = reprice(plan, layout).split
    assert [sum(kinds) for kinds in split.recomputed] == [2, 2, 2, 2]


def test_tokens_for_a_time_are_those_that_its_cost_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the guesses run out before they are close."""
    plan = given(dp=8, tp=2)
    for guesses in (1, 2, 12):
        monkeypatch.setattr("planner.layout.evaluate.MOST_GUESSES", guesses)
        told = within(plan, days=30.0, usd=None)
        assert told.run_cost is not None
        assert told.run_cost.tokens == told.training.tokens
    assert told.run_cost.days == pytest.approx(30.0, rel=1e-3)


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
        {(dense, "full"): 2, (moe, "selective"): 1}, {(moe, "full"): 1, (moe, "selective"): 1}, {(moe, "selective"): 1},
    ]  # fmt: skip
    assert Split((6, 0), "none").modes(model) == [{(dense, "none"): 2, (moe, "none"): 4}, {}]


def test_stages_cost_their_layers_and_what_they_hold() -> None:
    problem = toy_problem(toy_model(5, num_nextn_predict_layers=1, tie_word_embeddings=True))
    table = problem.pricing.table(Shape(tp=2, pp=3, dp=1, seq_length=2048, num_microbatches=6, sequence_parallel=1))
    (kind,) = problem.model.kinds
    layer, full = table.layers[kind, "none"], table.layers[kind, "full"]
    split = Split((2, 3, 0), "none", ((1,), (0,), (0,)))
    assert table.mtp is not None
    first, middle, last = Candidate(problem.pricing, table, split, "1f1b").costs
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
        (Split((2, 2)), "none"), (Split((2, 2), "selective"), "selective"),
        (Split((2, 2), "none", ((2,), (1,))), "none"), (Split((2, 2), "none", ((2,), (2,))), "full"),
        (Split((2, 2), "none", ((1, 1), (2, 0))), "full"),
    ],
)  # fmt: skip
def test_multi_token_prediction_is_recomputed_whole_where_all_layers_are(split: Split, mode: str) -> None:
    assert split.mtp_mode == mode


def test_what_an_alternative_trades() -> None:
    problem = toy_problem(cluster=toy_cluster(8, memory_gib=3.0), training=toy_training(32))
    answer = plan(problem.model, problem.cluster, problem.training, limits=problem.limits, runtime=problem.runtime)
    assert answer.alternatives
    for other in answer.alternatives:
        slower = other.step.step_s / answer.step.step_s - 1
        more = (other.worst_stage.memory.total_bytes - answer.best.worst_stage.memory.total_bytes) / GIB
        assert other.trade.startswith(f"{slower:+.1%} time, {more:+.1f} GiB")
    same = trade(answer.best, answer.best)
    assert same == "+0.0% time, +0.0 GiB"
    assert answer.best.trade == ""
