"""The file of our own torch runner (`plan.torch.yaml`) as the run that it describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.errors import SpecError
from planner.export.common.config_file import ConfigFile
from planner.export.common.exported_model import exported_model
from planner.export.common.imported_run import ImportedRun
from planner.export.common.markup import yaml_of

_HINT = "give a plan.torch.yaml that plan export wrote"
_AXES = ("tp", "cp", "dp", "ep", "micro_batch_size")
_READ = {
    *_AXES, "schedule", "num_microbatches", "seq_length", "dtype", "zero", "recompute_modules", "chunks", "model",
    "stage_to_rank", "sequence_parallel",
}  # fmt: skip
_IGNORED = {"schedule_csv", "balanced_routing"}


def read_torch(config: ConfigFile) -> ImportedRun:
    """The run that the runner's file describes. Raises SpecError for what is none."""
    data = yaml_of(config.text, _HINT)
    if not isinstance(data, Mapping) or not isinstance(data.get("chunks"), list):
        raise SpecError("the file has no chunks", _HINT)
    layout = _layout(data)
    ranks = layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"]
    steps = _number(data, "num_microbatches")
    imported = ImportedRun(
        "torch",
        {
            "model": exported_model(config.text) or data.get("model"),
            "num_gpus": ranks,
            "runtime": "torch-eager",
            "seq_length": _number(data, "seq_length"),
            "global_batch_size": layout["micro_batch_size"] * steps * layout["dp"],
            "dtype": "bf16",
            "parallelism": layout,
            "features": {},
        },
    )
    for name, value in data.items():
        if name not in _READ:
            (imported.ignored if name in _IGNORED else imported.unknown)[str(name)] = str(value)[:200]
    return imported


def _number(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{name}: {value!r:.60} is no positive number", _HINT)
    return value


def _layout(data: Mapping[str, Any]) -> dict[str, Any]:
    """The grid, the stages and what is recomputed."""
    chunks = data["chunks"]
    if not chunks or not all(isinstance(chunk, Mapping) for chunk in chunks):
        raise SpecError("chunks: holds no stages", _HINT)
    placement = data.get("stage_to_rank")
    ranks = placement if isinstance(placement, list) else []
    pp = 1 + max((rank for rank in ranks if isinstance(rank, int)), default=0)
    if pp < 1:
        raise SpecError(f"stage_to_rank: {placement!r:.60} names no rank", _HINT)
    counts = [_span(chunk) for chunk in chunks]
    layout: dict[str, Any] = {
        **{axis: _number(data, axis) for axis in _AXES},
        "pp": pp,
        "vpp": max(1, len(chunks) // pp),
        "sequence_parallel": bool(data.get("sequence_parallel")),
        "zero_stage": 1 if data.get("zero") else 0,
        **_recompute(data, chunks, counts),
    }
    if pp > 1:
        layout |= {"schedule": str(data.get("schedule")), "layers_per_stage": counts}
    return layout


def _span(chunk: Mapping[str, Any]) -> int:
    first, last = chunk.get("first_layer"), chunk.get("last_layer")
    if not isinstance(first, int) or not isinstance(last, int) or not 0 <= last - first <= 10_000:
        raise SpecError(f"chunks: first_layer {first!r:.40} and last_layer {last!r:.40} are no range", _HINT)
    return last - first


def _recompute(data: Mapping[str, Any], chunks: list[Any], counts: list[int]) -> dict[str, Any]:
    modules = data.get("recompute_modules")
    if modules:
        return {
            "recompute": "selective",
            "recompute_modules": list(map(str, modules)) if isinstance(modules, list) else [],
        }
    recomputed = [chunk.get("num_recomputed", 0) for chunk in chunks]
    most = max(recomputed)
    if not most:
        return {}
    return {"recompute": "full"} if recomputed == counts else {"recompute": "full", "recompute_num_layers": most}
