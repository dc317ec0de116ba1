"""scripts/house counts what a small package of every fault has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "house"
FILES = {
    "planner/__init__.py": "from planner.rooms.door import Door\n",
    "planner/rooms/__init__.py": "",
    "planner/rooms/door.py": "class Door: ...\nclass _Hidden: ...\n",
    "planner/rooms/lock.py": (
        "from planner.rooms.door import Door\nfrom planner.rooms import key\n\n\n"
        "def turn(door, side):\n    return getattr(door, f'{side}_lock') or getattr(door, 'open')\n"
    ),
    "planner/rooms/key.py": "class Door: ...\ndef cut():\n    from planner.rooms.lock import turn\n",
    "planner/wall.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from planner.roof import Roof\n"
        "def paint(wall, side):\n    setattr(wall, side + '_colour', 'white')\n"
    ),
    "planner/roof.py": "from planner import wall\nclass Roof: ...\n",
    "tests/tools/test_hammer.py": "def test_hammer(): ...\n",
    "tests/test_door.py": "def test_door():\n    assert True\n",
    "docs/page.md": "four words stand here\n",
    "docs/reference/api.md": "written from the code\n",
}


def test_every_fault_is_counted(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ran = subprocess.run([sys.executable, SCRIPT, "--json", tmp_path], capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    assert (found["files"], found["lines"], found["tests_lines"], found["docs_words"]) == (7, 19, 2, 4)
    assert found["tests_over_package"] == 0.105
    assert found["circles"] == [["planner.rooms.key", "planner.rooms.lock"]]
    assert found["single_importer_files"] == ["planner.roof", "planner.rooms.key", "planner.rooms.lock", "planner.wall"]
    assert found["repeated_classes"] == {"Door": ["planner.rooms.door", "planner.rooms.key"]}
    assert [line.split(" ", 1)[0] for line in found["composed_attributes"]] == [
        "planner.rooms.lock:6",
        "planner.wall:5",
    ]
    assert {name: room["files"] for name, room in found["rooms"].items()} == {
        "rooms": 4, "wall": 1, "roof": 1, "__init__": 1
    }  # fmt: skip
    assert sum(room["nodes"] for room in found["rooms"].values()) == found["nodes"] > 50
