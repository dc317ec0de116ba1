"""The planner as an agent calls it, by the client of the Model Context Protocol's own SDK."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

import anyio
from mcp import Client
from mcp.client.stdio import StdioServerParameters

from planner.serve import mcp_server
from planner.serve.mcp_server import server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
JOB = {"model": "1b", "gpus": 4, "seq_length": 2048, "global_batch_size": 16}
NAMES = {"plan", "evaluate", "fits", "explain", "sweep", "compare", "import", "check", "next", "observe"}


def called(folder: Path, name: str, **arguments: Any) -> tuple[bool, Any]:
    """True and the message of a refused call, or False and what the tool answered."""

    async def main() -> tuple[bool, Any]:
        async with Client(server(folder)) as client:
            result = await client.call_tool(name, arguments)
            text = getattr(result.content[0], "text", "") if result.content else ""
            return bool(result.is_error), text if result.is_error else result.structured_content

    return anyio.run(main)


def test_a_plan_is_typed_and_saved_under_the_folder(tmp_path: Path) -> None:
    refused, answer = called(tmp_path, "plan", job=JOB, save_as="plan.json")
    assert not refused
    assert answer["fits"]
    assert answer["step"]["step_s"] > 0
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert saved["best"]["step"]["step_s"] == answer["step"]["step_s"]
    _, given = called(tmp_path, "evaluate", job=JOB, layout={"tp": 2})
    assert given["layout"]["tp"] == 2
    assert given["step"]["step_s"] >= answer["step"]["step_s"]


@pytest.mark.parametrize(
    ("name", "arguments", "word"),
    [
        ("check", {"files": ["../outside.sh"]}, "outside of the folder"),
        ("plan", {"job": JOB, "save_as": "/tmp/elsewhere.json"}, "outside of the folder"),
        ("plan", {"job": JOB | {"model": "9bx"}}, "unknown '9bx'"),
        ("plan", {"job": JOB | {"gpus": 0}}, "gpus"),
    ],
)
def test_a_refusal_says_what_is_wrong(name: str, arguments: dict[str, Any], word: str, tmp_path: Path) -> None:
    refused, text = called(tmp_path, name, **arguments)
    assert refused
    assert word in text


def test_what_does_not_fit_says_what_would(tmp_path: Path) -> None:
    _, answer = called(tmp_path, "fits", job={"model": "405b", "gpus": 8})
    assert not answer["fits"]
    assert "GPUs" in answer["remedy"]


def test_the_next_trial_of_a_saved_plan_is_told(tmp_path: Path) -> None:
    called(tmp_path, "plan", job=JOB, save_as="plan.json")
    refused, answer = called(tmp_path, "next", plan_file="plan.json", days=30)
    assert not refused
    assert answer["favourite"] in {one["name"] for one in answer["layouts"]}


def test_a_cancelled_call_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def kept(*words: str, **options: Any) -> asyncio.subprocess.Process:
        started.append(await start(sys.executable, "-c", "import time; time.sleep(60)", **options))
        return started[-1]

    monkeypatch.setattr(mcp_server.asyncio, "create_subprocess_exec", kept)

    async def main() -> None:
        async with Client(server(tmp_path)) as client:
            with anyio.move_on_after(1):
                await client.call_tool("plan", {"job": JOB})
            with anyio.fail_after(10):
                await started[0].wait()

    anyio.run(main)
    assert started[0].returncode == -9


async def tools_of(address: Any) -> dict[str, Any]:
    async with Client(address) as client:
        return {tool.name: tool for tool in (await client.list_tools()).tools}


def test_tools_are_listed_over_http(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "planner.cli", "mcp", "--folder", str(tmp_path), "--http", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        tools = anyio.run(tools_of, address)
        process.send_signal(signal.SIGINT)
    assert tools.keys() == NAMES
    assert process.returncode == 130


def test_tools_are_listed_over_stdin_and_stdout(tmp_path: Path) -> None:
    words = ["-m", "planner.cli", "mcp", "--folder", str(tmp_path)]
    tools = anyio.run(tools_of, StdioServerParameters(command=sys.executable, args=words, env=dict(os.environ)))
    assert tools.keys() == NAMES
    assert [name for name, tool in tools.items() if not tool.annotations.read_only_hint] == ["plan"]
    assert "job" in tools["plan"].input_schema["properties"]
    assert "layout" in tools["plan"].output_schema["properties"]
