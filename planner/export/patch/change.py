"""A change of one setting of a user's file."""

from __future__ import annotations

import json
from typing import NamedTuple


class Change(NamedTuple):
    """A setting with the words that it shall have: none for a bare option, None where it shall go."""

    name: str
    words: tuple[str, ...] | None
    is_needed: bool = False
    """True for one that stays although nothing that is read depends on it: the trainer refuses what is left else."""

    def as_option(self) -> Change:
        """The change of `section.key` to a TOML or JSON value as one of `--section.key`."""
        value = None if self.words is None else json.loads(self.text)
        section, _, key = self.name.rpartition(".")
        if value is False:
            return Change(f"--{section}.no_{key}", (), self.is_needed)
        words = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        return Change(f"--{self.name}", () if value is True else (words,), self.is_needed)

    @property
    def text(self) -> str:
        """The words as they stand in a file."""
        return " ".join(self.words or ())
