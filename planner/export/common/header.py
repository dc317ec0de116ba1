"""The names by which exported files know their plan: comment lines at the top, a hash, and a slug."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from planner.answer import Plan


def header(plan: Plan, written_for: str, notes: Sequence[str] = ()) -> str:
    """Comment lines for the top of a file: the plan, its hash, the versions, what the plan does not decide."""
    layout = plan.parallelism
    lines = [
        f"{plan.model.name} on {layout.num_gpus_used} of {plan.cluster.num_gpus} GPUs: {layout}",
        f"exported by planner {plan.planner_version} for {written_for}; plan {plan_sha256(plan)[:16]}",
        *notes,
    ]
    return comment("\n".join(lines))


def plan_sha256(plan: Plan) -> str:
    """Hash of the whole plan, as it was made."""
    return hashlib.sha256(json.dumps(plan.as_planned.to_json(), sort_keys=True).encode()).hexdigest()


def slug(name: str) -> str:
    """A name for jobs and Kubernetes objects: a-z, 0-9 and -, at most 40, letter or digit at the ends."""
    text = "".join(char if char.isascii() and char.isalnum() else "-" for char in name.lower())
    return "-".join(part for part in text.split("-") if part)[:40].strip("-") or "plan"


def comment(text: str) -> str:
    """`text` as comment lines: control characters and line breaks cannot leave the comment."""
    return "".join(f"# {_printable(line)}".rstrip() + "\n" for line in text.split("\n"))


def _printable(line: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in line)
