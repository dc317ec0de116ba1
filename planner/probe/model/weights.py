"""Values of the probe's parameters: the same model whatever its sharding, so that runs can be compared bit for bit."""

from __future__ import annotations

from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn

from planner.probe.model.surroundings import Surroundings

INITIAL_STD = 0.02


def initialise(module: nn.Module, seed: int) -> None:
    """Fill a module: norms around 1, all else normal with INITIAL_STD; each parameter by seed and its name alone.

    If a parameter is sharded, the rows of all ranks get the same values.
    """
    for name, parameter in module.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(
            crc32(f"{seed} {whole_name(name, parameter)}".encode())
        )
        with torch.no_grad():
            values = local(parameter).normal_(0.0, INITIAL_STD, generator=generator)
            if "norm" in name and name.endswith("weight"):
                values.add_(1.0)


def local(tensor: Any) -> Tensor:
    """This rank's rows of a tensor that may be sharded, or the whole tensor."""
    return cast(Tensor, tensor.to_local()) if hasattr(tensor, "to_local") else cast(Tensor, tensor)


def whole_name(name: str, parameter: Tensor) -> str:
    """The name of a parameter in the whole model. Replicas share one name."""
    return str(getattr(parameter, "replica", name))


def copy_shard(whole: nn.Module, shard: nn.Module, around: Surroundings) -> None:
    """Fill `shard` with its rank's part of the parameters of `whole`, the same module built without peers."""
    whole_parameters = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in shard.named_parameters():
            parameter.copy_(shard_of(whole_parameters[name], parameter, around))


def shard_of(whole: Tensor, like: Tensor, around: Surroundings) -> Tensor:
    """The part of a whole parameter (or of its gradient) that `like` is; key-value heads fewer than tp repeat."""
    cut: Any = getattr(like, "shard", None)
    if cut is not None:
        dim, sections = cut
        parts = torch.split(whole, [width for width, _ in sections], dim=dim)
        pieces = [
            part.narrow(dim, around.tp.rank * (width // local) // around.tp.size * local, local)
            for part, (width, local) in zip(parts, sections, strict=True)
        ]
        return torch.cat(pieces, dim=dim)
    expert: Any = getattr(like, "expert", None)
    if expert is not None:
        return whole.narrow(0, around.ep.rank * like.shape[0], like.shape[0])
    return whole
