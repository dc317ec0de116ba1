"""Makes a spec of values, or raises one SpecError that says which of them is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from planner.errors import SpecError
from planner.specs.base import Spec
from planner.specs.problems import spec_error

S = TypeVar("S", bound=Spec)


def checked(model: type[S], values: Mapping[str, Any], where: str = "", spelling: Mapping[str, str] | None = None) -> S:
    """The `model` that `values` make; SpecError naming `where`, the field and the value.

    `spelling` maps field paths to what the user wrote (`num_gpus` to `--gpus`).
    """
    try:
        return model.model_validate(values)
    except ValidationError as exc:
        error = spec_error(exc, where, model, spelling)
        raise SpecError(error.message.removeprefix(": "), error.hint) from None
