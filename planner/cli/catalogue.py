"""`plan models` and `plan hardware`: what ships with the planner, and where its numbers come from."""

from __future__ import annotations

import fnmatch
import logging
import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from planner.cli import options as o
from planner.cli.options import Word
from planner.cli.output import show, tell, waiting
from planner.errors import SpecError, printable
from planner.files import write_text

if TYPE_CHECKING:
    from pydantic import BaseModel

    from planner.physics.layers import ModelTotals
    from planner.specs.base import Fields, Texts
    from planner.specs.hardware import HardwareSpec
    from planner.specs.model import ModelSpec

_log = logging.getLogger(__name__)
HEADS = ("name", "short", "GiB", "TFLOP/s", "GB/s", "next", "$/h")
SECTIONS = (
    "GPUs joined by NVLink in nodes and racks",
    "AMD's accelerators, joined by xGMI",
    "Cards on PCIe, some bridged in pairs by NVLink",
    "One memory for GPU and host",
)
LEGEND = """\
TFLOP/s in bf16 (fp16 where there is none), dense. GB/s per GPU and direction:
of the innermost links and how many GPUs they join, and of the next ones.
plan hardware NAME shows one with its other names, its links and its sources.
"""
BRIDGED = 2
"""GPUs that an NVLink bridge joins."""
SHORT_COLUMNS = 16
"""Columns for the first of a profile's other names, so that a line of the list has at most 80."""


def models_command(
    name: Word = None,
    source: Word = None,
    shard: Word = None,
    output: Word = None,
    force: bool = False,
    json: bool = False,
) -> None:
    """List the models, show one with its sources, or trace a module of your own into a model file.

    A module is built and run on torch's meta device, without data, in a process of its own with limits.

    \b
    Example:
      plan models
      plan models "qwen3*"
      plan models deepseek-v3
      plan models trace module:my_model.py:make -o my-model.yaml
      plan models trace hf-code:./checkpoint -o my-model.yaml
    """
    if name == "trace":
        _trace(source, shard, output, force)
        return
    from planner.specs.registry import load_model
    from planner.specs.shipped import names

    known = {own: (own, *aliases) for own, aliases in names("model").items()}
    if name is not None and "*" in name:
        known = {own: spoken for own, spoken in known.items() if fnmatch.filter(spoken, name.lower())}
        if not known:
            raise SpecError(f"models: no name is like {name[:100]!r}", "`plan models` lists the names")
        name = None
    models = [load_model(one) for one in ([name] if name is not None else known)]
    if json:
        data = [
            _plain(model) | {key: getattr(_totals(model), key) for key in ("num_parameters", "num_active_parameters")}
            for model in models
        ]
        tell(data if name is None else data[0])
    elif name is not None:
        counts = _totals(models[0])
        more = counts.num_predicting_parameters
        predicts = f"; {more:,} more predict further tokens" if more else ""
        sys.stdout.write(f"# {counts.num_parameters:,} parameters, {counts.num_active_parameters:,} active{predicts}\n")
        _show_yaml(_plain(models[0]))
    else:
        rows = map(_model, sorted(models, key=lambda model: _totals(model).num_parameters))
        _show_table(("name", "parameters", "active", "other names"), "lrrw", [*rows])


def _totals(model: ModelSpec) -> ModelTotals:
    from planner.physics.layers import model_totals
    from planner.trainers.load import load_runtime

    return model_totals(model, load_runtime(o.DEFAULT_RUNTIME), model.training.seq_length if model.training else 1)


def _model(model: ModelSpec) -> Texts:
    """One line of the list of models."""
    from planner.report.format import large

    counts = _totals(model)
    active = large(counts.num_active_parameters) if counts.num_active_parameters < counts.num_parameters else ""
    return model.name, large(counts.num_parameters), active, ", ".join(model.aliases)


def _trace(source: str | None, shard: str | None, output: str | None, force: bool) -> None:
    """Write the model file of a traced module, and say what it is."""

    import yaml

    from planner.physics.layers import model_totals
    from planner.specs.reading import load_yaml
    from planner.trace.trace import trace
    from planner.trainers.load import load_runtime

    if source is None:
        raise SpecError(
            "plan models trace: names no module", "plan models trace module:FILE.py:FACTORY -o my-model.yaml"
        )
    shards = None if shard is None else {str(key): str(value) for key, value in load_yaml(shard).items()}
    with waiting("tracing the module"):
        model = trace(source, PurePath(output or "traced").stem, shards)
    text = yaml.safe_dump(
        model.model_dump(mode="json", exclude_defaults=True), sort_keys=False, width=118, default_flow_style=None
    )
    write_text(output or "-", text, force)
    totals, traced = model_totals(model, load_runtime("torch-eager"), 4096), model.traced
    assert traced is not None
    _log.info(
        "%s: %s parameters, %d layers (%d different), %.4g GFLOP a token",
        model.name, f"{totals.num_parameters:,}", model.num_hidden_layers, len(traced.layers),
        totals.model_flops_per_token / 1e9,
    )  # fmt: skip


def hardware_command(name: Word = None, json: bool = False) -> None:
    """List the hardware, or show one with its sources.

    \b
    Example:
      plan hardware
      plan hardware h100
    """
    from planner.specs.registry import hardware_names, load_hardware

    profiles = [load_hardware(known) for known in ([name] if name is not None else hardware_names())]
    if json:
        data = [_plain(profile) for profile in profiles]
        tell(data if name is None else data[0])
        return
    if name is not None:
        _show_yaml(_plain(profiles[0]))
        return
    rows = [(_section(profile), _columns(profile)) for profile in profiles]
    widths = [max(len(head), *(len(row[column]) for _, row in rows)) for column, head in enumerate(HEADS)]
    for section in SECTIONS:
        sys.stdout.write(f"{section}\n")
        _show_table(HEADS, "lw" + "r" * (len(HEADS) - 2), [row for of, row in rows if of == section], widths)
        sys.stdout.write("\n")
    sys.stdout.write(LEGEND)


def _section(profile: HardwareSpec) -> str:
    """The heading of the table that lists a profile."""
    nvlink, xgmi, cards, shared = SECTIONS
    if profile.host.is_shared:
        return shared
    is_joined = profile.fabric == "NVLink" and profile.nvlink_domain_size > BRIDGED
    return xgmi if profile.is_amd else nvlink if is_joined else cards


def _columns(profile: HardwareSpec) -> Texts:
    """One line of the list of hardware."""
    peaks, tiers = profile.peak_tflops, profile.tiers
    short = list(profile.aliases[:2])
    while len(", ".join(short)) > SHORT_COLUMNS:
        short.pop()
    return (
        profile.name,
        ", ".join(short),
        f"{profile.memory_gib:.1f}",
        f"{peaks.get('bf16', peaks.get('fp16', 0)):,.0f}",
        f"{profile.nvlink_domain_size} × {tiers[0].gb_per_s:g}" if profile.nvlink_domain_size > 1 else "",
        f"{tiers[1].gb_per_s:.3g}" if len(tiers) > 1 else "",
        f"{profile.usd_per_gpu_hour:.2f}" if profile.usd_per_gpu_hour else "",
    )


def _plain(spec: BaseModel) -> Fields:
    return spec.model_dump(mode="json", exclude_none=True)


def _show_yaml(data: Fields) -> None:
    """Print YAML that `--model` or `--hardware` can read. PyYAML breaks a line one word after `width`."""
    import yaml

    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=50)
    if printable(text) != text:  # written as \\u202e and the like, which reads back
        text = yaml.safe_dump(data, sort_keys=False, width=50)
    sys.stdout.write(text)


def _show_table(heads: Texts, align: str, rows: Sequence[Texts], widths: Sequence[int] = ()) -> None:
    """Columns aligned as `headed` has it, each at least as wide as `widths` say."""
    from planner.report.pieces import headed

    table = headed(heads, align, rows)
    for column, width in zip(table.columns, widths, strict=False):
        column.min_width = width
    show(table)
