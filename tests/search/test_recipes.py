"""The recipe is chosen with the layout: optimal among its bundles, legal, and with consent only where that is due.

The search answers with the fastest layout whose risk is accepted, else with the safest, and says what more buys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import beside
from toys import MOE, Problem, case_of, solved, toy_cluster, toy_model, toy_problem, toy_training

from planner.answer import Plan
from planner.errors import Infeasible, SpecError
from planner.layout.candidate import Candidate
from planner.layout.confidence import memory_width, oom_probability
from planner.layout.evaluate import evaluate, priced_as_given
from planner.layout.variation import setting_of
from planner.search.case import Case
from planner.search.enumerate import enumerate_shapes
from planner.search.recipes import Recipes, pinned
from planner.search.safest import standing
from planner.search.search import plan, search
from planner.search.why.explain import program_text
from planner.search.why.misses import candidates_of
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.trainers.load import load_runtime, switches_of
from planner.trainers.rules.recipe import Setting, broken_recipe_rules, takes
from planner.trainers.switches import SWITCHES, Value

TABLES = beside(__file__)

SLOW: dict[str, Any] = {
    "model": toy_model(6, moe=MOE), "cluster": toy_cluster(8, network_gb_per_s=5.0, nvlink_gb_per_s=40.0),
    "training": toy_training(32), "cp": (1,), "zero_stage": (1,), "micro_batch_size": (1, 2), "switches": None,
}  # fmt: skip
"""A mixture whose expert exchanges take longer than its products."""


def recipes_of(problem: Problem) -> Recipes:
    return Recipes.of(case_of(problem))


@cache
def of_job(name: str, hardware: str, num_gpus: int, dtype: str = "bf16", **limits: Any) -> Plan:
    model, cluster = load_model(name), ClusterSpec(hardware=load_hardware(hardware), num_gpus=num_gpus)
    training = TrainingSpec(seq_length=4096, global_batch_size=1024, dtype=dtype)  # type: ignore[arg-type]
    return plan(model, cluster, training, limits=SearchLimits(**{name: _thawed(v) for name, v in limits.items()}))


def _thawed(value: Any) -> Any:
    return dict(value) if isinstance(value, frozenset) else value


@pytest.mark.thorough(2)
@pytest.mark.parametrize("tps", [(1,), (2,)])
def test_no_bundle_has_a_faster_layout(tps: tuple[int, ...]) -> None:
    """Every layout is replayed under every bundle that the search starts from."""
    problem = toy_problem(**(SLOW | {"tp": tps, "ep": (1, 4), "top": 1, "gap_fraction": 0.0}))
    answer, starts = solved(problem), recipes_of(problem).starts()
    best_s = min(replace(problem, runtime=runtime).best_step_s() for runtime in starts)
    assert len(starts) > 2
    assert answer.search.outcome != "feasible"
    assert answer.search.lower_bound_s <= best_s * (1 + 1e-6)
    assert answer.step.step_s <= best_s * 1.005


def test_a_mixture_on_slow_links_overlaps_its_exchanges_and_interleaves_for_it() -> None:
    chosen = of_job("qwen3-30b", "h100", 16)
    own = of_job("qwen3-30b", "h100", 16, switches="default")
    assert chosen.best.recipe["ep_overlap"] in (True, "delayed")
    assert chosen.parallelism.pp == 1 or chosen.parallelism.vpp > 1
    assert chosen.parallelism.recompute != "full"
    assert chosen.step.step_s < 0.97 * own.step.step_s
    assert own.best.recipe["ep_overlap"] is False
    assert own.best.offers == ()


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    trainer=st.sampled_from(["megatron", "torchtitan", "torch-eager", "nanotron"]), moe=st.booleans(),
    network=st.sampled_from([2.0, 50.0]), memory=st.sampled_from([2.0, 8.0, 80.0]),
    allowed=st.sets(st.sampled_from(["bf16_gradients", "bf16_moments", "nan_checks", "token_drop"])),
)  # fmt: skip
def test_what_is_chosen_is_legal_and_takes_nothing_without_consent(
    trainer: str, moe: bool, network: float, memory: float, allowed: set[str]
) -> None:
    problem = toy_problem(
        toy_model(8, **({"moe": MOE} if moe else {})), toy_cluster(8, memory_gib=memory, network_gb_per_s=network),
        toy_training(32), trainer, top=2, cp=(1,), switches=None, allow=tuple(sorted(allowed)),
    )  # fmt: skip
    try:
        answer = solved(problem)
    except Infeasible:
        return
    for layout in (answer.best, *answer.alternatives):
        runtime, chosen = layout.runtime_spec or answer.runtime_spec, layout.parallelism
        sizes = ("tp", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch_size", "num_microbatches", "zero_stage")
        shape = Shape.of(**{name: getattr(chosen, name) for name in sizes}, shard_size=chosen.shard_size)
        modules = chosen.recompute_modules
        job = problem.model, problem.cluster, problem.training
        assert takes(Setting(*job, runtime, shape, chosen.recompute, modules))
        for name in switches_of(runtime):
            value = SWITCHES[name].value_of(runtime)
            own = SWITCHES[name].value_of(problem.runtime)
            assert value == own or value not in SWITCHES[name].consent or name in allowed


@pytest.mark.parametrize(("job", "switch", "value", "changes"), TABLES["a_consent_buys_what_was_offered"])
def test_a_consent_buys_what_was_offered(job: tuple[str, str, int], switch: str, value: Value, changes: str) -> None:
    without = of_job(*job)
    offer = next(offer for offer in without.best.offers if offer.switch == switch)
    assert (offer.changes.split(":")[0], offer.allow) == (changes, (switch,))
    given = of_job(*job, allow=(switch,))
    assert given.best.recipe[switch] == value
    assert given.step.step_s <= offer.step_s * 1.005 < without.step.step_s * 1.005
    assert all(offer.switch != switch for offer in given.best.offers)
    unsearched = [" ".join(answer.search.unsearched) for answer in (without, given) if answer.search]
    assert [switch in left_out for left_out in unsearched] == [switch == "activation_offload", False]


def test_a_narrow_dtype_is_chosen_with_consent_only() -> None:
    wide, narrow = of_job("8b", "h100", 8), of_job("8b", "h100", 8, allow=("fp8",))
    assert (wide.training.dtype, narrow.training.dtype) == ("bf16", "fp8")
    assert narrow.step.step_s < wide.step.step_s
    assert any(offer.switch == "dtype" and offer.value == "fp8" for offer in wide.best.offers)


def test_pins_hold_and_the_rest_is_chosen_around_them() -> None:
    held = of_job("qwen3-30b", "h100", 16, switches=frozenset({"ep_overlap": False}.items()))
    free = of_job("qwen3-30b", "h100", 16)
    assert held.best.recipe["ep_overlap"] is False
    assert held.best.recipe["cuda_graph"] != "none"
    assert held.step.step_s > free.step.step_s
    assert "ep_overlap" not in held.search.searched.switches


@pytest.mark.parametrize(("switches", "says"), TABLES["pins_that_cannot_be_are_refused"])
def test_pins_that_cannot_be_are_refused(switches: dict[str, Any], says: str) -> None:
    problem = toy_problem(**SLOW)
    limits = problem.limits.model_copy(update={"switches": switches})
    with pytest.raises(SpecError, match=says):
        pinned(Case(load_model("deepseek-v3"), problem.cluster, problem.training, problem.runtime, limits))


def test_switches_are_moved_around_other_layouts_than_those_alike() -> None:
    """Five ways to number the ranks of one layout took all places, and its neighbour's cp_comm_type stayed."""
    cluster, training = (
        ClusterSpec(hardware="mi355x", num_gpus=256),
        TrainingSpec(seq_length=2048, global_batch_size=128),
    )
    job = partial(plan, "qwen3-235b-a22b", cluster, training, runtime="primus-megatron")
    pinned_s = job(limits=SearchLimits(top=1, cp=(2,), pp=(4,), ep=(64,))).step.step_s
    assert job(limits=SearchLimits(top=1)).step.step_s <= pinned_s


def test_of_switches_that_save_memory_the_fastest_is_chosen_and_overlap_needs_no_dispatcher() -> None:
    """Half of the optimizer on the host fits with all layers recomputed, 117 s, and all of it with modules, 89 s."""
    job = (ClusterSpec(hardware="v100-32gb", num_gpus=64), TrainingSpec(seq_length=4096, global_batch_size=256))
    less, more = (
        plan("mixtral-8x22b", *job, limits=SearchLimits(pp=(8,), cp=(1, 2), vpp=(7,), recompute=recompute))
        for recompute in (("selective",), None)
    )
    assert more.step.step_s <= less.step.step_s
    assert more.best.recommendation.fastest_step_s <= more.step.step_s
    assert set(more.search.searched.switches["ep_overlap"]) == {"false", "true", "delayed"}


def test_multi_token_prediction_is_recomputed_with_all_layers_in_a_node_too() -> None:
    """Its block was kept whole there: of two micro-batches the one that fits by 11 MB was ruled out."""
    cluster, training = ClusterSpec(hardware="h100", num_gpus=64), TrainingSpec(seq_length=4096, global_batch_size=64)
    switches = {"optimizer_offload": 1.0, "activation_offload": "none", "dispatcher": "deepep"}
    sizes = {"tp": (4,), "cp": (1,), "pp": (1,), "ep": (64,), "zero_stage": (3,)}
    one, both = (
        plan("deepseek-v3", cluster, training, limits=SearchLimits(micro_batch_size=mb, switches=switches, **sizes))
        for mb in ((2,), (1, 2))
    )
    assert both.step.step_s <= one.step.step_s * (1 + 1e-9)


def test_switches_that_a_runtime_has_by_hand_stay() -> None:
    by_hand = load_runtime("megatron").model_copy(update={"ep_overlap_fraction": 0.3})
    problem = toy_problem(**SLOW, runtime=by_hand, tp=(1,), pp=(2,), ep=(4,), top=1)
    assert "ep_overlap" not in recipes_of(problem).free
    assert solved(problem).runtime_spec.ep_overlap_fraction == 0.3


def test_what_goes_only_with_a_switch_that_is_off_by_hand_gives_way() -> None:
    by_hand = load_runtime("megatron").model_copy(update={"gradient_overlap_fraction": 0.0})
    chosen = solved(toy_problem(**SLOW, runtime=by_hand, tp=(1,), pp=(2,), ep=(4,), top=1)).runtime_spec
    assert (chosen.gradient_overlap_fraction, chosen.parameter_overlap_fraction) == (0.0, 0.0)


def test_the_answer_is_priced_as_every_other_layout_is() -> None:
    """What `plan` says of its choice, `evaluate` says of the same layout under the same runtime."""
    answer = of_job("qwen3-30b", "h100", 16)
    chosen = answer.parallelism
    sizes = ("tp", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch_size", "schedule", "recompute_modules")
    layers = tuple(last - first for first, last in _chunks_in_order(answer))
    layout = Parallelism(**{name: getattr(chosen, name) for name in sizes}, layers_per_stage=layers)
    again = evaluate(load_model("qwen3-30b"), answer.cluster, answer.training, layout, runtime=answer.runtime_spec)
    assert again.step.step_s == pytest.approx(answer.step.step_s, rel=1e-9)


def _chunks_in_order(answer: Plan) -> list[tuple[int, int]]:
    return sorted(chunk for stage in answer.stages for chunk in stage.chunks)


def test_every_gain_is_of_the_same_layout_without_the_switch() -> None:
    answer = of_job("qwen3-30b", "h100", 16)
    gains = {gain.switch: gain for gain in answer.best.recipe_gains}
    assert {"ep_overlap", "dispatcher"} <= gains.keys()
    for gain in gains.values():
        assert not gain.replanned
        assert gain.value == answer.best.recipe[gain.switch]
        # switches that gain nothing went back to the trainer's own value, or never were at another
        assert gain.without_step_s >= answer.step.step_s * (1 - 1e-9)


def test_a_gain_without_which_the_layout_does_not_fit_is_what_pinning_it_off_costs() -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=128)
    job = load_model("deepseek-v2-lite"), cluster, TrainingSpec(seq_length=4096, global_batch_size=4608)
    limits = SearchLimits(), SearchLimits(switches={"compile": False})
    found, without = (plan(*job, limits=each, runtime="torchtitan") for each in limits)
    (gain,) = found.best.recipe_gains
    assert gain.replanned
    assert gain.without_step_s == pytest.approx(without.step.step_s, rel=0.005)


@pytest.mark.parametrize(("hardware", "allow"), [("p5", ()), ("p5", ("dispatcher",)), ("h100", ())])
def test_a_dispatcher_whose_transport_is_unproven_is_an_offer(hardware: str, allow: tuple[str, ...]) -> None:
    """Over EFA, where only consent takes what rows are priced to gain."""
    cluster = ClusterSpec(hardware=load_hardware(hardware), num_gpus=64)
    training = TrainingSpec(seq_length=4096, global_batch_size=256)
    limits = SearchLimits(allow=allow, tp=(1,), pp=(2,), ep=(8,), micro_batch_size=(2,), top=1)
    found = plan(load_model("qwen3-30b-a3b"), cluster, training, limits=limits)
    free = hardware == "h100" or "dispatcher" in allow
    assert found.runtime_spec.sends_tokens_once == free
    assert any(offer.switch == "dispatcher" for offer in found.best.offers) == (not free)


def tight(memory_gib: float, **limits: object) -> Problem:
    """A problem of a few hundred layouts, most of which do not fit."""
    cluster, training = toy_cluster(4, memory_gib=memory_gib), toy_training(16)
    sizes = {"tp": (1, 2), "cp": (1,), "zero_stage": (1,), "schedule": ("1f1b",), "micro_batch_size": (1, 2)}
    return toy_problem(toy_model(4), cluster, training, **({"top": 1, "gap_fraction": 0.0} | sizes | limits))


def candidates(problem: Problem) -> Iterator[Candidate]:
    """All layouts with their default splits."""
    case = case_of(problem)
    for _, candidate in candidates_of(case, enumerate_shapes(case)[0]):
        yield candidate.priced_as(replace(candidate.pricing, counts_seconds=True))


def risk_of(candidate: Candidate) -> float:
    total_bytes = max(stage.total_bytes for stage in candidate.memory)
    pricing = candidate.pricing
    return oom_probability(total_bytes, pricing.cluster.hardware.memory_bytes, memory_width(pricing))


@given(st.sampled_from([2.0, 2.2, 2.6]), st.sampled_from([0.001, 0.02, 0.1, 0.3, 0.5, 0.9]))
@settings(max_examples=4, deadline=None)
def test_the_answer_is_the_fastest_of_all_whose_risk_is_accepted(memory_gib: float, risk: float) -> None:
    """Its bound holds for them, too: the program sees the capacity that the risk leaves."""
    problem = tight(memory_gib, oom_risk=risk, recompute=("none",))
    answer, best_s = search(case_of(problem)), problem.best_step_s()
    assert answer.fits
    assert answer.best.oom_probability is not None
    if math.isfinite(best_s):
        assert answer.best.oom_probability <= risk * (1 + 1e-9)
        assert not answer.warnings
        assert answer.step.step_s <= best_s * 1.005
        assert answer.search.lower_bound_s <= best_s * (1 + 1e-6)
    accepted = [c.step_s for c in candidates(problem) if risk_of(c) <= risk and c.fits]
    assert answer.warnings or min(accepted, default=math.inf) >= answer.step.step_s * (1 - 1e-9)


def test_less_risk_is_never_faster() -> None:
    answers = [search(case_of(tight(2.0, oom_risk=risk))) for risk in (0.3, 0.1, 1e-4)]
    steps = [answer.step.step_s for answer in answers]
    assert steps == sorted(steps)
    assert len(set(steps)) > 1


def test_where_nothing_is_safe_enough_the_safest_is_chosen_with_a_warning() -> None:
    need_gib = min(max(stage.total_bytes for stage in c.memory) for c in candidates(tight(2.0))) / 2**30
    problem = tight(need_gib * 1.01)
    answer = solved(problem)
    risk = answer.best.oom_probability
    assert answer.fits
    assert risk is not None
    assert 0.1 < risk < 0.5
    assert (
        f"no layout fits with a probability of 90%: this one, the safest found, fits with {1 - risk:.0%}"
        in (answer.warnings[0])
    )
    assert risk <= min(map(risk_of, candidates(problem))) * (1 + 1e-6)
    assert answer.risk_offer is None
    with pytest.raises(Infeasible, match="nothing fits in"):
        search(case_of(tight(need_gib * 0.97)))


def test_a_headroom_that_is_asked_for_is_all_that_is_asked_for() -> None:
    filling, ruled = tight(1.87, memory_headroom_gib=0.0), tight(1.87)
    assert search(case_of(filling)).step.step_s < search(case_of(ruled)).step.step_s
    none_left = tight(1.87, memory_headroom_gib=1.5)
    with pytest.raises(Infeasible):
        search(case_of(none_left))


def real(model: str, num_gpus: int, **limits: Any) -> Plan:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=num_gpus)
    training = TrainingSpec(seq_length=8192, global_batch_size=2048 if num_gpus > 1000 else 512)
    asked = SearchLimits(**({"top": 1, "time_limit_s": 600.0} | limits))
    return plan(load_model(model), cluster, training, limits=asked)


@pytest.mark.parametrize(("model", "num_gpus"), [("8b", 8), ("70b", 256), ("405b", 2048)])
def test_the_default_answer_fits_with_nine_in_ten(model: str, num_gpus: int) -> None:
    answer = real(model, num_gpus)
    for layout in (answer.best, *answer.alternatives):
        assert layout.oom_probability is not None
        assert layout.oom_probability <= 0.1
        assert answer.to_json()["best"]["oom_probability"] == answer.best.oom_probability


def test_the_gpu_may_be_filled_as_before() -> None:
    """Without headroom the fastest layout is the one of old, which runs out of memory about every other time."""
    filled, safe = real("8b", 8, memory_headroom_gib=0.0), real("8b", 8)
    assert filled.step.step_s == pytest.approx(48.75, rel=0.01)
    assert filled.step.step_s < safe.step.step_s
    assert filled.best.oom_probability is not None
    assert filled.best.oom_probability > 0.3
    assert filled.risk_offer is None


def test_what_more_risk_buys_is_bought_by_it() -> None:
    offered = real("8b", 8, top=2)
    offer = offered.risk_offer
    assert 0.1 < offer.oom_probability <= offer.oom_risk == 0.3
    assert offer.step_s < 0.995 * offered.step.step_s
    bought = real("8b", 8, oom_risk=offer.oom_risk)
    assert bought.step.step_s <= offer.step_s * 1.005
    assert bought.risk_offer is None or bought.risk_offer.oom_risk == 0.5


def test_the_program_that_is_shown_leaves_the_headroom_free() -> None:
    answer = real("8b", 8, pp=(2,))
    shown = [
        next(line for line in program_text(answer, limits=limits).splitlines() if "a rank can use" in line)
        for limits in (SearchLimits(), SearchLimits(memory_headroom_gib=0.0))
    ]
    ruled, filling = (float(line.split()[4]) for line in shown)
    assert ruled < filling - 2.5


def test_a_simpler_layout_keeps_to_the_rules_of_its_recipe() -> None:
    """Experts overlap in one chunk a rank in no pipeline, so that several chunks stay several."""
    runtime, _ = load_runtime("megatron").with_features({"ep_overlap": True, "dispatcher": "hybridep"})
    model, training = load_model("glm-4.5-air"), TrainingSpec(seq_length=4096, global_batch_size=16384)
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=128)
    layout = Parallelism(tp=2, pp=2, dp=32, ep=16, etp=1, vpp=4, micro_batch_size=1, recompute="selective")
    candidate, _ = priced_as_given(model, cluster, training, layout, runtime)
    case = Case(model, cluster, training, runtime, SearchLimits())
    found = standing(candidate, [], case, runtime).candidates[0]
    assert int(found.shape.vpp) > 1
    assert not any(broken_recipe_rules(setting_of(found)))


@pytest.mark.parametrize(("cp", "is_legal"), [(2, True), (8, False)])
def test_a_switch_moves_where_its_layouts_are_legal(cp: int, is_legal: bool) -> None:
    """All-to-all exchanges of context parallelism need as many heads as ranks, of which Mixtral has 8 of keys."""
    case = case_of(toy_problem(model=load_model("mixtral-8x7b"), cluster=toy_cluster(2 * cp), switches=None))
    layout = Parallelism(tp=2, cp=cp, ep=2, etp=1, micro_batch_size=1)
    candidate, _ = priced_as_given(case.model, case.cluster, case.training, layout, load_runtime("megatron"))
    assert (Recipes.of(case).moved(candidate, {"cp_comm_type": "a2a"}) is not None) is is_legal
