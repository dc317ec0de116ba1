"""Options become specs; whatever is wrong names the option."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from planner.cli import inputs
from planner.cli.inputs import Job
from planner.cli.options import JobOptions, LayoutOptions, SearchOptions
from planner.errors import SpecError
from planner.specs.training import Parallelism, SearchLimits

JOB = {"model": "405b", "gpus": 2048}


def read_job(options: dict[str, Any]) -> Job:
    return inputs.read_job(JobOptions(**options))


def read_limits(options: dict[str, Any]) -> SearchLimits:
    return inputs.read_limits(SearchOptions(**options), read_job(JOB))


def read_parallelism(options: dict[str, Any]) -> Parallelism:
    return inputs.read_parallelism(LayoutOptions(**options))


def problem(read: Any, **options: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        read({**JOB, **options})
    return caught.value


def test_what_is_not_given_comes_from_the_models_published_training() -> None:
    job = read_job(JOB)
    assert (job.training.seq_length, job.training.global_batch_size, job.training.dtype) == (8192, 2048, "bf16")
    assert (job.cluster.hardware.name, job.cluster.num_gpus, job.runtime) == ("h100-sxm-80gb", 2048, "megatron")


def test_a_longer_sequence_keeps_the_published_tokens_per_step() -> None:
    assert read_job({**JOB, "seq_length": 131072}).training.global_batch_size == 128


def test_batches_in_tokens() -> None:
    assert read_job({**JOB, "batch_tokens": "16777216"}).training.global_batch_size == 2048
    # 3,906 sequences is what 16M exactly are; 4,096 is what 2,048 GPUs divide, and what 16·2²⁰ are
    assert read_job({**JOB, "seq_length": 4096, "batch_tokens": "16M"}).training.global_batch_size == 4096
    # 15,625 sequences leave GPUs idle
    assert read_job({**JOB, "seq_length": 4096, "batch_tokens": "64000000"}).training.global_batch_size == 15360
    # exactly as asked where the GPUs divide it as well as anything near it
    assert (
        read_job({**JOB, "gpus": 48, "seq_length": 1000, "batch_tokens": "4800000"}).training.global_batch_size == 4800
    )


def test_16m_of_8192_is_2048_sequences_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert read_job({**JOB, "batch_tokens": "16M"}).training.global_batch_size == 2048
    assert "16M is taken as 16,777,216, 2,048 sequences" in caplog.text


def test_a_batch_near_that_suits_the_gpus_is_taken_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert read_job({**JOB, "batch_tokens": "1000000"}).training.global_batch_size == 120
    assert "--batch-tokens: 1000000 is taken as 983,040, 120 sequences" in caplog.text
    with caplog.at_level(logging.INFO):
        assert read_job({**JOB, "seq_length": 5000}).training.global_batch_size == 3328
    assert "llama-3.1-405b's published batch: 16,777,216 is taken as 16,640,000" in caplog.text


def test_a_batch_far_from_any_whole_number_of_sequences_is_refused() -> None:
    error = problem(read_job, batch_tokens="12000", gpus=1)
    assert error.message == "--batch-tokens: 12,000 tokens are no whole number of sequences of 8,192"
    assert error.hint == "--batch-tokens 8192 or --batch-tokens 16384"
    assert problem(read_job, batch_tokens="12000", gpus=8).hint == "--batch-tokens 65536"


def test_a_model_without_published_training_must_be_told(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(
        "{num_hidden_layers: 2, hidden_size: 64, intermediate_size: 128, num_attention_heads: 4, vocab_size: 512}"
    )
    assert "--seq-length and --global-batch-size: are missing" in problem(read_job, model=str(path)).message
    assert "--global-batch-size: is missing" in problem(read_job, model=str(path), seq_length=128).message
    job = read_job({"model": str(path), "gpus": 1, "seq_length": 128, "global_batch_size": 4})
    assert job.training.tokens_per_step == 512


def test_comma_lists_pin_axes() -> None:
    limits = read_limits({"tp": "8", "pp": "8, 16", "recompute": "none,full", "schedule": "1f1b", "top": 3})
    assert (limits.tp, limits.pp, limits.recompute, limits.schedule) == ((8,), (8, 16), ("none", "full"), ("1f1b",))
    assert (limits.top, limits.cp, limits.time_limit_s, limits.tp_across_nodes) == (3, None, 30.0, False)


def test_one_layout() -> None:
    layout = read_parallelism({"tp": 8, "pp": 2, "layers_per_stage": "64,62", "recompute_modules": "mlp, core_attn"})
    assert (layout.tp, layout.layers_per_stage, layout.recompute_modules) == (8, (64, 62), ("mlp", "core_attn"))
    assert "dp" not in layout.model_fields_set
    assert problem(read_parallelism, pp=2, layers_per_stage="1,2,3").message.startswith(
        "layers_per_stage has 3 entries"
    )


def test_the_hosts_speed_can_be_assumed() -> None:
    """Every launch of an eager layer follows it."""
    jobs = [read_job({**JOB, **more}) for more in ({}, {"assume": "host_us=20"}, {"host": "p5"})]
    assert [job.cluster.hardware.efficiency.host_us for job in jobs] == [46, 20, 60]


@pytest.mark.parametrize(
    ("options", "switch", "mean", "spread"),
    [
        ({}, None, 1.0, 0.0),
        ({}, "natural_routing=true", 1.6, 0.0),
        ({"lora": True}, None, 1.0, 2.0),
        ({"finetune": True}, None, 1.0, 2.0),
        ({"lora": True}, "natural_routing=false", 1.0, 0.0),
        ({"lora": True, "moe_imbalance": 1.2}, "natural_routing=true", 1.2, 0.0),
        # its bias balances them
        ({"model": "moonlight", "lora": True}, "natural_routing=true", 1.0, 0.01),
    ],
)
def test_options_say_how_uneven_experts_are(
    options: dict[str, Any], switch: str | None, mean: float, spread: float
) -> None:
    asked = LayoutOptions(**{**JOB, "model": "qwen3-30b", "runtime": "megatron", "switch": switch, **options})
    training = inputs.read_described(asked, inputs.read_job(asked)).training
    assert (training.moe_imbalance, training.moe_spread) == (mean, spread)


def test_a_dtype_alone_sums_gradients_no_narrower() -> None:
    for switch, num_bytes in ((None, 4), ("bf16_gradients=true", 2)):
        options: dict[str, Any] = {**JOB, "runtime": "megatron", "dtype": "fp8", "switch": switch}
        asked = LayoutOptions(**options)
        run = inputs.read_described(asked, inputs.read_job(asked))
        assert run.runtime_spec.in_dtype("fp8", "hopper").gradient_bytes == num_bytes
