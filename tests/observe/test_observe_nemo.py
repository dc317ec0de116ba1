"""NeMo's lines and MLPerf's log, in the forms of 4.1, 5.0 and 5.1. Real values are marked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from written import BEGIN_S, mllog, mlperf, read

from planner.errors import SpecError
from planner.specs.units import GIB


@pytest.mark.parametrize("version", ["4.1", "5.0", "5.1"])
def test_a_step_is_a_step_and_a_block_none(tmp_path: Path, version: str) -> None:
    seen = read(tmp_path, mlperf([55.0, 54.0, 54.0, 54.0], version))
    assert seen.sources[0].format == "mlperf"
    assert seen.series.steps == (1, 2, 3, 4)
    assert (seen.step_s, seen.num_steps) == (54.0, 4)
    assert seen.facts.global_batch_size == 1152
    assert seen.tokens_per_s == pytest.approx(1152 * 8192 / 54)
    assert seen.facts.num_gpus == 8
    assert seen.facts.trainer == "nemo"


def test_steps_evaluation_and_start_up_are_the_wall_time(tmp_path: Path) -> None:
    seen = read(tmp_path, mlperf([55.0, 54.0, 54.0]))
    assert seen.wall.model_dump() == pytest.approx(
        {
            "wall_s": 483.0, "startup_s": 300.0, "steps_s": 163.0, "evaluation_s": 20.0, "checkpoint_s": 0.0,
            "down_s": 0.0, "idle_s": 0.0, "overlap_s": 0.0,
        }
    )  # fmt: skip
    assert seen.peak_memory_bytes == round(58.817 * GIB)


def test_a_block_counted_as_a_step_would_show_as_time_counted_twice(tmp_path: Path) -> None:
    text = mlperf([50.0, 50.0]).replace('"throughput"', '"elsewhere"').replace('"step": 0}', '"step": 3456.0}')
    wall = read(tmp_path, text).wall
    assert wall.error_fraction == pytest.approx(50 / wall.wall_s)


def test_an_evaluation_without_a_start_is_told_by_its_steps(tmp_path: Path) -> None:
    lines = [line for line in mlperf([50.0, 50.0]).splitlines() if "eval_start" not in line]
    at = next(index for index, line in enumerate(lines) if "eval_stop" in line)
    steps = [mllog("tracked_stats", {"validation_step_time": 10.0}, BEGIN_S + 410 + 10 * i, step=1) for i in range(2)]
    wall = read(tmp_path, "\n".join([*lines[:at], *steps, *lines[at:]])).wall
    assert (wall.evaluation_s, wall.idle_s) == (20.0, 0.0)


def test_blocks_stand_in_for_steps_that_are_not_recorded(tmp_path: Path) -> None:
    def block(key: str, at_s: float) -> str:
        return mllog(key, None, BEGIN_S + at_s, epoch_count=9 * 1024 * 2048, first_epoch_num=0)

    lines = [mllog("global_batch_size", 1024, BEGIN_S), mllog("max_sequence_length", 2048, BEGIN_S)]
    lines += [block("block_start", 0), block("block_stop", 18), block("block_start", 20), block("block_stop", 38)]
    seen = read(tmp_path, "\n".join(lines))
    assert (seen.step_s, seen.num_steps) == (2.0, 18)


def lora(block_start: int | None = None, samples: tuple[int, ...] = (1536, 1920, 2304)) -> str:
    """A log of llama2_70b_lora in the form of 4.0 to 5.1, whose blocks' own counts differ from round to round."""
    lines = [mllog("global_batch_size", 8, BEGIN_S), mllog("lora_rank", 16, BEGIN_S)]
    at_s, before = float(BEGIN_S), 0
    for trained in samples:
        lines.append(mllog("block_start", None, at_s, samples_count=before if block_start is None else block_start))
        at_s += 2.0 * (trained - before) / 8
        lines.append(mllog("tracked_stats", {"throughput": 4.0}, at_s, step=trained))
        lines.append(mllog("block_stop", None, at_s, samples_count=before))
        lines.append(mllog("eval_start", None, at_s, samples_count=trained))
        at_s += 30.0
        lines.append(mllog("eval_stop", None, at_s, samples_count=trained))
        before = trained
    return "\n".join(lines)


@pytest.mark.parametrize("block_start", [None, 4224])
def test_blocks_of_samples_are_told_by_the_evaluations_between_them(tmp_path: Path, block_start: int | None) -> None:
    seen = read(tmp_path, lora(block_start))
    assert (seen.step_s, seen.num_steps) == (2.0, 288)
    assert seen.series.steps == (192, 240, 288)
    assert seen.facts.lora_rank == 16


def test_samples_that_are_no_whole_steps_are_no_blocks(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no lines of steps"):
        read(tmp_path, lora(samples=(1537, 1920)))


def test_lines_cut_off_are_left_out_and_said(tmp_path: Path) -> None:
    text = mlperf([50.0] * 5)
    seen = read(tmp_path, text[:-200] + "\n:::MLLOG {\n:::MLLOG []\n")
    assert seen.num_steps == 5
    assert any("cut off" in note for note in seen.notes)


def test_lines_of_progress(tmp_path: Path) -> None:
    line = (
        "Training epoch 0, iteration {0}/149 | lr: 3e-05 | consumed_samples: {0} | global_batch_size: 32 | "
        "global_step: {0} | reduced_train_loss: 1.2 | TFLOPS_per_GPU: 812 | train_step_timing in s: 5.17 | val_loss: 4"
    )
    seen = read(tmp_path, "\n".join(line.format(step) for step in range(120, 130)))
    assert (seen.step_s, seen.series.steps[0], seen.num_steps) == (5.17, 120, 10)
    assert (seen.facts.global_batch_size, seen.printed_tflops_per_gpu) == (32, 812)


PARAMETERS = {
    # of gpu-recipes' GPT-3 175B
    "cfg/micro_batch_size": 1, "cfg/global_batch_size": 2048, "cfg/tensor_model_parallel_size": 4,
    "cfg/pipeline_model_parallel_size": 8, "cfg/virtual_pipeline_model_parallel_size": 2,
    "cfg/encoder_seq_length": 2048, "cfg/max_position_embeddings": 2048, "cfg/num_layers": 96,
    "cfg/hidden_size": 12288, "cfg/ffn_hidden_size": 49152, "cfg/num_attention_heads": 96,
}  # fmt: skip


def dllogger(means_s: list[float], times_s: list[float]) -> str:
    lines = [{"timestamp": str(BEGIN_S), "step": "PARAMETER", "data": PARAMETERS}]
    for step, (mean_s, at_s) in enumerate(zip(means_s, times_s, strict=True)):
        data = {"reduced_train_loss": 11.0, "train_step_timing in s": mean_s}
        lines.append({"timestamp": str(BEGIN_S + at_s), "step": step, "data": data})
    return "\n".join("DLLL " + json.dumps(line) for line in lines)


def test_dllogger_prints_means_of_steps_whose_seconds_the_clock_says(tmp_path: Path) -> None:
    # the means that the recipe's file has: each is over the steps so far
    seen = read(tmp_path, dllogger([107.4, 66.4, 52.8, 46.0], [411.0, 436.6, 462.2, 487.9]))
    assert seen.series.seconds == pytest.approx((107.4, 25.6, 25.6, 25.7))
    assert seen.step_s == pytest.approx(25.6)
    assert seen.num_warmup_steps == 1


def test_dllogger_carries_its_configuration(tmp_path: Path) -> None:
    facts = read(tmp_path, dllogger([107.4], [411.0])).facts
    assert (facts.global_batch_size, facts.seq_length) == (2048, 2048)
    layout = facts.run["parallelism"]
    assert (layout["tp"], layout["pp"], layout["vpp"]) == (4, 8, 2)
    assert facts.run["model"]["num_hidden_layers"] == 96
