"""Logs written here after the trainers' own format strings: no trainer printed them, but for lines with a source."""

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from planner.observe.log_reader import observe
from planner.observe.observation import Observation

TABLES = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())

BEGIN_S = 1_712_372_000
"""2024-04-06 02:53:20 UTC."""


def read(folder: Path, *texts: str | bytes) -> Observation:
    """The observation of logs with these texts."""
    paths = []
    for count, text in enumerate(texts):
        path = folder / f"{count}.log"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        paths.append(str(path))
    return observe(paths)


def packed(folder: Path, text: str) -> Path:
    path = folder / "log.gz"
    path.write_bytes(gzip.compress(text.encode()))
    return path


def clock(at_s: float) -> str:
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S}"


def iteration(number: int, seconds: float, at_s: float | None = None, batch: int = 128) -> str:
    """Megatron-LM's line, as `training_log` writes it."""
    time = "" if at_s is None else f"[{clock(at_s)}] "
    return (
        f" {time}iteration {number:8d}/     500 | consumed samples: {number * batch:12d} | elapsed time per iteration "
        f"(ms): {seconds * 1e3:.1f} | learning rate: 1.000000E-05 | global batch size: {batch:5d} | lm loss: "
        "2.000000E+00 | loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |"
    )


def iterations(seconds: Iterable[float], first: int = 1, begin_s: float = BEGIN_S) -> Iterator[str]:
    """A line for each step, with its time."""
    at_s = begin_s
    for number, step_s in enumerate(seconds, start=first):
        at_s += step_s
        yield iteration(number, step_s, at_s)


def arguments(**values: object) -> str:
    """Megatron-LM's dump of its arguments."""
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
    begin, end = "------------------------ arguments ------------------------", "-------------------- end of arguments"
    return "\n".join([begin, *lines, f"{end} ---------------------"])


LLAMA_8B = TABLES["llama_8b"]
"""Llama 3 8B on 16 GPUs, with the defaults that a dump always has."""


# bigcode-project/Megatron-LM issue 28
TIMERS = TABLES["timers"]


def mllog(key: str, value: object, at_s: float, **metadata: object) -> str:
    """A line of MLPerf's log."""
    record = {"namespace": "", "time_ms": round(at_s * 1e3), "event_type": "POINT_IN_TIME", "key": key, "value": value}
    return ":::MLLOG " + json.dumps({**record, "metadata": {"file": "callbacks.py", "lineno": 1, **metadata}})


def mlperf(steps_s: list[float], version: str = "5.0", batch: int = 1152, evaluation_s: float = 20.0) -> str:
    """A run of MLPerf whose steps are followed by an evaluation, with the block average that is no step."""
    at_s = float(BEGIN_S)
    lines = [mllog("init_start", None, at_s) for _ in range(8)]
    lines += [mllog(k, v, at_s) for k, v in (("global_batch_size", batch), ("max_sequence_length", 8192))]
    at_s += 300
    lines += [mllog("init_stop", None, at_s), mllog("run_start", None, at_s), mllog("block_start", None, at_s)]
    for number, step_s in enumerate(steps_s, start=1):
        at_s += step_s
        metadata = {
            "4.1": {"step": number * batch * 8192},
            "5.0": {"step": float(number * batch)},
            "5.1": {"step": number - 1.0, "samples_count": float(number * batch)},
        }[version]
        name = "train_step_timing in s" if version == "4.1" else "train_step_time"
        lines.append(mllog("tracked_stats", {name: step_s, "reduced_train_loss": 7.7}, at_s, **metadata))
    mean_s = sum(steps_s) / len(steps_s)
    if version == "5.0":
        block = {"throughput": batch / mean_s, "train_step_time": mean_s, "max_memory_usage": 58.817}
        lines.append(mllog("tracked_stats", block, at_s, step=0))
    elif version == "5.1":
        lines.append(mllog("tracked_stats", {"train_step_time": mean_s}, at_s, samples_count=len(steps_s) * batch))
    lines += [mllog("block_stop", None, at_s), mllog("eval_start", None, at_s)]
    at_s += evaluation_s
    lines += [mllog("eval_stop", None, at_s), mllog("run_stop", None, at_s, status="success")]
    return "\n".join(lines) + "\n"


def torchtitan(steps_s: list[float], tokens: int = 8192, ranks: int = 1) -> str:
    """A run of torchtitan, every step printed by every rank."""
    at_s, lines = float(BEGIN_S), []

    def stamp() -> str:
        return f"[titan] {clock(at_s)},{int(at_s % 1 * 1000):03d} - root - INFO - "

    lines.append(
        f"[rank0]:{stamp()}Training starts at step 1, with local batch size 1, global batch size 8, sequence length "
        "8192, total steps 1000 (warmup 200)"
    )
    for number, step_s in enumerate(steps_s, start=1):
        at_s += step_s
        colours = ("\x1b[31m", "\x1b[32m", "\x1b[38;2;180;60;0m", "\x1b[34m", "\x1b[36m", "\x1b[35m", "\x1b[39m")
        red, green, orange, blue, cyan, magenta, reset = colours
        for rank in range(ranks):
            lines.append(
                f"[rank{rank}]:{stamp()}{red}step: {number:2}  {green}loss: {7:7.4f}  {orange}memory: {49.66:5.2f}GiB"
                f"(52.28%)  {blue}tps: {round(tokens / step_s):,}  {cyan}tflops: 339.16  {magenta}mfu: 34.29%{reset}"
            )
    return "\n".join(lines) + "\n"
