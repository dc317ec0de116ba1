"""The report in a real browser: a phone's width, light and dark, three pages on paper, nothing on the console."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import chromium

from planner.cli import main

JOBS = {
    "405b": "--model 405b --gpus 2048 --tokens 15T --tp 8 --pp 8,16 --cp 1 --micro-batch-size 1",
    "8b": "--model 8b --gpus 16 --pp 2 --cp 1",
}
READ = """() => {
  const parse = (text) => (text.match(/[0-9.]+/g) || []).map(Number);
  const linear = (c) => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const [r, g, b, a] = parse(getComputedStyle(node).backgroundColor);
      if (a === undefined || a > 0) return [r, g, b];
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll('body *')].flatMap((node) => {
    const words = [...node.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join(' ').trim();
    const style = getComputedStyle(node), svg = node.namespaceURI.endsWith('svg');
    if (!words || node.tagName === 'title' || !node.getClientRects().length) return [];
    const [ink, paper] = [parse(svg ? style.fill : style.color), behind(node)].map(light);
    const on_a_bar = svg && [0, 1].includes(Math.round(1e6 * ink) / 1e6);
    const ratio = (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
    return on_a_bar ? [] : [[words.slice(0, 40), ratio]];
  });
}"""
"""Every text that is shown with the contrast of WCAG 2 between it and what is behind it; numbers on coloured bars are
black or white and are left out."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Path:
    """The reports of two jobs."""
    path = tmp_path_factory.mktemp("reports")
    for name, job in JOBS.items():
        assert main([*job.split(), "-q", "-o", f"{path}/{name}.json"]) == 0
        assert main(["report", f"{path}/{name}.json", "-o", f"{path}/{name}.html"]) == 0
    return path


@pytest.mark.thorough(2)
@pytest.mark.parametrize(("name", "scheme"), [("405b", "dark"), ("8b", "light")])
def test_a_phone_shows_it_whole_and_every_text_can_be_read(browser: Any, folder: Path, name: str, scheme: str) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"file://{folder}/{name}.html")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    texts = page.evaluate(READ)
    assert len(texts) > 200
    assert [(words, round(ratio, 2)) for words, ratio in texts if ratio < 4.5] == []
    assert said == []
    page.close()


@pytest.mark.parametrize("name", JOBS)
def test_it_is_three_pages_on_paper(browser: Any, folder: Path, name: str) -> None:
    page = browser.new_page()
    page.goto(f"file://{folder}/{name}.html")
    paper = page.pdf(prefer_css_page_size=True)
    assert paper.count(b"/Type /Page\n") == 3
    page.close()


def test_the_timeline_opens_without_scripts_and_scrolls_on_a_phone(browser: Any, folder: Path) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800}, java_script_enabled=False)
    page.goto(f"file://{folder}/405b.html")
    assert not page.locator(".scroll svg.plot").is_visible()
    page.get_by_text("Zoom: single passes").click()
    assert page.locator(".scroll svg.plot").bounding_box()["width"] > 390
    assert page.locator("main").bounding_box()["width"] <= 390
    page.close()
