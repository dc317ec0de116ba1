"""`plan export`: a plan as the files that a trainer takes as they are."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from planner.export.bundle import Bundle

_log = logging.getLogger(__name__)
_TARGET, _OUTPUT = "Target", "Output"


def _option(panel: str, name: str, metavar: str | None, help_text: str, **more: Any) -> Any:
    return typer.Option(
        *name.split(), metavar=metavar, help=help_text, show_default=False, rich_help_panel=panel, **more
    )


def _complete_target(incomplete: str) -> list[str]:
    from planner.export.targets import TARGETS

    return [name for name in TARGETS if name.startswith(incomplete)]


PlanFile = Annotated[
    str, typer.Argument(metavar="PLAN.json", help="A plan saved with -o; - is stdin.", show_default=False)
]
To = Annotated[
    str,
    _option(
        _TARGET,
        "--to",
        "NAME,…",
        "A trainer: megatron, bridge, torchtitan, torch or deepspeed; launchers: torchrun, slurm, kubernetes.",
        autocompletion=_complete_target,
    ),
]
Alternative = Annotated[
    int | None, _option(_TARGET, "--alternative", "N", "Export the plan's N-th alternative, not its best layout.")
]
Image = Annotated[str | None, _option(_TARGET, "--image", "NAME", "Container image of the Kubernetes manifest.")]
Folder = Annotated[str | None, _option(_OUTPUT, "--output -o", "DIR", "Folder to write to. [MODEL-TARGET]")]
DryRun = Annotated[bool, _option(_OUTPUT, "--dry-run", None, "Print the files and write nothing.")]
Force = Annotated[bool, _option(_OUTPUT, "--force", None, "Replace files.")]
Json = Annotated[bool, _option(_OUTPUT, "--json", None, "The manifest as JSON; with --dry-run the files too.")]


def export_command(
    plan: PlanFile,
    to: To,
    alternative: Alternative = None,
    image: Image = None,
    output: Folder = None,
    dry_run: DryRun = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write the files that a trainer or a scheduler takes as they are, or say what it cannot express.

    \b
    Example:
      plan export plan.json --to megatron -o run
      plan export plan.json --to torchtitan,kubernetes --dry-run
    """
    from pathlib import Path

    from planner.cli.output import dumps
    from planner.cli.plan_file import read_plan, with_alternative
    from planner.export.arguments import slug
    from planner.export.bundle import write_bundle
    from planner.export.launch import IMAGE
    from planner.export.targets import export

    chosen = with_alternative(read_plan(plan), alternative)
    bundle = export(chosen, [name.strip() for name in to.split(",")], image or IMAGE)
    for note in bundle.notes:
        _log.info("%s", note)
    if dry_run:
        sys.stdout.write(dumps(_with_texts(bundle)) if json else _texts(bundle))
        return
    folder = Path(output or f"{slug(chosen.model.name)}-{bundle.targets[0]}")
    paths = write_bundle(bundle, folder, force)
    sys.stdout.write(dumps({**bundle.manifest(), "folder": str(folder)}) if json else _listing(paths))


def _listing(paths: list[Path]) -> str:
    return "".join(f"{path}\n" for path in paths)


def _texts(bundle: Bundle) -> str:
    return "\n".join(f"==> {file.name} <==\n{file.text}" for file in bundle.with_manifest())


def _with_texts(bundle: Bundle) -> dict[str, Any]:
    return {**bundle.manifest(), "texts": {file.name: file.text for file in bundle.files}}
