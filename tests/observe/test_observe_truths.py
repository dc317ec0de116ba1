"""Numbers that a log must not be read for, and those that it must: each with the truth that its own lines have."""

from pathlib import Path

import pytest
from written import BEGIN_S, LLAMA_8B, TABLES, arguments, iteration, iterations, mllog, read

from planner.errors import SpecError
from planner.observe.gap_rows import RunFiles
from planner.observe.judge import shown_rows
from planner.observe.observation import MemorySeries, Observation
from planner.observe.record import MOST_VALUES, RunRecord
from planner.specs.units import GIB, MIB


def gpt3(step_s: float, evaluations: int, counted: bool = True) -> str:
    """MLPerf's GPT-3 as Habana logs it in 3.1: one block, an evaluation every 12 steps, 66 s each."""
    lines = [mllog("global_batch_size", 2048, BEGIN_S), mllog("max_sequence_length", 2048, BEGIN_S)]
    tokens = 12 * 2048 * 2048
    lines.append(mllog("block_start", None, BEGIN_S, first_epoch_num=0, **({"epoch_count": tokens} if counted else {})))
    at_s = float(BEGIN_S)
    for number in range(1, evaluations + 1):
        at_s += 12 * step_s
        lines.append(mllog("eval_start", None, at_s, epoch_num=number * tokens))
        at_s += 66.0
        lines.append(mllog("eval_stop", None, at_s, epoch_num=number * tokens))
    return "\n".join([*lines, mllog("block_stop", None, at_s + 0.04, first_epoch_num=0)])


@pytest.mark.parametrize("counted", [True, False])
def test_a_block_is_cut_at_the_evaluations_inside_of_it(tmp_path: Path, counted: bool) -> None:
    seen = read(tmp_path, gpt3(40.0, 24, counted))
    assert (seen.step_s, seen.num_steps) == (pytest.approx(40.0, rel=1e-4), 24 * 12)
    assert seen.tokens_per_s == pytest.approx(2048 * 2048 / 40.0, rel=1e-4)
    assert seen.wall.evaluation_s == pytest.approx(24 * 66.0)


@pytest.mark.parametrize("factor", [3.0, 0.5])
def test_a_step_that_the_clock_contradicts_is_not_said(tmp_path: Path, factor: float) -> None:
    lines = (iteration(number, 9.0, BEGIN_S + factor * 9.0 * number) for number in range(1, 30))
    seen = read(tmp_path, "\n".join(lines))
    assert seen.step_s is None
    assert "9 s" in seen.notes[0]
    assert f"{9 * factor:g} s" in seen.notes[0]


def test_a_step_that_tokens_a_second_contradict_is_not_said(tmp_path: Path) -> None:
    dump = arguments(**LLAMA_8B)
    steps = [
        line.replace("| lm loss", "| tokens-per-second-per-gpu: 3640.9 | lm loss") for line in iterations([9.0] * 9)
    ]
    assert "tokens-per-second-per-gpu" in steps[0]
    seen = read(tmp_path, "\n".join([dump, *steps]))  # 128 × 8,192 tokens in 18 s on 16 GPUs
    assert seen.step_s is None
    assert "18 s by its tokens per second" in seen.notes[0]


def test_a_batch_that_grows_contradicts_nothing(tmp_path: Path) -> None:
    dump, speed = arguments(**LLAMA_8B), "| tokens-per-second-per-gpu: 7281.8 | lm loss"
    grown = [iteration(n, 2.25 if n < 20 else 9.0, batch=32 if n < 20 else 128) for n in range(1, 31)]
    seen = read(tmp_path, "\n".join([dump, *(line.replace("| lm loss", speed) for line in grown)]))
    assert seen.step_s == 2.25


def test_two_layouts_in_one_file_are_two_runs(tmp_path: Path) -> None:
    first = [arguments(**LLAMA_8B), *iterations([9.0] * 20)]
    again = [arguments(**LLAMA_8B), *iterations([9.0] * 20, first=21, begin_s=BEGIN_S + 900)]
    other = [arguments(**{**LLAMA_8B, "tensor_model_parallel_size": 4}), *iterations([6.0] * 20, begin_s=BEGIN_S + 900)]
    assert read(tmp_path, "\n".join([*first, *again])).num_steps == 40
    seen = read(tmp_path, "\n".join([*first, *other]))
    assert (seen.step_s, seen.num_steps) == (6.0, 20)
    assert seen.facts.run["parallelism"]["tp"] == 4
    assert any(note.startswith("20 lines of steps before") for note in seen.notes)


@pytest.mark.parametrize(("steps", "first", "step_s"), TABLES["a_run_begun_anew_in_another_way_is_another"])
def test_a_run_begun_anew_in_another_way_is_another(
    tmp_path: Path, steps: list[float], first: int, step_s: float
) -> None:
    again = iterations(steps, first=first, begin_s=BEGIN_S + 900)
    assert read(tmp_path, "\n".join([*iterations([9.0] * 30), *again])).step_s == step_s


def test_steps_of_two_kinds_have_no_median(tmp_path: Path) -> None:
    seen = read(tmp_path, "\n".join(iterations([5.0, 9.0] * 20)))
    assert (seen.step_s, "of 5 and of 9 s" in seen.notes[0]) == (None, True)


@pytest.mark.parametrize(("steps", "step_s"), [([40.0, 9.0], 9.0), ([9.0, 9.5], 9.25), ([14.0, 9.0, 9.0], 9.0)])
def test_a_slow_first_line_of_few_is_a_warm_up(tmp_path: Path, steps: list[float], step_s: float) -> None:
    assert read(tmp_path, "\n".join(iterations(steps))).step_s == step_s


@pytest.mark.parametrize(("line", "what", "hint"), TABLES["a_file_that_is_not_read_says_what_it_looks_like"])
def test_a_file_that_is_not_read_says_what_it_looks_like(tmp_path: Path, line: str, what: str, hint: str) -> None:
    with pytest.raises(SpecError, match=what) as refused:
        read(tmp_path, f"{line}\n" * 5)
    assert hint in refused.value.hint


def bars(total: int, every: int, step_s: float, begin_s: float = 0.0) -> list[str]:
    """A progress bar as tqdm prints it, after `begin_s` of compiling in its first step."""
    rows = []
    for step in range(0, total + 1, every):
        at_s = int(begin_s * (step > 0) + step * step_s)
        clock_ = f"{at_s // 3600}:" * (at_s >= 3600) + f"{at_s // 60 % 60:02d}:{at_s % 60:02d}"
        rows.append(f"{100 * step // total:3d}%|####      | {step}/{total} [{clock_}<15:21,  {step_s:.2f}s/it]")
    return rows


def test_progress_bars_of_trainers(tmp_path: Path) -> None:
    head = TABLES["progress_bars_of_trainers"]
    loads = ["Loading checkpoint shards: 100%|##########| 4/4 [05:10<00:00,  2.59s/it]"]
    seen = read(tmp_path, "\r".join(["\n".join([*head, *loads]), *bars(1200, 3, 1.68, 40.0), *bars(50, 1, 0.2)]))
    assert (
        seen.sources[0].format, seen.facts.global_batch_size, seen.facts.num_steps_asked,
    ) == ("progress bar", 128, 1200)  # fmt: skip
    assert seen.step_s == pytest.approx(1.68, rel=0.02)
    tune = [f"1|{n}|Loss: 0.91: {bar}" for n, bar in enumerate(bars(400, 1, 2.5))]
    told = read(tmp_path, "\n".join(tune))
    assert (told.facts.trainer, told.step_s) == ("torchtune", pytest.approx(2.5, rel=0.02))
    both = [*bars(400, 1, 2.5), *iterations([9.0] * 40)]
    assert read(tmp_path, "\n".join(both)).step_s == 9.0  # a trainer's own lines say it better
    done = (
        "{'train_runtime': 512.3, 'train_samples_per_second': 25.0, 'train_steps_per_second': 0.195, 'train_loss': 1.2}"
    )
    mean = read(tmp_path, done)
    assert (mean.step_s, mean.num_steps) == (pytest.approx(5.123), 100)


def test_files_and_short_excerpts_of_trainers_with_a_clock(tmp_path: Path) -> None:
    rows = (
        f'{{"current_steps": {n}, "total_steps": 300, "epoch": 0.3, "elapsed_time": "0:{s // 60:02d}:{s % 60:02d}"}}'
        for n, s in ((n, int(5.1 * n)) for n in range(5, 305, 5))
    )
    factory = read(tmp_path, "\n".join(rows))  # LLaMA-Factory's trainer_log.jsonl
    assert factory.step_s == pytest.approx(5.1, rel=0.01)
    assert any("begins at step 6" in note for note in factory.notes)  # the first line only says when it was
    two = (" 30%|###   | 258/873 [22:15<43:27,  4.24s/it]", " 30%|###   | 260/873 [22:24<43:01,  4.21s/it]")
    assert read(tmp_path, "\n".join(two)).step_s == 4.21  # the clock confirms the rate to the second
    odd = (" 1%|#  | 2/203 [00:12<16:46,  5.01s/it]", " 1%|#  | 3/203 [00:20<19:53,  5.97s/it]")
    few = "{'train_runtime': 41.2, 'train_steps_per_second': 0.073, 'train_loss': 1.6553}"
    for text in ("\n".join(odd), few):
        with pytest.raises(SpecError, match="no lines of steps"):
            read(tmp_path, text)


OUT_OF_MEMORY = TABLES["out_of_memory"]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (OUT_OF_MEMORY.format("5.30"), {"fragmentation", "out_of_memory"}),
        (OUT_OF_MEMORY.format("0.30"), {"out_of_memory"}),
        (TABLES["old_one"], {"out_of_memory"}),
        (TABLES["watchdog"], {"hang"}),
    ],
)
def test_errors_are_read_without_a_step(tmp_path: Path, line: str, names: set[str]) -> None:
    seen = read(tmp_path, line)
    assert (seen.sources[0].format, seen.step_s) == ("errors", None)
    assert {cause.name for cause in shown_rows(RunFiles(seen))} == names
    for failed in seen.failed_allocations:
        assert failed.requested_bytes in (2 * GIB, GIB // 2)
        assert failed.total_bytes is not None
    for hung in seen.hung_collectives:
        assert (hung.rank, hung.sequence, hung.num_elements, hung.seconds) == (4, 1580, 466119168, 600.067)


def test_rows_of_kin_that_count_otherwise(tmp_path: Path) -> None:
    endless = "\n".join(iteration(number, 2.5).replace("     500 |", "infinity |") for number in range(1, 9))
    counted = "\n".join(f"step:{n}/900 train_time:{150 * n + 9000}ms step_avg:1.00ms" for n in range(1, 400))
    assert read(tmp_path, endless).step_s == 2.5
    assert read(tmp_path, counted).step_s == pytest.approx(0.15, rel=1e-3)


# megatron/core/README_STRAGGLER.md
STRAGGLER = TABLES["straggler"]


def series(seen: Observation, kind: str, is_peak: bool) -> MemorySeries:
    (found,) = (row for row in seen.memory_series if row.kind == (f"max_{kind}" if is_peak else kind))
    return found


def report(rank: int, step: int, allocated: float, peak: float) -> str:
    """Megatron-LM's line of `--log-memory-interval`."""
    return (
        f"[Rank {rank}] (after {step} iterations) memory (MB) | allocated: {allocated:.2f} | max allocated: {peak:.2f} "
        "| reserved: 7000.00 | max reserved: 7000.00"
    )


def test_megatron_memory_over_steps_is_the_fullest_ranks(tmp_path: Path) -> None:
    lines = [
        line
        for step in range(1, 5)
        for line in (iteration(step, 2.0), report(0, step, 5000, 6000), report(4, step, 5000 + 10 * step, 6500))
    ]
    seen = read(tmp_path, "\n".join(lines))
    allocated, reserved = series(seen, "allocated", False), series(seen, "reserved", True)
    assert (allocated.rank, allocated.steps) == (4, (1, 2, 3, 4))
    assert allocated.num_bytes == tuple((5000 + 10 * step) * MIB for step in range(1, 5))
    assert series(seen, "allocated", True).num_bytes == (6500 * MIB,) * 4
    assert (reserved.rank, set(reserved.num_bytes)) == (0, {7000 * MIB})


def test_megatron_waits_for_batches(tmp_path: Path) -> None:
    timer = "    batch-generator ................................: ({low:.2f}, {high:.2f})"
    blocks = [
        line
        for step in range(1, 11)
        for line in (
            iteration(step, 2.0),
            "(min, max) time across ranks (ms):",
            timer.format(low=1, high=1000 if step == 7 else 10),
        )
    ]
    seen = read(tmp_path, "\n".join(blocks))
    (found,) = seen.timers
    assert found.max_s == 0.01
    assert seen.data_s == pytest.approx(0.12)  # of nine steps behind the first


def test_the_straggler_line_has_clocks_power_and_the_ranks(tmp_path: Path) -> None:
    other = STRAGGLER.replace("1950MHz/28", "1410MHz/28").replace("MxRtt/Rnk: 3468.20ms/0", "MxRtt/Rnk: 3500ms/5")
    seen = read(tmp_path, "\n".join([iteration(1, 5.0), STRAGGLER, iteration(2, 5.0), other]))
    found = {spread.name: spread for spread in seen.rank_spreads}
    clock, power, trip = found["clock_mhz"], found["power_w"], found["round_trip_s"]
    assert (clock.low, clock.low_rank, clock.low_share, clock.high, clock.num_values) == (1680, 28, 1.0, 1980, 2)
    assert (power.low, power.high_rank) == (pytest.approx(601.796), 18)
    assert (trip.high_share, trip.low_rank) == (0.5, 8)
    assert (found["utilization_fraction"].low, found["temperature_c"].high) == (0.97, 65)
    assert seen.data_s == pytest.approx(0.03465)


def test_the_parts_of_a_run_have_one_series(tmp_path: Path) -> None:
    first = [line for step in (1, 2) for line in (iteration(step, 2.0, 1e9 + step), report(0, step, step, step))]
    later = [line for step in (3, 4) for line in (iteration(step, 2.0, 2e9 + step), report(0, step, step, step))]
    seen = read(tmp_path, "\n".join(later), "\n".join(first))
    assert sorted(series(seen, "allocated", True).steps) == [1, 2, 3, 4]


def test_a_series_never_grows_beyond_its_limit() -> None:
    record = RunRecord("table")
    for step in range(3 * MOST_VALUES + 1):
        record.bytes_of(None, step, device_bytes=1000.0 if step == 5001 else 1.0 + step % 7)
    ((_, series),) = record.memory_series.items()
    assert len(series) <= MOST_VALUES
    assert (series[-1][0], max(value for _, value in series)) == (3 * MOST_VALUES, 1000.0)
    assert [step for step, _ in series] == sorted({step for step, _ in series})
