"""Numbers and texts that have broken readers, which mutants hold in place of others."""

from __future__ import annotations

from typing import Any

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 1e-300, 0.5, 1e9, 1e308, 2**31, 2**63, 10**30, float("inf"), float("nan"), "1" * 400, "0x10",
    "1e5",
    "٣", "1_000", "08", True, None, "", "none", "null", "auto", "8,8", "8x", "-", "~",
)  # fmt: skip
"""Values that stand in for a number, or for anything."""
WORDS = (
    "", " ", "\x1b[31mred\x1b[0m", "[bold]x[/bold]", "[/]", "a" * 5000, "\u202eabc", "ü", "𝟙", "../../etc/passwd",
    "%s%n",
    "{0}",
    "$A$A", "$(id)", "`id`", "*", "t*9999999999", "([0]*9999999999+[1])", "E((((t|)*999)*999)*999)*999L",
    "!!python/object:x",
    "&a [*a]", "<<", "[" * 300, "{" * 300, "(" * 300, "0F0", "999999999999F0", "\\", "'", '"', "#", "\t", "\r",
    "2024-13-45", "\x9b31m", "9" * 5000, "1e999", "${A:-${A}}", "{1..99999999}", "a=", "=b", "pod:8:1,*:*:*",
)  # fmt: skip
"""Texts that have broken readers."""
