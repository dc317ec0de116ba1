"""Bytes of a plan's stage, counted while the probe's own step of it runs on fake tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.probe.model.layers import DecoderLayer
from planner.probe.plan_side.eager import fuses_norms
from planner.probe.rank.rank_alone import trainer_alone
from planner.probe.rank.training import Trainer
from planner.probe.rehearse.account import BytesAlive
from planner.probe.rehearse.kernels import MOMENTS, gpu_kernels
from planner.probe.run import Place, ProbeRun
from planner.probe.torch_build import rehearsed_build
from planner.specs.model import LayerKind

KEPT, MOMENT = "kept by forwards", "made by the backward"
"""Labels of what a step allocates; before it, the label is empty."""
_LABELS = {"F": KEPT}


@dataclass
class CountedStage:
    """Bytes of one rank, as torch's allocator would count them."""

    static_bytes: int = 0
    """Bytes before the first forward."""
    peak_bytes: int = 0
    """Bytes at the step's fullest moment."""
    at_peak: dict[str, int] = field(default_factory=dict)
    """The peak's bytes by label."""
    layers: dict[tuple[LayerKind, str], int] = field(default_factory=dict)
    """Bytes that a layer keeps of a micro-batch, by its kind and by what is recomputed of it."""


def count_stage(run: ProbeRun, stage: int, architecture: str) -> CountedStage:
    """Build one stage of a run and run a step of it, its peers emulated, as on a GPU of `architecture`."""
    counted, account = CountedStage(), BytesAlive(MOMENTS)
    was_initialised = dist.is_initialized()
    with ExitStack() as stack:
        stack.enter_context(rehearsed_build(architecture))
        stack.enter_context(gpu_kernels(fuses_norms()))
        stack.enter_context(account.resized())
        stack.enter_context(FakeTensorMode())
        stack.enter_context(account)
        try:
            trainer = trainer_alone(run, run.rank(Place(stage, 0, 0, 0)), "cpu")
            gc.collect()  # what building needed for a moment is no part of the run
            counted.static_bytes = account.num_bytes
            account.reset_peak()

            def on_action(text: str) -> None:
                # an update of sharded parameters is first tried on whole ones, by their shapes
                account.counts = not (run.fully_sharded and text.startswith("optimizer"))
                account.label = _LABELS.get(text.lstrip("0123456789")[:1], MOMENT)

            with _kept_by_layers(trainer, account, counted):
                trainer.step(0, on_action)
        finally:
            if dist.is_initialized() and not was_initialised:
                dist.destroy_process_group()
    counted.peak_bytes, counted.at_peak = account.peak_bytes, account.at_peak
    return counted


@contextmanager
def _kept_by_layers(trainer: Trainer, account: BytesAlive, counted: CountedStage) -> Iterator[None]:
    """Write down what the first forward of each kind of layer leaves behind."""
    before: list[int] = []

    def enter(module: nn.Module, _: object) -> None:
        before.append(account.num_bytes)

    def leave(key: tuple[LayerKind, str]) -> None:
        kept = account.num_bytes - before.pop()
        if account.label == KEPT:  # not when the layer is recomputed
            counted.layers.setdefault(key, kept)

    handles = []
    for chunk in trainer.chunks.values():
        for number, (index, layer) in enumerate(chunk.layers.items()):
            assert isinstance(layer, DecoderLayer)
            base = "selective" if trainer.run.recompute_modules else "none"
            mode = "full" if number < chunk.spec.num_recomputed else base
            key = trainer.run.model.layers[int(index)], mode
            handles.append(layer.register_forward_pre_hook(enter, prepend=True))
            handles.append(layer.register_forward_hook(lambda *_, key=key: leave(key)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
