"""The page in a real browser, wide and narrow: controls change the plan, a remedy is applied, nothing is logged."""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from browsers import chromium
from served import Running
from tables import beside

TABLES = beside(__file__)

WIDTHS = (1400, 390)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests."""
    with chromium() as opened:
        yield opened


@pytest.fixture(params=WIDTHS)
def page(browser: Any, running: Running, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page with its first answer; after the test, its console must be empty."""
    context = browser.new_context(viewport={"width": request.param, "height": 900})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened, logged = context.new_page(), list[str]()
    opened.on("console", lambda message: logged.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: logged.append(str(error)))
    opened.on("requestfailed", lambda failed: logged.append(f"{failed.url}: {failed.failure}"))
    opened.goto(running.address)
    settled(opened)
    yield opened
    context.close()
    # a question that a newer one replaces is aborted on purpose
    assert [line for line in logged if "ERR_ABORTED" not in line] == []


def settled(page: Any) -> str:
    """The status, once the answer is final."""
    page.wait_for_selector("#answer[data-state=final]:not([aria-busy])", timeout=60_000)
    return str(page.text_content("#status"))


def change(page: Any, name: str, value: str) -> str:
    """The status after a control has another value."""
    field = page.locator(f"#controls [name='{name}']")
    page.evaluate("name => { document.querySelector(`[name='${name}']`).closest('details').open = true; }", name)
    page.eval_on_selector("#answer", "answer => { answer.dataset.state = 'old'; }")
    if field.evaluate("field => field.tagName") == "SELECT":
        field.select_option(value)
    else:
        field.fill(value)
        field.press("Enter")
    return settled(page)


@pytest.mark.thorough(2)
def test_controls_change_the_plan_the_memory_and_the_timeline(page: Any) -> None:
    def drawn() -> list[str]:
        return page.eval_on_selector_all("svg.plot", "plots => plots.map(plot => plot.outerHTML)")

    before, command = drawn(), page.text_content("#command")
    assert len(before) >= 3
    assert change(page, "seq_length", "4096").startswith("Proven")
    after = drawn()
    assert after[0] != before[0]
    assert after[-1] != before[-1]
    assert page.text_content("#command") == f"{command.replace('--global', '--seq-length 4096 --global')}"
    assert "seq_length=4096" in page.url
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.thorough(2)
def test_what_does_not_fit_is_mended_by_a_click(page: Any) -> None:
    change(page, "global_batch_size", "3")
    assert change(page, "memory_headroom", "79").startswith("Nothing fits")
    assert page.text_content("#answer h1") == "Nothing fits"
    remedy = page.locator("a.primary[data-apply]")
    assert re.fullmatch(r"Apply --\S+ \S+", remedy.text_content())
    page.eval_on_selector("#answer", "answer => { answer.dataset.state = 'old'; }")
    remedy.click()
    assert "step" in settled(page)
    assert page.locator("#answer .figures").count() == 1


@pytest.mark.thorough(2)
def test_a_wrong_value_is_marked_and_said(page: Any) -> None:
    assert "--gpus: 'many' is not a whole number" in change(page, "gpus", "many")
    assert page.get_attribute("[name=gpus]", "aria-invalid") == "true"
    assert change(page, "gpus", "8").startswith("Proven")
    assert page.get_attribute("[name=gpus]", "aria-invalid") is None


@pytest.mark.thorough(2)
def test_the_command_is_copied_and_an_alternative_looked_at(page: Any) -> None:
    page.click("button[data-copy]")
    page.wait_for_selector("#status:has-text('Copied the command line')")
    assert page.evaluate("() => navigator.clipboard.readText()") == page.text_content("#command")
    page.eval_on_selector("#answer", "answer => { answer.dataset.state = 'old'; }")
    page.locator("td a[data-apply]:not(.button)").first.click()
    settled(page)
    assert "This is alternative 1 of" in page.text_content("#answer .looking")
    assert "alternative=1" in page.url


@pytest.mark.thorough(2)
def test_files_are_downloaded(page: Any) -> None:
    with page.expect_download() as caught:
        page.click("text=plan.json")
    assert caught.value.suggested_filename == "llama-3-2-1b.json"
    with page.expect_download() as caught:
        page.click("text=Export as zip")
    assert caught.value.suggested_filename.endswith(".zip")


@pytest.mark.thorough(2)
def test_the_keyboard_reaches_everything(page: Any) -> None:
    page.evaluate("() => document.activeElement.blur()")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to the answer"
    page.keyboard.press("Enter")
    assert page.evaluate("() => document.activeElement.id") == "answer"
    reached = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("() => document.activeElement.tagName"))
        if "BODY" in reached:  # the end of the page
            break
        assert page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert reached >= {"BUTTON", "A", "SELECT"}


def test_a_screen_reader_finds_names_and_news(page: Any) -> None:
    nameless = page.evaluate(NAMELESS)
    assert nameless == []
    assert page.get_attribute("#status", "role") == "status"
    assert page.text_content("#status").startswith("Proven")
    assert page.evaluate("() => document.documentElement.lang") == "en"
    assert page.title().endswith("megatron")
    levels = page.eval_on_selector_all("h1, h2, h3", "all => all.map(heading => +heading.tagName[1])")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    ids = page.eval_on_selector_all("[id]", "all => all.map(element => element.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.thorough(2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    assert page.evaluate(FAINT) == []


NAMELESS = TABLES["nameless"]
"""Elements that have no name to be read out."""
FAINT = TABLES["faint"]
"""Words with less contrast than 4.5 to 1 (WCAG 2.2, 1.4.3)."""
