"""Tables of steps, and lines that trainers print in forms of their own."""

from __future__ import annotations

import logging
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
from written import iterations, read

from planner.errors import SpecError
from planner.observe.log_reader import TableColumns


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("step_time_ms", 1e-3), ("step_time_s", 1.0), ("step time (ms)", 1e-3), ("iteration_time [s]", 1.0),
        ("iteration-time", 1.0), ("time_per_iteration_ms", 1e-3), ("elapsed_ms", 1e-3), ("seconds", 1.0),
        ("llama-run - train_step_timing in s", 1.0), ("Iteration Time", 1.0), ("train_step_time", 1.0),
        ("step_duration_us", 1e-6),
    ],
)  # fmt: skip
def test_columns_of_time(name: str, unit: float) -> None:
    columns = TableColumns(["loss", name, "lr"])
    assert columns.found["seconds"][0] == name
    assert columns.values({name: "3"})["seconds"] == pytest.approx(3 * unit)


@pytest.mark.parametrize("name", ["lifetime", "time_ms_total", "loss", "timestamp", "steps", "timeout"])
def test_columns_of_no_time(name: str) -> None:
    assert "seconds" not in TableColumns([name]).found


def test_csv(tmp_path: Path) -> None:
    seen = read(tmp_path, "global_step,step_time_ms,loss\n10,900,3\n11,500,2\n12,510,2\n13,,2\n14,495,1\n15,500,1\n")
    assert (seen.step_s, seen.series.steps) == (0.5, (10, 11, 12, 14, 15))
    assert any("1 rows without a time" in note for note in seen.notes)


def test_a_time_column_is_the_wall_time(tmp_path: Path) -> None:
    rows = "".join(f"{step}\t2.0\t{1_700_000_000 + 3 * step}\n" for step in range(1, 5))
    wall = read(tmp_path, f"step\tstep_time_s\t_timestamp\n{rows}").wall
    assert (wall.steps_s, wall.idle_s, wall.wall_s) == (8.0, 3.0, 11.0)


def test_json_lines_with_tokens(tmp_path: Path) -> None:
    rows = "".join(f'{{"step": {step}, "iteration-time": 0.5, "tokens_per_second": 1000}}\n' for step in range(4))
    seen = read(tmp_path, rows)
    assert (seen.step_s, seen.tokens_per_s) == (0.5, 1000)
    assert any("states no unit" in note for note in seen.notes)


def test_numbers_alone_are_seconds(tmp_path: Path) -> None:
    seen = read(tmp_path, "2.0\n2.1\n1.9\n")
    assert (seen.step_s, seen.series.steps) == (2.0, (1, 2, 3))


@pytest.mark.parametrize("text", ["a,b\n1,2\n", '{"loss": 3}\n', "step,step_time_s\n1,nan\n2,-5\n3,1e999\n"])
def test_tables_without_times(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError, match="no lines of steps that are known"):
        read(tmp_path, text)


def test_seconds_since_the_begin_are_no_steps(tmp_path: Path) -> None:
    seen = read(tmp_path, "step,elapsed\n" + "".join(f"{step},{2 * step}\n" for step in range(1, 40)))
    assert seen.step_s is None
    assert "count from a begin" in seen.notes[0]


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """A process group of this process alone."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", ["max", "minmax"])
def test_timers_of_megatron_core(tmp_path: Path, alone: Any, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        timers_module = pytest.importorskip("megatron.core.timers")
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    timers = timers_module.Timers(log_level=2, log_option=option)
    for name, seconds in (("forward-compute", 0.02), ("optimizer", 0.01)):
        timers(name, log_level=1).set_elapsed(seconds)
    printed = timers.get_all_timers_string(["forward-compute", "optimizer"], normalizer=1.0)
    seen = {timer.name: timer for timer in read(tmp_path, "\n".join([*iterations([2.0] * 3), printed])).timers}
    assert set(seen) == {"forward-compute", "optimizer"}
    assert seen["forward-compute"].max_s == pytest.approx(0.02)


class Monitor:
    """A GPU's memory as torchtitan asks for it."""

    device_name, device_capacity_gib = "NVIDIA H100 80GB HBM3", 79.1

    def get_peak_stats(self) -> Any:
        return types.SimpleNamespace(
            max_active_gib=40.0, max_active_pct=50.0, max_reserved_gib=49.66, max_reserved_pct=62.78,
            num_alloc_retries=0, num_ooms=0,
        )  # fmt: skip

    def reset_peak_stats(self) -> None:
        pass


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchtitan's module of metrics, whose clock the test moves."""
    board = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metrics = pytest.importorskip("torchtitan.components.metrics")
    monkeypatch.setattr(metrics, "DeviceMemoryMonitor", lambda device: Monitor())
    return metrics


@pytest.mark.parametrize("quantized", [False, True])
def test_lines_of_torchtitan(tmp_path: Path, titan: Any, monkeypatch: pytest.MonkeyPatch, quantized: bool) -> None:
    now = [1_700_000_000.0]
    monkeypatch.setattr(titan.time, "perf_counter", lambda: now[0])
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            record.created, record.msecs = now[0], now[0] % 1 * 1000
            form = logging.Formatter("[titan] %(asctime)s - %(name)s - %(levelname)s - %(message)s")
            form.converter = time.gmtime
            lines.append(f"[rank0]:{form.format(record)}")

    kept = Kept()
    titan.logger.addHandler(kept)
    titan.logger.setLevel(logging.INFO)
    try:
        config = titan.MetricsProcessor.Config(log_freq=5, disable_color_printing=False)
        grid = types.SimpleNamespace(non_data_parallel_size=2)
        processor = titan.MetricsProcessor(config, parallel_dims=grid, has_quantization=quantized)
        processor.num_flops_per_token = 50_000_000_000
        titan.logger.info(
            "Trainer is initialized with local batch size 1, global batch size 4, gradient accumulation steps 1, "
            "sequence length 8192, total steps 30 (warmup 2)"
        )
        titan.logger.info("Training starts at step 1")
        for step in range(1, 31):
            now[0] += 8.0 if step == 1 else 1.4
            processor.ntokens_since_last_log += 16384
            processor.data_loading_times.append(0.01)
            if processor.should_log(step):
                processor.log(step, 6.1384, 6.2, 1.0)
            if step == 15:
                now[0] += 30.0
                processor.log_validation(5.0, step)
    finally:
        titan.logger.removeHandler(kept)
    seen = read(tmp_path, "\n".join(lines))
    assert seen.series.steps == (1, 5, 10, 15, 20, 25, 30)
    assert seen.step_s == pytest.approx(1.4, abs=1e-3)
    assert seen.num_warmup_steps == 1
    assert seen.facts.hardware == "NVIDIA H100 80GB HBM3"
    assert (seen.printed_mfu is None) is quantized
    assert (seen.facts.global_batch_size, seen.facts.seq_length) == (4, 8192)
    assert seen.peak_memory_bytes == round(49.66 * 2**30)
    assert (seen.wall.evaluation_s, seen.wall.idle_s) == (pytest.approx(30.0, abs=0.01), pytest.approx(0.0, abs=0.02))
