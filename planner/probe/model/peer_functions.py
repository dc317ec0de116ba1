"""Exchanges with peers as autograd functions, whose gradients go back the way that the tensors came."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.probe.model.peers import ExpertPeers, TensorPeers


class Enter(torch.autograd.Function):
    """Bring a sequence shard to all tensor-parallel ranks; its gradient is summed over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: TensorPeers) -> Tensor:
        ctx.peers = peers
        return peers.enter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.enter_grad(grad), None


class Leave(torch.autograd.Function):
    """Sum the tensor-parallel ranks' parts and shard the sequence again."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, peers: TensorPeers) -> Tensor:
        ctx.peers = peers
        return peers.leave(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.leave_grad(grad.contiguous()), None


class LeaveByView(torch.autograd.Function):
    """Sum the tensor-parallel ranks' parts; the sequence shard is a view of the sum and keeps all of it alive."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, peers: TensorPeers) -> Tensor:
        ctx.peers = peers
        return peers.all_reduce(y).chunk(peers.size)[peers.rank]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.peers.all_gather(grad.contiguous()), None


class HiddenToSequence(torch.autograd.Function):
    """[seq, batch, hidden/tp] → [seq/tp, batch, hidden]; without sequence parallelism → [seq, batch, hidden]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: TensorPeers) -> Tensor:
        ctx.peers = peers
        whole = peers.all_gather(x.movedim(-1, 0).contiguous()).movedim(0, -1)
        return (whole.chunk(peers.size)[peers.rank] if peers.sequence_parallel else whole).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        peers = ctx.peers
        whole = peers.all_gather(grad.contiguous()) if peers.sequence_parallel else grad
        return whole.chunk(peers.size, dim=-1)[peers.rank].contiguous(), None


class ExpertAllToAll(torch.autograd.Function):
    """All-to-all of rows; the gradient goes back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, peers: ExpertPeers, sent: list[int], received: list[int]) -> Tensor:
        ctx.peers, ctx.sent, ctx.received = peers, sent, received
        return peers.exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.peers.exchange(grad, ctx.received, ctx.sent), None, None, None
