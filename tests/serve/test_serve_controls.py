"""The controls are the options of the command line, and the same layout under them is priced as it is planned."""

from dataclasses import fields
from functools import cache

import pytest
from served import SMALL
from tables import beside

from planner.answer import Plan
from planner.cli.options import SearchOptions
from planner.cli.views import read_question
from planner.errors import SpecError
from planner.search.search import plan
from planner.serve.app import plan_panel, same_layout
from planner.serve.controls import CONTROLS, NETWORK, Catalogue, changed, form_of, options_of

TABLES = beside(__file__)

CATALOGUE = Catalogue.shipped({"model": "./mine.yaml"}, {})


@cache
def planned(network: str = "") -> Plan:
    case = read_question({**SMALL, **({"assume": f"{NETWORK}={network}"} if network else {})}).case
    return plan(case.model, case.cluster, case.training, limits=case.limits, runtime=case.runtime)


def test_every_option_of_a_search_has_a_control() -> None:
    options = {field.name for field in fields(SearchOptions)}
    assert options - {*CONTROLS, "calibration"} == set()
    assert {*CONTROLS} - {*options, NETWORK} == set()


@pytest.mark.parametrize("options", TABLES["controls_give_the_options_that_they_show"])
def test_controls_give_the_options_that_they_show(options: dict[str, str]) -> None:
    assert options_of(form_of(options), CATALOGUE) == options


def test_a_remedy_takes_the_place_of_what_was_given() -> None:
    form = {"model": "8b", "gpus": "1", "switch.ep_overlap": "true"}
    assert changed(form, ["--gpus", "48"]) == {**form, "gpus": "48"}
    assert changed(form, ["--tp-across-nodes"]) == {**form, "tp_across_nodes": "on"}
    assert changed(form, ["--switch", "ep_overlap=false"])["switch.ep_overlap"] == "false"


@pytest.mark.parametrize("form", [{"no_control": "1"}, {"tp": "8\n"}, {"tp": "\x1b[2J"}, {"tp": "8" * 3000}])
def test_other_controls_and_texts_are_refused(form: dict[str, str]) -> None:
    with pytest.raises(SpecError):
        options_of({name: f"a{text}a" for name, text in form.items()}, CATALOGUE)


def test_nothing_changed_is_the_same_price() -> None:
    again = same_layout(planned(), read_question(SMALL).case)
    assert again.step == planned().step
    assert again.stages == planned().stages


def test_the_same_layout_has_the_price_that_the_search_gives_it() -> None:
    slower = planned("5")
    again = same_layout(planned(), read_question({**SMALL, "assume": "network_gb_per_s=5"}).case)
    assert again.step.step_s >= slower.step.step_s * (1 - 1e-9)
    if again.parallelism == slower.parallelism and again.best.recipe == slower.best.recipe:
        assert again.step.step_s == pytest.approx(slower.step.step_s, rel=1e-6)


@pytest.mark.parametrize("changes", [{"tp": "8"}, {"gpus": "7"}, {"global_batch_size": "3"}, {"model": "8b"}])
def test_a_layout_that_cannot_be_kept_is_not_shown(changes: dict[str, str]) -> None:
    assert same_layout(planned(), read_question({**SMALL, **changes}).case) is None


def test_a_panel_says_what_the_command_line_says() -> None:
    panel = plan_panel(planned(), read_question(SMALL), SMALL, "final")
    assert f"{planned().step.step_s * 1e3:.0f}"[:3] in panel.status.replace(".", "")
    assert str(planned().parallelism) in panel.html
    assert panel.html.count("<svg") >= 4


def test_a_fine_tuning_is_asked_for_and_its_changes_are_links() -> None:
    form = {"model": "llama-3.2-1b", "gpus": "1", "hardware": "l40s-48gb", "qlora": "on", "lora_rank": "8", "top": "2"}
    question = read_question(options_of(form, CATALOGUE))
    adapters = question.case.training.adapters
    assert (adapters.rank, adapters.base_bits) == (8, 4)
    case = question.case
    made = plan(case.model, case.cluster, case.training, limits=case.limits, runtime=case.runtime)
    html = plan_panel(made, question, form, "final").html
    assert "What to change first" in html
    assert "Room, all else as it is" in html
    assert "lora_targets=attention" in html
    assert "sustained over months" not in html
