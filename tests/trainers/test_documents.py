"""Packed documents against masks that are counted, and against many sequences drawn and cut by hand.

The longest of drawn lengths: against every draw there is, and laws over counts.
A calibration is laid over a profile: factors multiply, shares replace, and the profile itself stays.
"""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.layout.evaluate import evaluate
from planner.physics import compute
from planner.physics.operators import Operator, operators_of
from planner.physics.passes import lateness
from planner.physics.pricing import Pricing
from planner.schedule.actions import Schedule
from planner.schedule.builders import interleaved_one_f_one_b
from planner.shape import FloatArray, Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import LinkTier
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import DocumentLength, Parallelism, TrainingSpec
from planner.trainers.calibration import UNPROBED_MEMORY_WIDTH, Calibration, Factor, Quantity, Share
from planner.trainers.documents import (
    UNEVEN_RANKS,
    Lengths,
    attended_fraction,
    example_lengths,
    excess_fraction,
    excess_microbatches,
    largest_normal,
    longest_of,
    mean_length,
    padding_fraction,
    rank_imbalance,
    texts_by_ranks,
)
from planner.trainers.load import load_runtime


def counted_fraction(lengths: list[int], seq_length: int, window: int) -> float:
    """Mean share of the causal mask that is set, over all places at which a stream of documents may be cut."""
    stream = np.repeat(np.arange(len(lengths)), lengths)
    total = len(stream)
    rows = np.arange(seq_length)
    causal = (rows[:, None] >= rows[None, :]) & (rows[:, None] - rows[None, :] < (window or seq_length))
    attended = 0.0
    for first in range(total):
        document = stream[(first + rows) % total] + len(lengths) * ((first + rows) // total)
        attended += (causal & (document[:, None] == document[None, :])).sum() - seq_length / 2
    return attended / total / seq_length**2


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(2, 48), st.integers(0, 30))
def test_share_is_that_of_the_mask(lengths: list[int], seq_length: int, window: int) -> None:
    documents = tuple((length, 1.0) for length in lengths)
    expected = counted_fraction(lengths, seq_length, window)
    # an integral counts half of the diagonal, which is less than a key a query, and 1/6 of one where documents end
    assert float(attended_fraction(documents, seq_length, window)) == pytest.approx(expected, abs=0.51 / seq_length)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(40, 400), min_size=1, max_size=4), st.integers(100, 300))
def test_share_without_a_window_is_exact_but_for_the_ends_of_documents(lengths: list[int], seq_length: int) -> None:
    documents = tuple((length, 1.0) for length in lengths)
    expected = counted_fraction(lengths, seq_length, 0)
    assert float(attended_fraction(documents, seq_length, 0)) == pytest.approx(expected, abs=1 / 6 / 40 / seq_length)


def test_endless_documents_attend_as_a_whole_sequence_does() -> None:
    for window in (0, 100, 5000):
        whole = Operator(name="a", kind="attention", q_len=4096, kv_len=4096, window=window)
        endless = Operator(
            name="a", kind="attention", q_len=4096, kv_len=4096, window=window, documents=((10**9, 1.0),)
        )
        assert float(endless.attended_fraction) == pytest.approx(float(whole.attended_fraction), rel=1e-5)


def test_short_documents_attend_to_their_own_length() -> None:
    documents = ((100, 3.0), (900, 1.0))
    mean_met = (3 * 100**2 + 900**2) / (3 * 100 + 900) / 2
    assert float(attended_fraction(documents, 10**6, 0)) == pytest.approx(mean_met / 10**6, rel=1e-3)


def sequences(documents: tuple[tuple[int, float], ...], seq_length: int, count: int, cp: int) -> np.ndarray:
    """Attention of each rank (columns) in each of `count` sequences, one token after the other."""
    lengths, shares = np.array(documents).T
    random = np.random.default_rng(5)
    drawn = random.choice(lengths.astype(int), 4 * count * seq_length // int(lengths.mean()), p=shares / shares.sum())
    position = np.concatenate([np.arange(length) for length in drawn])[: count * seq_length].reshape(count, seq_length)
    start = np.arange(seq_length) - position
    keys = np.where(start < 0, np.arange(seq_length), position) + 0.5
    parts = keys.reshape(count, 2 * cp, -1).sum(axis=2)
    return parts[:, :cp] + parts[:, ::-1][:, :cp]


@pytest.mark.parametrize("cp", [1, 4])
def test_ranks_are_as_uneven_as_in_sequences_cut_by_hand(cp: int) -> None:
    documents = ((100, 0.6), (500, 0.3), (3000, 0.1))
    by_rank = sequences(documents, 2048, 2000, cp)
    fullest = (by_rank.max(axis=1) * cp).mean() / by_rank.sum(axis=1).mean()
    assert float(rank_imbalance(documents, 2048, cp)) == pytest.approx(fullest, rel=0.05)


@pytest.mark.parametrize(("num_ranks", "each"), [(8, 16), (64, 64)])
def test_fullest_rank_has_as_much_as_among_ranks_drawn(num_ranks: int, each: int) -> None:
    documents = ((100, 0.6), (500, 0.3), (3000, 0.1))
    totals = sequences(documents, 2048, 2000, 1).sum(axis=1)
    drawn = np.random.default_rng(1).choice(totals, (400, num_ranks, each)).sum(axis=2)
    expected = (drawn.max(axis=1) / drawn.mean(axis=1)).mean() - 1
    assert float(excess_fraction(documents, 2048, each, num_ranks)) == pytest.approx(expected, rel=0.1)


def test_no_rank_has_more_than_whole_sequences() -> None:
    documents = ((10, 0.999), (10**6, 0.001))
    whole = 0.5 / float(attended_fraction(documents, 4096, 0)) - 1
    assert float(excess_fraction(documents, 4096, 1, 10**6)) == pytest.approx(whole)


def test_ranks_that_meet_in_every_micro_batch_wait_longer() -> None:
    documents = ((400, 0.9), (800, 0.1))
    alone = Shape.of(dp=8, num_microbatches=16, zero_stage=1)
    sharded = Shape.of(dp=8, num_microbatches=16, zero_stage=3)
    ends, each = (float(excess_microbatches(documents, 2048, 1, shape)) for shape in (alone, sharded))
    assert each == pytest.approx(4 * ends)  # √16: a rank's luck does not even out


@pytest.mark.parametrize(("pp", "vpp"), [(4, 1), (8, 1), (4, 2), (8, 2)])
def test_stages_wait_for_the_fullest_micro_batch_that_they_hold(pp: int, vpp: int) -> None:
    """Beside the orders of real schedules, replayed with micro-batches of unlike seconds."""
    documents, schedule = ((400, 0.9), (800, 0.1)), interleaved_one_f_one_b(pp, vpp, 64)
    deviation = float(excess_fraction(documents, 2048, 1, 64) / largest_normal(64))
    random = np.random.default_rng(1)
    drawn = random.standard_normal((8, 64))
    seconds = 1 + deviation * (drawn - drawn.mean(axis=1, keepdims=True))
    excess = np.mean([makespan(schedule, each) for each in seconds])
    expected = excess_microbatches(documents, 2048, 1, Shape.of(pp=pp, vpp=vpp, num_microbatches=64))
    assert float(expected) == pytest.approx(excess - makespan(schedule, np.ones(64)), rel=0.35)


def makespan(schedule: Schedule, seconds: FloatArray) -> float:
    """Forwards, of which a backward takes two, until the last rank is done."""
    ends: dict[tuple[str, int, int], float] = {}
    num_stages, waiting = len(schedule.stage_to_rank), [list(rank) for rank in schedule.ranks]
    free, share = [0.0] * len(waiting), 3 * num_stages / len(waiting)
    while any(waiting):
        for rank, actions in enumerate(waiting):
            while actions:
                kind, stage, index = actions[0]
                before = (kind, stage - 1 if kind == "F" else stage + 1, index)
                if kind == "B" and stage == num_stages - 1:
                    before = ("F", stage, index)
                if 0 <= before[1] < num_stages and before not in ends:
                    break
                begin_s = max(free[rank], ends.get(before, 0.0))
                free[rank] = ends[actions.pop(0)] = begin_s + seconds[index] * (1 + (kind == "B")) / share
    return max(free)


def price(runtime: str, documents: tuple[DocumentLength, ...] | None, seq_length: int = 32768) -> tuple[float, float]:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=16)
    training = TrainingSpec(seq_length=seq_length, global_batch_size=16, document_lengths=documents)
    step = evaluate("8b", cluster, training, Parallelism(tp=2, cp=2, dp=4), runtime=runtime).step
    return step.step_s, step.mfu


def test_a_trainer_that_masks_documents_is_faster_and_counts_their_flops_alone() -> None:
    short = (DocumentLength(length=1000, share=1.0),)
    step_s, mfu = price("torchtitan", None)
    masked_s, masked_mfu = price("torchtitan", short)
    assert masked_s < 0.85 * step_s
    assert masked_mfu * masked_s < 0.85 * mfu * step_s


def test_a_trainer_that_attends_across_documents_costs_the_same() -> None:
    assert price("megatron", (DocumentLength(length=1000, share=1.0),)) == price("megatron", None)


def test_a_step_waits_for_ranks_with_longer_documents() -> None:
    alike = ((2000, 1.0),)
    # as much attention on average, by few long documents among short ones
    unlike = ((200, 1.0), (4000, 0.0462))
    fractions = [float(attended_fraction(documents, 32768, 0)) for documents in (alike, unlike)]
    assert fractions[1] == pytest.approx(fractions[0], rel=0.01)
    model, runtime = load_model("8b"), load_runtime("torchtitan")
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=16)
    waits_s = []
    for documents in (alike, unlike):
        lengths = tuple(DocumentLength(length=length, share=share) for length, share in documents)
        training = TrainingSpec(seq_length=32768, global_batch_size=64, document_lengths=lengths)
        pricing = Pricing(model=model, training=training, cluster=cluster, runtime=runtime)
        shape = Shape.of(dp=8, tp=2, num_microbatches=8, seq_length=32768, sequence_parallel=1, zero_stage=3)
        op = next(op for op in operators_of(pricing.layer(model.kinds[0], shape)) if op.kind == "attention")
        each_s = sum(compute.operator_seconds(op, cluster.hardware, "bf16", pricing.runtime)) * model.num_hidden_layers
        excess = excess_microbatches(documents, 32768, 1, shape)
        late = lateness(training, cluster)
        waits_s.append(float(pricing.uneven_s(shape)))
        assert waits_s[-1] == pytest.approx(float(late * each_s * excess))
        whole = training.model_copy(update={"document_lengths": None})
        plain = Pricing(model=model, training=whole, cluster=cluster, runtime=runtime)
        assert float(pricing.tail_s(shape) - plain.tail_s(shape)) == pytest.approx(waits_s[-1])
    assert waits_s[1] > 1.1 * waits_s[0] > 0


def _training(lengths: Lengths, seq_length: int = 10_000) -> TrainingSpec:
    documents = tuple(DocumentLength(length=length, share=share) for length, share in lengths)
    return TrainingSpec(
        seq_length=seq_length, global_batch_size=4, document_lengths=documents or None, batching="padded"
    )


_LENGTHS = st.dictionaries(st.integers(1, 5000), st.floats(0.05, 5), min_size=1, max_size=4)


@given(shares=_LENGTHS, count=st.integers(1, 4))
def test_the_longest_is_as_likely_as_all_draws_say(shares: dict[int, float], count: int) -> None:
    lengths = example_lengths(_training(tuple(shares.items())))
    counted = dict.fromkeys((length for length, _ in lengths), 0.0)
    for draw in product(lengths, repeat=count):
        counted[max(length for length, _ in draw)] += prod(share for _, share in draw)
    found = dict(longest_of(lengths, count))
    assert found.keys() == counted.keys()
    assert all(found[length] == pytest.approx(chance, abs=1e-9) for length, chance in counted.items())


@given(shares=_LENGTHS, count=st.integers(1, 64))
def test_more_examples_are_padded_more_and_never_beyond_the_longest(shares: dict[int, float], count: int) -> None:
    lengths = example_lengths(_training(tuple(shares.items())))
    fewer, more = (padding_fraction(lengths, each) for each in (count, count + 1))
    assert -1e-12 <= fewer <= more + 1e-12
    assert mean_length(longest_of(lengths, count)) <= lengths[-1][0] * (1 + 1e-12)


def test_longer_examples_are_cut_to_a_sequence() -> None:
    cut = example_lengths(_training(((100, 1.0), (300, 2.0), (5000, 1.0)), seq_length=300))
    assert cut == ((100, 0.25), (300, 0.75))


def test_without_lengths_every_example_is_a_sequence() -> None:
    assert example_lengths(_training((), seq_length=77)) == ((77, 1.0),)
    assert padding_fraction(((77, 1.0),), 8) == 0


@pytest.mark.parametrize("packs", [True, False])
def test_a_text_has_as_many_ranks_as_hold_it(packs: bool) -> None:
    training = _training(((1000, 0.5), (2049, 0.3), (4096, 0.1), (8192, 0.1)), seq_length=8192)
    texts = texts_by_ranks(training, Shape.of(cp=4, dp=8, seq_length=8192), packs)
    assert [(own.seq_length, own.cp, own.dp) for _, own in texts] == [
        (1000, 1, 32), (pytest.approx((2049**2 * 3 + 4096**2) / (2049 * 3 + 4096)), 2, 16), (8192, 4, 8),
    ]  # fmt: skip
    tokens = sum(times * own.micro_batch_size * own.seq_length * 4 / own.cp for times, own in texts)
    assert tokens == pytest.approx((1 + UNEVEN_RANKS) * 8192)
    assert [own.micro_batch_size for _, own in texts] == (
        [2.048, pytest.approx(1.428, abs=1e-3), 1] if packs else [1, 1, 1]
    )


MEASURED = Calibration(
    source="NVIDIA H200, torch 2.11", gemm_factor=Factor(value=1.1, source="stages"),
    attention_factor={"flash": Factor(value=0.9, source="stages")},
    stream_factor=Factor(value=1.2, source="stages"),
    efficiency_fraction={"nvlink": Share(value=0.7, source="an all-gather")},
    context_gib=Quantity(value=1.5, source="a rank"), fragmentation_fraction=Share(value=0.05, source="a rank"),
    microbatch_overhead_s=Quantity(value=2e-4, source="a rank"),
)  # fmt: skip


def _cluster(**changes: object) -> ClusterSpec:
    fields = {"hardware": load_hardware("h200"), "num_gpus": 16, **changes}
    return ClusterSpec.model_validate(fields)


def test_factors_multiply_those_of_the_profile_and_shares_replace_them() -> None:
    hardware = load_hardware("h200")
    before = hardware.efficiency.model_copy(update={"gemm_factor": 1.05})
    after = MEASURED.of_hardware(hardware.model_copy(update={"efficiency": before}))
    efficiency = after.efficiency
    assert efficiency.gemm_factor == pytest.approx(1.05 * 1.1)
    assert (efficiency.flash.seconds_factor, efficiency.stream_factor) == (0.9, 1.2)
    assert efficiency.gemm == hardware.efficiency.gemm
    assert [tier.efficiency_fraction for tier in after.tiers] == [0.7, hardware.tiers[1].efficiency_fraction]
    assert (after.reserved.context_gib, after.reserved.fragmentation_fraction) == (1.5, 0.05)
    assert after.reserved.communicator_gib == hardware.reserved.communicator_gib


def test_the_profile_itself_stays_and_the_overlay_says_where_it_comes_from() -> None:
    before = load_hardware("h200").model_dump()
    after = MEASURED.of_hardware(load_hardware("h200"))
    assert load_hardware("h200").model_dump() == before
    assert after.efficiency.evidence == "probed"
    assert after.efficiency.source.endswith("Probed: NVIDIA H200, torch 2.11")
    assert after.efficiency.source.startswith(before["efficiency"]["source"])
    assert "an all-gather" in after.tiers[0].source


def test_what_was_not_measured_stays() -> None:
    hardware = load_hardware("h200")
    nothing = Calibration(source="x").of_hardware(hardware)
    assert (nothing.tiers, nothing.reserved) == (hardware.tiers, hardware.reserved)
    assert nothing.efficiency.model_copy(update={"evidence": "measured", "source": ""}) == (
        hardware.efficiency.model_copy(update={"source": ""})
    )
    runtime = load_runtime("megatron")
    assert Calibration(source="x").of_runtime(runtime) is runtime
    assert MEASURED.of_runtime(runtime).microbatch_overhead_s == 2e-4


def test_a_cluster_keeps_its_node_size_and_network_though_its_links_were_looked_up() -> None:
    cluster = _cluster(gpus_per_node=4, network_gb_per_s=25.0)
    assert cluster.tiers[0].num_gpus == 4
    after = MEASURED.of_cluster(cluster)
    assert (after.num_gpus, after.tiers[0].num_gpus, after.tiers[1].gb_per_s) == (16, 4, 25.0)
    assert after.tiers[0].efficiency_fraction == 0.7


def test_a_plan_of_a_calibrated_cluster_is_probed_and_slower_where_it_measured_slower() -> None:
    training, layout = TrainingSpec(seq_length=4096, global_batch_size=16), Parallelism(tp=2, pp=4, dp=2)
    plain = evaluate(load_model("8b"), _cluster(), training, layout)
    probed = evaluate(load_model("8b"), MEASURED.of_cluster(_cluster()), training, layout)
    assert (plain.evidence, probed.evidence) == ("calibrated", "probed")
    assert probed.step.breakdown.compute_s > plain.step.breakdown.compute_s
    assert probed.step.breakdown.tp_comm_s > plain.step.breakdown.tp_comm_s
    assert probed.stages[0].memory.reserved_bytes > plain.stages[0].memory.reserved_bytes


def test_every_number_is_said_with_its_source() -> None:
    cluster = _cluster()
    corrections = MEASURED.of_cluster(cluster).hardware.corrections
    says = {correction.name: correction.says for correction in corrections}
    assert len(says) == 7
    assert says["products"] == "× 1.000 → × 1.100 (stages)"
    assert says["nvlink's share of its rate"] == "80.0% → 70.0% (an all-gather)"
    assert says["host per micro-batch"] == "0 µs → 200 µs (a rank)"


def test_what_is_refused_or_confirmed_stays_and_is_said_with_the_reason() -> None:
    slow = Factor(value=1.5, source="stages", verdict="refused", reason="it explains little")
    lost = Share(value=0.05, source="an all-gather", verdict="refused", reason="another way")
    same = Quantity(value=1.02, source="a rank", verdict="confirmed", reason="as near as it repeats")
    doubted = Calibration(
        source="x", gemm_factor=slow, efficiency_fraction={"nvlink": lost}, context_gib=same, step_width=0.4
    )
    cluster = _cluster()
    after = doubted.of_cluster(cluster).hardware
    assert (after.tiers, after.reserved) == (cluster.hardware.tiers, cluster.hardware.reserved)
    assert (after.efficiency.gemm_factor, after.efficiency.evidence) == (1.0, "measured")
    assert [(c.before, c.measured, c.after) for c in after.corrections] == [
        (1.0, 1.5, 1.0),
        (0.8, 0.05, 0.8),
        (1.0, 1.02, 1.0),
    ]
    assert after.corrections[0].says == "refused, stays at × 1.000, measured × 1.500: it explains little"
    assert after.corrections[2].says == "stays at 1.00 GiB, measured 1.02 GiB: as near as it repeats"


def test_a_profile_that_was_confirmed_is_probed_and_stays() -> None:
    same = Factor(value=1.004, source="stages", verdict="confirmed", reason="as near as seconds repeat")
    after = Calibration(source="x", gemm_factor=same, step_width=0.08).of_hardware(load_hardware("h200"))
    assert (
        after.efficiency.gemm_factor, after.efficiency.evidence, after.efficiency.step_width,
    ) == (1.0, "probed", 0.08)  # fmt: skip


def test_the_network_that_a_user_states_is_corrected_too() -> None:
    rack = LinkTier(name="rack", gb_per_s=50.0, latency_us=8.0)
    measured = Calibration(source="x", efficiency_fraction={"rack": Share(value=0.4, source="an all-gather")})
    after = measured.of_cluster(_cluster(network_tiers=(rack,)))
    assert after.tiers[1].efficiency_fraction == 0.4
    assert after.hardware.corrections[0].before == rack.efficiency_fraction


def test_memory_that_no_probe_measured_keeps_the_width_of_a_measured_gpu() -> None:
    def width(calibration: Calibration) -> float:
        return calibration.of_hardware(load_hardware("h200")).reserved.width

    kernels = Calibration(source="x", gemm_factor=Factor(value=1.2, source="stages"))
    assert width(kernels) == UNPROBED_MEMORY_WIDTH
    assert width(kernels.model_copy(update={"memory_width": 0.01})) == 0.01
