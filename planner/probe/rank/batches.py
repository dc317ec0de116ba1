"""Tokens of a micro-batch, and the seed that every rank draws them from."""

from __future__ import annotations

from zlib import crc32

import torch
from torch import Tensor

from planner.probe.run import ProbeRun
from planner.specs.model import ModelSpec


def batch_seed(run: ProbeRun, step: int, dp: int, microbatch: int) -> int:
    return crc32(f"{run.seed} {step} {dp} {microbatch}".encode())


def synthetic_batch(model: ModelSpec, seq_length: int, batch: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens and labels [seq, batch] of whole sequences, the same for the same seed on any rank."""
    generator = torch.Generator("cpu").manual_seed(seed)
    tokens = torch.randint(0, model.vocab_size, (seq_length, batch), generator=generator)
    labels = torch.randint(0, model.vocab_size, (seq_length, batch), generator=generator)
    return tokens.to(device), labels.to(device)
