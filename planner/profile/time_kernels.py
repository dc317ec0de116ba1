"""Times products, attention and memory-bound operators on the device at hand, a CPU or a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from planner.probe.torch_build import this_build
from planner.profile.record import MeasuredRow
from planner.profile.shapes_to_measure import AttentionShape
from planner.profile.stopwatch import Stopwatch


def product_row(bench: Stopwatch, m: int, n: int, k: int) -> MeasuredRow:
    """y = x·wᵀ, dx = dy·w, dw = dyᵀ·x in bf16."""
    x, w, dy = bench.normal(m, k), bench.normal(n, k), bench.normal(m, n)
    return {
        "forward_us": bench.microseconds(lambda: x @ w.T),
        "dgrad_us": bench.microseconds(lambda: dy @ w),
        "wgrad_us": bench.microseconds(lambda: dy.T @ x),
    }


def attention_row(bench: Stopwatch, shape: AttentionShape, backend: str) -> MeasuredRow:
    """Causal attention, forward and all three gradients, as the probe's model runs it. Raises RuntimeError if the
    backend does not take the shape."""
    batch, seq, heads, kv_heads, qk_dim, v_dim = shape
    q = bench.normal(batch, heads, seq, qk_dim, grad=True)
    k, v = bench.normal(batch, kv_heads, seq, qk_dim, grad=True), bench.normal(batch, kv_heads, seq, v_dim, grad=True)
    grouped, build = heads != kv_heads, this_build()
    missing = qk_dim - v_dim if build.pads_values else 0

    def forward() -> Tensor:
        values = functional.pad(v, (0, missing)) if missing else v
        return functional.scaled_dot_product_attention(q, k, values, is_causal=True, enable_gqa=grouped)

    with warnings.catch_warnings(), sdpa_kernel([build.attention[backend]]):
        warnings.simplefilter("ignore")  # torch says of each other backend why it is not the one
        return {
            "forward_us": bench.microseconds(forward),
            "backward_us": bench.backward_us(forward(), (q, k, v)),
        }


def stream_row(bench: Stopwatch, name: str, rows: int, columns: int) -> MeasuredRow:
    """One memory-bound operator, and its backward if it has one. `kernel_problems.STREAMS` holds the bytes that they
    move."""
    grad = name in ("swiglu", "rms_norm", "layer_norm", "cross_entropy_fp32")
    x = bench.normal(rows, columns, grad=grad)
    inputs: tuple[Tensor, ...] = (x,)
    if name == "swiglu":
        other = bench.normal(rows, columns, grad=True)
        inputs = (x, other)
    calls: dict[str, Callable[[], Tensor]] = {
        "copy": lambda: y.copy_(x),
        "add": lambda: torch.add(x, x, out=y),
        "swiglu": lambda: functional.silu(x) * other,
        "rms_norm": lambda: functional.rms_norm(x, (columns,), weight, 1e-5),
        "layer_norm": lambda: functional.layer_norm(x, (columns,), weight, None, 1e-5),
        "cross_entropy_fp32": lambda: functional.cross_entropy(x.float(), labels),
        "adamw_fused_fp32": _adamw(bench, rows * columns) if name == "adamw_fused_fp32" else torch.Tensor,
        "accumulate_bf16_into_fp32": lambda: total.add_(x),
    }
    with nullcontext() if grad else torch.no_grad():
        y, total = torch.empty_like(x), torch.zeros(rows, columns, device=bench.device)
        weight = bench.normal(columns, grad=grad)
        labels = torch.randint(0, columns, (rows,), device=bench.device)
        if name.endswith("norm"):
            inputs = (x, weight)
        row: MeasuredRow = {"forward_us": bench.microseconds(calls[name]), "backward_us": None}
    if grad:
        row["backward_us"] = bench.backward_us(calls[name](), inputs)
    return row


def _adamw(bench: Stopwatch, size: int) -> Callable[[], Tensor]:
    parameter = torch.nn.Parameter(torch.zeros(size, device=bench.device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return cast(Callable[[], Tensor], optimizer.step)
