"""torchtitan's lines: tokens per second of a device, whose seconds follow from the times of the lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from written import read, torchtitan

from planner.specs.units import GIB

# torchtitan issue 1287, 8B on H100
LINE = (
    "[rank0]:[titan] 2025-06-16 22:30:50,322 - root - INFO - step: 200  loss:  6.1384  memory: 49.66GiB(52.28%)  "
    "tps: 5,856  tflops: 339.16  mfu: 34.29%"
)


def test_two_lines_have_the_steps_between_them(tmp_path: Path) -> None:
    later = LINE.replace("step: 200", "step: 210").replace("22:30:50,322", "22:31:04,322")
    seen = read(tmp_path, f"{LINE}\n{later}")
    assert (seen.series.steps, seen.num_steps) == ((210,), 10)
    assert seen.step_s == pytest.approx(1.4)
    assert seen.printed_mfu == pytest.approx(0.3429)
    assert (seen.peak_memory_bytes, seen.peak_memory_kind) == (round(49.66 * GIB), "reserved")
    assert seen.asks == ("--gpus N",)


def test_colours_and_all_ranks(tmp_path: Path) -> None:
    seen = read(tmp_path, torchtitan([9.0, 1.4, 1.4, 1.4, 1.4], ranks=4))
    assert (seen.series.steps, seen.num_warmup_steps) == ((1, 2, 3, 4, 5), 1)
    assert seen.step_s == pytest.approx(1.4, rel=1e-3)
    assert (seen.facts.global_batch_size, seen.facts.seq_length) == (8, 8192)
    assert any("15 lines" in note for note in seen.notes)


def test_words_of_older_lines_and_quantised_runs(tmp_path: Path) -> None:
    old = LINE.replace("tps:", "wps:").replace("mfu: 34.29%", "mfu: N/A")
    later = old.replace("step: 200", "step: 201").replace("50,322", "51,722").replace("loss:", "grad_norm: 1  loss:")
    seen = read(tmp_path, f"{old}\n{later.replace('grad_norm: 1  loss:  6.1384', 'loss:  6.1384  grad_norm:  1.0')}")
    assert seen.step_s == pytest.approx(1.4)
    assert seen.printed_mfu is None


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


def test_an_evaluation_is_no_step(tmp_path: Path) -> None:
    lines = torchtitan([1.0] * 6).splitlines()
    stamp = lines[-1].partition(" - root")[0]
    evaluated = f"{stamp[:-7]}:30,000 - root - INFO - validate step:  6  loss: 5.0  memory: 40.00GiB(50.0%)  tps: 99"
    seen = read(tmp_path, "\n".join([*lines, evaluated]))
    assert seen.series.steps == (1, 2, 3, 4, 5, 6)
    assert seen.wall is not None
    assert seen.wall.evaluation_s == pytest.approx(4.0)
