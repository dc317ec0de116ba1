"""`plan mcp`: the planner as tools for an agent."""

from __future__ import annotations

import typer

from planner.cli.options import Whole


def mcp_command(ctx: typer.Context, folder: str = ".", port: Whole = None) -> None:
    """Offer the planner to agents as tools of the Model Context Protocol, over stdin and stdout.

    \b
    Example:
      plan mcp
      plan mcp --folder runs --port 8010
    """
    from pathlib import Path

    from planner.distribution import install_line
    from planner.errors import PlannerError, SpecError

    root = Path(folder)
    if not root.is_dir():
        raise SpecError(f"--folder: {folder!r} is no folder", "name one, such as --folder .")
    try:
        from planner.serve.mcp_server import server
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise PlannerError("plan mcp needs mcp, which is not installed", install_line("mcp")) from None
    made = server(root)
    if port is None:
        made.run("stdio")
    else:
        made.run("streamable-http", host="127.0.0.1", port=port)
