"""A sweep plans what `plan` plans, and its answers and its front are those that trying all pairs finds."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pages import printed
from priced_plans import priced_plan
from probes import probe_result, probe_run
from tables import beside

from planner.answer import Plan
from planner.cli import main
from planner.decide import check as checking
from planner.decide.check import Check, check
from planner.decide.compare import Compared, Comparison, compare, of_observation, of_plan, of_probe
from planner.decide.sweep import Goal, PlannedNodes, Point, Sweep, Trial, of_points, plan_all, planned, with_deadline
from planner.errors import SpecError
from planner.export.import_run import read
from planner.layout.evaluate import evaluate
from planner.observe.observation import Observation, SourceFile
from planner.probe.result import ProbedMemory, ProbeResult
from planner.report.decisions import as_csv, markdown, render_comparison, sarif, says_sweep, short_names
from planner.search.case import Case
from planner.search.search import plan
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import AdapterSpec, Parallelism, SearchLimits, TrainingSpec
from planner.specs.units import GIB
from planner.trainers.load import load_runtime

TABLES = beside(__file__)


def trial(num_gpus: int, model: str = "8b", hardware: str = "h100", tokens: float | None = 1e12, **pins: Any) -> Trial:
    case = Case(
        load_model(model), ClusterSpec(hardware=load_hardware(hardware), num_gpus=num_gpus),
        TrainingSpec(seq_length=4096, global_batch_size=128, tokens=tokens), load_runtime("megatron"),
        SearchLimits(**pins),
    )  # fmt: skip
    return Trial({"gpus": num_gpus, "hardware": hardware}, case)


def here(trials: Any) -> list[Point]:
    return [planned(one) for one in trials]


PINS: dict[str, Any] = {"tp": (1, 2), "pp": (1, 2), "micro_batch_size": (1,), "vpp": (1,)}


@pytest.mark.parametrize("more", TABLES["a_point_has_the_figures_of_the_plan_with_its_options"], ids=str)
def test_a_point_has_the_figures_of_the_plan_with_its_options(more: dict[str, Any]) -> None:
    one = trial(16, **PINS, **more)
    answer = plan(one.case.model, one.case.cluster, one.case.training, limits=one.case.limits)
    point = planned(one)
    assert (point.fits, point.layout, point.step_s) == (True, str(answer.parallelism), answer.step.step_s)
    assert (point.days, point.usd, point.usd_interval) == (
        answer.run_cost.days, answer.run_cost.usd, answer.run_cost.usd_interval,
    )  # fmt: skip
    low, high = point.tokens_per_s_interval or (0, 0)
    assert low < answer.step.tokens_per_s < high
    assert high == pytest.approx(answer.training.tokens_per_step / answer.step.step_s_interval[0])


def test_what_cannot_be_planned_is_a_point_with_its_reason() -> None:
    point = planned(trial(8, "405b"))
    assert not point.fits
    assert point.step_s is None
    assert "nothing fits" in point.reason


def test_scaling_is_held_against_the_fewest_gpus_of_the_same_kind() -> None:
    answer = of_points(here([trial(n, hardware=kind, **PINS) for n in (16, 8) for kind in ("h100", "h200")]), Goal())
    efficiency = {(point.num_gpus, point.options["hardware"]): point.scaling_efficiency for point in answer.points}
    assert efficiency[8, "h100"] == efficiency[8, "h200"] == 1.0
    assert 0.9 < (efficiency[16, "h100"] or 0) <= 1.02
    assert answer.points[0].num_gpus == 16, "points keep their order"


def test_processes_give_the_same_points_in_the_same_order() -> None:
    trials = [trial(n, **PINS) for n in (8, 32, 16, 24, 40, 48, 56, 64)]
    assert plan_all(trials) == here(trials)


POINTS = st.builds(
    lambda gpus, fits, days, usd: Point(
        options={"gpus": gpus}, num_gpus=gpus, fits=fits, step_s=1.0, tokens_per_s=1.0, days=days, usd=usd,
        days_interval=(days * 0.9, days * 1.1),
    ),
    st.integers(1, 50), st.booleans(), st.integers(1, 20).map(float), st.integers(1, 20).map(float),
)  # fmt: skip


@given(st.lists(POINTS, max_size=12), st.none() | st.integers(1, 20), st.none() | st.integers(1, 20))
def test_front_and_answers_are_those_of_all_pairs(
    points: list[Point], deadline: int | None, budget: int | None
) -> None:
    answer = Sweep(points=tuple(points), goal=Goal(deadline_days=deadline, budget_usd=budget))
    for number, point in enumerate(points):
        beaten = [
            other for other in points
            if other.fits and other.days <= point.days and other.usd <= point.usd
            and (other.days, other.usd) != (point.days, point.usd)
        ]  # fmt: skip
        assert (number in answer.pareto) == (point.fits and not beaten)
    met = [p for p in points if p.fits and p.days <= (deadline or 99) and p.usd <= (budget or 99)]
    found = {name: None if index is None else points[index] for name, index in answer.answers.items()}
    for name, field in (("fewest_gpus", "num_gpus"), ("cheapest", "usd"), ("fastest", "days")):
        best = found[name]
        assert (best is None) == (not met)
        assert best is None or getattr(best, field) == min(getattr(point, field) for point in met)


def test_the_probability_of_a_deadline_follows_the_interval() -> None:
    point = Point(options={}, num_gpus=8, fits=True, days=10.0, days_interval=(8.0, 12.5))
    assert with_deadline(point, 10.0).deadline_probability == pytest.approx(0.5)
    assert with_deadline(point, 12.5).deadline_probability == pytest.approx(0.9)
    assert with_deadline(point, 8.0).deadline_probability == pytest.approx(0.1)
    assert with_deadline(point, None).deadline_probability is None


@given(
    rates=st.lists(st.floats(0.01, 1.0), min_size=24, max_size=24), late=st.floats(0, 0.01),
    deadline=st.floats(0.5, 80.0), fits_from=st.integers(1, 20),
)  # fmt: skip
def test_the_fewest_are_of_a_linear_scan(rates: list[float], late: float, deadline: float, fits_from: int) -> None:
    """Layouts use some of the nodes; more nodes open more layouts, and idle ones cost a little."""

    def point(num_nodes: int) -> Point:
        used = max(range(1, num_nodes + 1), key=lambda n: (sum(rates[:n]) * (n % 3 != 1), n))
        days = 100 / sum(rates[:used]) / (used % 3 != 1 or 0.5) * (1 + late * num_nodes) / 10
        return Point(
            options={}, num_gpus=8 * num_nodes, num_gpus_used=8 * used, fits=num_nodes >= fits_from, step_s=days,
            days=days, usd=days,
        )  # fmt: skip

    nodes = PlannedNodes(trial(8), lambda trials: [point(one.num_gpus // 8) for one in trials], 24)
    goal = Goal(deadline_days=deadline)
    assert nodes.first_that(lambda p: p.fits) == fits_from
    scan = next((n for n in range(1, 25) if goal.is_met(point(n))), None)
    # halving needs that all the nodes meet what fewer do: nodes that bring less than their waits cost may not
    assume(scan is None or goal.is_met(point(24)))
    assert nodes.first_that(goal.is_met, fits_from) == scan


def test_tables_and_csv_have_every_point_and_say_the_answers() -> None:
    answer = of_points(
        [*here([trial(8, **PINS), trial(16, **PINS)]), planned(trial(8, "405b"))], Goal(deadline_days=1e4)
    )
    rows = list(csv.DictReader(io.StringIO(as_csv(answer))))
    assert [row["fits"] for row in rows] == ["True", "True", "False"]
    assert float(rows[1]["usd_interval_low"]) < float(rows[1]["usd"]) < float(rows[1]["usd_interval_high"])
    assert "fewest GPUs: 8 GPUs" in says_sweep(answer)
    assert says_sweep(of_points([planned(trial(8, "405b"))], Goal())) == "None of 1 point fits."


def plan_of(global_batch_size: int = 64, hardware: str = "h100", runtime: str = "megatron", **layout: Any) -> Plan:
    sizes = {"tp": 2, "pp": 4, "dp": 2} | layout
    num_gpus = sizes["tp"] * sizes["pp"] * sizes["dp"]
    return priced_plan("8b", num_gpus, batch=global_batch_size, hardware=hardware, runtime=runtime, **sizes)


def text_of(comparison: Comparison) -> str:
    return printed(render_comparison(comparison), markup=False)


def probed(plan: Plan, **changes: Any) -> ProbeResult:
    memory = ProbedMemory(static_bytes=GIB, peak_allocated_bytes=9 * GIB, peak_reserved_bytes=0, device_used_bytes=0)
    return probe_result(plan, lambda stage: (1e-3, 2e-3), memory=memory, **changes)


@settings(max_examples=15, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]), batch=st.sampled_from([64, 128]),
    recompute=st.sampled_from(["none", "full"]), hardware=st.sampled_from(["h100", "mi300x"]),
)  # fmt: skip
def test_terms_add_up_to_the_difference_of_steps(tp: int, pp: int, batch: int, recompute: str, hardware: str) -> None:
    sides = [plan_of(), plan_of(batch, hardware, tp=tp, pp=pp, recompute=recompute)]
    answer = compare([of_plan(plan, str(number)) for number, plan in enumerate(sides)]).to_json()
    moved = sides[1].step.step_s - sides[0].step.step_s
    assert sum(row["seconds"] for row in answer["waterfall"]) == pytest.approx(moved, abs=1e-9 * sides[0].step.step_s)


def test_facts_that_differ_are_named_and_others_are_not() -> None:
    comparison = compare([of_plan(plan_of(), "a.json"), of_plan(plan_of(tp=4, recompute="full"), "b.json")])
    answer = comparison.to_json()
    assert answer["files"] == ["a.json", "b.json"]
    differences = answer["differences"]
    assert differences["tp"] == [2, 4]
    assert differences["recompute"] == ["none", "full"]
    assert differences["gpus"] == [16, 32]
    assert differences["step_s"][0] > differences["step_s"][1]
    assert not {"pp", "model", "hardware", "seq_length"} & differences.keys()
    text = text_of(comparison)
    assert "b trains" in text
    assert "loses most in recomputing" in text


def test_a_plan_beside_itself_differs_in_nothing() -> None:
    side = of_plan(plan_of(), "a.json")
    comparison = compare([side, side.model_copy(update={"name": "b.json"})])
    assert comparison.differences == {}
    assert "as fast" in text_of(comparison)


def test_three_sides_are_held_against_the_first() -> None:
    plans = [plan_of(), plan_of(tp=4), plan_of(pp=2)]
    comparison = compare([of_plan(made, f"{number}.json") for number, made in enumerate(plans)])
    for made, rows in zip(plans[1:], comparison.waterfalls, strict=True):
        assert sum(row.seconds for row in rows) == pytest.approx(made.step.step_s - plans[0].step.step_s)
    assert max(map(len, text_of(comparison).splitlines())) <= 80


def test_what_a_probe_measured_stands_beside_a_plan_in_the_terms_that_it_tells_apart() -> None:
    plan = plan_of(hardware="h200", runtime="torch-eager")
    result = probed(plan, mode="ranks", step_s=plan.step.step_s * 1.5)
    comparison = compare([of_plan(plan, "plan.json"), of_probe(result, "probe.json")])
    (rows,) = comparison.waterfalls
    assert {row.term for row in rows} == {"passes_s", "waits_s", "exposed_dp_s", "optimizer_s", "overhead_s"}
    assert sum(row.seconds for row in rows) == pytest.approx(0.5 * plan.step.step_s)
    assert comparison.differences["peak_allocated_bytes"][1] == 9 * GIB
    assert "recompute" not in comparison.differences, "a probe does not say"
    assert "eager torch" in text_of(comparison)


def test_stages_probed_alone_have_a_step_and_no_terms() -> None:
    plan = plan_of(hardware="h200", runtime="torch-eager")
    (rows,) = compare([of_plan(plan, "plan"), of_probe(probed(plan, step_s=3.0), "probe")]).waterfalls
    assert [(row.term, row.other_s) for row in rows] == [("step_s", 3.0)]


def test_a_probe_without_a_step_of_its_own_is_refused() -> None:
    with pytest.raises(SpecError, match=r"probe.json: (has no whole step|ran in small)"):
        of_probe(probed(plan_of(hardware="h200", runtime="torch-eager"), step_s=None), "probe.json")
    small = plan_of(hardware="h200", runtime="torch-eager")
    with pytest.raises(SpecError, match="ran in small"):
        of_probe(probed(small, step_s=1.0, run=probe_run(small, dtype="float64")), "probe.json")


@pytest.mark.parametrize(("names", "short"), TABLES["columns_are_headed_by_the_part_of_a_name_that_tells_files_apart"])
def test_columns_are_headed_by_the_part_of_a_name_that_tells_files_apart(names: list[str], short: list[str]) -> None:
    assert short_names(names) == short


def test_adapters_that_differ_are_named() -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=1)

    def tuned(adapters: AdapterSpec | None) -> Plan:
        training = TrainingSpec(seq_length=1024, global_batch_size=4, adapters=adapters)
        return evaluate(load_model("llama-3.2-1b"), cluster, training, Parallelism(), runtime="hf")

    lora, qlora = (of_plan(tuned(AdapterSpec(rank=8, base_bits=bits)), f"{bits}.json") for bits in (16, 4))
    differs = compare([lora, qlora]).to_json()["differences"]
    assert differs["base_bits"] == [16, 4]
    assert "rank" not in differs
    whole = compare([lora, of_plan(tuned(None), "whole.json")]).to_json()["differences"]
    assert whole["trained"] == ["adapters", "all weights"]
    assert whole["rank"] == [8, None]


@pytest.fixture(scope="module")
def compared_plan() -> Plan:
    return priced_plan(num_gpus=16, tp=4, pp=2, dp=2)


def observed(step_s: float, **breakdown: float) -> Compared:
    source = SourceFile(path="a.log", format="megatron")
    return of_observation(
        Observation(sources=(source,), step_s=step_s, tokens_per_s=1e5, breakdown=breakdown), "observed.json"
    )


TIMERS = {"forward_backward_s": 3.0, "gradients_s": 0.2, "parameters_s": 0.1, "optimizer_s": 0.3}
TRACES = {"compute_s": 2.5, "tp_comm_s": 0.4, "pp_comm_and_waits_s": 0.3, "exposed_dp_s": 0.1, "optimizer_s": 0.3}


@pytest.mark.parametrize(
    ("breakdown", "terms"),
    [
        (TIMERS, {"pipeline_s", "exposed_dp_s", "optimizer_s", "overhead_s"}),
        (TRACES, {"passes_s", "waits_s", "exposed_dp_s", "optimizer_s", "overhead_s"}),
        ({"forward_backward_s": 3.0}, {"pipeline_s", "others_s"}),
        ({"unattributed_s": 4.0}, {"step_s"}),
        ({}, {"step_s"}),
    ],
)
def test_terms_are_those_of_both_and_add_up(compared_plan: Plan, breakdown: dict[str, float], terms: set[str]) -> None:
    comparison = compare([of_plan(compared_plan, "plan.json"), observed(4.0, **breakdown)])
    (rows,) = comparison.waterfalls
    assert {row.term for row in rows} == terms
    assert sum(row.seconds for row in rows) == pytest.approx(4.0 - compared_plan.step.step_s)
    assert sum(row.other_s for row in rows) == pytest.approx(4.0)
    if breakdown is TIMERS:
        by_name = {row.term: row for row in rows}
        assert by_name["exposed_dp_s"].other_s == pytest.approx(0.3)
        step = compared_plan.step.breakdown
        assert by_name["exposed_dp_s"].first_s == pytest.approx(step.exposed_dp_s)
        assert by_name["pipeline_s"].first_s == pytest.approx(
            step.compute_s + step.tp_comm_s + step.pp_comm_s + step.bubble_s
        )
    assert "Where the seconds go" in printed(render_comparison(comparison))


def test_two_runs_are_held_against_each_other_as_finely_as_both_are_known() -> None:
    (rows,) = compare([observed(4.0, **TIMERS), observed(5.0, **TIMERS)]).waterfalls
    assert {row.term for row in rows} == {*TIMERS, "unattributed_s"}
    (rows,) = compare([observed(4.0, **TIMERS), observed(5.0, **TRACES)]).waterfalls
    assert {row.term for row in rows} == {"pipeline_s", "exposed_dp_s", "optimizer_s", "overhead_s"}
    assert sum(row.seconds for row in rows) == pytest.approx(1.0)


ROOT = Path(__file__).parents[2]
SCRIPT = TABLES["script"]
FULL = "--use-distributed-optimizer --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EDITS = TABLES["edits"]
"""What a pull request changes in the script, and the exit code of its check."""


def checked(tmp_path: Path, old: str, new: str) -> Check:
    (tmp_path / "old").mkdir()
    before, after = tmp_path / "old" / "run.sh", tmp_path / "run.sh"
    before.write_text(SCRIPT)
    after.write_text(SCRIPT.replace(old, new))
    return check(after, against=before, searches=False)


@pytest.mark.parametrize("name", EDITS)
def test_the_exit_code_says_what_is_wrong(name: str, tmp_path: Path) -> None:
    old, new, code = EDITS[name]
    assert checked(tmp_path, old, new).exit_code == code


def test_a_change_is_told_by_its_settings_and_by_terms_that_add_up(tmp_path: Path) -> None:
    answer = checked(tmp_path, *EDITS["recomputes"][:2])
    assert answer.comparison.differences["recompute"] == ("none", "full")
    seconds = sum(row.seconds for row in answer.comparison.waterfalls[0])
    assert seconds == pytest.approx(answer.new.step_s - answer.old.step_s)
    assert answer.slower_fraction == pytest.approx(answer.new.step_s / answer.old.step_s - 1)
    text = markdown([answer])
    assert "recompute none → full" in text
    assert "| fits | yes" in text


def test_findings_are_results_of_sarif(tmp_path: Path) -> None:
    log = sarif([checked(tmp_path, *EDITS["unknown"][:2])], "1.0")
    assert [result["ruleId"] for result in log["runs"][0]["results"]] == ["unknown"]
    assert log["runs"][0]["results"][0]["message"]["text"].startswith("--attention-of-tomorrow 3")


def test_the_worst_of_several_files_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name in ("nothing", "unknown", "too large"):
        old, new, _ = EDITS[name]
        paths.append(tmp_path / f"{name.replace(' ', '_')}.sh")
        paths[-1].write_text(SCRIPT.replace(old, new))
    assert main(["check", *map(str, paths), "--no-search", "--json"]) == 3
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [one["exit_code"] for one in checks] == [0, 10, 3]


def test_the_planners_own_choice_is_named_where_it_is_faster(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace(*EDITS["recomputes"][:2]))
    new = check(path).new
    assert new.better_step_s is not None
    assert new.better_step_s < new.step_s
    assert "TP" in new.better


def test_a_grid_that_does_not_divide_is_refused_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace("--global-batch-size 256", "--global-batch-size 250"))
    assert main(["check", str(path), "--no-search"]) == 8
    assert "global_batch_size: 250" in capsys.readouterr().err
    assert main(["check", str(path), "--no-search", "--json"]) == 8
    assert json.loads(capsys.readouterr().out)["checks"][0]["exit_code"] == 8
    (tmp_path / "notes.sh").write_text("echo nothing")
    assert main(["check", str(path), str(tmp_path / "notes.sh"), "--no-search", "--format", "sarif"]) == 2
    results = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    assert [result["ruleId"] for result in results] == ["refused", "unreadable"]


def test_a_variable_is_given_and_an_old_file_is_read_once(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    reads: list[str] = []
    monkeypatch.setattr(checking, "read", lambda name, *rest: reads.append(str(name)) or read(name, *rest))
    files = [str(tmp_path / name) for name in ("old.sh", "new.sh", "newer.sh")]
    for file in files:
        Path(file).write_text(SCRIPT.replace("--micro-batch-size 1", "--micro-batch-size ${MBS}"))
    command = ["check", *files[1:], "--against", files[0], "--no-search", "--json"]
    assert main(command) == 2
    assert "--set MBS=" in capsys.readouterr().err
    reads.clear()
    assert main([*command, "--set", "MBS=2"]) == 0
    assert reads == files


@pytest.mark.parametrize("name", ["action.yml", ".pre-commit-hooks.yaml"])
def test_the_action_and_the_hook_run_plan_check(name: str) -> None:
    data = yaml.safe_load((ROOT / name).read_text())
    runs = [data[0]["entry"]] if isinstance(data, list) else [step.get("run", "") for step in data["runs"]["steps"]]
    assert any("plan check" in text for text in runs)
