"""nanotron's line, whose three digits limit what is known of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
from written import read

LINE = (
    "01/17/2024 13:47:{:02} [INFO|DP=0|PP=0|TP=0|ip-26]: iteration: {} / 1000 | consumed_tokens: 1.31M | "
    "elapsed_time_per_iteration_ms: 1.2K | tokens_per_sec: 218K | tokens_per_sec_per_gpu: 27.2K | global_batch_size: "
    "20 | lm_loss: 10.6 | model_tflops_per_gpu: 49.3 | cuda_memory_allocated: 75.2M | cuda_max_memory_reserved: 547M"
)


@pytest.mark.parametrize("name", ["elapsed_time_per_iteration_ms", "time_per_iteration_ms"])
def test_three_digits_say_so(tmp_path: Path, name: str) -> None:
    lines = [LINE.replace("elapsed_time_per_iteration_ms", name).format(10 + step, step) for step in range(1, 4)]
    seen = read(tmp_path, "\n".join(lines))
    assert (seen.step_s, seen.sources[0].format) == (1.2, "nanotron")
    assert seen.step_s_precision_fraction == pytest.approx(50 / 1200)
    assert (seen.tokens_per_s, seen.printed_tflops_per_gpu) == (218_000, 49.3)
    assert (seen.peak_memory_bytes, seen.peak_memory_kind) == (547_000_000, "reserved")
    assert seen.facts.global_batch_size == 20
