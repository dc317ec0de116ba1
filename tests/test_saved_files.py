"""Every number of a file that commands read back is as it was saved, or refused by name, or has no influence.

Saved plans are read back whole, or not at all.
Plans that version 0.2 saved, one a trainer and kind, are read: running jobs are held against theirs.

`tests/plans_of_0_2` holds them as `plan … --time-limit 12 -o` of df63a9e7 wrote them.
"""

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
from planner.cli.measurements import probe_of
from planner.errors import SpecError
from planner.observe.history import kept_run, read_kept, text_of
from planner.observe.judge import judged, observed_of
from planner.observe.log_reader import observe
from planner.plan_file import plan_of
from planner.saved import with_digest

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
