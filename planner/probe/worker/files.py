"""Names of the files that ranks and their launcher leave for each other in the folder of a run; {} is the rank."""

from __future__ import annotations

RUN_FILE = "run.json"
RESULT_FILE, STATUS_FILE, FAILURE_FILE = "rank{}.json", "rank{}.status", "rank{}.failure.json"
STACK_FILE, LOG_FILE = "rank{}.stack", "rank{}.log"
