"""Orders in which ranks are numbered."""

from __future__ import annotations

from typing import Final

RANK_ORDERS: Final = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
"""The innermost group first: pipelines are outermost, or data parallelism is. The first is every trainer's default."""
