"""The date of the calibration is data: no fitted number changes without a row that says when and by what."""

from __future__ import annotations

import hashlib
import json
from functools import reduce
from pathlib import Path
from typing import Any

import planner
from planner.specs.registry import hardware_names, load_hardware
from planner.trainers.calibration import shipped_fits
from planner.trainers.load import load_runtime
from planner.trainers.shipped import calibration_date
from tools.calibrate.runs import COEFFICIENTS

ROOT = Path(planner.__file__).parents[1]
WIDTHS_OF_HF = ("step_width", "memory_width", "host_factor")
"""The numbers that tools/finetune_widths reads from published runs."""


def part(of: Any, name: str) -> Any:
    if isinstance(of, dict):
        return of.get(name)
    return of[int(name)] if name.isdigit() else getattr(of, name)


def fitted_values() -> dict[str, Any]:
    """Every number that a fit chose, as it ships."""
    profiles = [load_hardware(name) for name in hardware_names()]
    values: dict[str, Any] = {
        profile.name: profile.efficiency.model_dump(exclude_defaults=True, exclude={"source", "evidence"})
        for profile in profiles
        if profile.efficiency.evidence != "spec_sheet"
    }
    for coefficient in COEFFICIENTS:
        load = load_hardware if coefficient.of == "hardware" else load_runtime
        for name in coefficient.names:
            values[f"{name} {coefficient.path}"] = reduce(part, coefficient.path.split("."), load(name))
    hf = load_runtime("hf")
    return values | {f"hf {name}": getattr(hf, name) for name in WIDTHS_OF_HF}


def digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def test_no_fitted_number_changes_without_a_row_that_dates_it() -> None:
    now = digest(fitted_values())
    assert shipped_fits().fingerprint == now, (
        f"fitted numbers changed: add a row with today's date to planner/trainers/fits.yaml, and fingerprint: {now}"
    )


def test_a_number_that_moves_changes_the_fingerprint() -> None:
    values = fitted_values()
    moved = {**values, "h100-sxm-80gb": {**values["h100-sxm-80gb"], "launch_us": 4.3}}
    assert digest(moved) != digest(values)
    assert len(values) > 60
    assert None not in values.values()


def test_fits_are_in_order_and_the_last_is_the_calibration() -> None:
    fits = shipped_fits().fits
    assert [fit.date for fit in fits] == sorted(fit.date for fit in fits)
    assert calibration_date() == fits[-1].date


def test_sources_name_commands_and_sections_that_exist() -> None:
    for fit in shipped_fits().fits:
        command, pages = fit.source.split("; ")
        page, _, section = pages.partition(", ")
        assert (ROOT / command.split()[0]).exists()
        assert f"## {section}\n" in (ROOT / page).read_text()
