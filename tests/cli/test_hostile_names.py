"""Names that would steer a terminal, through every format of file and every command: none is shown as it stands."""

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from planner.cli import main
from planner.errors import PlannerError, one_line, printable
from planner.report.pieces import Plain

CORPUS = Path(__file__).parents[1] / "fuzzing" / "corpus"
NAME = "h\x1b[31m\x9b1m\u202e[bold]zz[/bold]"
"""A colour, the same in one C1 byte, text from right to left, and rich's markup."""
QUOTED = json.dumps(NAME)
"""It as JSON, YAML and TOML spell it."""
MODEL = {
    "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1024,
    "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
JOB = ["--hardware", "h100", "--gpus", "8", "-b", "8", "-s", "2048"]


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Runs a command in a folder of files; what it shows, once that is known to be harmless."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, **files: str) -> str:
        for name, text in files.items():
            Path(name.replace("__", ".")).write_text(text)
        handlers = logging.getLogger().handlers[:]
        try:
            main(list(words))
        finally:
            logging.getLogger().handlers[:] = handlers
        captured = capsys.readouterr()
        for stream in captured:
            assert not {letter for letter in stream if not letter.isprintable()} - {"\n"}, words
            assert not re.search(r"(?<!bold.)zz", "".join(stream.split())), words  # markup is shown, or made a slug
        for line in captured.err.splitlines():
            assert len(line) <= 2_100
        return str(captured.out + captured.err)

    return run


def model(**changes: Any) -> str:
    return json.dumps(MODEL | changes)


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("yaml", f"name: {QUOTED}\n{QUOTED}: 1\n"), ("yaml", f"name: a\nhidden_size: {QUOTED}\n"),
        ("yaml", f"a: 1\n{QUOTED}: 1\n{QUOTED}: 2\n"), ("yaml", f"a: !{'%1b%1b'}yy 1\n"), ("yaml", f"- {QUOTED}\n"),
        ("json", model(**{NAME: 1})), ("json", model(hidden_size=NAME)), ("json", model(model_type=NAME)),
        ("json", model(architectures=[NAME])), ("json", f"{{{QUOTED}: 1, {QUOTED}: 2}}"), ("json", "{" + NAME),
        ("toml", f"[training]\n{QUOTED} = {QUOTED}\n"),
    ],
)  # fmt: skip
def test_an_error_about_a_spec(shown: Any, suffix: str, text: str) -> None:
    for option in ("--model", "--hardware", "--runtime"):
        given = {"--model": "1b", "--hardware": "h100", option: f"spec.{suffix}"}
        job = [word for pair in given.items() for word in pair]
        said = shown("evaluate", "--tp", "1", *job, *JOB[2:], **{f"spec__{suffix}": text})
        assert said.startswith("error: ")
        assert "\nhint: " in said


def test_a_model_with_such_a_name(shown: Any) -> None:
    files = {"m__json": model(name="h[bold]zz[bold]")}  # more than that is refused
    said = shown("evaluate", "--model", "m.json", *JOB, "--tp", "1", "-o", "plan.json", **files)
    assert "error" not in said
    for words in (
        ["models", "m.json"], ["evaluate", "--model", "m.json", *JOB, "--tp", "1"],
        ["evaluate", "--model", "m.json", *JOB, "--tp", "3"], ["compare", "plan.json", "plan.json"],
        ["export", "plan.json", "--to", "megatron", "--dry-run"],
        ["export", "plan.json", "--to", "torchtitan", "-o", NAME.replace("/", "")], ["memory", "plan.json"],
        ["trace", "plan.json", "-o", "trace.json"], ["report", "plan.json", "-o", "report.html"],
        ["report", "plan.json", "-o", "-"], ["explain", "plan.json"], ["replan", "plan.json"],
    ):  # fmt: skip
        shown(*words)
    page = Path("report.html").read_text()
    assert "\x1b" not in page
    assert "\u202e" not in page


IMPORTS = {
    "run__sh": (CORPUS / "shell" / "dense.sh").read_text() + f"\ntorchrun pretrain_gpt.py --{NAME} {NAME}\n",
    "args__sh": f"torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --{NAME} '{NAME}'",
    "conf__toml": (CORPUS / "torchtitan" / "config.toml").read_text() + f"\n[other]\n{QUOTED} = {QUOTED}\n",
    "broken__toml": f"[training]\n{NAME}",
    "trainer__json": json.dumps(json.loads((CORPUS / "huggingface" / "trainer.json").read_text()) | {NAME: NAME}),
    "ds_config__json": json.dumps(
        json.loads((CORPUS / "deepspeed" / "ds_config.json").read_text()) | {NAME: NAME, "fp16": {NAME: NAME}}
    ),
    "bridge__json": json.dumps(json.loads((CORPUS / "bridge" / "dense.json").read_text()) | {NAME: NAME}),
    "accelerate__yaml": (CORPUS / "huggingface" / "accelerate_fsdp.yaml").read_text() + f"\n{QUOTED}: {QUOTED}\n",
    "primus__yaml": (CORPUS / "primus" / "experiment.yaml").read_text() + f"\n{QUOTED}: {QUOTED}\n",
    "nemo__yaml": f"name: megatron_gpt\ntrainer: {{devices: {QUOTED}}}\nmodel: {{{QUOTED}: {QUOTED}}}\n",
    "recipe__py": f"from torchtitan import Trainer\ndef a():\n  return Trainer.Config(x={NAME!r}, **{{{NAME!r}: 1}})\n",
    "broken__py": f"from torchtitan.config import TrainingConfig\n{NAME}\n",
}  # fmt: skip


@pytest.mark.parametrize("name", IMPORTS)
def test_a_configuration_that_is_imported(shown: Any, name: str) -> None:
    for more in ([], ["--gpus", "8", "--model", "1b", "-s", "2048", "-b", "8"], ["--json"]):
        shown("import", name.replace("__", "."), "--no-search", *more, **{name: IMPORTS[name]})


def test_runs_with_such_names(shown: Any) -> None:
    run = {"model": MODEL | {"name": NAME}, "hardware": "h100", "num_gpus": 8, "seq_length": 2048,
           "global_batch_size": 8, "parallelism": {"dp": 8}}  # fmt: skip
    lines = [
        {"id": NAME, "run": run}, {"id": "a\nb" + NAME, "run": run | {NAME: 1}},
        {"id": 1, "run": run | {"hardware": NAME}}, {"id": 1, "run": run | {"features": {NAME: NAME}}},
    ]  # fmt: skip
    text = "\n".join([*map(json.dumps, lines), NAME, f'{{"{NAME}'])
    said = shown("evaluate", "--runs", "runs.jsonl", runs__jsonl=text)
    assert len(said.splitlines()) == 2 * (len(lines) + 2)


@pytest.mark.parametrize("name", ["megatron.log", "deepspeed.log", "mlperf.log", "torchtitan.log", "steps.csv"])
def test_a_log_with_such_lines(shown: Any, name: str) -> None:
    text = (CORPUS / "log" / name).read_text()
    head, _, rest = text.partition("\n")
    hostile = {
        "megatron.log": f"{head}\n  {NAME} ...... {NAME}\n  fp8 ....... {NAME}\n{rest}\n{NAME}\nRuntimeError: {NAME}\n",
        "mlperf.log": text + f':::MLLOG {{"key": "submission_platform", "time_ms": 1, "value": {QUOTED}}}\n',
        "steps.csv": f"{NAME} - {head},{NAME}\n{rest}",
    }.get(name, f"{text}\n{NAME}\nRuntimeError: {NAME}\n")
    for words in ([], ["--json"], ["-o", "seen.json"]):
        shown("observe", f"{NAME.replace('/', '')}.log", *words, **{f"{NAME.replace('/', '')}.log": hostile})
    for words in (["compare", "seen.json", "seen.json"], ["report", "seen.json", "-o", "seen.html"]):
        shown(*words)
    if Path("seen.html").exists():
        assert "\x1b" not in Path("seen.html").read_text()


def test_other_files_and_paths(shown: Any) -> None:
    place = NAME.replace("/", "")
    for words in (
        ["schedule", "--from-csv", "s.csv"], ["probe", "s.csv"], ["--model", "1b", *JOB, "--phases", "p.yaml"],
        ["--model", NAME, *JOB], ["--model", "1b", "--hardware", NAME, "--gpus", "8"],
        ["--model", "1b", *JOB, "--calibration", place], ["import", place], ["observe", place], ["report", place],
        ["compare", place, place], ["export", place], ["evaluate", "--runs", place], [NAME], [f"--{NAME}"],
        ["validate", "--add", place],
    ):  # fmt: skip
        said = shown(*words, s__csv=f"0F0,{NAME}\n", p__yaml=f"phases:\n- {{name: {QUOTED}, {QUOTED}: 1}}\n")
        assert "error: " in said


def test_a_word_of_an_error_is_cut_and_the_line_too() -> None:
    error = PlannerError(f"a: {'x' * 500} is wrong", "b " * 5_000)
    first, second = error.lines().splitlines()
    assert first == f"error: a: {'x' * 100}…{'x' * 99} is wrong"
    assert len(second) == len("hint: ") + 2_000
    assert one_line("a\nb\tc\x85d") == "a b c d"


def test_every_control_and_mark_of_direction_is_replaced() -> None:
    marks = [chr(code) for code in (*range(32), *range(0x7F, 0xA0), 0x202A, 0x202E, 0x2066, 0x2069, 0x200F, 0xFEFF)]
    assert {printable(mark) for mark in marks} == {"?", "\n", "\t"}
    assert printable("Größe × 2 — 模型") == "Größe × 2 — 模型"


def test_a_renderable_keeps_its_colours_and_loses_those_of_its_text() -> None:
    table = Table(title=Text(NAME))
    table.add_column(Text(NAME))
    table.add_row(Text(NAME, style="red"))
    console = Console(force_terminal=True, color_system="standard", markup=False, width=80, file=sys.stdout)
    with console.capture() as capture:
        console.print(Plain(table))
    text = capture.get()
    assert "\x1b[31mh?[31m?1m?[bold]zz[/bold]\x1b[0m" in text
    assert not {"\x9b", "\u202e"} & set(text)
