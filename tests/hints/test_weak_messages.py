"""Messages that were weak once: what each says now, and the command line that its reader types next, which works."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from hints.test_hints_work import failure
from planner.cli import main


class Row(NamedTuple):
    """A command line, what its error and its hint say (nothing where it succeeds), and what then succeeds."""

    typed: str
    says: str = ""
    hint: str = ""
    then: str = ""


_QUICK = " --tp 1 --pp 1 --cp 1 --micro-batch-size 1 --top 1 -q"
ROWS = (
    Row("-m meta-llama/Llama-3.2-1B -g 8 -s 8k -b 64" + _QUICK),
    Row("-m 1b --nodes 1 --batch-tokens 4M" + _QUICK),
    Row("-m 1b -g 8 --days 30" + _QUICK),
    Row("-m 1b -g 8 --finetune" + _QUICK),
    Row("-m 1b -g 8 --tier spine:*:400Gb/s" + _QUICK),
    Row("-m 1b -g 8 --assume network_gb_per_s=400Gb/s" + _QUICK),
    Row("-m 1b -g 8 --fastest" + _QUICK),
    Row("help sweep"),
    Row("-m 14b -g 8", "'14b'", "qwen3-14b", "evaluate -m qwen3-14b -g 8 --tp 8"),
    Row("-m Qwen/Qwen2.6-VL-7B -g 8", "no such file", "qwen2.5-7b", "evaluate -m qwen2.5-7b -g 8 --tp 2"),
    Row("-m 1b -g 16 --tp 4 --pp 4 --dp 4", "64 ranks, more than 16 GPUs", "--pp 1 works",
        "-m 1b -g 16 --tp 4 --pp 1 --dp 4 --top 1"),
    Row("-m 1b -g 8 --oom-risk 5", "--oom-risk", "0.05", "-m 1b -g 8 --oom-risk 5%" + _QUICK),
    Row("-m 1b -g 8 --tokens 15", "one step", "--tokens 15T", "-m 1b -g 8 --tokens 15T" + _QUICK),
    Row("-m 8b -g 8 --schedule zb", "unknown 'zb'", "--runtime automodel has zb-v",
        "-m 8b -g 8 --schedule zb-v --runtime automodel --pp 2 --top 1 -q"),
    Row("-m 1b -g 8 --lora --tp 2", "shards weights alone", "--tp 1 works", "-m 1b -g 8 --lora --tp 1 --top 1 -q"),
    Row("compare one.json", "1 file", "name two"),
    Row("export", "PLAN.json", "-o plan.json makes one"),
    Row("memory", "PLAN.json", "-o plan.json makes one"),
    Row("export plan.json", "--to", "megatron|"),
    Row("-m kimi-k2.5 -g 16", "alone take", "it fits on"),
    Row("-m 70b -g 4 -s 4k -b 8", "GiB a GPU at least", "train adapters beside frozen weights: --lora --runtime hf",
        "-m 70b -g 4 -s 4k -b 8 --lora --runtime hf --top 1 -q"),
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.typed)
def test_a_message_says_what_its_reader_needs(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    code, error, hint = failure(shlex.split(row.typed), capsys)
    assert (code == 0) == (not row.says), error
    assert row.says in error
    assert row.hint in hint
    # reasons are words, without codes and how often each held
    assert " × " not in error.replace(" × h100", "")
    if row.then:
        assert main(shlex.split(row.then)) == 0


def test_switches_that_save_memory_come_before_more_gpus(caplog: pytest.LogCaptureFixture) -> None:
    from planner import ClusterSpec, TrainingSpec, plan

    found = plan(
        "mixtral", ClusterSpec(hardware="a100-40gb", num_gpus=16), TrainingSpec(seq_length=4096, global_batch_size=1024)
    )
    assert found.best.recipe["optimizer_offload"] in (0.5, 1.0)
    assert "optimizer_offload" in found.best.warnings[0]


def test_within_a_percent_the_robust_layout_in_few_chunks_comes_first() -> None:
    from planner import ClusterSpec, SearchLimits, TrainingSpec, plan

    cluster, training = (
        ClusterSpec(hardware="h100", num_gpus=128),
        TrainingSpec(seq_length=32768, global_batch_size=128),
    )
    found = plan("70b", cluster, training)
    fastest = plan("70b", cluster, training, limits=SearchLimits(fastest=True))
    reason = found.best.recommendation
    assert reason is not None
    assert fastest.best.recommendation is None
    assert reason.fastest_step_s == pytest.approx(fastest.step.step_s, rel=1e-6)
    assert 1 <= found.step.step_s / fastest.step.step_s <= 1.01
    shorter = plan("70b", cluster, training.model_copy(update={"seq_length": 16384})).best.recommendation
    assert shorter is not None
    assert shorter.chunks < shorter.fastest_chunks
    assert reason.worst_loss_fraction is not None
    assert reason.fastest_worst_loss_fraction is not None
    assert reason.worst_loss_fraction < 0.02 < reason.fastest_worst_loss_fraction
    assert found.search is not None
    assert fastest.search is not None
    assert found.search.gap == pytest.approx(fastest.search.gap, abs=1e-6)


def test_a_narrow_dtype_says_its_scales_and_takes_no_consent() -> None:
    from planner import ClusterSpec, Parallelism, SearchLimits, TrainingSpec, evaluate, plan

    cluster = ClusterSpec(hardware="h100", num_gpus=8)
    training = TrainingSpec(seq_length=4096, global_batch_size=64, dtype="fp8")
    found = plan("1b", cluster, training, limits=SearchLimits(tp=(1,), pp=(1,), top=1))
    assert found.best.recipe["bf16_gradients"] is False
    assert found.best.narrow_scaling is not None
    assert (found.best.narrow_scaling.scaling, found.best.narrow_scaling.published) == ("tensorwise", None)
    layout = Parallelism(tp=1, pp=8, ep=8, dp=128)
    mixture = evaluate("deepseek-v3", ClusterSpec(hardware="h100", num_gpus=1024), training.model_copy(
        update={"global_batch_size": 15360}), layout)  # fmt: skip
    assert mixture.best.narrow_scaling is not None
    assert mixture.best.narrow_scaling.published == "blockwise"


def test_two_jobs_that_are_compared_are_said_to_be_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, job in (("a", "-m 8b -g 8 -b 64 --tp 2"), ("b", "-m 1b -g 32 -b 256 --tp 1")):
        words = f"evaluate {job} -s 4k -q -o {tmp_path / name}.json"
        assert main(shlex.split(words)) == 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    said = " ".join(capsys.readouterr().out.split("What differs")[0].split())
    assert "× as many tokens a second, with another model, 4 × the GPUs, another batch" in said


def test_a_layout_in_fewer_chunks_recomputes_what_was_asked_for() -> None:
    from planner import ClusterSpec, SearchLimits, TrainingSpec, plan

    cluster = ClusterSpec(hardware="a100", num_gpus=128)
    limits = SearchLimits(recompute=("full",), pp=(8,))
    found = plan("llama-3.1-70b", cluster, TrainingSpec(seq_length=8192, global_batch_size=1024), limits=limits)
    assert found.best.recommendation.chunks < found.best.recommendation.fastest_chunks
    assert {mode for stage in found.stages for mode, count in stage.recompute.items() if count} == {"full"}
    assert found.search is not None
    assert found.step.step_s >= found.search.lower_bound_s
