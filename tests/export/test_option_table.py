"""The table of options holds each option once, and every function that it names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from planner.export.megatron import model_options, plan_options
from planner.export.megatron.option_rows import all_rows, rows_of, table
from planner.export.trainer_files import Arguments, filled

ROOT = Path(str(plan_options.__file__)).parents[1]
_CODECS = {"model": model_options.CODECS, "layout": plan_options.CODECS}
_TWICE = {
    "--lr-decay-style", "--ckpt-format", "--tokenizer-type", "--train-iters", "--eval-iters", "--eval-interval",
    "--no-bias-gelu-fusion",
}  # fmt: skip
"""Options whose value depends on the section that a run has."""


def test_an_option_has_one_row() -> None:
    counts = Counter(row.name for row in all_rows())
    assert {name for name, count in counts.items() if count > 1} == _TWICE
    paths = [path for name, path in {row.name: row.bridge for row in all_rows()}.items() if path]
    assert len(set(paths)) == len(paths), "a field of Bridge is the value of one option"


@pytest.mark.parametrize("part", _CODECS)
def test_rows_and_functions_name_each_other(part: str) -> None:
    named = {row.by for rows in rows_of(part).values() for row in rows} - {""}
    assert named == set(_CODECS[part])


def test_switches_and_dtypes_set_options_of_some_row() -> None:
    """But for those that Megatron-Bridge and Primus need no word for."""
    rows = {row.name for row in all_rows()}
    settings: list[Arguments] = [
        row for rows in table()["switches"].values() for row in rows if not row.get("read_only")
    ]
    settings += [*table()["dtypes"].values(), *table()["narrow_weights"].values()]
    unknown = {name for row in settings for name in row if name.startswith("--")} - rows
    assert unknown == {
        "--enable-cuda-graph", "--external-cuda-graph", "--moe-enable-deepep", "--grad-reduce-in-bf16",
        "--exp-avg-dtype", "--exp-avg-sq-dtype", "--muon-tp-mode",
    }  # fmt: skip


def test_rows_of_settings_are_filled_and_left_out() -> None:
    layout = SimpleNamespace(pp=4, vpp=1)
    row = {
        "pp": "=layout.pp", "vpp?": "=chunks", "mtp??": "=blocks", "tune??": "=tunes", "flag?": {"if": "=flag", "x": 1},
        "lr": ["=arguments.get('--lr', 1)", "='--lr' in arguments"],
        "variable?": {"if": "=layout.pp", "value": "=as it is"},
    }  # fmt: skip
    values = {"layout": layout, "chunks": 0, "blocks": 0, "tunes": None, "flag": False, "arguments": {"--min-lr": 0}}
    assert filled(row, values) == {"pp": 4, "mtp": 0, "lr": [1, False], "variable": "=as it is"}


def test_every_file_of_the_settings_is_written() -> None:
    sources = "\n".join(path.read_text() for path in ROOT.rglob("*.py"))
    files = yaml.safe_load((ROOT / "settings.yaml").read_text())
    assert [name for name in files if f'"{name}"' not in sources] == []
