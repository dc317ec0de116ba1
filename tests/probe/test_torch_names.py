"""Our modules take of torch what the oldest version that they run on has; what newer ones add is asked for first.

`tools/torch_names` wrote the names from a real torch 2.6; ranks need 2.9.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from torch_names import FILES, PACKAGE, attributes, keywords, torch_names  # noqa: E402

OLDEST = Path(__file__).with_name("torch_names.txt")
NEWER = {
    "probe/torch_build.py": {"all_gather_single", "reduce_scatter_single"},
    "probe/model/layers.py": {"_grouped_mm"},
    "probe/rank/gradients.py": {"set_gradient_divide_factor", "set_custom_all_gather", "ignored_params"},
    "probe/rank/training.py": {"set_custom_all_gather", "set_custom_reduce_scatter"},
}
"""Names and keywords of newer versions that our files use."""


def of_the_oldest() -> dict[str, dict[str, list[str] | None]]:
    """Names of each module and class of the oldest torch, with the parameters of functions where they are known."""
    owners: dict[str, dict[str, list[str] | None]] = {}
    for line in OLDEST.read_text(encoding="utf-8").splitlines()[1:]:
        owner, _, names = line.partition(": ")
        found = (re.fullmatch(r"([^(]+)(?:\((.*)\))?", name) for name in names.split(" "))
        owners[owner] = {m[1]: None if m[2] is None else m[2].split(",") for m in found if m is not None}
    return owners


OWNERS = of_the_oldest()
CLASSES = [owner for owner in OWNERS if owner.rpartition(".")[2][0].isupper()]


def where(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def lookup(name: str) -> list[str] | None:
    """Parameters of a dotted name below torch, or None where they are unknown. Raises KeyError if the oldest torch does
    not have the name, as far as its modules are listed."""
    owner, parts = "torch", name.split(".")
    while f"{owner}.{parts[0]}" in OWNERS and len(parts) > 1:
        owner, parts = f"{owner}.{parts[0]}", parts[1:]
    for listed in OWNERS:  # torch.ops.aten is listed and torch.ops is not
        if name.startswith(f"{listed.removeprefix('torch.')}."):
            owner, parts = listed, name.removeprefix(f"{listed.removeprefix('torch.')}.").split(".")
    parameters = OWNERS[owner][parts[0]]
    return parameters if len(parts) == 1 else None  # what is below a class, a function or an operator


@pytest.mark.parametrize("path", FILES, ids=where)
def test_a_module_takes_no_name_that_the_oldest_torch_lacks(path: Path) -> None:
    newer = NEWER.get(where(path), set())
    for name in torch_names(path):
        if name.rpartition(".")[2] not in newer:
            try:
                lookup(name)
            except KeyError:
                pytest.fail(f"torch.{name} is newer than 2.6, or its module is not in tools/torch_names")
    for name, word in keywords(path):
        parameters = None if name.rpartition(".")[2] in newer else lookup(name)
        assert parameters is None or word in {*parameters, *newer}, f"torch.{name} has no {word}= in 2.6"


def attributes_since() -> set[str]:
    """Attributes of this torch's classes that nothing of the oldest one has, nor of Python."""

    def of_class(name: str) -> set[str]:
        module, _, attribute = name.rpartition(".")
        return set(dir(getattr(import_module(module), attribute, object)))

    known = {name for names in OWNERS.values() for name in names}
    known |= {name for kind in (list, tuple, dict, str, Path) for name in dir(kind)}
    return {name for owner in CLASSES for name in of_class(owner) if not name.startswith("__")} - known


@pytest.mark.parametrize("path", FILES, ids=where)
def test_a_module_reads_no_attribute_that_the_oldest_torch_lacks(path: Path) -> None:
    found = attributes(path) & attributes_since()
    assert found <= NEWER.get(where(path), set()), "newer than 2.6"


def test_names_are_told_apart() -> None:
    assert lookup("distributed.init_process_group") is not None
    assert "device_id" in (lookup("distributed.init_process_group") or ())
    assert lookup("ops.aten._flash_attention_forward.default") is None
    for missing in ("_grouped_mm", "accelerator.memory_allocated", "ops.aten._cudnn_of_tomorrow"):
        with pytest.raises(KeyError):
            lookup(missing)


def test_every_name_of_torch_exists_here() -> None:
    def exists(name: str) -> bool:
        value: Any = torch
        for part in name.split("."):
            if isinstance(value, type(torch)) and not hasattr(value, part):
                try:
                    import_module(f"{value.__name__}.{part}")
                except ImportError:
                    return False
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
            if not isinstance(value, type(torch)):
                return True  # a class, a function or an operator: what is below it has its own tests
        return True

    missing = {f"{where(path)}: {name}" for path in FILES for name in torch_names(path) if not exists(name)}
    newer = {f"{path}: {name}" for path, names in NEWER.items() for name in names}
    assert missing <= newer
