"""Seconds of a step: short replays stand for long ones only where the pipeline repeats itself."""

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from pinned_numbers import LAYOUTS
from tables import beside
from toys import Problem, legal_counts, toy_cluster, toy_model, toy_problem, toy_training

from planner.answer import Plan, RunCost
from planner.decide.compare import of_plan
from planner.layout.candidate import Candidate, Split, activation_peaks_bytes, by_rank
from planner.layout.evaluate import evaluate
from planner.layout.price import reprice
from planner.layout.seconds import outside_pipeline, run_pipeline
from planner.layout.step import KINDS, LATE, PassExchange, compute_terms, exchanges_of_passes, mean_step_s
from planner.physics.cost import CostTable
from planner.physics.passes import COMM_GROUPS
from planner.physics.stage_memory import stage_memory
from planner.schedule.orders import build_schedule
from planner.schedule.replay import Durations, makespan_s, replay
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import AdapterSpec, DocumentLength, Parallelism, TrainingSpec
from planner.trainers.documents import Lengths

TABLES = beside(__file__)


def priced(problem: Problem, **sizes: Any) -> CostTable:
    sizes = {"dp": 2, "seq_length": 2048, "shard_size": 2, "micro_batch_size": 1} | sizes
    return problem.pricing.table(Shape(**sizes))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_long_steps_are_what_their_full_replay_says(schedule: str, pp: int) -> None:
    """Uneven splits too, where the busiest rank sets the pace only after many micro-batches."""
    rng, vpp = random.Random(pp), 2 if schedule.startswith("interleaved") else 1
    problem = toy_problem(toy_model(9), toy_cluster(8, network_gb_per_s=5.0))
    splits = list(legal_counts(9, pp, vpp, empty_ends=True))
    for rounds in (5, 16, 40):
        table = priced(problem, pp=pp, vpp=vpp, num_microbatches=pp * rounds)
        # the nearer to even, the longer it takes the busiest rank to set the pace
        even = sorted(splits, key=lambda counts: max(counts) - min(counts))[:12]
        for counts in {*even, *rng.sample(splits, min(6, len(splits)))}:
            candidate = Candidate(problem.pricing, table, Split(counts), schedule)
            exact_s = makespan_s(candidate.order, candidate.durations)
            quick = candidate.run(exact=False)
            assert quick.makespan_s == pytest.approx(exact_s, rel=3e-3), (counts, rounds)
            full = candidate.run()
            assert full.makespan_s == pytest.approx(exact_s, rel=1e-12)
            assert quick.busy_s == pytest.approx(full.busy_s)
            assert quick.num_microbatches == full.num_microbatches == pp * rounds
            assert candidate.step_s == pytest.approx(exact_s + sum(candidate.outside), rel=3e-3)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2"])
def test_steps_overlap_where_the_optimizer_is_validated_later(schedule: str) -> None:
    """Under ZB-H2 with equal passes, ranks idle only because they begin and end in turn: steps leave nothing idle."""
    problem = toy_problem(toy_model(16))
    table = priced(problem, pp=4, num_microbatches=16)
    later = replace(problem.pricing, runtime=problem.pricing.runtime.model_copy(update={"validates_later": True}))
    apart, beside = (Candidate(pricing, table, Split((4, 4, 4, 4)), schedule) for pricing in (problem.pricing, later))
    assert beside.step_s - sum(beside.outside) == pytest.approx(beside.run().makespan_s)
    timeline = replay(apart.order, apart.durations)
    spans_s = [end_s[-1] - start_s[0] for start_s, end_s in zip(timeline.start_s, timeline.end_s, strict=True)]
    expected = max(spans_s) if schedule.startswith("zb") else timeline.makespan_s
    assert beside.run().makespan_s == pytest.approx(float(expected))
    assert (beside.step_s < apart.step_s) == (schedule == "zb-h2")
    assert beside.run().makespan_s >= max(beside.run().busy_s) * (1 - 1e-12)


def test_a_rank_that_sets_the_pace_late_is_waited_for() -> None:
    """The first rank is busier than the last by a twentieth: it takes over after more rounds than are replayed."""
    table = priced(toy_problem(toy_model(8)), pp=4, num_microbatches=48)
    halves = [0.9, 0.594, 0.594, 0.85]
    durations = Durations([0.82, 0.53, 0.53, 0.82], halves, halves, p2p_s=0.017, blocking_p2p=True)
    exact_s = makespan_s(build_schedule("1f1b", 4, 1, 48), durations)
    assert run_pipeline(table.shape, durations, "1f1b", exact=False).makespan_s == pytest.approx(exact_s, rel=1e-6)
    few, more = (makespan_s(build_schedule("1f1b", 4, 1, m), durations) for m in (12, 16))
    assert more + (more - few) / 4 * 32 < 0.98 * exact_s


def test_parts_on_one_rank_add_up() -> None:
    problem = toy_problem(toy_model(8))
    table = priced(problem, pp=2, vpp=2, num_microbatches=4)
    costs = Candidate(problem.pricing, table, Split((1, 2, 3, 2)), "interleaved-1f1b").costs
    first, second = by_rank(costs, (0, 1, 0, 1))
    assert first.total_s == pytest.approx(costs[0].total_s + costs[2].total_s)
    assert second.static_bytes == pytest.approx(costs[1].static_bytes + costs[3].static_bytes)
    folded = by_rank(costs, (0, 1, 1, 0))
    assert folded[0].live_bytes == pytest.approx(costs[0].live_bytes + costs[3].live_bytes)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_activations_held_are_those_of_the_order(schedule: str) -> None:
    """Stage by stage: what is kept from a forward to its backward, whatever the stages keep."""
    pp, vpp = 3, 2 if schedule == "interleaved-1f1b" else 1
    order = build_schedule(schedule, pp, vpp, 9)
    live = [1.0, 10.0, 100.0, 1000.0, 10_000.0, 100_000.0][: pp * vpp]
    for rank, peak in enumerate(activation_peaks_bytes(order, live)):
        held = most = 0.0
        for action in order.ranks[rank]:
            held += live[action.stage] if action.kind == "F" else -live[action.stage]
            most = max(most, held)
        assert held == 0
        assert peak == most
    if vpp == 1:
        assert activation_peaks_bytes(order, [1.0] * 3) == [3.0, 2.0, 1.0]


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_memory_is_that_of_the_worst_moment(zero_stage: int) -> None:
    """While the loss runs its logits come on top of the activations; afterwards a layer's backward does."""
    problem = toy_problem(toy_model(6, vocab_size=200_000))
    table = priced(problem, pp=2, num_microbatches=8, zero_stage=zero_stage)
    costs = Candidate(problem.pricing, table, Split((4, 2)), "1f1b").costs
    first, last = (stage_memory(problem.pricing, table, cost, 7.0) for cost in costs)
    assert first.logits_bytes == 0
    assert last.logits_bytes == round(float(table.head.logits_bytes)) > 0
    assert first.workspace_bytes > last.workspace_bytes
    assert first.activations_bytes == last.activations_bytes == 7
    assert first.optimizer_bytes == pytest.approx(12 * float(costs[0].parameters) / (2 if zero_stage else 1), abs=1)


def test_fitting_is_to_the_byte() -> None:
    problem = toy_problem(toy_model(6))
    table, split = priced(problem, pp=2, num_microbatches=8), Split((3, 3))
    memories = Candidate(problem.pricing, table, split, "1f1b").memory
    needed_gib = max(memory.total_bytes for memory in memories) / 2**30
    for gib, fits in ((needed_gib + 1e-9, True), (needed_gib - 1e-6, False)):
        other = toy_problem(toy_model(6), toy_cluster(8, memory_gib=gib), toy_training(16), memory_headroom_gib=0.0)
        assert Candidate(other.pricing, table, split, "1f1b").fits is fits


def test_one_stage_has_no_hops_in_a_cluster_of_one_tier() -> None:
    """A measured profile of one GPU has a single tier; a pipeline of one stage then has a number for no boundary."""
    whole = toy_cluster(4)
    hardware = whole.hardware.model_copy(update={"tiers": whole.hardware.tiers[-1:]})
    problem = toy_problem(toy_model(4), whole.changed(hardware=hardware))
    for pp in (1, 2):
        candidate = Candidate(
            problem.pricing, priced(problem, pp=pp, num_microbatches=4), Split((4 // pp,) * pp), "1f1b"
        )
        assert candidate.run(True).makespan_s > 0


EXCHANGING = [layout for layout in LAYOUTS if {"tp", "cp", "ep"} & layout[4].keys()]


def candidate_of(model: str, num_gpus: int, trainer: str, dtype: str, sizes: dict[str, Any]) -> Candidate:
    hardware = load_hardware("mi355x" if trainer.startswith("primus") else "h100")
    training = TrainingSpec(seq_length=4096, global_batch_size=64, dtype=dtype)  # type: ignore[arg-type]
    cluster = ClusterSpec(hardware=hardware, num_gpus=num_gpus)
    plan = evaluate(model, cluster, training, Parallelism(**sizes), runtime=trainer)
    return reprice(plan, plan.best)


def exposed_s(exchanges: tuple[PassExchange, ...], group: str) -> float:
    return sum(exchange.exposed_s for exchange in exchanges if exchange.group == group)


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("model", "num_gpus", "trainer", "dtype", "sizes"), EXCHANGING)
def test_they_add_up_to_the_stages(model: str, num_gpus: int, trainer: str, dtype: str, sizes: dict[str, Any]) -> None:
    candidate = candidate_of(model, num_gpus, trainer, dtype, sizes)
    each, by_part, by_pass = (exchanges_of_passes(candidate, together) for together in ("", "part", "pass"))
    for stage, cost in enumerate(candidate.costs):
        lengths_s = {"F": cost.forward_total_s, "B": cost.backward_total_s, "I": cost.input_grad_total_s}
        for kind in KINDS:
            way = "forward" if kind == "F" else "backward"
            for group in COMM_GROUPS:
                priced_s = float(getattr(cost, f"{group}_{way}_s"))
                for passes in (each, by_part, by_pass):
                    assert exposed_s(passes[stage, kind], group) == pytest.approx(priced_s, rel=1e-9, abs=1e-15)
            ends_s = 0.0
            for exchange in each[stage, kind]:
                assert exchange.start_s >= ends_s * (1 - 1e-12)
                assert min(exchange.exposed_s, exchange.hidden_s) >= 0
                ends_s = exchange.start_s + exchange.exposed_s
            assert ends_s <= float(lengths_s[kind]) * (1 + 1e-9)
            assert len(by_pass[stage, kind]) <= len(by_part[stage, kind]) <= len(each[stage, kind])


def test_layers_follow_each_other_and_come_back_in_reverse() -> None:
    candidate = candidate_of("llama-3.1-8b", 16, "megatron", "bf16", {"tp": 2, "cp": 4, "pp": 2})
    passes = exchanges_of_passes(candidate)
    parts = list(dict.fromkeys(exchange.part for exchange in passes[0, "F"]))
    assert parts == ["embedding", *(f"layer {layer}" for layer in range(16))]
    assert list(dict.fromkeys(exchange.part for exchange in passes[0, "B"])) == parts[::-1]
    layer = [exchange for exchange in passes[0, "F"] if exchange.part == "layer 3"]
    named = [[exchange.group, exchange.name] for exchange in layer if exchange.name not in LATE.values()]
    assert named == TABLES["layers_follow_each_other_and_come_back_in_reverse"]
    leads = {exchange.name: exchange.leads for exchange in layer}
    assert leads["mlp up gather"]
    assert not leads["mlp down scatter"]


def test_a_recomputed_layer_repeats_its_exchanges_before_its_gradients() -> None:
    sizes = {"tp": 8, "pp": 4, "vpp": 2, "recompute": "full"}
    candidate = candidate_of("gpt3-175b", 64, "megatron-2021", "bf16", sizes)
    backward = exchanges_of_passes(candidate)[1, "B"]
    layer = [exchange.name for exchange in backward if exchange.part == backward[0].part]
    forward = [exchange.name for exchange in exchanges_of_passes(candidate)[1, "F"]][: len(layer) // 2]
    assert layer[: len(forward) - 1] == forward[:-1]


def test_a_slow_rank_takes_longer_for_them_too() -> None:
    candidate = candidate_of("llama-3.1-8b", 16, "megatron", "bf16", {"tp": 2, "pp": 2})
    slow = Candidate(candidate.pricing, candidate.table, candidate.split, candidate.schedule, rank_factors=(1.0, 1.5))
    even, slowed = exchanges_of_passes(candidate), exchanges_of_passes(slow)
    assert slowed[0, "F"] == even[0, "F"]
    assert exposed_s(slowed[1, "B"], "tp") == pytest.approx(1.5 * exposed_s(even[1, "B"], "tp"))


FIRST = {"reduce_s": 5.0, "gather_s": 3.0, "forward_s": 1.0, "input_grad_s": 2.0, "weight_grad_s": 0.0}
"""Seconds of a rank, one micro-batch: exchanges, and nothing else than compute that hides them."""


def exposed(
    pp: int, vpp: int, zero_stage: int, schedule: str, ranks: Sequence[dict[str, float]] = (), **switches: float
) -> float:
    """Seconds of exchange that nothing hides, where all that passes could."""
    problem = toy_problem(toy_model(8), toy_cluster(8), toy_training(8))
    hides = dict.fromkeys(("gradient_overlap_fraction", "parameter_overlap_fraction", "fsdp_overlap_fraction"), 1.0)
    pricing = replace(problem.pricing, runtime=problem.pricing.runtime.model_copy(update=hides | switches))
    shape = Shape(pp=pp, vpp=vpp, dp=2, num_microbatches=4, seq_length=2048, zero_stage=zero_stage, shard_size=2)
    table = pricing.table(shape)
    nothing = dict.fromkeys((f.name for f in fields(table.head) if f.name.endswith("_s")), 0.0)
    costs = [replace(table.head, **{**nothing, **seconds}) for seconds in ranks or [FIRST] * pp]
    return outside_pipeline(pricing, table, costs, schedule).exposed_dp_s


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "zero_stage", "exposed_s"),
    [
        ("none", 1, 1, 1, (5 - 2) + (3 - 1)),
        ("1f1b", 2, 1, 1, (5 - 2) + (3 - 1)),
        ("none", 1, 1, 2, 4 * (5 - 2) + (3 - 1)),  # gradients of each of four micro-batches
        ("none", 1, 1, 3, 4 * (5 + 2 * 3 - 3)),  # and weights twice
        ("1f1b", 2, 1, 3, (5 - 2) + (3 - 1)),  # gathered from the first micro-batch to the last
        ("interleaved-1f1b", 2, 2, 1, max((5 - 2) / 2, 5 - 1.5 * 2) + max((3 - 1) / 2, 3 - 1.5 * 1)),
        ("interleaved-1f1b", 4, 2, 1, (5 - 2) / 2 + (3 - 1) / 2),  # the last chunk's alone
        ("zb-v", 4, 2, 1, (5 - 2) + (3 - 1)),
    ],
)
def test_exposed_exchange(schedule: str, pp: int, vpp: int, zero_stage: int, exposed_s: float) -> None:
    assert exposed(pp, vpp, zero_stage, schedule) == pytest.approx(exposed_s)


@pytest.mark.parametrize(("pp", "zero_stage", "exposed_s"), TABLES["what_is_hidden_slows_down_what_hides_it"])
def test_what_is_hidden_slows_down_what_hides_it(pp: int, zero_stage: int, exposed_s: float) -> None:
    """More than the (5 - 2) + (3 - 1) that nothing hides."""
    assert exposed(pp, 1, zero_stage, "none", contention_fraction=0.8) == pytest.approx(exposed_s)


@pytest.mark.parametrize(("pp", "zero_stage", "exposed_s"), [(2, 3, 5 + (3 - 1)), (2, 1, (5 - 2) + (3 - 1))])
def test_torch_s_stages_wait_for_sharded_reductions(pp: int, zero_stage: int, exposed_s: float) -> None:
    assert exposed(pp, 1, zero_stage, "1f1b", has_torch_stages=True) == pytest.approx(exposed_s)


@pytest.mark.parametrize(("schedule", "vpp", "exposed_s"), TABLES["the_rank_waited_for_is_not_always_the_first"])
def test_the_rank_waited_for_is_not_always_the_first(schedule: str, vpp: int, exposed_s: float) -> None:
    ranks = [FIRST, FIRST | {"reduce_s": 9.0, "gather_s": 7.0}]
    assert exposed(2, vpp, 1, schedule, ranks) == pytest.approx(exposed_s)


def plan_of(model: str, seq_length: int = 4096, dtype: Any = "bf16", **layout: Any) -> Plan:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=32)
    training = TrainingSpec(seq_length=seq_length, global_batch_size=64, dtype=dtype)
    return evaluate(load_model(model), cluster, training, Parallelism(**layout))


def terms_of(plan: Plan) -> dict[str, float]:
    candidate = reprice(plan, plan.best)
    return compute_terms(candidate, int(np.argmax(candidate.run().busy_s)))


DENSE = {"tp": 4, "pp": 4, "dp": 2}
PLANS: dict[str, dict[str, Any]] = TABLES["plans"]


@pytest.mark.parametrize("job", PLANS.values(), ids=list(PLANS))
def test_the_terms_add_up_to_the_compute_of_the_step(job: dict[str, Any]) -> None:
    plan = plan_of(**job)
    terms = terms_of(plan)
    compute_s = plan.step.breakdown.compute_s
    assert sum(terms.values()) == pytest.approx(compute_s, rel=1e-9)
    assert min(terms.values()) > -1e-9 * compute_s
    assert terms["products_s"] > 0.3 * compute_s


def test_each_term_is_of_what_it_names() -> None:
    plain = terms_of(plan_of("8b", **DENSE))
    longer = terms_of(plan_of("8b", seq_length=16384, **DENSE))
    recomputed = terms_of(plan_of("8b", recompute="full", **DENSE))
    narrow = terms_of(plan_of("8b", dtype="fp8", **DENSE))
    assert longer["attention_s"] / plain["attention_s"] > 8  # four times the tokens, each over four times the keys
    assert longer["products_s"] / plain["products_s"] == pytest.approx(4, rel=0.1)
    assert (plain["recompute_s"], recomputed["products_s"]) == (0.0, plain["products_s"])
    # a forward is a third of a layer's products, and repeated
    assert 0.2 < recomputed["recompute_s"] / (plain["products_s"] + plain["attention_s"]) < 0.5
    assert narrow["products_s"] < 0.75 * plain["products_s"]
    assert narrow["attention_s"] == pytest.approx(plain["attention_s"])
    # plans are compared by what all ranks compute: the busiest one may hold neither embedding nor head
    light_ends = plan_of("8b", layers_per_stage=(8, 9, 9, 6), **DENSE)
    assert terms_of(light_ends)["ends_s"] == 0 < of_plan(light_ends, "plan").terms["ends_s"]


SHORT_AND_LONG: Lengths = ((512, 0.5), (1024, 0.5))


@cache
def _evaluated(
    lengths: Lengths, batching: str, num_gpus: int = 1, zero_stage: int = 0, seq_length: int = 1024, micro: int = 2
) -> Plan:
    documents = tuple(DocumentLength(length=length, share=share) for length, share in lengths)
    mean = sum(length * share for length, share in lengths)
    training = TrainingSpec(
        seq_length=seq_length, global_batch_size=16, document_lengths=documents, batching=batching,  # type: ignore[arg-type]
        examples=8000, epochs=2, tokens=16_000 * mean, adapters=AdapterSpec(),
    )  # fmt: skip
    layout = Parallelism(dp=num_gpus, micro_batch_size=micro, zero_stage=zero_stage)  # type: ignore[arg-type]
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=num_gpus)
    return evaluate(load_model("8b"), cluster, training, layout, runtime="hf")


def _cost(plan: Plan) -> RunCost:
    assert plan.run_cost is not None
    return plan.run_cost


def test_padding_nothing_is_as_long_as_packing() -> None:
    padded, packed = (_cost(_evaluated(((1024, 1.0),), batching)) for batching in ("padded", "packed"))
    assert padded.days == pytest.approx(packed.days)
    assert padded.num_steps == packed.num_steps == 1000
    assert padded.padding_fraction == 0
    assert padded.packed_days == pytest.approx(packed.days)


def test_packing_is_never_slower_and_says_what_it_gains() -> None:
    padded, packed = (_cost(_evaluated(SHORT_AND_LONG, batching)) for batching in ("padded", "packed"))
    assert packed.days < padded.days
    assert padded.packed_days == pytest.approx(packed.days)
    assert packed.padding_fraction is None
    # the longer of two is long in three of four draws
    assert padded.padding_fraction == pytest.approx(1 - 768 / (0.75 * 1024 + 0.25 * 512))
    assert padded.num_steps == pytest.approx(1000)
    assert packed.num_steps == pytest.approx(750)


def test_the_mean_step_is_that_of_the_lengths_it_may_have() -> None:
    plan, short = _evaluated(SHORT_AND_LONG, "padded"), _evaluated(((512, 1.0),), "padded", seq_length=512)
    expected = 0.75 * plan.best.step.step_s + 0.25 * short.best.step.step_s
    assert mean_step_s(plan) == pytest.approx(expected, rel=1e-9)


def test_the_memory_is_that_of_the_longest() -> None:
    padded, whole = (_evaluated(lengths, "padded") for lengths in (SHORT_AND_LONG, ((1024, 1.0),)))
    assert padded.best.stages == whole.best.stages


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_ranks_wait_for_the_one_with_the_longest_examples(zero_stage: int) -> None:
    plan = _evaluated(SHORT_AND_LONG, "padded", 4, zero_stage)
    mean_s, longest_s = mean_step_s(plan), plan.best.step.step_s
    training = plan.training.model_copy(update={"seq_length": 512})
    short = evaluate(
        plan.model.spec, plan.cluster, training, Parallelism(dp=4, micro_batch_size=2, zero_stage=zero_stage),  # type: ignore[arg-type]
        runtime="hf",
    )  # fmt: skip
    alone_s = 0.75 * longest_s + 0.25 * short.best.step.step_s
    assert alone_s < mean_s <= longest_s
    if zero_stage == 3:
        # of eight examples one is long but in one draw of 256
        assert mean_s == pytest.approx(longest_s - (longest_s - short.best.step.step_s) / 256)


def test_a_run_in_tokens_alone_has_no_examples() -> None:
    plan = _evaluated(SHORT_AND_LONG, "packed")
    training = plan.training.model_copy(update={"examples": None, "document_lengths": None})
    plain = evaluate(plan.model.spec, plan.cluster, training, Parallelism(micro_batch_size=2), runtime="hf")
    assert _cost(plain).num_steps is None
    assert _cost(plain).days == pytest.approx(_cost(plan).days)
