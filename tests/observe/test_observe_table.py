"""Tables of steps, and lines that trainers print in forms of their own."""

import logging
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from written import TABLES, iterations, read, torchtitan

from planner.errors import SpecError
from planner.observe.log_reader import TableColumns
from planner.specs.units import GIB


@pytest.mark.parametrize(("name", "unit"), TABLES["columns_of_time"])
def test_columns_of_time(name: str, unit: float) -> None:
    columns = TableColumns(["loss", name, "lr"])
    assert columns.found["seconds"][0] == name
    assert columns.values({name: "3"})["seconds"] == pytest.approx(3 * unit)


@pytest.mark.parametrize("name", ["lifetime", "time_ms_total", "loss", "timestamp", "steps", "timeout"])
def test_columns_of_no_time(name: str) -> None:
    assert "seconds" not in TableColumns([name]).found


@pytest.mark.parametrize("text", ["a,b\n1,2\n", '{"loss": 3}\n', "step,step_time_s\n1,nan\n2,-5\n3,1e999\n"])
def test_tables_without_times(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError, match="no lines of steps that are known"):
        read(tmp_path, text)


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


# torchtitan issue 1287, 8B on H100
LINE = TABLES["line_of_observe_table"]


def test_colours_and_all_ranks(tmp_path: Path) -> None:
    seen = read(tmp_path, torchtitan([9.0, 1.4, 1.4, 1.4, 1.4], ranks=4))
    assert (seen.series.steps, seen.num_warmup_steps) == ((1, 2, 3, 4, 5), 1)
    assert seen.step_s == pytest.approx(1.4, rel=1e-3)
    assert (seen.facts.global_batch_size, seen.facts.seq_length) == (8, 8192)
    assert any("15 lines" in note for note in seen.notes)


def test_what_happens_between_steps_is_named(tmp_path: Path) -> None:
    lines = torchtitan([1.0] * 12 + [4.0] + [1.0] * 12).splitlines()
    collected = (
        "[rank0]:[titan] 2025-06-16 22:30:48,735 - root - INFO - [GC] Peforming periodical GC collection. 3.0 seconds."
    )
    text = "\n".join([*lines[:13], collected, *lines[13:]])
    (outlier,) = read(tmp_path, text).outliers
    assert (outlier.kind, outlier.steps) == ("periodic", (13,))
    assert "garbage collection" in outlier.likely


def test_the_grid_counts_the_gpus(tmp_path: Path) -> None:
    line = "[rank0]:[titan] 2025-06-16 22:30:00,000 - root - INFO - Building device mesh with parallelism: "
    new = f"{line}pp=2, dp_replicate=1, dp_shard=4, cp=1, tp=2, ep=4"
    old = line.replace("parallelism: ", "") + "['pp', 'dp_shard', 'tp'], [2, 4, 2]"
    for text in (new, old.replace("mesh with", "3-D device mesh with").replace("Building device", "Building")):
        assert (
            read(tmp_path, f"{text}\n{LINE}\n{LINE.replace('200', '201').replace(',322', ',822')}").facts.num_gpus == 16
        )


# DeepSpeed issue 2629
OLD = TABLES["old"]
NEW = OLD.replace("0/{},", "epoch=0/micro_step={0}/global_step={0},").replace("timer.py:197", "timer.py:260")
BATCH = "[2022-12-20 02:07:00,130] [INFO] [config.py:1014:print]   train_batch_size ............. 320"
# accelerate issue 1589
BREAKDOWN = TABLES["breakdown"]


@pytest.mark.parametrize("line", [OLD, NEW])
def test_samples_per_second_of_a_batch_are_a_step(tmp_path: Path, line: str) -> None:
    seen = read(tmp_path, "\n".join([BATCH, *(line.format(step) for step in (10, 20, 30))]))
    assert (seen.step_s, seen.series.steps) == (2.0, (10, 20, 30))
    assert seen.facts.global_batch_size == 320
    assert (seen.peak_memory_bytes, seen.peak_memory_kind) == (round(2.6 * GIB), "allocated")


def test_the_breakdown_is_timers(tmp_path: Path) -> None:
    seen = read(tmp_path, f"{BATCH}\n{OLD.format(10)}\n{BREAKDOWN}")
    assert {timer.name: timer.max_s for timer in seen.timers}["backward_microstep"] == pytest.approx(0.07359)
    assert any("synchronises" in note for note in seen.notes)


# saforem2's notes of 2024-04-21; karpathy/nanochat#147; build-nanogpt; verl's FSDPSFTTrainer; fms-fsdp; PaddleNLP
CHAT = "step {1:05d}/21400 (0.02%) | loss: 8.89 | lrm: 1.00 | dt: 989.44ms | tok/sec: 529,882 | mfu: 74.13 | total"
NANO = "step {1:4d}| loss: 10.93 | lr: 6.0000e-05 | norm: 27.0145  | dt: 2713.86ms | tok/sec: 193189.05"
SFT = "step:{1} - train/loss:0.723 - train/lr(1e-3):0.0096 - train/time(s):2.81"
FMS = "step: {1}\nloss: 3.1\nreserved memory: 72345678848\ncurrent step time: 1.2355\noverall step time: 1.3"
PADDLE = TABLES["paddle"]
CHATTED = NEW.replace("{0}", "{1}0").replace("14,130", "{0:02},130")  # no line says the batch


@pytest.mark.parametrize(
    ("line", "trainer", "step_s"),
    [
        (TABLES["argonne"], "megatron-deepspeed", 2.0078), (CHAT, "nanochat", 0.98944), (NANO, "nanochat", 2.71386),
        (SFT, "verl", 2.81), (FMS, "fms-fsdp", 1.2355), (PADDLE, "paddlenlp", 80.81), (CHATTED, "deepspeed", 0.2),
    ],
)  # fmt: skip
def test_a_line_is_read_as_its_trainer_means_it(tmp_path: Path, line: str, trainer: str, step_s: float) -> None:
    seen = read(tmp_path, "\n".join(line.format(10 + 2 * step, step) for step in range(1, 7)))
    assert (seen.facts.trainer, seen.step_s) == (trainer, pytest.approx(step_s))


LINES = list(iterations([1.0] * 9))


def of_ranks(**timers: tuple[float, float]) -> str:
    """Megatron-LM's timers with `--timing-log-option minmax`."""
    lines = [f"    {name} ...: ({low:.2f}, {high:.2f})" for name, (low, high) in timers.items()]
    return "\n".join([*LINES, "(min, max) time across ranks (ms):", *lines])


def test_timers_of_the_slowest_rank_are_terms_of_the_step(tmp_path: Path) -> None:
    seen = read(tmp_path, of_ranks(**{"forward-backward": (700.0, 900.0), "optimizer": (50.0, 60.0)}))
    assert seen.breakdown == pytest.approx({"forward_backward_s": 0.9, "optimizer_s": 0.06, "unattributed_s": 0.04})


@pytest.mark.parametrize(("optimizer_ms", "told"), [(120.0, True), (160.0, False)])
def test_the_most_of_several_ranks_may_pass_a_step(tmp_path: Path, optimizer_ms: float, told: bool) -> None:
    seen = read(tmp_path, of_ranks(**{"forward-backward": (700.0, 900.0), "optimizer": (50.0, optimizer_ms)}))
    assert sum(seen.breakdown.values()) == pytest.approx(1.0)
    assert ("optimizer_s" in seen.breakdown) is told


def test_what_happens_before_the_first_step_is_no_timer_of_a_step(tmp_path: Path) -> None:
    """As bigscience-workshop/bigscience's logs of gpt2-meg have them."""
    setup = "time (ms) | model-and-optimizer-setup: 330.10 | train/valid/test-data-iterators-setup: 513.20"
    seen = read(tmp_path, "\n".join([setup, *LINES, "time (ms) | forward-compute: 300.00 | backward-compute: 600.00"]))
    assert [timer.name for timer in seen.timers] == ["forward-compute", "backward-compute"]


LOGS = yaml.safe_load((Path(__file__).parent / "logs.yaml").read_text())


def found(seen: Any, path: str) -> Any:
    """A field of an observation by its path, as plain data."""
    for part in path.split("."):
        seen = seen[part] if isinstance(seen, dict) else seen[int(part)] if part.isdigit() else getattr(seen, part)
    return [found(seen, str(place)) for place in range(len(seen))] if isinstance(seen, tuple) else seen


@pytest.mark.parametrize("name", LOGS)
def test_a_log_shows_what_its_lines_say(tmp_path: Path, name: str) -> None:
    row = LOGS[name]
    seen = read(tmp_path, row["text"])
    for path, value in row.get("shows", {}).items():
        assert found(seen, path) in (value, pytest.approx(value) if type(value) in (float, list) else value), path
    assert all(said in found(seen, path) for path, said in row.get("holds", {}).items())
    assert all(any(words in note for note in seen.notes) for words in row.get("says", ()))
