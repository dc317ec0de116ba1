"""`plan hardware` lists what there is in 80 columns, and a card without bf16 says so with a hint that works."""

from __future__ import annotations

import pytest

from planner.cli import main
from planner.specs.registry import hardware_names, load_hardware


@pytest.fixture
def listed(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["hardware"]) == 0
    return capsys.readouterr().out


def test_the_list_has_every_profile_once_and_no_line_beyond_80_columns(listed: str) -> None:
    lines = listed.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.endswith(" $/h") for line in lines), "no column is cut"
    first = [line.split()[0] for line in lines if line.strip()]
    assert all(first.count(name) == 1 for name in hardware_names())


@pytest.mark.parametrize(
    ("name", "heading"),
    [("h100-sxm-80gb", "NVLink in nodes"), ("mi300x", "AMD"), ("rtx-3090-nvlink-24gb", "Cards on PCIe"),
     ("l40s-48gb", "Cards on PCIe"), ("dgx-spark-128gb", "One memory")],
)  # fmt: skip
def test_hardware_is_listed_with_its_like(name: str, heading: str, listed: str) -> None:
    (block,) = [block for block in listed.split("\n\n") if f"\n{name} " in block]
    assert heading in block.splitlines()[0]


@pytest.mark.parametrize("name", ["4090", "spark", "t4", "3090-nvlink"])
def test_a_card_is_shown_with_the_sources_of_its_numbers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hardware", name]) == 0
    shown = capsys.readouterr().out
    assert f"name: {load_hardware(name).name}" in shown
    assert shown.count("source: ") >= 4 + len(load_hardware(name).tiers)


@pytest.mark.thorough(2)
@pytest.mark.parametrize("name", ["t4", "v100-32gb"])
def test_a_gpu_without_bf16_says_so_and_what_it_asks_for_works(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--model", "1b", "--gpus", "1", "--hardware", name, "--lora", "--seq-length", "512", "--json"]
    assert main(job) == 0
    out = capsys.readouterr().out
    assert "has no bf16" in out
    assert "--dtype fp16" in out
    assert main([*job, "--dtype", "fp16"]) == 0
    assert "has no bf16" not in capsys.readouterr().out
