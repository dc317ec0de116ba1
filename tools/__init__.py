"""What is run seldom, and in no wheel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from planner.errors import PlannerError


def exit_code_of(main: Callable[[Sequence[str]], None]) -> int:
    """Run a script's `main` on the command line's arguments and return its exit code.

    If the planner fails, stderr shows one `error:` line and one `hint:` line.
    """
    try:
        main(sys.argv[1:])
    except PlannerError as error:
        sys.stderr.write(error.lines())
        return error.exit_code
    return 0
