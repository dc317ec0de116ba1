"""The seconds of stages as `plan schedule` is given them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.schedule.compare import RankSeconds

MIN_SECONDS, MAX_SECONDS = 1e-12, 1e9
"""Less and more than any step takes; what lies between can be added up and drawn. 0 is allowed beside them."""


def rank_seconds(
    pp: int,
    forward: tuple[float, ...] | None,
    backward: tuple[float, ...] | None,
    weight_grad: tuple[float, ...] | None,
    p2p: float,
    blocking: bool,
    sizes: tuple[float, ...] | None,
    slow_ranks: dict[int, float],
    slow_links: dict[tuple[int, int], float],
) -> RankSeconds:
    """Seconds of each rank's passes and transfers; SpecError naming the option that makes no sense."""
    from planner.errors import SpecError
    from planner.schedule.compare import RankSeconds

    def per_rank(option: str, values: tuple[float, ...]) -> tuple[float, ...]:
        if len(values) not in (1, pp) or not all(value == 0 or _is_time(value) for value in values):
            raise SpecError(
                f"{option} {','.join(f'{value:g}' for value in values)}: not one time, nor one for each of {pp} ranks",
                f"{option} 1",
            )
        return values if len(values) == pp else values * pp

    forward_s = per_rank("--forward", forward or (1.0,))
    backward_s = per_rank("--backward", backward) if backward else tuple(2 * f for f in forward_s)
    weight_grad_s = per_rank("--weight-grad", weight_grad) if weight_grad else tuple(b / 2 for b in backward_s)
    if any(w > b for w, b in zip(weight_grad_s, backward_s, strict=True)):
        raise SpecError("--weight-grad is longer than --backward, of which it is a part", "lower it, or leave it out")
    if not any((*forward_s, *backward_s)):
        raise SpecError("--forward 0 and --backward 0: no stage takes any time", "leave one of them out")
    input_grad_s = tuple(b - w for b, w in zip(backward_s, weight_grad_s, strict=True))
    (p2p_s,) = per_rank("--p2p", (p2p,))[:1]
    if sizes is not None and not all(map(_is_time, sizes)):
        raise SpecError("--sizes: a micro-batch has no length above 0", "--sizes 1,1,2 for three micro-batches")
    return RankSeconds(
        forward_s, input_grad_s, weight_grad_s, p2p_s, blocking, sizes, slow_ranks=slow_ranks, slow_links=slow_links
    )


def slow_stages_of(words: list[str] | None, pp: int) -> dict[int, float]:
    """`3:1.2` as {3: 1.2}."""
    from planner.errors import SpecError
    from planner.specs.units import is_count

    factors = {}
    for word in words or []:
        rank, _, factor = word.partition(":")
        if not (is_count(rank) and int(rank) < pp and _is_factor(factor)):
            raise SpecError(f"--slow-stage {word[:60]}: not a rank below {pp} and a factor", "--slow-stage 3:1.2")
        factors[int(rank)] = float(factor)
    return factors


def slow_links_of(words: list[str] | None, pp: int) -> dict[tuple[int, int], float]:
    """`1-2:5` as {(1, 2): 5.0}."""
    from planner.errors import SpecError
    from planner.specs.units import is_count

    factors = {}
    for word in words or []:
        link, _, factor = word.partition(":")
        ends = link.split("-")
        if not (len(ends) == 2 and all(is_count(e) and int(e) < pp for e in ends) and _is_factor(factor)):
            raise SpecError(f"--slow-link {word[:60]}: not two ranks below {pp} and a factor", "--slow-link 1-2:5")
        factors[int(ends[0]), int(ends[1])] = float(factor)
    return factors


def _is_time(value: float) -> bool:
    return MIN_SECONDS <= value <= MAX_SECONDS


def _is_factor(word: str) -> bool:
    try:
        return 0 < float(word) < float("inf")
    except ValueError:
        return False
