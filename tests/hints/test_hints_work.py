"""Every hint that names an option, a value or a number is typed as it says, and then works."""

from __future__ import annotations

import shlex

import pytest

from hints.applied import Case, mended
from hints.cases import CASES, NOT_TYPED, NOT_TYPED_IN
from hints.found import hints
from planner.cli import main

MOST_TRIED = 3
"""Alternatives of a hint that are tried; a list of names may be long."""


def failure(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, and the texts of the `error:` and the `hint:` line."""
    code = main(words)
    lines = capsys.readouterr().err.splitlines()
    told = {line.partition(": ")[0]: line.partition(": ")[2] for line in lines}
    return code, told.get("error", ""), told.get("hint", "")


@pytest.mark.thorough(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fails)
def test_a_hint_works_when_it_is_typed(
    case: Case, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # what the report says of assumptions prices the layout thirty times more
    monkeypatch.setattr("planner.layout.evaluate.told_assumptions", lambda *_, **__: ())
    code, error, hint = failure(shlex.split(case.fails), capsys)
    assert code in (2, 3)
    lines = mended(case, hint)
    assert lines, hint
    for words in lines[:MOST_TRIED]:
        again, other, _ = failure(words, capsys)
        if case.moves_on:
            assert other.partition(":")[0] != error.partition(":")[0], (words, other)
        else:
            assert again == 0, (hint, words, other)


def test_every_hint_that_names_something_is_typed() -> None:
    """A new one needs a case in tests/hints/cases.py, or a reason there why it cannot be typed."""
    missing = [
        f"{hint.home}:{hint.line}: {hint.text}"
        for hint in hints()
        if hint.names_something
        and not any(case.home == hint.home and case.says in hint.text for case in CASES)
        and not any(hint.home.startswith(folder) for folder in NOT_TYPED_IN)
        and not any(home == hint.home and says in hint.text for home, says in NOT_TYPED)
    ]
    assert not missing, "\n".join(missing)


def test_no_exception_has_outlived_its_hint() -> None:
    """Each case and each exception still speaks of a hint that stands there."""
    for home, says in (*NOT_TYPED, *((case.home, case.says) for case in CASES)):
        assert any(hint.home == home and says in hint.text for hint in hints()), (home, says)
