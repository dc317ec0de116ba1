"""The site in docs/: generated pages are today's, links and names of code exist, answers obey their schemas."""

from __future__ import annotations

import ast
import json
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from planner import __version__, answer
from planner.answer import layout
from planner.cli import app, main
from planner.specs.reading import load_yaml

ROOT = Path(__file__).parents[2]
TABLES = yaml.safe_load((ROOT / "tests" / "tables.yaml").read_text())
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md"))
NEW = [page for page in PAGES if page.parent.name in ("guide", "physics", "reference") or page.name == "index.md"]
CODE = re.compile(
    r"`((?:planner|tests|tools|scripts|docs|model_specs|hardware_profiles)/[\w./-]+)(?::(\w+(?:\.\w+)*))?`"
)
LINK = re.compile(r"(?<!\!)\[[^\]\n]*\]\(([^)\s]+)\)")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The package that writes the reference."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from reference import links, pages, schemas  # noqa: F401

        return sys.modules["reference"]
    finally:
        sys.path.pop(0)


def named(page: Path) -> str:
    return str(page.relative_to(DOCS))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs makes them."""
    headings = re.findall(r"^#+ +(.+?)\s*$", FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in headings)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()) for text in plain}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for target in LINK.findall(text) + PICTURE.findall(text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(file), f"{target}: no such heading"


@cache
def names_of(file: Path) -> frozenset[str]:
    """What a module defines and its page shows: functions, classes with their members, constants of a line each."""

    def found(body: list[ast.stmt], before: str) -> set[str]:
        names = set()
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(before + node.name)
                names |= found(node.body, f"{before}{node.name}.") if isinstance(node, ast.ClassDef) else set()
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names |= {before + target.id for target in targets if isinstance(target, ast.Name)}
        return names

    return frozenset(found(ast.parse(file.read_text()).body, ""))


@pytest.mark.parametrize("page", NEW, ids=named)
def test_code_that_a_page_names_exists(page: Path) -> None:
    for path, name in CODE.findall(page.read_text()):
        assert (ROOT / path).exists(), path
        assert not name or name in names_of(ROOT / path), f"{path}:{name}"


def test_physics_names_a_function_for_most_that_it_says(reference: ModuleType) -> None:
    """Names of code become links only where their package has a page: all that physics names has one."""
    shown = reference.links.shown_packages()
    for page in (DOCS / "physics").glob("*.md"):
        linked = reference.links.linked(page.read_text(), shown)
        left = [found[0] for found in CODE.finditer(FENCE.sub("", page.read_text())) if found[1].endswith(".py")]
        lone = [text for text in left if text.startswith("`planner/") and f"[{text}]" not in linked]
        assert not lone, f"{page.name}: {lone}"


def test_every_page_is_in_the_book() -> None:
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {named(page) for page in PAGES} == listed


def test_the_site_of_a_version_has_a_folder_and_a_heading_of_its_own(reference: ModuleType) -> None:
    config = reference.links.on_config({"site_name": "planner", "site_dir": "/site"})
    assert config == {"site_name": f"planner {__version__}", "site_dir": f"/site/{__version__}"}


def test_the_site_loads_nothing_from_elsewhere() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css"} & set(settings)
    assert "http" not in (ROOT / "mkdocs.yml").read_text()


def test_generated_pages_are_those_of_today(reference: ModuleType) -> None:
    for name, text in reference.pages.texts().items():
        assert (reference.pages.FOLDER / name).read_text() == text, f"{name}: run scripts/docs reference"


def test_published_schemas_are_those_of_the_types(reference: ModuleType) -> None:
    texts = reference.schemas.texts()
    assert {file.name for file in reference.schemas.FOLDER.glob("*.json")} == set(texts)
    for name, text in texts.items():
        assert (reference.schemas.FOLDER / name).read_text() == text, f"{name}: run scripts/docs reference"


def test_every_field_of_a_plan_is_in_the_index() -> None:
    index = (DOCS / "physics" / "where-numbers-come-from.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", index, re.MULTILINE | re.DOTALL))
    for module in (answer, layout):
        for name, kind in vars(module).items():
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__module__ == module.__name__:
                lists = re.findall(r"^- `planner/[^:]+:[^ ]+: (.*(?:\n  .*)*)", sections[name], re.MULTILINE)
                rows = [row for fields in lists for row in re.findall(r"(?:^|;\s+)`(\w+)`\s", fields)]
                assert set(rows) == set(kind.model_fields), name


def test_every_command_that_prints_json_has_a_schema(reference: ModuleType) -> None:
    top = app._root().make_context("plan", [], resilient_parsing=True)
    commands = {name: app._root().get_command(top, name) for name in app.COMMANDS}
    printing = [name for name, command in commands.items() if any("--json" in param.opts for param in command.params)]
    told = " ".join(row.says for row in reference.schemas.SCHEMAS.values())
    assert [name for name in printing if not re.search(rf"`plan {name} [^`]*--json`", told)] == []


EXAMPLES: dict[str, str] = {
    "plan": "evaluate --model llama-3.2-1b --gpus 8 --tp 2 --json",
    "program": "explain --model llama-3.2-1b --gpus 8 --program --json",
    "explain": "explain --model llama-3.2-1b --gpus 8 --tp 2 --json", "model": "models llama-3.2-1b --json",
    "hardware": "hardware h100 --json", "schedule": "schedule auto --pp 2 -m 4 --slow-stage 1:1.2 --json",
    "schedules": "schedule --compare --pp 4 -m 8 --json", "memory": "memory plan.json --stage 0 --json",
    "export": "export plan.json --to megatron --dry-run --json",
    "observe": "observe train.log --plan plan.json --json", "compare": "compare plan.json plan.json --json",
    "next": "next plan.json --days 30 --json", "sweep": "sweep --model llama-3.2-1b --gpus 8 --json",
    "runs": "evaluate --runs runs.jsonl --json", "doctor": "doctor --json",
    "error": "evaluate --model llama-3.2-1b --gpus 8 --tp 3 --json",
}  # fmt: skip
"""A command for each schema whose answer is cheap; `plan.json` is the first one's plan."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_answers_obey_their_schemas(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs the extra test")
    monkeypatch.chdir(tmp_path)
    line = EXAMPLES[name]
    if "plan.json" in line:
        main(["--model", "llama-3.2-1b", "--gpus", "8", "-q", "-o", "plan.json"])
    step = " iteration {0}/ 9 | elapsed time per iteration (ms): 900.0 | global batch size:  2048 |\n"
    Path("train.log").write_text("".join(step.format(number) for number in range(1, 9)))
    job = {"model": "llama-3.2-1b", "hardware": "h100", "num_gpus": 8, "seq_length": 4096, "global_batch_size": 64}
    runs = [{"id": gpus, "run": job | {"num_gpus": gpus}} for gpus in (8, 7)]
    Path("runs.jsonl").write_text("".join(f"{json.dumps(run)}\n" for run in runs))
    capsys.readouterr()
    code, printed = main([*line.split(), "-q"]), capsys.readouterr().out
    assert (code == 0) == (name != "error")
    schema = json.loads((DOCS / "schemas" / f"{name}.json").read_text())
    for text in printed.splitlines() if name == "runs" else [printed]:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("trainer-file", sorted((ROOT / "planner" / "trainers" / "data").glob("*.yaml"))),
        ("hardware-file", sorted((ROOT / "hardware_profiles").glob("*.yaml"))),
        ("model-file", sorted((ROOT / "model_specs").glob("*.yaml"))),
        ("phases-file", sorted((DOCS / "phases").glob("*.yaml"))),
    ],
)
def test_files_that_ship_obey_their_schemas(name: str, files: list[Path]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs the extra test")
    schema = jsonschema.Draft202012Validator(json.loads((DOCS / "schemas" / f"{name}.json").read_text()))
    assert files
    for file in files:
        assert [problem.message for problem in schema.iter_errors(load_yaml(file))] == [], file.name


@pytest.mark.parametrize(("name", "wrong"), TABLES["schemas_refuse_what_is_none"])
def test_schemas_refuse_what_is_none(name: str, wrong: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs the extra test")
    schema = json.loads((DOCS / "schemas" / f"{name}.json").read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(wrong)
