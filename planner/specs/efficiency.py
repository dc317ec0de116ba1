"""How much of its data sheet a GPU reaches: a few numbers per kind of kernel, each with a physical meaning."""

from __future__ import annotations

from typing import Literal

from planner.specs.base import Spec


class Efficiency(Spec):
    """Achieved shares of peak, and the shape of their decline for small work."""

    evidence: Literal["measured", "family", "spec_sheet"] = "spec_sheet"
    """Measured on this GPU, on another of its silicon generation, or on neither."""
    source: str = ""
