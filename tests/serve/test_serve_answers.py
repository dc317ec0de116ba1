"""The lines that the page gets for its controls, and the files that it offers."""

import io
import json
import threading
import zipfile
from urllib.parse import urlencode

import pytest
from served import SMALL, Running
from tables import beside

from planner.plan_file import plan_of

TABLES = beside(__file__)


def test_a_job_ends_in_the_plan_of_the_command_line(running: Running) -> None:
    asked, *panels = running.answer(SMALL)
    assert asked["kind"] == "asked"
    assert asked["placeholders"]["seq_length"]
    assert [panel["state"] for panel in panels if panel["state"] != "so far"] in (["waiting", "final"], ["final"])
    last = panels[-1]
    assert last["status"].startswith("Proven")
    assert "plan --model llama-3.2-1b --gpus 8" in last["html"]


def test_a_job_that_was_asked_before_is_answered_at_once(running: Running) -> None:
    running.answer(SMALL)
    again = running.answer(SMALL)
    assert [line.get("state") for line in again] == [None, "final"]


def test_a_change_shows_the_same_layout_before_the_search_ends(running: Running) -> None:
    key = running.answer(SMALL)[0]["key"]
    lines = running.answer({**SMALL, "network_gb_per_s": "10"}, shown=key)
    assert lines[1]["state"] == "same"
    assert "Same layout" in lines[1]["status"]
    assert lines[-1]["state"] == "final"
    assert "network_gb_per_s=10" in lines[-1]["html"]


def test_the_same_layout_is_said_not_to_fit_where_less_memory_may_be_filled(running: Running) -> None:
    key = running.answer(SMALL)[0]["key"]
    same = running.answer({**SMALL, "memory_headroom": "76"}, shown=key)[1]
    assert same["status"].startswith("The same layout does not fit")
    assert "GiB of the 3.1 that may be filled" in same["html"]


def test_what_does_not_fit_names_its_reason_and_a_remedy(running: Running) -> None:
    last = running.answer({"model": "llama-3.1-70b", "gpus": "1"})[-1]
    assert last["status"].startswith("Nothing fits: it fits on 7 GPUs; or ")
    assert "nothing fits in 79.1 GiB" in last["html"]
    assert 'data-apply="yes">Apply --gpus 7</a>' in last["html"]
    assert "gpus=7" in last["html"]


def test_an_alternative_is_shown_instead_of_the_best(running: Running) -> None:
    best, other = running.answer(SMALL)[-1], running.answer(SMALL, alternative=1)[-1]
    assert best["status"] != other["status"]
    assert "This is alternative 1 of" in other["html"]


@pytest.mark.parametrize(("form", "says"), TABLES["what_is_wrong_is_said_in_words"])
def test_what_is_wrong_is_said_in_words(running: Running, form: dict[str, str], says: str) -> None:
    last = running.answer({**SMALL, **form})[-1]
    assert last["state"] == "final"
    assert says in last["html"]
    assert "Traceback" not in last["html"]
    assert "<script" not in last["html"]


def test_files_are_those_of_the_commands(running: Running) -> None:
    query = urlencode(SMALL)
    response, text = running.ask("GET", f"/files/plan.json?{query}")
    assert response.status == 200
    assert "attachment" in response.headers["content-disposition"]
    plan = plan_of(json.loads(text), "plan.json")
    assert plan.command.startswith("plan --model llama-3.2-1b")
    assert plan.search is not None
    response, text = running.ask("GET", f"/files/export.zip?{query}&to=megatron&launcher=slurm")
    names = zipfile.ZipFile(io.BytesIO(text)).namelist()
    assert response.status == 200
    assert {"manifest.json", "launch.sbatch"} <= set(names)
    response, text = running.ask("GET", f"/files/trace.json?{query}&alternative=1")
    assert response.status == 200
    assert json.loads(text)["traceEvents"]


def test_a_file_that_cannot_be_made_says_why(running: Running) -> None:
    response, text = running.ask("GET", f"/files/export.zip?{urlencode(SMALL)}&to=excel")
    assert response.status == 422
    assert b"excel" in text
    assert b"Traceback" not in text
    assert running.ask("GET", "/files/passwd")[0].status == 404
    assert running.ask("GET", "/files/..%2f..%2fetc%2fpasswd")[0].status == 404


def test_many_clients_at_once_are_all_answered(running: Running) -> None:
    running.answer(SMALL)
    states: list[str] = []
    threads = [threading.Thread(target=lambda: states.append(running.answer(SMALL)[-1]["state"])) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert states == ["final"] * 100
