"""Every number of a file that commands read back is as it was saved, or refused by name, or has no influence.

Saved plans are read back whole, or not at all.
Plans that version 0.2 saved, one a trainer and kind, are read: running jobs are held against theirs.

`tests/plans_of_0_2` holds them as `plan … --time-limit 12 -o` of df63a9e7 wrote them.
"""

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from edits import edits, leaves, with_edit
from priced_plans import priced_plan
from probes import probe_result

from planner.answer import Plan
from planner.cli import main
from planner.cli.measurements import probe_of
from planner.errors import SpecError
from planner.observe.history import kept_run, read_kept, text_of
from planner.observe.judge import judged, observed_of
from planner.observe.log_reader import observe
from planner.plan_file import plan_of, read_plan, step_now_s
from planner.saved import changed_entry, with_digest

TABLES = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())

INPUTS = ("model", "cluster", "training", "runtime", "runtime_spec")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return priced_plan("1b", 4, batch=8, tp=2, pp=2)


@pytest.fixture(scope="module")
def observed(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    log = tmp_path_factory.mktemp("run") / "steps.csv"
    step_s = 1.1 * plan.step.step_s
    log.write_text("step,step_time_s\n" + "".join(f"{n},{step_s * (1 + 0.002 * (n % 3)):.6f}\n" for n in range(1, 31)))
    return with_digest(judged(observe([str(log)]), plan, "plan.json").model_dump(mode="json"))


@pytest.fixture(scope="module")
def probe(plan: Plan) -> dict[str, Any]:
    return with_digest(probe_result(plan, lambda stage: (1e-3, 2e-3)).model_dump(mode="json"))


def refused(read: Callable[[dict[str, Any]], object], data: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        read(data)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
    return caught.value.message


@pytest.mark.parametrize("kind", ["plan", "probe", "observed"])
def test_every_edited_leaf_is_refused(kind: str, plan: Plan, request: pytest.FixtureRequest) -> None:
    """One edit of each leaf, another kind of edit from leaf to leaf."""
    data = plan.to_json() if kind == "plan" else request.getfixturevalue(kind)
    read = {"plan": plan_of, "probe": probe_of, "observed": observed_of}[kind]
    read(data, "file")
    found = [(path, value) for path, value in leaves(data) if kind == "plan" or "plan" not in path]
    for number, (path, value) in enumerate(found[:: 1 + len(found) // 250]):
        ways = edits(value)
        message = refused(lambda edited: read(edited, "file"), with_edit(data, path, ways[number % len(ways)]))
        assert str(path[0]) in message or path[0] == "digest", message


def test_the_numbers_of_a_plan_without_a_digest_have_no_influence(plan: Plan) -> None:
    older = {key: value for key, value in plan.to_json().items() if key != "digest"}
    expected = plan_of(older, "file")
    assert expected.best == plan.best, "a price is a function of its inputs"
    answers = [path for path, _ in leaves(older) if path[0] == "best" and path[1] in ("step", "stages", "sustained")]
    for path in answers[::9]:
        value = dict(leaves(older))[tuple(path)]
        try:
            again = plan_of(with_edit(older, path, edits(value)[1]), "file")
        except SpecError:
            continue
        assert again == expected, path


def test_a_price_that_moved_since_is_said_and_not_refused(plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    longer = {"step_s": plan.step.step_s + 1, "breakdown": plan.step.breakdown.model_copy(update={"bubble_s": 1.0})}
    longer["breakdown"] = plan.step.breakdown.model_copy(update={"bubble_s": plan.step.breakdown.bubble_s + 1})
    best = plan.best.model_copy(update={"step": plan.step.model_copy(update=longer)})
    other = plan.model_copy(update={"planner_version": "0.0.9", "best": best})
    with caplog.at_level(logging.WARNING):
        assert plan_of(other.to_json(), "plan.json").best == best, "another version's price is its own"
    said = f"plan.json: priced by planner 0.0.9 at {best.step.step_s:.4g} s; now {plan.step.step_s:.4g} s"
    assert caplog.messages == [said]


def test_another_writer_of_json_changes_nothing(plan: Plan) -> None:
    """Keys sorted, spaces gone, and whole numbers without their point, as `jq -Sc` and JavaScript write them."""
    text = json.dumps(plan.to_json(), sort_keys=True, separators=(",", ":")).replace(".0,", ",").replace(".0}", "}")
    assert ".0," not in text
    assert plan_of(json.loads(text), "plan.json") == plan


def test_measurements_without_a_digest_are_read_if_possible(probe: dict[str, Any], observed: dict[str, Any]) -> None:
    older = {key: value for key, value in probe.items() if key != "digest"}
    assert with_digest(probe_of(older, "probe.json").model_dump(mode="json")) == probe
    assert "step_s is -1e+30" in refused(lambda data: probe_of(data, "f"), {**older, "step_s": -1e30})
    older = {key: value for key, value in observed.items() if key != "digest"}
    assert with_digest(observed_of(older, "observed.json").model_dump(mode="json")) == observed
    for path, message in TABLES["measurements_without_a_digest_are_read_if_possible"]:
        value = dict(leaves(older))[tuple(path)]
        assert message in refused(lambda data: observed_of(data, "f"), with_edit(older, tuple(path), value * 1.01)), (
            path
        )


def test_an_edited_run_of_the_history_is_refused(plan: Plan, observed: dict[str, Any], tmp_path: Path) -> None:
    text = text_of(kept_run(observed_of(observed, "observed.json"), "observed.json")[0])
    path = tmp_path / "run-1.json"
    path.write_text(text)
    assert read_kept(path).plan.best.step == plan.step
    data = json.loads(text)
    path.write_text(json.dumps({**data, "step_s": data["step_s"] * 1.01}))
    with pytest.raises(SpecError, match="step_s: was edited after it was saved"):
        read_kept(path)


@pytest.mark.parametrize(
    ("command", "kind"),
    TABLES["commands_say_one_line_of_an_edited_or_truncated_file"],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_commands_say_one_line_of_an_edited_or_truncated_file(
    command: list[str], kind: str, plan: Plan, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    data = plan.to_json() if kind == "plan" else request.getfixturevalue(kind)
    path = tmp_path / "saved.json"
    words = [{"FILE": str(path), "OUT": str(tmp_path / "out")}.get(word, word) for word in command]
    field = {"plan": ("best", "step", "mfu"), "probe": ("ranks", 0, "num_parameters")}.get(
        kind, ("observation", "num_steps")
    )
    path.write_text(json.dumps(with_edit(data, field, 3), indent=2))
    assert main(words) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == ["error", "hint"]
    assert field[0] in told[0]
    text = json.dumps(data, indent=2)
    path.write_text(text[: len(text) * 2 // 3])
    assert main(words) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in told] == ["error", "hint"]
    assert f"saved.json: line {path.read_text().count(chr(10)) + 1}" in told[0]


@pytest.mark.parametrize("share", [0, 0.001, 0.1, 0.37, 0.5, 0.81, 0.99, 0.9999])
def test_a_truncated_plan_is_refused_with_its_line(share: float, plan: Plan, tmp_path: Path) -> None:
    text, path = plan.saved_text(), tmp_path / "plan.json"
    path.write_text(text[: round((len(text) - 2) * share)])
    assert "plan.json: " in refused(lambda data: Plan.load(path), {})


def test_a_digest_names_the_first_entry_that_is_new_gone_or_changed() -> None:
    data = with_digest({"a": 1, "b": {"c": [1.0], "d": None}, "reasons": {"too large": 3}, "empty": {}})
    assert changed_entry(data) is None
    assert changed_entry(json.loads(json.dumps(data).replace("1.0", "1"))) is None
    assert changed_entry({**data, "b": {"c": [2.0], "d": None}}) == "b.c"
    assert changed_entry({**data, "b": {"c": [1.0]}}) == "b.d"
    assert changed_entry({**data, "reasons": {"too large": 4}}) == "reasons"
    assert changed_entry({**data, "empty": {"x": 1}}) == "empty.x"
    assert changed_entry({**data, "resume": 1}) == "resume"
    assert changed_entry({**data, "resume": 1}, beside=("resume",)) is None


@pytest.fixture
def saved() -> dict[str, Any]:
    return priced_plan(num_gpus=16, tp=2, pp=4, vpp=2, dp=2).to_json()


def test_a_plan_is_read_as_it_was_saved(saved: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(saved))
    assert read_plan(str(tmp_path / "plan.json")).to_json() == saved


def test_a_plan_is_read_from_the_json_of_a_replanned_job(saved: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**saved, "resume": {"choices": []}}))
    assert read_plan(str(tmp_path / "plan.json")).to_json() == saved


def test_plans_of_earlier_versions_are_read_without_gone_fields(saved: dict[str, Any], tmp_path: Path) -> None:
    older = json.loads(json.dumps(saved))
    older["cluster"]["hardware"]["efficiency"]["untuned_factor"] = 1.4
    older["runtime_spec"] |= {"tuned_products": True, "stands_for": "megatron", "min_microbatches_is_pp": False}
    del older["digest"]
    (tmp_path / "plan.json").write_text(json.dumps(older))
    assert read_plan(str(tmp_path / "plan.json")).to_json() == saved
    for field in ("rules", "export_rules", "year", "models", "later_features", "graphs_routing_on_racks"):
        del older["runtime_spec"][field]
    (tmp_path / "plan.json").write_text(json.dumps(older))
    assert read_plan(str(tmp_path / "plan.json")).to_json()["best"] == saved["best"]


EDITED = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())["edits_are_refused"]


def change(place: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    """An edit of the entry at a place: names and numbers with points between them."""

    def edit(plan: Any) -> None:
        for key in place.split(".") if place else ():
            plan = plan[int(key) if key.isdigit() else key]
        plan.update(values)

    return edit


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        *((change(place, **values), message) for place, values, message in EDITED),
        (lambda plan: plan["best"]["stages"][1]["chunks"].__setitem__(0, [4, 9]), "do not hold layers 0 to 32"),
        (lambda plan: plan["digest"].pop("runtime"), "runtime: was edited"),
        (lambda plan: plan.update(alternatives=[{**plan["best"], "stages": []}]), "alternatives[0]: stages are not"),
    ],
)
def test_edits_are_refused(
    saved: dict[str, Any], edit: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    edit(saved)
    (tmp_path / "plan.json").write_text(json.dumps(saved))
    with pytest.raises(SpecError) as caught:
        read_plan(str(tmp_path / "plan.json"))
    assert message in caught.value.message


PLANS = sorted((Path(__file__).parent / "plans_of_0_2").glob("*.json.gz"))


@pytest.fixture
def saved_of_plans_of_0_2(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The plan of a test's parameter, as it was saved."""
    path = tmp_path / request.param.stem
    path.write_bytes(gzip.decompress(request.param.read_bytes()))
    return path


def test_there_is_a_plan_of_every_trainer_that_0_2_had() -> None:
    assert len(PLANS) == 22


@pytest.mark.parametrize("saved_of_plans_of_0_2", PLANS, indirect=True, ids=lambda path: path.name.split(".")[0])
def test_a_saved_plan_is_read_as_it_was_and_priced_today(saved_of_plans_of_0_2: Path) -> None:
    plan, told = read_plan(str(saved_of_plans_of_0_2)), json.loads(saved_of_plans_of_0_2.read_text())
    assert isinstance(plan, Plan)
    assert plan.step.step_s == told["best"]["step"]["step_s"]
    assert [stage.chunks for stage in plan.stages] == [
        tuple(map(tuple, stage["chunks"])) for stage in told["best"]["stages"]
    ]
    assert 0.5 < step_now_s(plan) / plan.step.step_s < 2
