"""Files of any size and any content: streamed, unpacked, cleaned, and refused with one error."""

import gzip
import io
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written import BEGIN_S, LLAMA_8B, TIMERS, arguments, iteration, iterations, mlperf, packed, read, torchtitan

from planner.cli.output import dumps
from planner.errors import SpecError
from planner.observe import lines as lines_module
from planner.observe import record as record_module
from planner.observe.formats import GRAMMARS
from planner.observe.lines import MAX_LINE_BYTES, Tally, cleaned, lines, without_launcher
from planner.observe.log_reader import observe
from planner.observe.observation import Observed
from planner.observe.steady import Steady, quantile, steady
from planner.report.observe import render_observed

LOG = "\n".join(iterations([2.0] * 20))


def test_lines_end_as_any_system_ends_them(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\r\ntwo\rthree\n\nfour")
    tally = Tally()
    assert list(lines(str(path), tally)) == [b"one", b"two", b"three", b"four"]
    assert (tally.num_lines, tally.num_bytes) == (4, 20)


def test_lines_across_blocks_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", 7)
    path = tmp_path / "a.log"
    path.write_text("a line that is longer than a block\nand another\n")
    assert list(lines(str(path), Tally())) == [b"a line that is longer than a block", b"and another"]


def test_each_mebibyte_is_progress(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("x" * 2**20 + "\n" + "y" * 2**19)
    seen: list[None] = []
    list(lines(str(path), Tally(), lambda: seen.append(None)))
    assert len(seen) == 1


@pytest.mark.parametrize("block", [1000, 2**20])
def test_endless_lines_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(lines_module, "BLOCK_BYTES", block)
    path, tally = tmp_path / "a.log", Tally()
    path.write_bytes(b"x" * (3 * MAX_LINE_BYTES) + b"\nend")
    assert [len(line) for line in lines(str(path), tally)] == [MAX_LINE_BYTES, 3]
    assert tally.num_cut == 1


def test_gzip_is_unpacked(tmp_path: Path) -> None:
    assert observe([str(packed(tmp_path, LOG))]).num_steps == 20
    (wide := tmp_path / "windows.log").write_text(LOG, encoding="utf-16")
    assert observe([str(wide)]).num_steps == 20


def test_a_damaged_gzip_gives_what_came_before(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(60_000).hex()
    path = packed(tmp_path, LOG + "\n" + "\n".join(noise[i : i + 100] for i in range(0, len(noise), 100)))
    path.write_bytes(path.read_bytes()[:-30_000])
    seen = observe([str(path)])
    assert seen.num_steps == 20
    assert "cut off or damaged" in seen.sources[0].partial


def test_a_gzip_cut_at_its_head_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.log.gz"
    path.write_bytes(gzip.compress(LOG.encode())[:12])
    with pytest.raises(SpecError, match="cannot be read"):
        observe([str(path)])


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty.log").touch()
    for name, says in (("missing.log", "No such file"), ("empty.log", "is empty"), (".", "is a directory")):
        with pytest.raises(SpecError, match=says):
            observe([str(tmp_path / name)])
    with pytest.raises(SpecError, match="cannot be read"):
        observe(["\0"])


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(bytes(10_000), id="zeros"), pytest.param(b"\x80\x02}q\x01" * 1000, id="pickle"),
        pytest.param(b"\x89PNG\r\n\x1a\n" + bytes(5000), id="image"),
        pytest.param(random.Random(0).randbytes(50_000), id="noise"),
        pytest.param(b"PK\x03\x04" + bytes(100), id="zip"), pytest.param(b"hello\nworld\n", id="other text"),
        pytest.param(LOG.encode("utf-16-le"), id="utf-16 that does not say so"),
        pytest.param(b"\n" * 5000, id="blank lines"), pytest.param(b"[" * 100_000, id="brackets"),
        pytest.param(b'{"a":' * 20_000, id="nesting"),
    ],
)  # fmt: skip
def test_files_that_are_no_log_end_in_one_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(SpecError, match=r"is a binary file|has no lines of steps"):
        read(tmp_path, data)


HOSTILE = [
    iteration(1, 2.0).replace("2000.0", "9" * 400), iteration(1, 2.0).replace("2000.0", "nan"),
    iteration(1, 2.0).replace("2000.0", "-1"), iteration(1, 2.0).replace("       1/", "9" * 60 + "/"),
    iteration(20, 2.0, BEGIN_S).replace("2024-04-06", "9999-99-99"),
    "[Rank 99999999999] (after 1 iterations) memory (MB) | max allocated: 1e999",
    "    forward ....: (1e5, " + "9" * 5000 + ")", "  a b " + "." * 60_000,
    "  name " + "." * 40 + " " + "x" * 60_000, ":::MLLOG " + "[" * 60_000, ':::MLLOG {"key": 3, "time_ms": "now"}',
    ':::MLLOG {"key": "tracked_stats", "time_ms": 1, "value": {"train_step_time": {}}, "metadata": {"step": []}}',
    "DLLL " + '{"data": ' * 5000, 'DLLL {"step": 1e400, "data": {"train_step_timing in s": true}}',
    "step:  1  loss: 1 memory: 9GiB(9%)  tps: ,,,,  mfu: %",
    "0/1, CurrSamplesPerSec=0, RunningAvgSamplesPerSec=inf, MaxMemAllocated=-1GB",
    "comm op: x | time (ms): 0 | msg size: 0 MB | algbw (Gbps): 0 | busbw (Gbps): 0",
    "iteration: 1 / 2 | time_per_iteration_ms: ...", "\x1b]0;" + "a" * 60_000, "\x1b[31m" * 10_000 + "iteration",
    "12: " * 10_000 + "iteration       20/ 2 | elapsed time per iteration (ms): 1.0 |",
]  # fmt: skip


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_lines_change_nothing(tmp_path: Path, line: str) -> None:
    seen = read(tmp_path, f"{LOG}\n{line}\n")
    assert (seen.num_steps, seen.step_s) == (20, 2.0)
    assert all(text.isprintable() for text in seen.notes)


def test_text_from_a_log_is_printable(tmp_path: Path) -> None:
    line = ':::MLLOG {"key": "submission_platform", "value": "\\u001b[2J8xH100", "time_ms": 1, "metadata": {}}'
    assert read(tmp_path, f"{mlperf([2.0])}{line}\n").facts.hardware == "[2J8xH100"


def test_prefixes_of_launchers_are_taken_off() -> None:
    for text, rank in (
        ("[default7]: iteration", 7), ("[rank12]:iteration", 12), ("  3: iteration", 3), ("iteration", None),
        ("2024-04-06T02:59:36.1Z 5: [rank5]: iteration", 5), ("[1,4]<stdout>: iteration", 4),
        ("\x1b[32mnode-3: [rank1]: \x1b[0miteration", 1), ("stdout: iteration", None),
    ):  # fmt: skip
        line, of_rank = without_launcher(cleaned(text.encode()))
        assert (line.strip(), of_rank) == ("iteration", rank)
    assert cleaned(b"\xff iteration").endswith(" iteration")


class Endless(io.RawIOBase):
    """50 MB of a log that is nowhere as a whole."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = self._blocks(num_blocks)

    @staticmethod
    def _blocks(num_blocks: int) -> Iterator[bytes]:
        number = 0
        for _ in range(num_blocks):
            texts = []
            for _ in range(20):
                number += 1
                texts.append(iteration(number, 2.0, BEGIN_S + 2 * number))
                texts.append("x" * 50_000)
            yield "\n".join(texts).encode() + b"\n"

    def read1(self, size: int = -1) -> bytes:
        return next(self.blocks, b"")


def test_a_long_log_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(path: str) -> Any:
        return Endless(52)

    monkeypatch.setattr(lines_module, "opened", opened)
    tracemalloc.start()
    try:
        seen = observe(["big.log"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen.sources[0].num_bytes > 50_000_000
    assert seen.num_steps == 1040
    assert peak < 12_000_000


SEEDS = (
    "\n".join([arguments(**LLAMA_8B), *iterations([2.0] * 8), TIMERS]), mlperf([2.0] * 6),
    torchtitan([2.0] * 6, ranks=2), "step,step_time_ms\n1,900\n2,500\n3,510\n",
)  # fmt: skip
TOKENS = [b"nan", b"-1", b"1e308", b"9" * 25, b"", b"|", b"\n", b"\x1b[", b"\xff", b"\0", b"{", b"None", b": ", b"inf"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30), st.sampled_from(TOKENS)), max_size=9),
)
def test_mutants_of_logs_end_as_they_should(tmp_path: Path, text: str, changes: list[tuple[float, int, bytes]]) -> None:
    data = text.encode()
    for where, length, token in changes:
        at = int(where * len(data))
        data = data[:at] + token + data[at + length :]
    try:
        seen = Observed(observation=read(tmp_path, data))
    except SpecError:
        return
    assert dumps(seen.model_dump(mode="json"))
    assert render_observed(seen)


def test_grammars_have_names_and_rows() -> None:
    assert len({grammar.name for grammar in GRAMMARS}) == len(GRAMMARS)
    assert all(row.holds for grammar in GRAMMARS for row in grammar.rows)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("\n".join(iterations([2.0] * 3)), "megatron"), (mlperf([2.0] * 3), "mlperf"),
        (torchtitan([2.0] * 3), "torchtitan"), ("step_time_s\n2\n", "table"),
    ],
)  # fmt: skip
def test_the_content_says_the_format(tmp_path: Path, text: str, kind: str) -> None:
    assert read(tmp_path, "some words before\n" * (kind != "table") + text).sources[0].format == kind


def test_two_trainers_in_one_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"steps of megatron \(30\) and of torchtitan \(20\)"):
        read(tmp_path, "\n".join(iterations([2.0] * 30)) + "\n" + torchtitan([2.0] * 20))


def test_a_few_lines_of_another_do_not_matter(tmp_path: Path) -> None:
    seen = read(tmp_path, "\n".join(iterations([2.0] * 30)) + "\n" + torchtitan([2.0] * 3))
    assert (seen.sources[0].format, seen.num_steps) == ("megatron", 30)


def test_a_step_that_ranks_print_late_is_no_restart(tmp_path: Path) -> None:
    numbers = [1, 2, 1, 3, 2, 4, 4, 3, 5, 4, 5, 6]
    seen = read(tmp_path, "\n".join(iteration(n, 2.0, BEGIN_S + 2 * n) for n in numbers))
    assert (seen.series.steps, seen.restarts) == ((1, 2, 3, 4, 5, 6), ())
    assert any("6 lines" in note for note in seen.notes)


def test_a_restart_is_its_lost_work(tmp_path: Path) -> None:
    again = iterations([2.0] * 30, 21, BEGIN_S + 100 + 300)
    seen = read(tmp_path, "\n".join([*iterations([2.0] * 50), *again]))
    (restart,) = seen.restarts
    assert (restart.from_step, restart.to_step, restart.lost_steps) == (50, 21, 30)
    assert (restart.lost_s, restart.down_s) == pytest.approx((60.0, 300.0))
    assert (seen.wall.down_s, seen.wall.steps_s) == pytest.approx((300.0, 160.0))


def test_a_restart_after_one_step_is_told_by_the_dump(tmp_path: Path) -> None:
    dump = arguments(**LLAMA_8B)
    text = "\n".join([dump, *iterations([2.0] * 5), dump, *iterations([2.0] * 5, 5, BEGIN_S + 20)])
    (restart,) = read(tmp_path, text).restarts
    assert (restart.from_step, restart.to_step, restart.lost_steps) == (5, 5, 1)


def test_a_restart_without_times_is_told_by_how_far_it_falls_back(tmp_path: Path) -> None:
    lines = [iteration(n, 2.0) for n in [*range(1, 41), *range(21, 41)]]
    (restart,) = read(tmp_path, "\n".join(lines)).restarts
    assert (restart.lost_steps, restart.down_s) == (20, None)


def test_each_start_has_its_own_warm_up(tmp_path: Path) -> None:
    first = iterations([9.0, *[2.0] * 19])
    again = iterations([8.0, *[2.0] * 19], 11, BEGIN_S + 600)
    seen = read(tmp_path, "\n".join([*first, *again]))
    assert (seen.num_warmup_steps, seen.outliers) == (2, ())
    assert seen.warmup_extra_s == pytest.approx(13.0)


def test_parts_of_a_run_are_one_run(tmp_path: Path) -> None:
    first, second = "\n".join(iterations([2.0] * 50)), "\n".join(iterations([2.0] * 50, 31, BEGIN_S + 300))
    for texts in ((first, second), (second, first)):
        seen = read(tmp_path, *texts)
        assert seen.num_steps == 100
        assert [(restart.from_step, restart.to_step) for restart in seen.restarts] == [(50, 31)]
        assert seen.wall.wall_s == pytest.approx(400)
        assert len(seen.sources) == 2


def test_ranks_of_a_run_are_beside_each_other(tmp_path: Path) -> None:
    memory = "[Rank {}] (after 2 iterations) memory (MB) | max allocated: {} | max reserved: 9000.0"
    seen = read(tmp_path, "\n".join(iterations([2.0] * 5)), memory.format(0, 500.0), memory.format(8, 700.0))
    assert [rank.rank for rank in seen.memory] == [0, 8]
    assert seen.num_steps == 5


def test_more_steps_than_are_kept_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "MAX_STEPS", 10)
    seen = read(tmp_path, "\n".join(iterations([2.0] * 15)))
    assert seen.num_steps == 10
    assert "5 steps after the first 10 were left" in seen.sources[0].partial


def test_a_long_series_is_thinned_and_the_statistics_are_not(tmp_path: Path) -> None:
    seen = read(tmp_path, "\n".join(["step_time_s", *["2.0"] * 9001]))
    assert (seen.series.stride, len(seen.series.steps), seen.num_steps) == (3, 3001, 9001)


SETTINGS = settings(max_examples=50, deadline=None)
NOISE = st.lists(st.floats(0.99, 1.01), min_size=20, max_size=200)


def told(seconds: list[float] | np.ndarray, covers: list[float] | None = None, **more: object) -> Steady:
    values = np.asarray(seconds, dtype=float)
    weights = np.ones(len(values)) if covers is None else np.asarray(covers, dtype=float)
    return steady(np.arange(1, len(values) + 1), values, weights, **more)  # type: ignore[arg-type]


@SETTINGS
@given(NOISE, st.floats(1e-3, 1e3))
def test_scale_is_scale(seconds: list[float], factor: float) -> None:
    one, other = told(seconds), told([factor * value for value in seconds])
    assert other.step_s == pytest.approx(factor * one.step_s)
    assert (other.low_s, other.high_s) == pytest.approx((factor * one.low_s, factor * one.high_s))
    assert other.drift_fraction == pytest.approx(one.drift_fraction, abs=1e-6)


@SETTINGS
@given(NOISE, st.data())
def test_a_tenth_of_slow_steps_moves_the_median_inside_the_noise(seconds: list[float], data: st.DataObject) -> None:
    rows = data.draw(st.sets(st.integers(0, len(seconds) - 1), max_size=len(seconds) // 10))
    slowed = [value * 20 if row in rows else value for row, value in enumerate(seconds)]
    found = told(slowed)
    assert 0.99 <= found.step_s <= 1.01
    assert sum(one.num_steps for one in found.outliers) + int(found.warmup.sum()) == len(rows)


@SETTINGS
@given(NOISE, st.randoms(use_true_random=False))
def test_order_changes_neither_median_nor_spread(seconds: list[float], random: object) -> None:
    shuffled = list(seconds)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = told(seconds), told(shuffled)
    assert (one.step_s, one.low_s, one.high_s) == (other.step_s, other.low_s, other.high_s)


@SETTINGS
@given(st.floats(0.5, 100), st.integers(20, 300), st.floats(-0.2, 0.2))
def test_a_drift_is_found(step_s: float, count: int, drift: float) -> None:
    line = step_s * (1 + drift * np.linspace(-0.5, 0.5, count))
    assert told(line).drift_fraction == pytest.approx(drift, abs=1e-3)


@SETTINGS
@given(st.floats(1e-3, 1e3), st.integers(1, 100))
def test_equal_steps_have_no_outliers_no_spread_and_no_drift(step_s: float, count: int) -> None:
    found = told([step_s] * count)
    assert (found.step_s, found.low_s, found.high_s, found.outliers) == (step_s, step_s, step_s, ())
    assert found.drift_fraction in (None, 0.0)
    assert not found.warmup.any()


@SETTINGS
@given(st.lists(st.tuples(st.floats(0.1, 10), st.integers(1, 5)), min_size=1, max_size=30), st.floats(0.05, 0.95))
def test_weights_are_repetitions(rows: list[tuple[float, int]], fraction: float) -> None:
    values, weights = np.array([value for value, _ in rows]), np.array([float(count) for _, count in rows])
    each = np.repeat(values, weights.astype(int))
    assert quantile(values, weights, fraction) == quantile(each, np.ones(len(each)), fraction)


def test_a_warm_up_is_at_the_begin_and_ends() -> None:
    found = told([30.0, 12.0, *[10.0] * 30, 12.0])
    assert np.flatnonzero(found.warmup).tolist() == [0, 1]
    assert found.warmup_extra_s == pytest.approx(22.0)
    assert [outlier.steps for outlier in found.outliers] == [(33,)]


def test_outliers_that_the_log_explains_have_its_name() -> None:
    seconds = [1.0] * 40
    seconds[10] = seconds[20] = 3.0
    found = told(seconds, marks={10: {"checkpoint"}, 20: {"evaluation"}})
    assert [(outlier.kind, outlier.steps, outlier.extra_s) for outlier in found.outliers] == [
        ("checkpoint", (11,), pytest.approx(2.0)),
        ("evaluation", (21,), pytest.approx(2.0)),
    ]


def test_outliers_at_equal_distances_are_periodic() -> None:
    seconds = [1.5 if row % 25 == 24 else 1.0 for row in range(200)]
    (outlier,) = told(seconds).outliers
    assert (outlier.kind, outlier.period_steps, outlier.num_steps) == ("periodic", 25, 8)
    assert outlier.extra_s == pytest.approx(4.0)


def test_outliers_in_a_row_are_a_slow_spell() -> None:
    seconds = [1.0] * 50 + [1.4] * 8 + [1.0] * 50
    (outlier,) = told(seconds).outliers
    assert (outlier.kind, outlier.num_steps, outlier.steps[0]) == ("slow_spell", 8, 51)


def test_outliers_here_and_there_are_unexplained() -> None:
    seconds = [1.0] * 100
    for row in (13, 21, 54, 71, 90):
        seconds[row] = 1.3
    (outlier,) = told(seconds).outliers
    assert (outlier.kind, outlier.period_steps) == ("unexplained", None)


def test_digits_that_are_not_printed_are_no_outliers() -> None:
    seconds = [1.0, 1.1] * 10 + [1.2]
    assert told(seconds, precision_fraction=0.05).outliers == ()
