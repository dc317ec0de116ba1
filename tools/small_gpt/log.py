"""The log of a run, as Megatron-LM prints it, or as CSV."""

from __future__ import annotations

from datetime import datetime

from small_gpt.job import Run

TIMERS = ("forward-backward", "forward-compute", "backward-compute", "batch-generator", "all-grads-sync", "optimizer")


class Log:
    """The log of a run, written by its last rank in Megatron-LM's form, or as CSV."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.path = run.folder / ("train.log" if run.log == "megatron" else "steps.csv")
        self.peaks = [0] * run.layout.num_ranks
        layout = run.layout
        if run.log == "megatron":
            head = (
                f"using world size: {layout.num_ranks}, data-parallel size: {layout.dp}, context-parallel size: 1, "
                f"tensor-model-parallel size: {layout.tp}, pipeline-model-parallel size: {layout.pp}\n"
                "------------------------ arguments ------------------------\n"
                + "".join(f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in self._arguments())
                + "-------------------- end of arguments ---------------------\n"
            )
        else:
            head = "timestamp,step,step_time_s,memory_bytes,loss\n"
        self.path.write_text(head)

    def _arguments(self) -> list[tuple[str, object]]:
        fault, layout = self.run.fault, self.run.layout
        collects = fault.kind == "collects"
        return [
            ("log_interval", 1), ("manual_gc", collects), ("manual_gc_interval", fault.every if collects else 0),
            ("micro_batch_size", layout.micro_batch_size), ("seq_length", layout.seq_length),
            ("train_iters", self.run.num_steps),
        ]  # fmt: skip

    def add(self, number: int, seconds: float, loss: float, memory: list[int], timers: list[list[float]]) -> None:
        """Write what is printed after a step; `timers` by rank."""
        now, run, layout = datetime.now(), self.run, self.run.layout
        self.peaks = [max(pair) for pair in zip(self.peaks, memory, strict=True)]
        if run.log == "csv":
            text = f"{now.isoformat()},{number},{seconds:.6f},{max(memory)},{loss:.4f}\n"
        else:
            batch = layout.dp * layout.num_microbatches * layout.micro_batch_size
            text = (
                f" [{now}] iteration {number:8d}/{run.num_steps:8d} | consumed samples: {number * batch:12d} |"
                f" elapsed time per iteration (ms): {seconds * 1e3:.1f} | learning rate: 1.000000E-04 |"
                f" global batch size: {batch:5d} | lm loss: {loss:.6E} | number of skipped iterations:   0 |"
                f" number of nan iterations:   0 |\n"
            )
            if number % 2 == 0:
                text += "".join(self._memory(rank, number, used) for rank, used in enumerate(memory))
            text += self._timers(timers)
        with self.path.open("a") as file:
            file.write(text)

    def _memory(self, rank: int, number: int, used: int) -> str:
        return (
            f"[Rank {rank}] (after {number} iterations) memory (MB) | allocated: {used / 2**20:.2f} |"
            f" max allocated: {self.peaks[rank] / 2**20:.2f}\n"
        )

    def _timers(self, timers: list[list[float]]) -> str:
        if self.run.timers == "none":
            return ""
        by_name = dict(zip(TIMERS, zip(*timers, strict=True), strict=True))
        by_name = {name: values for name, values in by_name.items() if max(values) > 0}
        if self.run.timers == "all":
            lines = ["    times across ranks (ms):"]
            for name, values in by_name.items():
                lines.append(f"  {name}:")
                lines += [f"     rank {rank:2d}: {value * 1e3:.2f}" for rank, value in enumerate(values)]
        else:
            lines = ["(min, max) time across ranks (ms):"]
            for name, values in by_name.items():
                lines.append(f"    {(name + ' ').ljust(48, '.')}: ({min(values) * 1e3:.2f}, {max(values) * 1e3:.2f})")
        return "\n".join(lines) + "\n"
