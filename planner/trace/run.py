"""A few steps of a user's module on data-parallel ranks, as a plan has them; on a CPU where torch sees no GPU.

    torchrun --nproc-per-node 8 -m planner.trace.run --config plan.torch.yaml

Weights are in bf16, with masters, moments and summed gradients in fp32, as the plan was priced; tokens are random.
Prints each step's seconds and the peak of the memory. MODULE in the environment stands in for the source in the file.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.specs.reading import load_yaml
from planner.trace.worker import built, layers_of, logits_of

WARM_UP = 2
"""Steps that are left out of the mean."""


class Masters:
    """AdamW on masters in fp32, of which a rank has all, or with ZeRO-1 every n-th."""

    def __init__(self, module: nn.Module, ranks: int, rank: int, is_sharded: bool) -> None:
        self.weights = [weight for weight in module.parameters() if weight.requires_grad]
        self.gradients = [torch.zeros_like(weight, dtype=torch.float32) for weight in self.weights]
        self.owners = [number % ranks if is_sharded else rank for number in range(len(self.weights))]
        self.ranks, self.rank, self.is_sharded = ranks, rank, is_sharded
        self.own = {
            number: nn.Parameter(weight.detach().float())
            for number, weight in enumerate(self.weights)
            if self.owners[number] == rank
        }
        self.optimizer = torch.optim.AdamW(self.own.values(), lr=1e-4)

    def add(self) -> None:
        """Add a micro-batch's gradients to the sums in fp32."""
        for weight, total in zip(self.weights, self.gradients, strict=True):
            if weight.grad is not None:
                total += weight.grad
                weight.grad = None

    def step(self) -> None:
        """Sum gradients over the ranks, update, and hand new weights on."""
        for number, total in enumerate(self.gradients):
            if self.ranks > 1:
                dist.all_reduce(total)
            if number in self.own:
                self.own[number].grad = total / self.ranks
        self.optimizer.step()
        for number, weight in enumerate(self.weights):
            if number in self.own:
                weight.data.copy_(self.own[number].data)
            if self.is_sharded and self.ranks > 1:
                dist.broadcast(weight.data, self.owners[number])
            self.gradients[number].zero_()


def step(module: nn.Module, masters: Masters, tokens: torch.Tensor, micro_batches: int) -> float:
    """One optimizer step on random tokens; its loss."""
    total = 0.0
    for _ in range(micro_batches):
        logits = logits_of(module(tokens[:, :-1])).flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()) / micro_batches
        loss.backward()  # type: ignore[no-untyped-call]
        masters.add()
        total += float(loss)
    masters.step()
    return total


def recomputed(blocks: list[nn.Module]) -> None:
    """Run the blocks again in the backward."""
    for block in blocks:
        forward = block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False)


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(prog="planner.trace.run", description="Runs one rank of a module of your own.")
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seq-length", type=int, help="shorter sequences, on a CPU say")
    given = parser.parse_args()
    plan: Any = load_yaml(given.config)
    has_gpu, ranks = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", "1"))
    rank, device = int(os.environ.get("RANK", "0")), torch.device("cpu")
    if has_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if has_gpu else "gloo")
    torch.manual_seed(0)
    source = os.environ.get("MODULE") or plan["model"]["traced"]["source"].rpartition(", torch ")[0]
    module = built(source, device.type).to(device).train()
    if any(chunk.get("num_recomputed") for chunk in plan["chunks"]):
        recomputed(layers_of(module))
    masters = Masters(module, ranks, rank, bool(plan["zero"]))
    length = given.seq_length or plan["seq_length"]
    shape = (plan["micro_batch_size"], length + 1)
    tokens = torch.randint(plan["model"]["vocab_size"], shape, device=device)
    seconds = list[float]()
    for number in range(given.steps):
        began = time.perf_counter()
        loss = step(module, masters, tokens, plan["num_microbatches"])
        seconds.append(time.perf_counter() - began)
        if rank == 0:
            peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if has_gpu else ""
            print(f"step {number + 1}: {seconds[-1]:.3f} s, loss {loss:.3f}{peak}", flush=True)
    counted = seconds[WARM_UP:] or seconds
    if rank == 0:
        print(f"mean of {len(counted)} steps: {sum(counted) / len(counted):.3f} s", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
