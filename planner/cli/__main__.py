"""`python -m planner.cli` is `plan`."""

import sys

from planner.cli import main

sys.exit(main())
