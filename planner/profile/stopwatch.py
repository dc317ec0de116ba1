"""Seconds of calls on one device, and the tensors that they work on."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from planner.probe.repeats import STEADY_S, Repeats, spread_fraction
from planner.probe.run import Device
from planner.specs.units import MICRO

FEWEST = 3
"""The smallest number of calls of a timing, and of those before it."""
WARM_UP_FRACTION, STEADY_FRACTION = 0.05, 0.85
"""Shares of a figure's part of the budget: calls before the timing, and the timing. The rest is for those that vary."""
FIRST_WARM_UP_S = 3.0
"""Seconds of products before the first figure: a GPU that was idle is cold, and its clocks are high."""
ROUND_S, MOST_IN_ROUND = 0.05, 500
"""A round of calls takes about so long; all of them are issued before the first is read."""


class Stopwatch:
    """Measures seconds of calls on one device, within a budget that `num_figures` figures share.

    What a figure does not need of its part is left to those after it.
    """

    def __init__(self, device: Device, budget_s: float, num_figures: int = 1) -> None:
        self.device, self.budget_s, self.num_left = device, budget_s, num_figures
        self.spread = 0.0
        """The largest spread of a figure since this was last set to 0."""
        self.is_cold = device == "cuda" and budget_s > 0

    def microseconds(self, call: Callable[[], object]) -> float:
        """Median of calls that follow one another, each timed by itself; on a GPU between two events on its stream."""
        if self.is_cold:
            self._warm_up()
            self.is_cold = False
        began_s, share_s = time.perf_counter(), max(self.budget_s, 0.0) / max(self.num_left, 1)
        warm_up = Repeats(FEWEST, most_s=WARM_UP_FRACTION * share_s)
        seconds = self._repeated(call, warm_up, guess_s=ROUND_S)
        most_s = (1 - WARM_UP_FRACTION) * share_s
        timing = Repeats(FEWEST, min(STEADY_S, STEADY_FRACTION * share_s), most_s)
        seconds = self._repeated(call, timing, guess_s=median(seconds))
        self.spread = max(self.spread, spread_fraction(seconds) or 0.0)
        self.num_left -= 1
        self.budget_s -= time.perf_counter() - began_s
        return median(seconds) / MICRO

    def _warm_up(self) -> None:
        """Keep the GPU busy with products, so that the first figure is measured like the last."""
        x = self.normal(4096, 4096)
        self._repeated(lambda: x @ x, Repeats(FEWEST, most_s=min(FIRST_WARM_UP_S, self.budget_s / 10)), ROUND_S)

    def _repeated(self, call: Callable[[], object], repeats: Repeats, guess_s: float) -> list[float]:
        """Seconds of calls, round after round, until they suffice."""
        seconds: list[float] = []
        began_s, round_s = time.perf_counter(), min(ROUND_S, repeats.most_s)
        while True:
            seconds += self._round(call, max(FEWEST, min(MOST_IN_ROUND, int(round_s / max(guess_s, 1e-9)))))
            total_s = max(sum(seconds), time.perf_counter() - began_s)  # short kernels wait for the host
            if repeats.suffice(len(seconds), total_s, partial(spread_fraction, seconds)):
                return seconds
            guess_s = median(seconds)

    def _round(self, call: Callable[[], object], num_calls: int) -> list[float]:
        if self.device == "cpu":
            times = []
            for _ in range(num_calls):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            return times
        event = cast(Any, torch.cuda.Event)
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(num_calls)]
        for start, end in pairs:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def backward_us(self, output: Tensor, inputs: tuple[Tensor, ...]) -> float:
        """Microseconds of computing all gradients of `inputs`."""
        seed = torch.ones_like(output)
        return self.microseconds(lambda: torch.autograd.grad(output, inputs, seed, retain_graph=True))

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
        made = torch.randn(*shape, device=self.device, dtype=dtype)
        return made.requires_grad_() if grad else made
