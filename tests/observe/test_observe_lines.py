"""Files of any size and any content: streamed, unpacked, cleaned, and refused with one error."""

from __future__ import annotations

import gzip
import io
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written import BEGIN_S, LLAMA_8B, TIMERS, arguments, iteration, iterations, mlperf, packed, read, torchtitan

from planner.cli.output import dumps
from planner.errors import SpecError
from planner.observe import lines as lines_module
from planner.observe.lines import MAX_LINE_BYTES, Tally, cleaned, lines
from planner.observe.log_reader import observe
from planner.observe.observation import Observed
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
        pytest.param(bytes(10_000), id="zeros"),
        pytest.param(b"\x80\x02}q\x01" * 1000, id="pickle"),
        pytest.param(b"\x89PNG\r\n\x1a\n" + bytes(5000), id="image"),
        pytest.param(random.Random(0).randbytes(50_000), id="noise"),
        pytest.param(b"PK\x03\x04" + bytes(100), id="zip"),
        pytest.param(b"hello\nworld\n", id="other text"),
        pytest.param(b"\xff\xfe" + LOG.encode("utf-16-le"), id="utf-16"),
        pytest.param(b"\n" * 5000, id="blank lines"),
        pytest.param(b"[" * 100_000, id="brackets"),
        pytest.param(b'{"a":' * 20_000, id="nesting"),
    ],
)
def test_files_that_are_no_log_end_in_one_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(SpecError, match=r"is a binary file|has no lines of steps"):
        read(tmp_path, data)


HOSTILE = [
    iteration(1, 2.0).replace("2000.0", "9" * 400),
    iteration(1, 2.0).replace("2000.0", "nan"),
    iteration(1, 2.0).replace("2000.0", "-1"),
    iteration(1, 2.0).replace("       1/", "9" * 60 + "/"),
    iteration(20, 2.0, BEGIN_S).replace("2024-04-06", "9999-99-99"),
    "[Rank 99999999999] (after 1 iterations) memory (MB) | max allocated: 1e999",
    "    forward ....: (1e5, " + "9" * 5000 + ")",
    "  a b " + "." * 60_000,
    "  name " + "." * 40 + " " + "x" * 60_000,
    ":::MLLOG " + "[" * 60_000,
    ':::MLLOG {"key": 3, "time_ms": "now"}',
    ':::MLLOG {"key": "tracked_stats", "time_ms": 1, "value": {"train_step_time": {}}, "metadata": {"step": []}}',
    "DLLL " + '{"data": ' * 5000,
    'DLLL {"step": 1e400, "data": {"train_step_timing in s": true}}',
    "step:  1  loss: 1 memory: 9GiB(9%)  tps: ,,,,  mfu: %",
    "0/1, CurrSamplesPerSec=0, RunningAvgSamplesPerSec=inf, MaxMemAllocated=-1GB",
    "comm op: x | time (ms): 0 | msg size: 0 MB | algbw (Gbps): 0 | busbw (Gbps): 0",
    "iteration: 1 / 2 | time_per_iteration_ms: ...",
    "\x1b]0;" + "a" * 60_000,
    "\x1b[31m" * 10_000 + "iteration",
    "12: " * 10_000 + "iteration       20/ 2 | elapsed time per iteration (ms): 1.0 |",
]


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
        assert (cleaned(text.encode())[0].strip(), cleaned(text.encode())[1]) == ("iteration", rank)
    assert cleaned(b"\xff\xfe iteration")[0].endswith(" iteration")


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
    "\n".join([arguments(**LLAMA_8B), *iterations([2.0] * 8), TIMERS]),
    mlperf([2.0] * 6),
    torchtitan([2.0] * 6, ranks=2),
    "step,step_time_ms\n1,900\n2,500\n3,510\n",
)
TOKENS = [b"nan", b"-1", b"1e308", b"9" * 25, b"", b"|", b"\n", b"\x1b[", b"\xff", b"\0", b"{", b"None", b": ", b"inf"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30), st.sampled_from(TOKENS)), max_size=9),
)
def test_mutants_of_logs_end_in_an_answer_or_an_error(
    tmp_path: Path, text: str, changes: list[tuple[float, int, bytes]]
) -> None:
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
