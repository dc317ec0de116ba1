"""The lines of Megatron-LM and its kin. Lines marked with a source are real and quoted; the others are written here.

nanotron's line, whose three digits limit what is known of a step.
NeMo's lines and MLPerf's log, in the forms of 4.1, 5.0 and 5.1. Real values are marked.
"""

from pathlib import Path

import pytest
from written import BEGIN_S, LLAMA_8B, TABLES, TIMERS, arguments, clock, iterations, mllog, mlperf, read

from planner.errors import SpecError
from planner.observe.observation import Observation
from planner.specs.units import GIB, MIB

# Megatron-LM issue 756: Mixtral on 16 H100
ITERATION = TABLES["iteration"]
MEMORY = TABLES["memory"]


def test_memory_is_in_mebibytes_for_each_rank(tmp_path: Path) -> None:
    seen = read(tmp_path, f"{ITERATION}\n{MEMORY}\n{MEMORY.replace('Rank 0', 'Rank 8').replace('6245.04', '7000.00')}")
    assert [(rank.rank, rank.max_allocated_bytes) for rank in seen.memory] == [
        (0, round(6245.04 * MIB)),
        (8, 7000 * MIB),
    ]
    assert (seen.peak_memory_bytes, seen.peak_memory_kind) == (7000 * MIB, "allocated")


def test_timers_with_least_and_most(tmp_path: Path) -> None:
    seen = read(tmp_path, f"{ITERATION}\n{TIMERS}")
    timers = {timer.name: (timer.min_s, timer.max_s) for timer in seen.timers}
    assert timers["forward-compute"] == pytest.approx((2.58492, 2.73566))
    assert seen.breakdown["forward_backward_s"] == pytest.approx(5.17715)
    assert seen.breakdown["optimizer_s"] == pytest.approx(0.07313)
    assert sum(seen.breakdown.values()) == pytest.approx(seen.step_s)


def test_timers_with_the_greatest_alone(tmp_path: Path) -> None:
    text = f"{ITERATION}\nmax time across ranks (ms):\n    optimizer ......................................: 73.13\n"
    timers = read(tmp_path, text).timers
    assert [(timer.name, timer.max_s) for timer in timers] == [("optimizer", pytest.approx(0.07313))]


def test_timers_on_one_line(tmp_path: Path) -> None:
    # Megatron-LM issue 184
    text = f"{ITERATION}\ntime (ms) | forward-compute: 604.56 | backward-compute: 701.16 | optimizer: 60.00\n"
    timers = {timer.name: timer.max_s for timer in read(tmp_path, text).timers}
    assert timers == pytest.approx({"forward-compute": 0.60456, "backward-compute": 0.70116, "optimizer": 0.06})


def test_gaps_are_what_the_log_says_happened(tmp_path: Path) -> None:
    head = f"[before the start of training step] datetime: {clock(BEGIN_S)} "
    early, late = iterations([2.0] * 10, begin_s=BEGIN_S + 7), iterations([2.0] * 10, 11, BEGIN_S + 57)
    said = "saving checkpoint at iteration      10 to ckpt\n  successfully saved checkpoint from iteration      10"
    last = iterations([2.0] * 10, 21, BEGIN_S + 97)
    text = "\n".join([head, *early, said, *late, "validation loss at iteration 20 | lm loss value: 2 |", *last])
    wall = read(tmp_path, text).wall
    assert wall.model_dump() == pytest.approx(
        TABLES["gaps_are_what_the_log_says_happened"]
    )  # fmt: skip


def _stated(tmp_path: Path, **changes: object) -> Observation:
    return read(tmp_path, "\n".join([arguments(**{**LLAMA_8B, **changes}), *iterations([5.4] * 5)]))


def test_the_dump_is_the_job(tmp_path: Path) -> None:
    seen = _stated(tmp_path)
    run = seen.facts.run
    assert (seen.facts.num_gpus, seen.facts.seq_length, seen.facts.global_batch_size) == (16, 8192, 128)
    assert run["model"]["num_key_value_heads"] == 8
    assert run["model"]["vocab_size"] == 128256
    assert run["model"].get("moe") is None
    assert run["model"].get("mla") is None
    layout = run["parallelism"]
    assert (layout["tp"], layout["pp"], layout["zero_stage"], layout["sequence_parallel"]) == (2, 2, 1, True)
    assert "etp" not in layout
    assert (run["dtype"], run["features"]["overlap_grad_reduce"]) == ("bf16", True)
    assert seen.tokens_per_s == pytest.approx(128 * 8192 / 5.4)


def test_defaults_of_a_dump_say_nothing_and_values_do(tmp_path: Path) -> None:
    run = _stated(tmp_path, fp8="hybrid", num_query_groups=1, group_query_attention=False).facts.run
    assert run["dtype"] == "fp8"
    assert run["model"]["num_key_value_heads"] == 32
    mixture = _stated(tmp_path, num_experts=8).facts.run
    assert mixture["parallelism"]["etp"] == 2
    assert mixture["features"]["dispatcher"] == "allgather"


def test_a_dump_that_is_no_job_leaves_the_steps(tmp_path: Path) -> None:
    seen = _stated(tmp_path, num_attention_heads="thirty-two")
    assert seen.facts.run == {}
    assert seen.num_steps == 5


def test_ranks_that_print_at_once_leave_several_on_a_line(tmp_path: Path) -> None:
    others = "".join(MEMORY.replace("Rank 0", f"Rank {rank}") for rank in (1, 2))
    seen = read(tmp_path, f"{ITERATION}\n{MEMORY}{others}\n")
    assert [rank.rank for rank in seen.memory] == [0, 1, 2]
    assert {rank.max_reserved_bytes for rank in seen.memory} == {6554 * MIB}


def test_a_dump_of_megatron_deepspeed(tmp_path: Path) -> None:
    more = {"deepspeed": True, "zero_stage": 1, "model_parallel_size": 4, "tensor_model_parallel_size": None}
    facts = _stated(tmp_path, **more).facts
    assert (facts.trainer, facts.run["runtime"]) == ("megatron-deepspeed", "megatron-deepspeed")
    assert facts.run["parallelism"]["zero_stage"] == 1


def test_the_arguments_say_what_comes_as_often(tmp_path: Path) -> None:
    seconds = [3.0 if step % 10 == 0 else 2.0 for step in range(1, 101)]
    dump = arguments(**LLAMA_8B, manual_gc_interval=10)
    (outlier,) = read(tmp_path, "\n".join([dump, *iterations(seconds)])).outliers
    assert (outlier.kind, outlier.period_steps) == ("periodic", 10)
    assert "manual_gc_interval" in outlier.likely


def test_a_dump_of_2021_has_its_batch_beside_it(tmp_path: Path) -> None:
    """bigscience-workshop/bigscience, experiments/gpt2-meg-ds-zero: `batch_size` is a rank's, DeepSpeed says all."""
    old = {"batch_size": 4, "micro_batch_size": None, "global_batch_size": None, "deepspeed": True}
    dump = arguments(**{name: value for name, value in {**LLAMA_8B, **old}.items() if name != "micro_batch_size"})
    said = "[2021-05-25 22:30:04,196] [INFO] [config.py:752:print]   train_batch_size ............. 768"
    facts = read(tmp_path, "\n".join([dump, said, *iterations([9.0] * 9)])).facts
    assert facts.run["parallelism"]["micro_batch_size"] == 4
    assert facts.global_batch_size == 128  # the lines' own, which comes last


LINE = TABLES["line"]


@pytest.mark.parametrize("name", ["elapsed_time_per_iteration_ms", "time_per_iteration_ms"])
def test_three_digits_say_so(tmp_path: Path, name: str) -> None:
    lines = [LINE.replace("elapsed_time_per_iteration_ms", name).format(10 + step, step) for step in range(1, 4)]
    seen = read(tmp_path, "\n".join(lines))
    assert (seen.step_s, seen.sources[0].format) == (1.2, "nanotron")
    assert seen.step_s_precision_fraction == pytest.approx(50 / 1200)
    assert (seen.tokens_per_s, seen.printed_tflops_per_gpu) == (218_000, 49.3)
    assert (seen.peak_memory_bytes, seen.peak_memory_kind) == (547_000_000, "reserved")
    assert seen.facts.global_batch_size == 20


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
        TABLES["steps_evaluation_and_start_up_are_the_wall_time"]
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
