"""The module of a virtual stage with its values, in the dtype of the run."""

from __future__ import annotations

import torch

from planner.probe.model.chunk import Chunk
from planner.probe.model.surroundings import Surroundings
from planner.probe.model.weights import copy_shard, initialise
from planner.probe.run import ProbeRun


def dtypes(run: ProbeRun) -> tuple[torch.dtype, torch.dtype]:
    """dtype of weights and activations, and of gradients and optimizer state."""
    compute: torch.dtype = getattr(torch, run.dtype)
    return compute, torch.float64 if compute == torch.float64 else torch.float32


def build_chunk(run: ProbeRun, stage: int, around: Surroundings, device: str) -> Chunk:
    """The module of a virtual stage. Where results are checked, its values are a shard of the model that one process
    has.

    On the meta device the module has no values yet.
    """
    spec, usual = run.chunk_of(stage), torch.get_default_dtype()
    torch.set_default_dtype(dtypes(run)[0])
    try:
        with torch.device(device):
            chunk = Chunk(run.model, spec, around)
            whole = Chunk(run.model, spec, Surroundings()) if run.check else chunk
    finally:
        torch.set_default_dtype(usual)
    if device != "meta":
        initialise(whole, run.seed)
    if whole is not chunk:
        copy_shard(whole, chunk, around)
    return chunk
