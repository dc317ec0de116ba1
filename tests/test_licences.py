"""The table of licences says what the installed packages state, and all of them go with Apache 2.0."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def licences() -> ModuleType:
    """tools/licences as a module."""
    loader = importlib.machinery.SourceFileLoader("licences", str(ROOT / "tools" / "licences"))
    spec = importlib.util.spec_from_loader("licences", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_table_is_what_the_installed_packages_say(licences: ModuleType) -> None:
    written = {row.name: row.licence for row in licences.written_rows(licences.TABLE.read_text())}
    installed = {row.name: row.licence for row in licences.installed_rows()}
    differing = {
        name: (licence, written.get(name)) for name, licence in installed.items() if written.get(name) != licence
    }
    assert differing == {}, "tools/licences writes the table anew; read what changed"
    assert all(licences.is_permitted(licence) for licence in written.values()), written


def test_every_package_that_is_asked_for_has_a_row(licences: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = [*project["dependencies"], *extras["serve"], *extras["probe"]]
    names = {canonicalize_name(Requirement(need).name) for need in needs}
    assert names <= {row.name for row in licences.written_rows(licences.TABLE.read_text())}


@pytest.mark.parametrize(
    ("licence", "is_permitted"),
    [
        ("MIT", True), ("Apache-2.0 OR GPL-3.0-only", True), ("Apache-2.0 AND (BSD-3-Clause OR GPL-2.0-only)", True),
        ("GPL-3.0-only", False), ("MIT AND AGPL-3.0-or-later", False), ("unknown", False), ("Proprietary", False),
    ],
)  # fmt: skip
def test_what_does_not_go_with_apache_2_is_refused(licences: ModuleType, licence: str, is_permitted: bool) -> None:
    assert licences.is_permitted(licence) is is_permitted


def test_a_row_of_a_package_that_is_not_installed_is_kept(licences: ModuleType) -> None:
    text = licences.TABLE.read_text()
    rows = licences.installed_rows()
    absent = licences.rewritten(text, [licences.Row("zzz-absent", "MIT", "extra probe"), *rows])
    assert "| `zzz-absent` | MIT | extra probe |" in licences.rewritten(absent, rows)
