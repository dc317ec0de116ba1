"""The planner as tools of the Model Context Protocol: an agent asks, and gets what a person reads at the terminal.

A tool is a command of `plan` that runs in a process of its own with `--json`: a call that is cancelled ends its
process, and no call can write but a plan that the caller names under the server's folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import BaseModel, Field

from planner.answer import Layout, StepTime
from planner.decide.check import CheckedFile
from planner.decide.next import NextAnswer
from planner.distribution import __version__
from planner.serve.server import HOST, Announced, listen
from planner.specs.base import Fields, Ints, Texts
from planner.specs.training import Dtype

Call = Context[Any, Any]
"""A call of a tool, which hears of its progress."""
READS = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
WRITES = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
INSTRUCTIONS = (
    "Predicts how long a training step of a large model takes on N GPUs, whether it fits in memory, and which layout"
    " is best, in seconds and without a GPU. Ask before you spend GPU hours on trials. Every step comes with an 80%"
    " interval: two layouts whose intervals overlap widely are told apart only by a measurement."
)


class ToolJob(BaseModel):
    """A training job."""

    model: str = Field(description="A name (`plan models` lists them), a Hub name, or a config.json under the folder.")
    gpus: int = Field(gt=0, description="Number of GPUs.")
    hardware: str = Field("h100", description="A GPU or a rented instance: h100, gb200, mi300x, p5en, …")
    seq_length: int | None = Field(None, gt=0, description="Tokens of a sequence; the model's own if left out.")
    global_batch_size: int | None = Field(None, gt=0, description="Sequences of an optimizer step.")
    dtype: Dtype = Field("bf16", description="bf16, fp16, fp8, mxfp8 or nvfp4.")
    runtime: str = Field("megatron", description="The trainer: megatron, bridge, torchtitan, hf, deepspeed, …")
    lora: bool = Field(False, description="Train LoRA adapters, and not the weights.")

    def words(self) -> list[str]:
        """The job as options of a command."""
        return [*_words(**self.model_dump(exclude={"lora"})), *["--lora"] * self.lora]


class Sizes(BaseModel):
    """A layout of the caller's: only what differs from 1 need be said; dp follows from the number of GPUs."""

    tp: int = Field(1, gt=0)
    pp: int = Field(1, gt=0)
    cp: int = Field(1, gt=0)
    ep: int = Field(1, gt=0)
    vpp: int = Field(1, gt=0)
    dp: int | None = Field(None, gt=0)
    micro_batch_size: int = Field(1, gt=0)
    zero_stage: int | None = Field(None, ge=0, le=3)
    recompute: str = Field("none", pattern="none|selective|full")

    def words(self, gpus: int) -> list[str]:
        """The layout as options of a command."""
        dp = self.dp or max(gpus // (self.tp * self.pp * self.cp), 1)
        return _words(**self.model_dump(exclude={"dp"}), dp=dp)


class PlanAnswer(BaseModel):
    """A layout with its step and its memory."""

    layout: Layout
    step: StepTime
    fits: bool
    oom_probability: float | None
    needed_gib: float
    outcome: str = ""
    """How far the search came: `optimal` or `feasible` with its gap; empty for a layout that was given."""
    gap: float | None = None
    warnings: list[str] = []
    alternatives: list[str] = []
    saved: str | None = None


class FitsAnswer(BaseModel):
    """An answer to the question whether anything fits, with what would make it fit."""

    fits: bool
    needed_gib: float | None = None
    oom_probability: float | None = None
    because: str = ""
    remedy: str = ""


class CheckAnswer(BaseModel):
    """Verdicts on launch files; `exit_code` is 0, 3 memory, 8 refused, 9 worse than the old file, 10 unknown."""

    checks: list[CheckedFile]
    exit_codes: list[int]


class CompareAnswer(BaseModel):
    """The settings that differ between two plans or runs, and the terms of the step that make the difference."""

    differences: dict[str, list[Any]]
    waterfall: list[Fields]


class Tools:
    """The tools of a server, none of which reads or writes outside of its folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def path(self, name: str) -> Path:
        """A file of the folder; ToolError where the name leads out of it."""
        found = (self.root / name).resolve()
        if not found.is_relative_to(self.root):
            raise ToolError(f"{name[:80]!r}: outside of the folder of this server, {self.root}")
        return found

    async def plan(self, job: ToolJob, ctx: Call, save_as: str | None = None, time_limit_s: float = 60) -> PlanAnswer:
        """The fastest layout that fits, proven within a gap, with its alternatives; saved under a name if asked."""
        words = [*job.words(), "--time-limit", str(time_limit_s)]
        target = None if save_as is None else self.path(save_as)
        found = await _plan_json(words, ctx)
        if target is not None:
            target.write_text(json.dumps(found), encoding="utf-8")
        return _answer(found, None if target is None else str(target))

    async def evaluate(self, job: ToolJob, layout: Sizes, ctx: Call) -> PlanAnswer:
        """The step and the memory of a layout that the caller names, whether it fits or not."""
        return _answer(await _plan_json(["evaluate", *job.words(), *layout.words(job.gpus)], ctx))

    async def fits(self, job: ToolJob, ctx: Call, layout: Sizes | None = None) -> FitsAnswer:
        """Say whether the job, or one layout of it, fits in memory, and what would make it fit."""
        words = job.words() if layout is None else ["evaluate", *job.words(), *layout.words(job.gpus)]
        data = await _run(words, ctx, accepts=(0, 3))
        if "error" in data:
            error = data["error"]
            return FitsAnswer(fits=False, because=error["message"], remedy=error.get("hint", ""))
        found = _answer(data)
        return FitsAnswer(fits=found.fits, needed_gib=found.needed_gib, oom_probability=found.oom_probability)

    async def explain(self, job: ToolJob, ctx: Call, pinned: dict[str, int | str] | None = None) -> Fields:
        """Why the best layout is the best or, with axes pinned (tp, pp, …), why those are not chosen."""
        return await _run(["explain", *job.words(), *_words(**(pinned or {}))], ctx, accepts=(0, 3))

    async def sweep(self, job: ToolJob, gpus: str, ctx: Call) -> Fields:
        """The job on several numbers of GPUs, such as `64..1024` or `64,128`: steps, cost, the fewest that fit."""
        words = job.words()
        words[words.index("--gpus") + 1] = gpus
        return await _run(["sweep", *words], ctx)

    async def compare(self, first: str, second: str, ctx: Call) -> CompareAnswer:
        """Two saved plans or runs of the folder beside each other: what differs and where the seconds go."""
        data = await _run(["compare", str(self.path(first)), str(self.path(second))], ctx)
        return CompareAnswer(differences=data["differences"], waterfall=data["waterfall"])

    async def import_(self, file: str, ctx: Call, gpus: int | None = None, hardware: str | None = None) -> Fields:
        """A launch script, recipe or YAML of the folder as the run that it describes, with its price."""
        data = await _run(["import", str(self.path(file)), "--no-search", *_words(gpus=gpus, hardware=hardware)], ctx)
        return {name: data[name] for name in ("source", "run", "unknown", "notes", "refused")} | {
            "answer": _answer(data["evaluated"]).model_dump(mode="json")
        }

    async def check(
        self, files: list[str], ctx: Call, against: str | None = None, gpus: int | None = None,
        hardware: str | None = None,
    ) -> CheckAnswer:  # fmt: skip
        """Say whether launch files start, fit, and are no worse than the file that they replace."""
        old = [] if against is None else ["--against", str(self.path(against))]
        words = [
            "check",
            *(str(self.path(file)) for file in files),
            *old,
            *_words(gpus=gpus, hardware=hardware),
        ]
        data = await _run(words, ctx, accepts=(0, 3, 8, 9, 10))
        return CheckAnswer(
            checks=[CheckedFile.model_validate(one["new"]) for one in data["checks"]],
            exit_codes=[one["exit_code"] for one in data["checks"]],
        )

    async def next(
        self, plan_file: str, ctx: Call, observed_files: Texts = (), days: float | None = None
    ) -> NextAnswer:
        """The one short run that would save most of a run of so many days, and what it would decide, for a saved plan.

        `observed_files` are trials that were run, as `plan observe LOG --plan TRIAL -o FILE` saved them.
        """
        measured = ",".join(str(self.path(file)) for file in observed_files) or None
        words = ["next", str(self.path(plan_file)), *_words(days=days, measured=measured)]
        return NextAnswer.model_validate(await _run(words, ctx))

    async def observe(self, log: str, ctx: Call, plan_file: str | None = None) -> Fields:
        """A run's log of the folder: its steady step, memory, and the gap to a saved plan with its causes."""
        words = ["observe", str(self.path(log))]
        return await _run(words if plan_file is None else [*words, "--plan", str(self.path(plan_file))], ctx)


def server(folder: Path) -> MCPServer[Any]:
    """The server, whose tools read and write under `folder` alone."""
    made: MCPServer[Any] = MCPServer("planner", version=__version__, instructions=INSTRUCTIONS)
    tools = Tools(folder)
    made.tool(annotations=WRITES)(tools.plan)
    made.tool(name="import", annotations=READS)(tools.import_)
    for tool in (
        tools.evaluate,
        tools.fits,
        tools.explain,
        tools.sweep,
        tools.compare,
        tools.check,
        tools.next,
        tools.observe,
    ):
        made.tool(annotations=READS)(tool)
    return made


def over_http(made: MCPServer, port: int, ready: Callable[[str], None]) -> None:
    """Offer the tools at /mcp of this machine's own address until interrupted; `ready` is called with the address."""
    logging.getLogger("mcp").setLevel(logging.WARNING)
    with listen(port, "plan mcp --http") as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}/mcp"
        settings = uvicorn.Config(made.streamable_http_app(), log_level="error")
        Announced(settings, lambda: ready(address)).run(sockets=[listener])


def _words(**given: Any) -> list[str]:
    """Values as options of a command, those that are not given left out."""
    known = ((f"--{name.replace('_', '-')}", str(value)) for name, value in given.items() if value is not None)
    return [word for pair in known for word in pair]


async def _plan_json(words: list[str], ctx: Call) -> Fields:
    """The plan that a command prints; ToolError with the planner's own words where there is none."""
    data = await _run(words, ctx, accepts=(0, 3))
    if "error" in data:
        raise ToolError(f"{data['error']['message']}\n{data['error'].get('hint', '')}".strip())
    return data


async def _run(words: list[str], ctx: Call, accepts: Ints = (0,)) -> Fields:
    """The JSON that a command prints. Its process ends with the call, also where the call is cancelled."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "planner.cli", *words, "--json",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    began_s, reading = time.monotonic(), asyncio.ensure_future(process.communicate())
    try:
        while not (await asyncio.wait([reading], timeout=1.0))[0]:
            elapsed_s = time.monotonic() - began_s
            await ctx.report_progress(elapsed_s, message=f"plan {words[0].lstrip('-')}: {elapsed_s:.0f} s")
        out, told = reading.result()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode not in accepts:
        raise ToolError(told.decode(errors="replace").strip() or f"ended with {process.returncode}")
    answer: Fields = json.loads(out)
    return answer


def _answer(data: Fields, saved: str | None = None) -> PlanAnswer:
    best, search = data["best"], data.get("search") or {}
    needed = max(stage["memory"]["total_bytes"] for stage in best["stages"])
    return PlanAnswer(
        layout=Layout.model_validate(best["parallelism"]),
        step=StepTime.model_validate(best["step"]),
        fits=best["fits"],
        oom_probability=best.get("oom_probability"),
        needed_gib=needed / 2**30,
        outcome=search.get("outcome", ""),
        gap=search.get("gap"),
        warnings=best.get("warnings", []),
        alternatives=[
            f"{Layout.model_validate(other['parallelism'])}: {other['step']['step_s']:.4g} s, {other.get('trade', '')}"
            for other in data.get("alternatives", [])[:3]
        ],
        saved=saved,
    )
