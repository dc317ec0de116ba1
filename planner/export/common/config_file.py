"""A configuration as a reader gets it: its text, the folder it lies in, and the recipe that the user names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from planner.specs.reading.text import text_beside

_PARENTS = 12


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A configuration's text and what is known around it."""

    text: str
    path: Path | None = None
    """Its path; None for text that was piped in."""
    recipe: str | None = None
    """The function or entry that the user chose, where a file has several."""

    def beside(self, name: str) -> str | None:
        """The text of a file that the configuration names, if it lies in the same folder or below it.

        A path that the reader cannot know in full (`$DIR/conf.sh` with DIR unset) is looked for by its end.
        """
        if self.path is None or not name:
            return None
        folder, parts = self.path.parent, [part for part in PurePosixPath(name).parts if part not in ("/", ".", "..")]
        if name.startswith("../") and (text := text_beside(folder / name)) is not None:
            return text
        for start in range(len(parts)):
            found = folder.joinpath(*parts[start:])
            if found != self.path and (text := text_beside(found)) is not None:
                return text
        return None

    def above(self, name: str) -> str | None:
        """The text of the file at a relative path in the configuration's folder or in one that holds it."""
        if self.path is None:
            return None
        return next((text for folder in self._roots(0) if (text := text_beside(folder / name)) is not None), None)

    def module(self, name: str, level: int = 0) -> ConfigFile | None:
        """The Python module that the configuration imports, where its file lies in the same tree of packages."""
        if self.path is None:
            return None
        parts = [part for part in name.split(".") if part]
        for folder in self._roots(level):
            files = [folder.joinpath(*parts).with_suffix(".py")] if parts else []
            for path in (*files, folder.joinpath(*parts, "__init__.py")):
                if (text := text_beside(path)) is not None:
                    return ConfigFile(text, path)
        return None

    def _roots(self, level: int) -> Iterator[Path]:
        """Folders that a module's dotted name may begin in."""
        assert self.path is not None
        parents = [self.path.absolute().parent, *self.path.absolute().parent.parents]
        if level:
            yield from parents[level - 1 : level]
            return
        yield from parents[:_PARENTS]
