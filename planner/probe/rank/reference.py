"""The same training in one process, whose loss, gradients and gradient norm the distributed run must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from planner.probe.model.attention_tables import AttentionTables
from planner.probe.model.chunk import Chunk
from planner.probe.model.surroundings import Surroundings
from planner.probe.model.weights import initialise, shard_of
from planner.probe.rank.batches import batch_seed, synthetic_batch
from planner.probe.rank.build_chunk import dtypes
from planner.probe.rank.fully_sharded import ShardedParameters
from planner.probe.rank.gradients import ADAM, FlatParameters, clip_scale
from planner.probe.rank.parameters import Parameters
from planner.probe.result import Check, StepSeconds, shown
from planner.probe.run import ChunkSpec, ProbeRun

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest allowed error over the largest value. Errors come from sums over ranks, whose order differs."""


class Reference(NamedTuple):
    """The results of one process: losses and gradient norms of all steps, gradients of the first step."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]


def compute_reference(run: ProbeRun, num_steps: int, on_batch: Callable[[str], None]) -> Reference:
    """Train the whole model on the whole batch for `num_steps` steps; `on_batch` hears of each micro-batch."""
    around = Surroundings(balanced_routing=run.balanced_routing)
    dtype, _ = dtypes(run)
    layers, has_mtp = run.model.num_hidden_layers, any(chunk.mtp for chunk in run.chunks)
    spec = ChunkSpec(first_layer=0, last_layer=layers, embedding=True, head=True, mtp=has_mtp)
    model = Chunk(run.model, spec, around).to(dtype)
    initialise(model, run.seed)
    tables = AttentionTables.of(run.model, run.whole_seq_length, around, torch.empty(0, dtype=dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, **cast(Any, ADAM))
    reference = Reference([], [], {})
    for step in range(num_steps):
        optimizer.zero_grad()
        total = 0.0
        for dp in range(run.dp):
            for microbatch in range(run.num_microbatches):
                on_batch(f"step {step}, micro-batch {dp * run.num_microbatches + microbatch}")
                seed = batch_seed(run, step, dp, microbatch)
                tokens, labels = synthetic_batch(run.model, run.whole_seq_length, run.micro_batch_size, seed, "cpu")
                loss = model(None, tokens, labels, tables) / (run.num_microbatches * run.dp)
                loss.backward()
                total += loss.item()
        grads = {name: cast(Tensor, p.grad) for name, p in model.named_parameters()}
        if step == 0:
            reference.grads.update({name: grad.clone() for name, grad in grads.items()})
        norm, scale = clip_scale(torch.stack([grad.square().sum() for grad in grads.values()]).sum(), run.max_norm)
        for grad in grads.values():
            grad.mul_(scale)
        optimizer.step()
        reference.losses.append(total)
        reference.norms.append(float(norm))
    return reference


def check_gradients(
    reference: Reference,
    parameters: Parameters,
    flats: Sequence[FlatParameters | ShardedParameters],
    around: Surroundings,
    dtype: torch.dtype,
) -> Check:
    """Compare this rank's shard of the summed gradients with the gradients of one process."""
    names = {id(parameter): name for name, _, parameter in parameters.named}
    largest = max(float(grad.abs().max()) for grad in reference.grads.values())
    worst, worst_name = 0.0, ""
    for parameter, elements, gradient in (part for flat in flats for part in flat.gradient_shards()):
        expected = shard_of(reference.grads[names[id(parameter)]], parameter, around).flatten()[elements]
        error = float((gradient - expected).abs().max()) / largest if gradient.numel() else 0.0
        if not error <= worst:  # also when it is no number
            worst, worst_name = error, names[id(parameter)]
    passed = worst <= TOLERANCES[dtype]
    detail = f"largest error {worst:.1e} of the largest gradient, at {worst_name}" if worst else "equal to the last bit"
    return Check(name="gradients", passed=passed, detail=detail)


def check_steps(reference: Reference, steps: list[StepSeconds], dtype: torch.dtype) -> list[Check]:
    """Compare losses and gradient norms of all steps with those of one process."""
    checks = []
    for name, measured, expected in (
        ("loss", [step.loss for step in steps], reference.losses),
        ("gradient norm", [step.gradient_norm for step in steps], reference.norms),
    ):
        pairs = zip(measured, expected, strict=True)
        passed = all(a is not None and abs(a - b) <= TOLERANCES[dtype] * abs(b) for a, b in pairs)
        checks.append(
            Check(name=name, passed=passed, detail=f"{shown(measured[-1], 6)}, one process {expected[-1]:.6f}")
        )
    return checks
