"""A followed run: its band, and what ends it: an alarm, its last step, or the end of its input."""

import os
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_observe_truths import report
from written import BEGIN_S, LLAMA_8B, arguments, iteration, iterations, mlperf, torchtitan

from planner.answer import Plan
from planner.cli import main
from planner.errors import SpecError
from planner.observe.follower import BURST, Band, BandWatch, FollowedRun, Follower
from planner.observe.lines import MAX_LINE_BYTES, FileEnd, NewLines, StdinEnd, source_of

BAND = Band(9.0, 10.0, "plan.json")


def watched(seconds: Iterable[float], covers: int = 1, **changes: object) -> tuple[BandWatch, int | None]:
    """The watch after the first step of the alarm, and the number of that step."""
    watch = BandWatch(**{"band": BAND, "allowed_steps": 20, **changes})  # type: ignore[arg-type]
    for number, value in enumerate(seconds, start=1):
        watch.take(value, covers, False)
        if watch.rings:
            return watch, number * covers
    return watch, None


def noisy(level_s: float, count: int, rng: random.Random) -> Iterator[float]:
    """Steps as MLPerf's 42 logs of 405B have them: noise of 0.4% whose neighbours are alike, and 3% that take longer,
    by 10% in the mean (in those logs CV 3.4%, slowest ÷ median 1.43)."""
    deviation = 0.0
    for _ in range(count):
        deviation = 0.5 * deviation + rng.gauss(0, 0.004 * 0.75**0.5)
        slow = 1 + rng.expovariate(10) if rng.random() < 0.03 else 1.0
        yield level_s * (1 + deviation) * slow


@pytest.mark.parametrize("level", [0.905, 0.95, 0.98, 0.995])
def test_no_alarm_inside_of_the_band(level: float) -> None:
    # 10 runs of 2,000 steps each, up to half a percent from the band's end
    rung = [watched(noisy(10 * level, 2_000, random.Random(seed)))[1] for seed in range(10)]
    assert rung == [None] * 10


def test_a_run_that_becomes_slow_rings_after_so_many_steps() -> None:
    rng = random.Random(1)
    steps = [*noisy(9.5, 300, rng), *noisy(10.4, 100, rng)]
    watch, at = watched(steps)
    assert (watch.side, watch.place) == (1, "above")
    assert at is not None
    assert 320 <= at <= 325


SHORT = {"band": Band(0.45, 0.5, "plan.json")}


@pytest.mark.parametrize(
    ("seconds", "more", "at"),
    [
        ([10.5] * 100, {}, 44), ([30.0, 20.0, *[9.5] * 50, *[10.5] * 22], {}, 74),  # slow from its begin: a warm-up
        (([9.5] * 9 + [19.0]) * 40, {}, None), (([9.5] * 5 + [12.0] * 15) * 20, {}, None),  # one in ten is slow
        # short steps have to be out for two minutes unless far
        ([0.47] * 30 + [0.53] * 100, SHORT, None), ([0.47] * 30 + [0.53] * 300, SHORT, 30 + 2 + 227),
        ([0.47] * 30 + [0.7] * 100, SHORT, 52),
        # lines that are means need three, and digits that are not printed ring nothing
        ([9.5] * 10 + [12.0] * 10, {"covers": 10}, 150), ([9.5] * 10 + [12.0] * 2 + [9.5] * 10, {"covers": 10}, None),
        ([10.04] * 100, {"precision_fraction": 0.005}, None), ([10.2] * 100, {"precision_fraction": 0.005}, 44),
    ],
)  # fmt: skip
def test_the_step_of_the_alarm(seconds: list[float], more: dict[str, Any], at: int | None) -> None:
    assert watched(seconds, **more)[1] == at


def test_below_the_band_rings_unless_only_slow_ones_do() -> None:
    watch, at = watched([9.5] * 10 + [8.5] * 30)
    assert (watch.place, at) == ("below", 32)
    assert watched([9.5] * 10 + [8.5] * 30, only_slow=True)[1] is None


def test_steps_that_the_log_explains_are_not_counted() -> None:
    watch = BandWatch(5, BAND)
    for number in range(200):
        watch.take(9.5 if number % 2 else 15.0, 1, number % 2 == 0)
    assert (watch.place, watch.out_steps) == ("in band", 0)


def test_a_start_begins_anew() -> None:
    watch, _ = watched([9.5] * 10 + [12.0] * 10)
    assert watch.out_steps > 0
    watch.start()
    assert (watch.out_steps, watch.place) == (0, "warm-up")
    for _ in range(20):
        watch.take(12.0, 1, False)
    assert watch.out_steps == 0


@dataclass
class Parts:
    """A log that comes in parts; between them nothing is new, and a clock goes on."""

    parts: list[list[bytes]]
    ends: bool = True
    seconds_between: float = 60.0
    now_s: float = 0.0

    def read(self) -> list[bytes] | None:
        if not self.parts:
            return None if self.ends else []
        return self.parts.pop(0)

    def now(self) -> float:
        return self.now_s

    def wait(self) -> None:
        self.now_s += self.seconds_between
        if not self.parts and self.now_s > 1e5:
            raise KeyboardInterrupt


def lines_of(text: str | Iterable[str]) -> list[bytes]:
    return [line.encode() for line in (text.splitlines() if isinstance(text, str) else text)]


def run(
    *parts: Any, expected: Any = None, watch: BandWatch | None = None, **more: Any
) -> tuple[Follower, list[FollowedRun], FollowedRun]:
    source = Parts([lines_of(part) for part in parts], more.pop("ends", True))
    loop = Follower(
        "train.log", source, lambda observation: (expected, "plan.json" if expected else ""),
        source.now, source.wait, watch or BandWatch(), **more,
    )  # fmt: skip
    shown = list(loop.standings())
    return loop, shown, loop.standing(final=True)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The job of the dump in `written`: Llama 3 8B on 16 GPUs."""
    path = tmp_path_factory.mktemp("follow") / "plan.json"
    job = ["--model", "8b", "--hardware", "h100", "--tp", "2", "--pp", "2", "--gpus", "16", "-b", "128", "-s", "8192"]
    assert main(["evaluate", *job, "-q", "-o", str(path)]) == 0
    return Plan.load(path)


STEPS = [12.0, *[9.0 + 0.01 * (step % 5) for step in range(80)]]


def test_a_run_without_a_prediction_says_its_own_band() -> None:
    loop, shown, last = run(iterations(STEPS), is_live=True)
    assert (loop.ended, last.final, last.step, last.total_steps) == ("end of input", True, 81, 500)
    assert shown[0].place == "learning"
    assert shown[0].band_s is None
    assert last.band_source == "the run's own first 51 steps"
    assert last.band_s == pytest.approx((0.0, 9.02 * 1.05))
    assert (last.place, last.rings) == ("in band", False)


def test_a_run_that_becomes_slow_rings() -> None:
    loop, _, last = run(iterations([*STEPS, *[12.0] * 60]), is_live=True)
    assert (loop.ended, last.rings, last.place, last.out_steps) == ("alarm", True, "above", 20)
    assert last.step == 81 + 22
    # the last steps are those that are out
    assert (last.window_steps, last.window_step_s) == (22, 12.0)
    answer = loop.answer(last_steps=True)
    assert answer.verdict == "slow"
    whole = loop.answer(last_steps=False)
    assert whole.observation.num_steps == 103


def test_what_was_out_before_and_is_no_more_rings_nothing() -> None:
    old = [*STEPS, *[12.0] * 60, *[9.0] * 60]
    assert run(iterations(old))[0].ended == "end of input"
    assert run(iterations(old[:-60]))[0].ended == "alarm"
    assert run(iterations(old), is_live=True)[0].ended == "alarm"


def test_a_run_that_becomes_faster_than_its_own_band_is_in_it() -> None:
    loop, _, last = run(iterations([*STEPS, *[7.0] * 100]), is_live=True)
    assert (loop.ended, last.place) == ("end of input", "in band")


def test_a_plan_is_the_band(plan: Plan) -> None:
    low_s, high_s = plan.step.step_s_interval or (0.0, 0.0)
    fine = iterations([plan.step.step_s] * 60)
    loop, _, last = run(fine, expected=plan, is_live=True)
    assert (loop.ended, last.band_s, last.band_source) == ("end of input", (low_s, high_s), "plan.json")
    assert last.mfu == pytest.approx(plan.step.mfu, rel=1e-4)
    assert last.predicted_step_s == plan.step.step_s == pytest.approx(last.step_s, rel=1e-3)
    loop, _, last = run(iterations([high_s * 1.1] * 60), expected=plan, is_live=True)
    assert (loop.ended, last.step) == ("alarm", 44)
    assert last.says.startswith("above the band")


def test_the_log_of_another_job_is_refused(plan: Plan) -> None:
    other = arguments(**{**LLAMA_8B, "world_size": 8})
    with pytest.raises(SpecError, match=r"of another job than plan\.json: GPUs 8, not 16"):
        run([*other.splitlines(), *iterations(STEPS)], expected=plan)


def test_the_run_ends_with_its_last_step_or_with_its_tokens(plan: Plan) -> None:
    steps = [line.replace("/     500", "/      60") for line in iterations(STEPS[:60])]
    assert run(steps, [], ends=False)[0].ended == "last step"
    text = torchtitan([1.4] * 30).replace("total steps 1000", "total steps 30")
    loop, _, last = run(text, [], ends=False)
    assert (loop.ended, last.eta_s) == ("last step", 0.0)
    _, _, last = run(mlperf([5.0] * 30), total_tokens=1152 * 8192 * 100)
    assert last.total_steps == 100
    assert last.eta_s == pytest.approx(70 * 5.0, rel=0.01)


def test_silence_rings_after_half_an_hour() -> None:
    loop, _, last = run(iterations(STEPS), [], ends=False)
    assert (loop.ended, last.rings) == ("silent", True)
    assert "no step for 30 minutes" in last.says


def test_a_line_of_steps_is_shown_once_in_so_many_and_rarer_in_a_burst() -> None:
    _, shown, _ = run(iterations(STEPS), is_live=True)
    assert [found.step for found in shown] == [20, 40, 60, 80]
    _, shown, _ = run(iterations([9.0] * 60 * BURST), is_live=True)
    assert [found.step for found in shown[48:52]] == [980, 1000, 1040, 1080]
    # of what was there before, only where it stands
    _, shown, _ = run(iterations(STEPS), [])
    assert [found.step for found in shown] == [81]


def test_restarts_are_counted_and_what_the_log_explains_is_not_out() -> None:
    first, later = list(iterations(STEPS)), list(iterations([20.0, *[9.0] * 40], first=61, begin_s=BEGIN_S + 5000))
    first.insert(50, "saving checkpoint at iteration      50 to /ckpt in torch_dist format")
    first.insert(72, "validation loss at iteration 70 | lm loss value: 2.0 |")
    _, _, last = run([*first, *later], is_live=True)
    assert (last.place, last.num_steps) == ("in band", 122)
    assert last.eta_s == pytest.approx((500 - 101) * 9.0, rel=0.01)


def test_memory_printed_once_stays_the_peak() -> None:
    text = [iteration(1, 9.0), report(0, 1, 5000, 6000), *(iteration(step, 9.0) for step in range(2, 200))]
    _, _, last = run(text)
    assert (last.step, last.peak_memory_bytes) == (199, 6000 * 2**20)


def test_hostile_lines_are_passed_over() -> None:
    nan = "iteration 9/ 9 | elapsed time per iteration (ms): nan |"
    rubbish = ["\x1b[2J\x1b]0;title\x07", nan, "\0" * 50, "é" * 90_000]
    _, _, last = run([line for step in iterations(STEPS) for line in (*rubbish, step)], is_live=True)
    assert (last.step, last.place) == (81, "in band")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_bytes(b"one\ntwo\nthr")
    return path


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_half_a_line_waits_for_its_end(log: Path) -> None:
    end = FileEnd(str(log))
    assert end.read() == [b"one", b"two"]
    assert end.read() == []
    append(log, b"ee\r\nfour")
    assert end.read() == [b"three"]
    append(log, b"\n")
    assert end.read() == [b"four"]


def test_a_file_that_was_renamed_is_read_to_its_end_and_the_new_one_from_its_begin(log: Path) -> None:
    end = FileEnd(str(log))
    end.read()
    log.rename(log.with_suffix(".1"))
    append(log.with_suffix(".1"), b"ee\nhal")
    log.write_bytes(b"new\n")
    assert [end.read() for _ in range(3)] == [[b"three"], [b"new"], []]


def test_a_file_that_was_cut_is_read_again_without_its_half_line(log: Path) -> None:
    said: list[str] = []
    end = FileEnd(str(log), said.append)
    end.read()
    log.write_bytes(b"new\n")
    assert end.read() == [b"new"]
    assert len(said) == 1
    assert "was cut off" in said[0]


def test_a_file_that_vanishes_is_waited_for_and_said_once(log: Path) -> None:
    said: list[str] = []
    end = FileEnd(str(log), said.append)
    end.read()
    log.unlink()
    assert [end.read() for _ in range(4)] == [[]] * 4
    assert said == [f"{log}: is not there: waiting for it"]
    log.write_bytes(b"back\n")
    assert end.read() == [b"back"]


def test_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    said: list[str] = []
    end = FileEnd(str(tmp_path / "later" / "train.log"), said.append)
    assert [end.read(), end.read(), len(said)] == [[], [], 1]
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "train.log").write_bytes(b"now\n")
    assert end.read() == [b"now"]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("train.log.gz", b"", "is packed"), ("train.log", b"\x1f\x8b\x08\0", "is packed"),
        ("train.log", bytes(1000), "is a binary file"), ("folder", None, "is no regular file"),
    ],
)  # fmt: skip
def test_what_does_not_grow_by_lines_is_refused(tmp_path: Path, name: str, data: bytes | None, says: str) -> None:
    path = tmp_path / name
    path.mkdir() if data is None else path.write_bytes(data)
    with pytest.raises(SpecError, match=says) as caught:
        source_of(str(path)).read()
    assert caught.value.hint


def test_a_line_without_an_end_takes_no_memory() -> None:
    lines = NewLines("long.log")
    for _ in range(40):
        assert lines.of(b"x" * MAX_LINE_BYTES) == []
    assert lines.of(b"\nnext\n") == [b"x" * MAX_LINE_BYTES, b"next"]


def test_standard_input_ends_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin, os.fdopen(writer, "wb", buffering=0) as pipe:
        monkeypatch.setattr(sys, "stdin", stdin)
        end = StdinEnd()
        assert end.read() == []
        pipe.write(b"one\ntw")
        assert end.read() == [b"one"]
        pipe.write(b"o")
        pipe.close()
        assert [end.read(), end.read(), end.read()] == [[], [b"two"], None]
