"""Signals beside the steps: memory over steps, waits for data, retries of the allocator, slow ranks and clocks."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_observe_trainers import BATCH, LINE, OLD
from written import iteration, read

from planner.observe.observation import MemorySeries, Observation
from planner.observe.record import MOST_VALUES, RunRecord
from planner.specs.units import GB, GIB, MIB

# megatron/core/README_STRAGGLER.md
STRAGGLER = (
    " 0: INFO:megatron.core.utils:[2024-03-14 23:07:56] | MnRtt/Rnk: 3453.08ms/8 | MxRtt/Rnk: 3468.20ms/0 | "
    "MnPwr/Rnk: 601796W/8 | MxPwr/Rnk: 683801W/18 | MnTmp/Rnk: 52C/0 | MxTmp/Rnk: 65C/21 | MnUtl/Rnk: 97%/8 | "
    "MxUtl/Rnk: 100%/6 | MnClk/Rnk: 1950MHz/28 | MxClk/Rnk: 1980MHz/0 | MnDRtt/Rnk: 14.27ms/23 | "
    "MxDRtt/Rnk: 34.65ms/3 | MnEtpt/Rnk: 296.02TF/0 | MxEtpt/Rnk: 297.32TF/8"
)


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


def test_torchtitan_memory_over_steps(tmp_path: Path) -> None:
    lines = [
        LINE.replace("step: 200", f"step: {200 + step}").replace("50,322", f"{50 + step},322").replace("49.66", size)
        for step, size in enumerate(("49.66", "49.70", "50.10", "51.00"))
    ]
    seen = series(read(tmp_path, "\n".join(lines)), "reserved", True)
    assert (seen.rank, seen.steps) == (0, (200, 201, 202, 203))
    assert seen.num_bytes == tuple(round(size * GIB) for size in (49.66, 49.7, 50.1, 51.0))


def test_deepspeed_memory_in_use_and_at_most(tmp_path: Path) -> None:
    # DeepSpeed issue 522
    usage = (
        "[2022-02-21 23:35:27,338] [INFO] [utils.py:827:see_memory_usage] MA 4.96 GB         Max_MA 5.09 GB         "
        "CA 6.39 GB         Max_CA 6 GB"
    )
    seen = read(tmp_path, "\n".join([BATCH, *(OLD.format(step) for step in (10, 20, 30)), usage]))
    now = series(seen, "allocated", False)
    assert (now.steps, now.num_bytes) == ((10, 20, 30), tuple(round(size * GIB) for size in (1.75, 1.75, 4.96)))
    assert seen.memory[0].max_reserved_bytes == round(6.39 * GIB)
    assert seen.peak_memory_bytes == round(5.09 * GIB)


def test_bridge_and_primus_memory_over_steps(tmp_path: Path) -> None:
    bridge = [
        f"{iteration(step, 2.0)} mem-allocated-gigabytes: {10 + step} | mem-max-allocated-gigabytes: {20 + step} |"
        for step in range(1, 4)
    ]
    seen = read(tmp_path, "\n".join(bridge))
    assert series(seen, "allocated", False).num_bytes == (11 * GB, 12 * GB, 13 * GB)
    assert series(seen, "allocated", True).num_bytes == (21 * GB, 22 * GB, 23 * GB)
    primus = [
        f"{iteration(step, 2.0)} hip mem usage/free/total/usage_ratio: {100 + step}.00GB/73.00GB/191.00GB/61.48% |"
        for step in range(1, 4)
    ]
    assert series(read(tmp_path, "\n".join(primus)), "device", False).num_bytes == (101 * GIB, 102 * GIB, 103 * GIB)


def test_nemo_memory_over_steps(tmp_path: Path) -> None:
    # NeMo issue 14850
    line = (
        " 0: Training epoch 0, iteration {0}/29 | lr: 5.389e-06 | global_batch_size: 512 | global_step: {0} | "
        "max_memory_reserved: 57466159104 | max_memory_allocated: 53930270720 | reduced_train_loss: 10.22 | "
        "train_step_timing in s: 27.01 | consumed_samples: 4608 | TFLOPS_per_GPU: 48.58"
    )
    seen = read(tmp_path, "\n".join(line.format(step) for step in range(8, 11)))
    assert series(seen, "reserved", True).num_bytes == (57466159104,) * 3
    assert (seen.peak_memory_bytes, seen.peak_memory_kind) == (53930270720, "allocated")


def test_columns_of_a_table(tmp_path: Path) -> None:
    head = "step,step_time_s,memory/max_reserved(GiB),mem_gb,time_metrics/data_loading(s),memory/num_alloc_retries"
    rows = [f"{step},2.0,{40 + step},{30 + step},{0.5 if step == 4 else 0.1},{step}" for step in range(1, 5)]
    seen = read(
        tmp_path, "\n".join([f"{head},gpu_power_w,sm_clock_mhz,cpu_mem_gb", *(f"{row},690,1755,900" for row in rows)])
    )
    assert series(seen, "reserved", True).num_bytes == tuple((40 + step) * GIB for step in range(1, 5))
    assert series(seen, "device", False).num_bytes[-1] == 34 * GB
    assert seen.data_s == pytest.approx(0.2)
    assert (seen.num_alloc_retries, seen.watts_per_gpu, seen.clock_mhz) == (4, 690, 1755)
    assert any("mem_gb" in note and "10^9" in note for note in seen.notes)


def test_torchtitan_metrics_exported_as_a_table(tmp_path: Path) -> None:
    seen = read(
        tmp_path, "Step,time_metrics/end_to_end(s),memory/max_active(GiB)\n10,1.4,44.1\n20,1.5,44.2\n30,1.4,44.3\n"
    )
    assert (seen.step_s, series(seen, "allocated", True).num_bytes[-1]) == (1.4, round(44.3 * GIB))


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
    assert seen.data_s == pytest.approx(0.109)


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


def test_the_newer_straggler_line_counts_batches_in_microseconds(tmp_path: Path) -> None:
    line = STRAGGLER.replace("34.65ms/3", "34650.00us/3").replace("14.27ms/23", "14270.00us/23")
    assert read(tmp_path, f"{iteration(1, 5.0)}\n{line}").data_s == pytest.approx(0.03465)


def test_retries_and_out_of_memory(tmp_path: Path) -> None:
    # torchtitan pull request 2389, PyTorch issue 193195
    titan = "[titan] 2026-02-24 19:41:0{0},031 - root - WARNING - {1} CUDA memory allocation retries."
    later = LINE.replace("step: 200", "step: 210").replace("22:30:50,322", "22:31:04,322")
    seen = read(tmp_path, "\n".join([LINE, titan.format(1, 9), titan.format(1, 4), later, titan.format(2, 12)]))
    assert (seen.num_alloc_retries, seen.num_ooms) == (12, None)
    torch = (
        "[rank1]:[W812 16:00:28.643448608 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 1 "
        "while trying to allocate 20971520 bytes (free: 15794176, total: 150111977472)."
    )
    oom = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total …"
    seen = read(tmp_path, "\n".join([iteration(1, 2.0), torch, torch, iteration(2, 2.0), oom]))
    assert (seen.num_alloc_retries, seen.num_ooms) == (2, 1)


def test_a_log_without_them_leaves_them_open(tmp_path: Path) -> None:
    seen = read(tmp_path, iteration(1, 2.0))
    assert (seen.memory_series, seen.rank_spreads, seen.data_s, seen.num_alloc_retries) == ((), (), None, None)


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
