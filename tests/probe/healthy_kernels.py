"""Every kernel and every exchange that the ranks' own code runs on a fake GPU, priced one by one by our own formulas.

The operator lists of the planner are not asked. A kernel's price follows from what torch runs: products from their
sizes, attention from the kernel's name and its tensors, all else from the bytes of the tensors that it reads and
writes. What the ranks' code runs is therefore told apart from what the planner believes that it runs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from planner.physics import compute
from planner.physics.communication import Kind, collective_s
from planner.physics.operators import Operator
from planner.probe.torch_build import GATHER, SCATTER
from planner.specs.cluster import ClusterSpec
from planner.trainers.spec import RuntimeSpec

Pass = Literal["forward", "backward"]

FREE = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "detach", "alias", "set_"}
    | {"_unsafe_view", "lift_fresh", "_reshape_alias", "scalar_tensor", "_local_scalar_dense", "item", "wait_tensor"}
    | {"_record_function_enter_new", "_record_function_exit", "record_stream"}
)
"""Operations that run no kernel."""
PRODUCTS = frozenset({"mm", "addmm", "bmm", "_grouped_mm"})
FAMILIES = {
    "_fused_rms_norm": "norm", "_fused_rms_norm_backward": "norm", "native_layer_norm": "norm",
    "native_layer_norm_backward": "norm", "_log_softmax": "loss", "_log_softmax_backward_data": "loss",
    "nll_loss_forward": "loss", "nll_loss_backward": "loss", "embedding": "embedding",
    "embedding_dense_backward": "embedding", "_fused_adamw_": "optimizer", "index_select": "permute",
    "index_add": "permute", "index_add_": "permute", "silu": "activation", "silu_backward": "activation",
    "gelu": "activation", "gelu_backward": "activation", "topk": "router", "sort": "router",
}  # fmt: skip
"""Families of kernels whose names say it; the others are plain or strided."""


class Kernel(NamedTuple):
    """One kernel or exchange that ran."""

    name: str
    seconds: float
    num_bytes: float = 0.0
    detail: str = ""
    ranks: tuple[int, ...] = ()
    """The ranks of an exchange."""


@dataclass
class Account:
    """What ran in one section."""

    kernels: list[Kernel] = field(default_factory=list)
    exchanges: list[Kernel] = field(default_factory=list)

    @property
    def gpu_s(self) -> float:
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def exchange_s(self) -> float:
        return sum(exchange.seconds for exchange in self.exchanges)

    def by_name(self) -> dict[str, tuple[int, float]]:
        """Number of launches and seconds of each kernel."""
        totals: dict[str, list[float]] = defaultdict(list)
        for kernel in (*self.kernels, *self.exchanges):
            totals[kernel.name].append(kernel.seconds)
        return {name: (len(values), sum(values)) for name, values in sorted(totals.items(), key=lambda x: -sum(x[1]))}


@dataclass
class Prices:
    """Our own formulas, for one GPU in its cluster."""

    cluster: ClusterSpec
    runtime: RuntimeSpec
    slow: Mapping[str, float] = field(default_factory=dict)
    """Factors on the seconds of some kinds of kernels: product, attention, stream, exchange."""
    head_columns: int = 0
    """Columns of the head's product on a rank, whose gradients are cheaper (`head_backward_factor`)."""

    def operator_s(self, op: Operator, which: int) -> float:
        kind = {"gemm": "product", "attention": "attention"}.get(op.kind, "stream")
        seconds = compute.operator_seconds(op, self.cluster.hardware, "bf16", self.runtime)[which]
        return float(seconds) * self.slow.get(kind, 1.0)

    def product_s(self, m: int, k: int, n: int, count: int, role: Literal["forward", "dgrad", "wgrad"]) -> float:
        """Seconds of `count` products of m × k by k × n, which play a part for the weight of a linear layer."""
        sizes = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (k, m, n)}[role]
        columns = {"forward": n, "dgrad": k, "wgrad": m}[role]
        is_head = role != "forward" and columns == self.head_columns
        factor = self.runtime.head_backward_factor if is_head else 1.0
        op = Operator(name=role, kind="gemm", count=count, m=sizes[0], n=sizes[1], k=sizes[2], backward_factor=factor)
        return self.operator_s(op, ("forward", "dgrad", "wgrad").index(role))

    def stream_s(self, num_bytes: float, family: str, way: Pass) -> float:
        return self.operator_s(
            Operator(name="", kind="elementwise", family=family, forward_bytes=num_bytes, forward_kernels=1), 0
        )

    def exchange_s(self, kind: Kind, num_bytes: float, ranks: list[int]) -> float:
        """Seconds of an exchange over evenly spaced ranks."""
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        return float(collective_s(kind, num_bytes, len(ranks), stride, self.cluster)) * self.slow.get("exchange", 1.0)


def dense_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, each counted once where dimensions are expanded."""
    sizes = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()


class Recorder(TorchDispatchMode):
    """Writes down every kernel that torch launches, with its price, in the account of the section that runs."""

    def __init__(self, prices: Prices) -> None:
        super().__init__()
        self.prices, self.accounts, self.muted, self.way = prices, defaultdict[str, Account](Account), 0, "forward"
        self.section, self.attention_kernels = "other", set[str]()

    @property
    def account(self) -> Account:
        return self.accounts[self.section]

    @contextmanager
    def during(self, section: str, way: Pass = "forward") -> Iterator[Account]:
        before = self.section, self.way
        self.section, self.way = section, way
        try:
            yield self.account
        finally:
            self.section, self.way = before

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Kernels that stand in for one that is written down by hand."""
        self.muted += 1
        try:
            yield
        finally:
            self.muted -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if not self.muted and func.namespace == "aten" and not func.is_view and name not in FREE:
            self.account.kernels.append(self.priced(name, args, kwargs or {}, out))
        return out

    def priced(self, name: str, args: Any, kwargs: Any, out: Any) -> Kernel:
        inputs = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        outputs = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        detail = " ".join(f"{tuple(x.shape)}{str(x.dtype)[6:]}" for x in inputs[:4])
        if name in PRODUCTS:
            return Kernel(name, self._product_s(name, inputs), detail=detail)
        if name.startswith("_flash_attention"):
            return Kernel(name, self._flash_s(name, inputs, kwargs), detail=detail)
        num_bytes = self._moved_bytes(name, inputs, outputs)
        return Kernel(name, self.prices.stream_s(num_bytes, self._family(name, inputs), self.way), num_bytes, detail)

    def _moved_bytes(self, name: str, inputs: list[Any], outputs: list[Any]) -> float:
        """Bytes read and written; what is updated in place is both."""
        if name in ("zero_", "fill_", "normal_"):
            return dense_bytes(inputs[0])
        if name.startswith("new_") or name.endswith("_like"):
            return sum(map(dense_bytes, outputs))
        if name in ("copy_", "_foreach_copy_"):
            return sum(map(dense_bytes, inputs))
        if name in ("embedding", "index_select", "gather"):  # of what is looked in, only what is found, and once
            found = dense_bytes(outputs[0])
            return found + min(found, dense_bytes(inputs[0])) + sum(dense_bytes(x) for x in inputs[1:])
        if name.startswith("scatter") and name.endswith("_"):  # of what is added to, only where something is added
            return 2 * dense_bytes(inputs[2]) + sum(map(dense_bytes, inputs[1:]))
        if name == "_log_softmax":  # read for the maximum, the sum and the result
            return 3 * dense_bytes(inputs[0]) + dense_bytes(outputs[0])
        if name.startswith("nll_loss"):  # one column is read; the gradient is zeros but for one column
            return sum(map(dense_bytes, outputs))
        if name == "_fused_adamw_":
            master, grads, *moments = inputs[:4]
            return 2 * dense_bytes(master) + dense_bytes(grads) + 2 * sum(map(dense_bytes, moments))
        return sum(map(dense_bytes, inputs)) + sum(map(dense_bytes, outputs))

    def _family(self, name: str, inputs: list[Any]) -> str:
        if name in FAMILIES:
            return FAMILIES[name]
        if name == "add_" and len({x.dtype for x in inputs}) > 1:
            return "accumulate"
        if any(not x.is_contiguous() for x in inputs) or (name == "cat" and self.way == "forward"):
            return "strided"
        return "copy"

    def _product_s(self, name: str, inputs: list[Any]) -> float:
        a, b = (inputs[1], inputs[2]) if name == "addmm" else (inputs[0], inputs[1])
        if name == "_grouped_mm":
            count = inputs[2].shape[0]
            if b.dim() == 2:  # rows of all experts are summed over
                return self.prices.product_s(a.shape[0], a.shape[1] // count, b.shape[1], count, "wgrad")
            role: Any = "forward" if self.way == "forward" else "dgrad"
            # recomputed products run in the backward too: their weight comes transposed
            role = "forward" if not b.is_contiguous() else role
            return self.prices.product_s(a.shape[0] // count, a.shape[1], b.shape[2], count, role)
        if a.dim() == 3:
            return self.prices.product_s(a.shape[1], a.shape[2], b.shape[2], a.shape[0], "forward")
        role = "forward" if not b.is_contiguous() else "dgrad"
        role = "wgrad" if not a.is_contiguous() else role
        return self.prices.product_s(a.shape[0], a.shape[1], b.shape[1], 1, role)

    def _flash_s(self, name: str, inputs: list[Any], kwargs: Any) -> float:
        """FlashAttention-2 by itself: tensors are [batch, sequence, heads, dim]."""
        backward = "backward" in name
        q, k, v = inputs[1:4] if backward else inputs[:3]
        window = kwargs.get("window_size_left") or -1
        self.attention_kernels.add("flash")
        return self.attention_s(q, k, v, "flash", backward, window + 1)

    def attention_s(self, q: Any, k: Any, v: Any, kernel: str, backward: bool, window: int = 0) -> float:
        """Causal attention of q over k and v, [batch, sequence, heads, dim]; the last query sees the last key.

        Where there are more keys than queries, queries see all keys before their own block, and half of that.
        """
        queries, keys = q.shape[1], k.shape[1]
        v_dim = q.shape[3] if kernel == "flash" else v.shape[3]  # FlashAttention-2 wants values as wide as keys
        square = Operator(
            name="attention", kind="attention", batch=q.shape[0], heads=q.shape[2], kv_heads=k.shape[2],
            q_len=queries, kv_len=queries, window=window if window < queries else 0, qk_dim=q.shape[3],
            v_dim=v_dim,
        )  # fmt: skip
        name = "fastest" if kernel == "cudnn" else "flash"
        runtime = self.prices.runtime.model_copy(update={"attention_kernel": name})
        seconds = compute.operator_seconds(square, self.prices.cluster.hardware, "bf16", runtime)[backward]
        # the rectangle before the block has no ragged end; its ramp is that of its keys, over which the backward runs
        seen = min(keys - queries, window) if window else keys - queries
        if seen:
            long = Operator(
                name="attention", kind="attention", batch=1, heads=q.shape[2], q_len=2**24, kv_len=2**24,
                qk_dim=q.shape[3], v_dim=v_dim,
            )  # fmt: skip
            long_s = compute.operator_seconds(long, self.prices.cluster.hardware, "bf16", runtime)[backward]
            kernels = self.prices.cluster.hardware.efficiency.kernel(name)
            ramp = kernels.backward_ramp_keys / 2 if backward and not window else 0
            seconds = seconds + long_s * q.shape[0] * (queries + ramp) * seen / 2**47
        return float(seconds) * self.prices.slow.get("attention", 1.0)


class _Attention(torch.autograd.Function):
    """torch's scaled_dot_product_attention of [batch, heads, sequence, dim]: one kernel, with its own backward."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, kernel: str, recorder: Recorder) -> Any:
        with recorder.quiet():
            out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        ctx.by = recorder, kernel
        ctx.save_for_backward(q, k, v, out)
        _Attention._record(*ctx.by, q, k, v, False)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, _ = ctx.saved_tensors
        _Attention._record(*ctx.by, q, k, v, True)
        with ctx.by[0].quiet():
            return *(torch.empty_like(x) for x in (q, k, v)), None, None

    @staticmethod
    def _record(recorder: Recorder, kernel: str, q: Any, k: Any, v: Any, backward: bool) -> None:
        with recorder.quiet():
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        seconds = recorder.attention_s(q, k, v, kernel, backward)
        recorder.account.kernels.append(
            Kernel(f"attention {'backward' if backward else 'forward'}", seconds, detail=str((q.shape, k.shape)))
        )


class _RMSNorm(torch.autograd.Function):
    """torch's fused RMSNorm: the backward reads input and gradient twice, once for the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, recorder: Recorder) -> Any:
        with recorder.quiet():
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        ctx.recorder = recorder
        ctx.save_for_backward(x, weight)
        _RMSNorm._record(recorder, "_fused_rms_norm", 2 * dense_bytes(out))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        with ctx.recorder.quiet():
            x_grad, weight_grad = torch.empty_like(x), torch.empty_like(weight)
        _RMSNorm._record(ctx.recorder, "_fused_rms_norm_backward", 5 * dense_bytes(x_grad), 2)
        return x_grad, weight_grad, None

    @staticmethod
    def _record(recorder: Recorder, name: str, num_bytes: float, kernels: int = 1) -> None:
        seconds = recorder.prices.stream_s(num_bytes, "norm", recorder.way)
        recorder.account.kernels.append(Kernel(name, seconds, num_bytes))


@contextmanager
def recorded(prices: Prices, monkeypatch: pytest.MonkeyPatch, kernel: str) -> Iterator[Recorder]:
    """Inside of a fake GPU: a recorder of all kernels and exchanges. `kernel` is torch's choice for plain attention."""
    recorder = Recorder(prices)
    for name, kind, whole in EXCHANGES:
        monkeypatch.setattr(dist, name, _noting(getattr(dist, name), kind, whole, recorder))

    def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, **_: Any) -> Any:
        wide = q.shape[3] > 128 and (q.shape[3], v.shape[3]) != (192, 128)
        ran = "efficient" if attn_mask is not None else "flash" if wide else kernel
        recorder.attention_kernels.add(ran)
        return _Attention.apply(q, k, v, ran, recorder)

    def rms_norm(x: Any, shape: Any, weight: Any, eps: float) -> Any:
        return _RMSNorm.apply(x, weight, recorder)

    # a GPU runs these as one kernel each, the CPU otherwise
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(torch.nn.functional, "rms_norm", rms_norm)
    with recorder:
        yield recorder


def _noting(real: Callable[..., Any], kind: Kind, whole: int, recorder: Recorder) -> Callable[..., Any]:
    def exchange(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
        num_bytes = (*args, *kwargs.values())[whole].nbytes
        recorder.account.exchanges.append(
            Kernel(kind, recorder.prices.exchange_s(kind, num_bytes, ranks), num_bytes, ranks=tuple(ranks))
        )
        with recorder.quiet():
            return real(*args, group=group, **kwargs)

    return exchange


EXCHANGES: tuple[tuple[str, Kind, int], ...] = (
    (GATHER, "all_gather", 0),
    (SCATTER, "reduce_scatter", 1),
    ("all_reduce", "all_reduce", 0),
    ("all_to_all_single", "all_to_all", 1),
)
"""torch.distributed's exchanges, what they are called here, and the argument that is the whole tensor."""
