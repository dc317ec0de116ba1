"""Switches that a run does not say: the interval of its step covers their likely values, and the worst one is named."""

import math
from collections.abc import Collection
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import beside
from toys import toy_problem

from planner.answer import SIGMAS_TO_END, Plan, PricedLayout
from planner.layout.confidence import (
    DEVIATIONS,
    HOST_WIDTH,
    OVERLAP_WIDTH,
    TAIL,
    TRACED_WIDTH,
    TUNED_WIDTH,
    VISION_WIDTH,
    WIDE,
    Choice,
    headroom_bytes,
    memory_width,
    mixture_interval,
    oom_probability,
    width_terms,
)  # fmt: skip
from planner.layout.evaluate import evaluate, pricing_of
from planner.layout.runs import parse_run
from planner.physics.pricing import Pricing
from planner.search.search import plan
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.specs.units import GIB
from planner.trainers.load import load_runtime
from planner.trainers.spec import RuntimeSpec

TABLES = beside(__file__)

MIXTURE = TABLES["mixture"]
SHARDED = TABLES["sharded"]


def _priced(run: dict[str, Any], **more: Any) -> PricedLayout:
    return parse_run({"run": {**run, **more}}).evaluate()


def _ends(layout: PricedLayout) -> tuple[float, float]:
    low_s, high_s = layout.step.step_s_interval or (0.0, 0.0)
    return math.log(low_s / layout.step.step_s), math.log(high_s / layout.step.step_s)


@pytest.mark.parametrize("run", [MIXTURE, SHARDED])
def test_a_run_that_says_nothing_is_wider_and_no_slower(run: dict[str, Any]) -> None:
    bare, said = _priced(run), _priced(run, features={"p2p_overlap": True, "natural_routing": False})
    assert bare.step.step_s == said.step.step_s
    assert said.unsaid == ()
    low, high = _ends(said)
    assert low == pytest.approx(-high)
    assert _ends(bare)[0] <= low * (1 - 1e-9)
    assert _ends(bare)[1] - _ends(bare)[0] > 1.1 * (high - low)
    # an empty list of features is none
    assert _priced(run, features={}).step.step_s_interval == bare.step.step_s_interval


@pytest.mark.parametrize("run", [MIXTURE, SHARDED])
def test_the_switch_named_first_moves_the_step_most(run: dict[str, Any]) -> None:
    bare = _priced(run)
    effects = [abs(math.log(one.other_step_s / bare.step.step_s)) for one in bare.unsaid]
    assert effects == sorted(effects, reverse=True)
    assert min(effects) > 0.0198
    for one in bare.unsaid:
        # the step of a run that says it, which may say no more than that
        stated = _priced(run, features={one.switch: one.other})
        if one.switch != "overlap_grad_reduce":
            assert stated.step.step_s == pytest.approx(one.other_step_s, rel=1e-6)
        assert one.value != one.other


def test_only_what_goes_with_the_run_is_likely() -> None:
    def named(**more: Any) -> set[str]:
        return {one.switch for one in _priced(MIXTURE, **more).unsaid}

    assert {"cuda_graph", "dispatcher"} <= named()
    # graphs of the whole step fuse experts in 8 bits with scaled blocks, and run on Blackwell
    assert "cuda_graph" not in named(dtype="bf16")
    assert "cuda_graph" not in named(hardware="h100", dtype="fp8")
    # overlapped exchanges recompute no whole layer
    assert "ep_overlap" not in named(parallelism={**MIXTURE["parallelism"], "recompute": "full"})  # type: ignore[dict-item]
    # FlashAttention 1 has no kernels for Blackwell
    assert "attention_kernel" in {one.switch for one in _priced(SHARDED).unsaid}
    assert "attention_kernel" not in {one.switch for one in _priced(SHARDED, hardware="b200").unsaid}
    # a trainer of the past, of whose runs nothing else is known
    gpt = {**SHARDED, "model": "gpt3-175b", "hardware": "a100", "runtime": "megatron", "num_gpus": 64}
    assert _priced(gpt, parallelism={"tp": 8, "pp": 8, "dp": 1}).unsaid == ()


def test_a_saved_or_explicit_trainer_says_all() -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    training = TrainingSpec(seq_length=4096, global_batch_size=32)
    said = evaluate("8b", cluster, training, Parallelism(fsdp="full_shard"), runtime=load_runtime("torch-fsdp"))
    bare = evaluate("8b", cluster, training, Parallelism(fsdp="full_shard"), runtime="torch-fsdp", says_switches=False)
    assert said.best.unsaid == ()
    assert bare.best.unsaid[0].switch == "attention_kernel"
    assert bare.to_json()["best"]["unsaid"][0]["other"] == "flash1"


def test_what_is_named_is_said_and_no_more() -> None:
    cluster = ClusterSpec(hardware=load_hardware("a800"), num_gpus=16)
    layout = Parallelism(pp=2, ep=8, recompute="full")

    def priced(batch: int, says: Collection[str]) -> PricedLayout:
        training = TrainingSpec(seq_length=8192, global_batch_size=batch)
        return evaluate("qwen3-30b-a3b", cluster, training, layout, says_switches=says).best

    few, some, many = priced(16, ()), priced(16, ("dispatcher",)), priced(1024, ())
    assert {one.switch for one in few.unsaid} - {one.switch for one in some.unsaid} == {"dispatcher"}
    # few tokens a step are likely a fine-tuning, whose texts go to experts as they like, and fragment memory
    shares = [
        {one.switch: one.other_fraction for one in layout.unsaid}["natural_routing"] for layout in (few, some, many)
    ]
    assert shares == [0.8, 0.2, 0.2]
    low, high = few.worst_stage.memory.total_bytes_interval or (0.0, 0.0)
    assert high / few.worst_stage.memory.total_bytes > 1.3 * few.worst_stage.memory.total_bytes / low
    assert _ends(few)[1] > 1.3 * _ends(many)[1]


@pytest.mark.parametrize("choices", TABLES["the_ends_are_quantiles_of_the_mixture"])
def test_the_ends_are_quantiles_of_the_mixture(choices: dict[str, list[Choice]]) -> None:
    """As a million draws have them: a value for each switch, and an error of the rest."""
    width, rng, num = 0.12, np.random.default_rng(0), 1_000_000
    draws = rng.normal(0.0, width / DEVIATIONS, num)
    for others in choices.values():
        columns = np.array([(0.0, 1 - sum(p for _, p, _ in others), 0.0), *others]).T
        drawn = rng.choice(len(others) + 1, num, p=columns[1])
        draws += columns[0][drawn] + rng.normal(0.0, np.sqrt(columns[2][drawn]) / DEVIATIONS)
    low, high = np.quantile(draws, [TAIL, 1 - TAIL])
    # never narrower than where all is said
    assert mixture_interval(width, choices) == pytest.approx((min(low, -width), max(high, width)), abs=2e-3)


PACKED = TABLES["packed"]


@pytest.mark.parametrize(("more", "widens"), TABLES["small_steps_of_bridge_may_be_packed_texts"])
def test_small_steps_of_bridge_may_be_packed_texts(more: dict[str, Any], widens: bool) -> None:
    priced = _priced(PACKED, **more)
    found = [one for one in priced.unsaid if one.switch == "packed_documents"]
    assert bool(found) == widens
    if widens:
        # the card of Qwen3-8B measured 7.42 s
        assert found[0].other_step_s == pytest.approx(7.4, rel=0.12)
        assert _ends(priced)[1] > math.log(1.5)


@pytest.mark.parametrize(
    ("run", "option"),
    [
        (PACKED, "--switch packed_documents=…"),
        (PACKED | {"global_batch_size": 512}, None),
        ({**MIXTURE, "model": "gpt-oss-20b", "dtype": "bf16", "adapters": {"rank": 8}}, "--moe-imbalance"),
        ({**MIXTURE, "model": "glm-5", "dtype": "bf16", "adapters": {"rank": 8}}, "plan next"),
    ],
)
def test_a_wide_interval_names_the_fact_that_halves_it(run: dict[str, Any], option: str | None) -> None:
    priced = _priced(run, features={"dispatcher": "deepep"} if "adapters" in run else {"tp_comm_overlap": False})
    low, high = _ends(priced)
    fact = priced.deciding_fact
    assert (fact.option if fact else None) == option
    assert ((high - low) / 2 > WIDE) == (fact is not None)
    if fact is not None:
        assert 2 * fact.known_half_width <= fact.half_width == pytest.approx((high - low) / 2)


def test_packed_texts_of_unsaid_lengths_may_take_less_and_no_more() -> None:
    run = {**PACKED, "runtime": "megatron", "seq_length": 32768, "features": {"packed_documents": True}}
    priced = _priced(run)
    (one,) = priced.unsaid
    assert (one.switch, one.value) == ("document_lengths", 32768)
    assert one.other_step_s < 0.8 * priced.step.step_s
    assert _ends(priced)[0] < -0.3 < 0.1 > _ends(priced)[1]


@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_a_fine_tuned_mixture_is_wider_and_its_allocator_loses_more(spread: float) -> None:
    training = {"seq_length": 4096, "global_batch_size": 256, "moe_spread": spread}
    pricing = Pricing(
        model=load_model("qwen3-30b"), training=TrainingSpec(**training),
        cluster=ClusterSpec(hardware=load_hardware("h100"), num_gpus=8), runtime=load_runtime("megatron"),
    )  # fmt: skip
    best = _priced(MIXTURE, hardware="h100", dtype="bf16")
    assert width_terms(pricing, best, 0.0)["routing"] == (TUNED_WIDTH if spread else 0.0)
    assert memory_width(pricing) == pytest.approx(0.287 if spread else 0.085, abs=0.002)
    assert pricing.lost_fraction == pytest.approx(0.15 if spread else 0.03)


def test_gradients_that_show_show_in_every_micro_batch_of_zero_2() -> None:
    """Multi-node rates collapsed with it (GPT-NeoX issue 965)."""
    cluster = ClusterSpec(hardware=load_hardware("a100"), num_gpus=16)
    training = TrainingSpec(seq_length=2048, global_batch_size=512, dtype="fp16")
    one, two = (
        evaluate(
            "megatron-7.5b", cluster, training, Parallelism(zero_stage=stage, fsdp="all", micro_batch_size=4),
            runtime="megatron-deepspeed",
        ).best.step.breakdown.exposed_dp_s
        for stage in (1, 2)
    )  # fmt: skip
    assert two > 3 * one


def _evaluated(model: str = "8b", evidence: str = "family", num_gpus: int = 8) -> Plan:
    hardware = load_hardware("h100")
    efficiency = hardware.efficiency.model_copy(update={"evidence": evidence})
    cluster = ClusterSpec(hardware=hardware.model_copy(update={"efficiency": efficiency}), num_gpus=num_gpus)
    training = TrainingSpec(seq_length=4096, global_batch_size=num_gpus * 4)
    return evaluate(load_model(model), cluster, training, Parallelism(tp=2))


def _width(plan: Plan) -> float:
    low_s, high_s = plan.step.step_s_interval or (0.0, 0.0)
    assert low_s < plan.step.step_s < high_s
    return math.log(plan.step.step_s / low_s)


def _memory_width(plan: Plan) -> float:
    memory = plan.best.worst_stage.memory
    assert memory.total_bytes_interval is not None
    return math.log(memory.total_bytes / memory.total_bytes_interval[0])


def test_less_evidence_makes_wider_intervals() -> None:
    plans = [_evaluated(evidence=evidence) for evidence in ("probed", "measured", "family", "spec_sheet")]
    for widths in ([_width(p) for p in plans], [_memory_width(p) for p in plans]):
        assert widths == sorted(widths)
        assert widths[-1] > 2 * widths[0]


def test_timed_kernels_say_little_of_amds_software_and_a_probe_all() -> None:
    def width(evidence: str) -> float:
        hardware = load_hardware("mi300x")
        efficiency = hardware.efficiency.model_copy(update={"evidence": evidence})
        cluster = ClusterSpec(hardware=hardware.model_copy(update={"efficiency": efficiency}), num_gpus=8)
        training = TrainingSpec(seq_length=4096, global_batch_size=32)
        return _width(evaluate(load_model("8b"), cluster, training, Parallelism(), runtime="primus-megatron"))

    assert width("spec_sheet") > 1.2 * width("measured")
    assert width("probed") < width("measured") / 2


def test_routing_and_scale_each_widen_the_step() -> None:
    dense = _width(_evaluated())
    assert _width(_evaluated("deepseek-v2-lite")) > dense
    few, many = (_evaluated(num_gpus=n) for n in (4096, 65536))
    shares = [p.step.breakdown.tp_comm_s / p.step.step_s for p in (few, many)]
    assert shares[0] == pytest.approx(shares[1], rel=0.05)  # the same exchanges: only the scale differs
    assert _width(many) > _width(few)


def test_a_tower_and_layers_traced_in_another_trainer_each_widen_the_step() -> None:
    tower = load_model("1b").model_copy(update={"vision": object(), "traced": object()})
    cluster, training = ClusterSpec(hardware="h100", num_gpus=8), TrainingSpec(seq_length=4096, global_batch_size=32)
    best = _evaluated().best

    def width(model: ModelSpec, runtime: str) -> float:
        pricing = Pricing(model=model, training=training, cluster=cluster, runtime=load_runtime(runtime))
        return width_terms(pricing, best, 0.0)["layers"]

    assert width(load_model("1b"), "megatron") == 0
    assert width(tower, "torch-eager") == VISION_WIDTH
    assert width(tower, "megatron") == pytest.approx(math.hypot(VISION_WIDTH, TRACED_WIDTH))


def test_the_more_of_a_step_is_the_hosts_or_hides_exchanges_the_wider_it_is() -> None:
    megatron = load_runtime("megatron")
    graphs = megatron.model_copy(update={"cuda_graphs": True})

    def of(model: str, runtime: RuntimeSpec) -> Pricing:
        training = TrainingSpec(seq_length=2048, global_batch_size=64)
        cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
        return Pricing(model=load_model(model), training=training, cluster=cluster, runtime=runtime)

    def fraction(model: str, runtime: RuntimeSpec = megatron) -> float:
        return of(model, runtime).host_fraction(Shape(tp=8, seq_length=2048))

    assert 0 == fraction("llama-3.2-1b", graphs) < fraction("70b") < 0.6 < fraction("llama-3.2-1b") <= 1
    assert fraction("qwen3-30b-a3b") > 0.5, "its host launches routing and experts as well"
    best = _evaluated().best
    alone, shared = (width_terms(of("8b", megatron), best, share) for share in (0.0, 0.5))
    assert shared == pytest.approx(alone | {"host": 0.5 * HOST_WIDTH})
    hiding = width_terms(of("8b", megatron), best, 0.0, hidden_s=best.step.step_s / 2)
    assert hiding == pytest.approx(alone | {"exchanges": alone["exchanges"] + OVERLAP_WIDTH / 2})


def test_an_alternative_is_undecided_where_its_interval_reaches_below_the_best_ones() -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    training = TrainingSpec(seq_length=4096, global_batch_size=64)
    found = plan(load_model("8b"), cluster, training, limits=SearchLimits(top=5, time_limit_s=60.0))
    assert found.best.step.step_s_interval is not None
    for other in found.alternatives:
        assert other.step.step_s_interval is not None
        reaches = other.step.step_s_interval[0] <= found.best.step.step_s_interval[1]
        assert (other in found.undecided) == reaches


WIDTHS = st.floats(0.02, 0.5)
GIBS = st.floats(1.0, 300.0)


def evaluated(memory_gib: float = 80.0, tp: int = 8, runtime: str = "megatron", model: str = "8b") -> Plan:
    hardware = load_hardware("h100").model_copy(update={"memory_gib": memory_gib})
    training = TrainingSpec(seq_length=4096, global_batch_size=32)
    return evaluate(
        load_model(model), ClusterSpec(hardware=hardware, num_gpus=8), training, Parallelism(tp=tp), runtime=runtime
    )


@given(GIBS, GIBS, GIBS, WIDTHS)
def test_more_memory_and_less_need_are_safer(total: float, capacity: float, more: float, width: float) -> None:
    risk = oom_probability(total, capacity, width)
    assert 0 <= oom_probability(total, capacity + more, width) <= risk <= oom_probability(total + more, capacity, width)
    assert risk <= 1


@given(GIBS, WIDTHS)
def test_the_ends_of_the_interval_have_a_tenth_on_either_side(total: float, width: float) -> None:
    assert oom_probability(total, total * math.exp(width), width) == pytest.approx(0.1)
    assert oom_probability(total, total, width) == pytest.approx(0.5)
    assert oom_probability(total, total * math.exp(-width), width) == pytest.approx(0.9)
    assert pytest.approx(NormalDist().inv_cdf(0.9)) == SIGMAS_TO_END


@given(st.floats(0.001, 0.999), st.floats(0.5, 1.5))
def test_a_rank_fits_beside_the_headroom_exactly_if_its_risk_is_accepted(risk: float, filled: float) -> None:
    pricing = toy_problem().pricing
    capacity = pricing.cluster.hardware.memory_bytes
    total = filled * (capacity - headroom_bytes(pricing, SearchLimits(oom_risk=risk)))
    accepted = oom_probability(total, capacity, memory_width(pricing)) <= risk
    # above one half the rule leaves nothing free, and layouts must fit all the same
    assert accepted == (filled <= 1) or (risk > 0.5 and accepted) or filled == pytest.approx(1)


@given(st.floats(1e-300, 0.998), st.floats(0.001, 0.5))
def test_more_risk_leaves_less_free(risk: float, more: float) -> None:
    pricing = toy_problem().pricing
    free = [headroom_bytes(pricing, SearchLimits(oom_risk=r)) for r in (risk, min(0.999, risk + more))]
    assert free[0] >= free[1] >= 0
    assert free[0] < pricing.cluster.hardware.memory_bytes


@pytest.mark.parametrize("gib", [0.0, 3.5])
def test_a_headroom_that_is_asked_for_replaces_the_rule(gib: float) -> None:
    problem = toy_problem(oom_risk=0.001, memory_headroom_gib=gib)
    assert problem.pricing.headroom_bytes == gib * GIB
    assert pricing_of(problem.model, problem.cluster, problem.training, problem.runtime).headroom_bytes == 0


def test_a_given_layout_fits_by_its_bytes_and_says_its_risk() -> None:
    total_gib = evaluated().best.worst_stage.memory.total_bytes / GIB
    risks = []
    for filled, fits in ((1.01, False), (0.999, True), (0.95, True), (0.8, True)):
        best = evaluated(total_gib / filled).best
        assert best.fits is fits
        assert best.oom_probability is not None
        risks.append(best.oom_probability)
    assert risks == sorted(risks, reverse=True)
    assert risks[0] > 0.5 > risks[1] > 0.1
    assert risks[-1] < 0.01


@pytest.mark.parametrize(("surer", "runtime"), [("megatron", "torchtitan"), ("megatron", "nanotron")])
def test_a_trainer_whose_allocator_is_known_less_well_leaves_more_free(surer: str, runtime: str) -> None:
    pricing = toy_problem().pricing
    known, other = (replace(pricing, runtime=load_runtime(name)) for name in (surer, runtime))
    assert memory_width(other) > memory_width(known)
    assert headroom_bytes(other, SearchLimits()) > headroom_bytes(known, SearchLimits())


def test_gpus_that_idle_bring_utilisation_down() -> None:
    """Half the GPUs at the same step, but for a node more to be late, do half the model FLOPs a GPU."""
    model, hardware = load_model("8b"), load_hardware("h100")
    training = TrainingSpec(seq_length=4096, global_batch_size=32)
    steps = [
        evaluate(model, ClusterSpec(hardware=hardware, num_gpus=n), training, Parallelism(tp=8, dp=1)).step
        for n in (8, 16)
    ]
    assert steps[1].step_s == pytest.approx(steps[0].step_s, rel=0.005)
    assert steps[1].mfu == pytest.approx(steps[0].mfu / 2, rel=0.005)
    assert steps[1].model_tflops_per_gpu == pytest.approx(steps[0].model_tflops_per_gpu / 2, rel=0.005)


def test_what_rocm_holds_is_known_less_well() -> None:
    """A GPU whose libraries are known less well leaves more free; the two widths are independent."""
    hardware = load_hardware("mi355x")
    known = hardware.model_copy(update={"reserved": hardware.reserved.model_copy(update={"width": 0.0})})
    widths = []
    for gpu in (hardware, known):
        cluster = ClusterSpec(hardware=gpu, num_gpus=8)
        training = TrainingSpec(seq_length=4096, global_batch_size=64)
        widths.append(memory_width(pricing_of(load_model("8b"), cluster, training, load_runtime("primus-megatron"))))
    assert widths[0] == pytest.approx(math.hypot(widths[1], hardware.reserved.width))
    assert widths[0] > widths[1]
