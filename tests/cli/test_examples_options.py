"""--examples, --epochs, --example-lengths, --batching, --objective and --optimizer as a user types them."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cli.inputs import read_job, read_limits
from planner.cli.options import JobOptions, SearchOptions, command_line
from planner.layout.evaluate import evaluate
from planner.report.rows import cost_figures
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.documents import example_lengths, mean_length


def _training(**options: object) -> TrainingSpec:
    asked = JobOptions(model="8b", gpus=1, lora=True, no_history=True, **options)  # type: ignore[arg-type]
    return read_job(asked).training


def test_examples_are_tokens_by_their_mean_length() -> None:
    training = _training(examples="10k", epochs=3.0, example_lengths="512")
    assert (training.tokens, training.examples, training.epochs) == (10_000 * 3 * 512, 10_000, 3.0)
    # no batch is longer than its longest example
    assert (training.batching, training.seq_length) == ("padded", 512)


def test_without_lengths_an_example_is_a_sequence() -> None:
    training = _training(examples="10k", seq_length=1024)
    assert (training.tokens, training.batching) == (10_000 * 1024, "packed")


def test_both_sequences_of_a_pair_are_counted() -> None:
    assert _training(examples="10k", seq_length=1024, objective="dpo").tokens == 2 * 10_000 * 1024


def test_a_mean_and_a_most_are_a_lognormal_that_ends_there() -> None:
    lengths = example_lengths(_training(example_lengths="400:2048"))
    assert mean_length(lengths) == pytest.approx(400, rel=0.01)
    assert lengths[-1][0] == 2048
    assert sum(share for length, share in lengths if length < 2048) > 0.99


def test_lengths_may_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.yaml"
    path.write_text("lengths:\n  - {length: 100, share: 3}\n  - {length: 200, share: 1}\n")
    training = _training(example_lengths=str(path), batching="packed", examples="400")
    assert training.tokens == pytest.approx(400 * 125)
    assert (training.batching, training.seq_length) == ("packed", 2048)


def test_an_optimizer_is_the_switch_of_that_name() -> None:
    asked = SearchOptions(model="8b", gpus=1, lora=True, optimizer="paged-adamw-8bit", no_history=True)
    assert read_limits(asked, read_job(asked)).switches == {"optimizer": "paged-adamw-8bit"}
    assert "--optimizer paged-adamw-8bit" in command_line(asked)


def test_the_answer_says_examples_steps_and_padding() -> None:
    asked = JobOptions(
        model="1b", gpus=1, lora=True, no_history=True, examples="2k", epochs=2.0, example_lengths="300:1024",
        usd_per_gpu_hour=2.0, global_batch_size=8,
    )  # fmt: skip
    job = read_job(asked)
    plan = evaluate(job.model, job.cluster, job.training, Parallelism(micro_batch_size=4), runtime=job.runtime_spec)
    texts = {figure.name: figure.text for figure in cost_figures(plan)}
    assert texts["examples"] == "2,000 examples × 2 epochs"
    assert texts["steps"] == "500 steps"
    assert "padding" in texts["padding"]
    assert texts["time"].endswith(("min", "h", ")"))
    assert plan.run_cost.usd == pytest.approx(2 * 24 * plan.run_cost.days)
