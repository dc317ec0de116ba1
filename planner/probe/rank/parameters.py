"""A rank's parameters, sorted by the ranks over which their gradients are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from planner.probe.model.chunk import Chunk
from planner.probe.model.weights import local, whole_name
from planner.probe.run import ProbeRun


class Parameters:
    """Parameters of a rank by the ranks over which gradients are summed: dense ones over dp·cp, experts over
    expert-dp."""

    def __init__(self, run: ProbeRun, chunks: dict[int, Chunk], holders: Callable[[str, int], tuple[int, ...]]) -> None:
        self.run = run
        self.named: list[tuple[str, int, nn.Parameter]] = [
            (whole_name(name, parameter), stage, parameter)
            for stage, chunk in chunks.items()
            for name, parameter in chunk.named_parameters()
        ]
        self.holders = {(name, stage): holders(name, stage) for name, stage, _ in self.named}

    def of_kind(self, expert: bool, tp_rank: int, pp_rank: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters whose squares this rank counts in the global norm, and the others."""
        counted: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        seen: set[str] = set()
        for name, stage, parameter in self.named:
            if hasattr(parameter, "expert") != expert:
                continue
            first_holder = self.holders[name, stage][0] == pp_rank and name not in seen
            seen.add(name)
            once = expert or hasattr(parameter, "shard") or tp_rank == 0
            (counted if first_holder and once else others).append(parameter)
        return counted, others

    def partial_over_tp(self) -> Iterator[Tensor]:
        """Main gradients that must be summed over tensor-parallel ranks, each of which has a part."""
        for _, _, parameter in self.named:
            partial = getattr(parameter, "partial", None)
            if not hasattr(parameter, "expert") and (
                partial == "always" or (partial == "sequence" and self.run.sequence_parallel)
            ):
                yield main_gradient(parameter)

    def replicas(self) -> dict[tuple[int, ...], dict[str, list[Tensor]]]:
        """Main gradients of parameters that are held more than once, by holders and by name."""
        by_holders: dict[tuple[int, ...], dict[str, list[nn.Parameter]]] = {}
        for name, stage, parameter in self.named:
            by_holders.setdefault(self.holders[name, stage], {}).setdefault(name, []).append(parameter)
        return {
            holders: {
                name: [main_gradient(parameter) for parameter in replicas]
                for name, replicas in names.items()
                if len(holders) > 1 or len(replicas) > 1
            }
            for holders, names in by_holders.items()
        }


def main_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient that backward has added up for a parameter: its `main_grad` buffer, or this rank's rows."""
    main: Tensor | None = getattr(parameter, "main_grad", None)
    return local(parameter.grad) if main is None else main
