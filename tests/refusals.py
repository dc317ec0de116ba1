"""What a user gets wrong ends in one error that says so and in a hint."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from planner.errors import PlannerError, SpecError


@contextmanager
def refused(message: str, hint: str = "", error: type[PlannerError] = SpecError) -> Iterator[None]:
    """The block is refused with this in its message and this in its hint, which is never empty."""
    with pytest.raises(error) as caught:
        yield
    assert message in caught.value.message
    assert caught.value.hint
    assert hint in caught.value.hint
