"""Reports name the switch left unsaid that matters most, on the terminal, as HTML, and in a line of --runs."""

from __future__ import annotations

import json

import pytest

from planner.cli import main
from planner.layout.evaluate import evaluate
from planner.report.format import says_unsaid
from planner.report.page import report_page
from planner.report.terminal import summary
from planner.report.view import view_of
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware
from planner.specs.training import Parallelism, TrainingSpec

JOB = ["--model", "8b", "--gpus", "8", "--seq-length", "16384", "--fsdp", "full_shard", "--runtime", "torch-fsdp"]


def test_every_report_says_it() -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    training = TrainingSpec(seq_length=16384, global_batch_size=32)
    layout = Parallelism(fsdp="full_shard")
    plan = evaluate("8b", cluster, training, layout, runtime="torch-fsdp", says_switches=False)
    most = plan.best.unsaid[0]
    slower = most.other_step_s / plan.step.step_s - 1
    words = f"attention_kernel; flash1 would be {100 * slower:.0f}% slower"
    assert says_unsaid(plan.best).startswith(words)
    (sure,) = (section for section in view_of(plan).sections if section.name == "sure")
    assert ("not said", says_unsaid(plan.best)) in sure.parts[0].rows
    assert summary(plan.best).endswith(f"not said: {says_unsaid(plan.best)}")
    assert words in report_page(plan)
    said = evaluate("8b", cluster, training, layout, runtime="torch-fsdp", says_switches=True)
    assert says_unsaid(said.best) == ""
    assert "not said" not in summary(said.best)


@pytest.mark.parametrize(
    ("options", "is_said"),
    [
        ([], False),
        (["--assume", "network_gb_per_s=50"], False),
        (["--switch", "default"], True),
        (["--switch", "attention_kernel=flash1"], True),
        (["--assume", "fsdp_overlap_fraction=0.5"], True),
    ],
)
def test_options_that_say_a_switch_say_all(
    options: list[str], is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *JOB, *options, "--json"]) == 0
    assert (json.loads(capsys.readouterr().out)["best"]["unsaid"] == []) is is_said
