"""The name under which the planner is installed, which is another one than the package's: `planner` was taken."""

from __future__ import annotations

DISTRIBUTION = "trainplan"
__version__ = "0.2.0"
EXTRA_OF_MODULE = {"torch": "probe", "starlette": "serve", "uvicorn": "serve"}
"""The extras that bring modules which the planner itself does without."""


def install_line(*extras: str, here: bool = True) -> str:
    """The line that installs the planner with these extras, quoted as zsh wants it, by this Python's own pip.

    Where the planner is installed already, pip takes that one and adds what the extras need; another Python's pip
    would ask an index for it. `here` false is for another machine.
    """
    import importlib.util
    import shlex
    import shutil
    import sys
    from pathlib import Path

    wanted = f"'{DISTRIBUTION}[{','.join(extras)}]'" if extras else DISTRIBUTION
    python = Path(sys.executable)
    found = shutil.which("pip")
    if not here or (found is not None and Path(found).parent == python.parent):
        return f"pip install {wanted}"
    own = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {shlex.quote(str(own))} {wanted}"
    return f"{shlex.quote(str(own))} -m pip install {wanted}"
