"""How many examples a law is tried with: a few in the tests, thousands under `scripts/laws`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings

EXAMPLES = "LAW_EXAMPLES"
"""The environment's variable with the number of examples of each law; unset, the few of each law by itself."""


def law(num_examples: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Settings of a law: the same few examples each time, or as many new ones as the environment says."""
    asked = os.environ.get(EXAMPLES)
    return settings(
        max_examples=num_examples if asked is None else int(asked),
        derandomize=asked is None,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        # an example is a whole job, which takes hundreds of pricings to shrink
        phases=(Phase.explicit, Phase.generate),
        print_blob=True,
    )
