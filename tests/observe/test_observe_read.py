"""Detection, mixtures, steps printed by many ranks, restarts, and several files of one run."""

from __future__ import annotations

from pathlib import Path

import pytest
from written import BEGIN_S, LLAMA_8B, arguments, iteration, iterations, mlperf, read, torchtitan

from planner.errors import SpecError
from planner.observe import record as record_module
from planner.observe.formats import GRAMMARS


def test_grammars_have_names_and_rows() -> None:
    assert len({grammar.name for grammar in GRAMMARS}) == len(GRAMMARS)
    assert all(row.holds for grammar in GRAMMARS for row in grammar.rows)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("\n".join(iterations([2.0] * 3)), "megatron"),
        (mlperf([2.0] * 3), "mlperf"),
        (torchtitan([2.0] * 3), "torchtitan"),
        ("step_time_s\n2\n", "table"),
    ],
)
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


def test_memory_alone_is_an_observation_without_a_step(tmp_path: Path) -> None:
    seen = read(tmp_path, "[Rank 3] (after 2 iterations) memory (MB) | max allocated: 512.0")
    assert (seen.step_s, seen.peak_memory_bytes) == (None, 512 * 2**20)
