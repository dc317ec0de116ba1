"""The kernels of attention that torch takes are written down as they run."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from planner.probe.model.attention import KernelsSeen  # noqa: E402
from planner.probe.verdict.evidence import in_words  # noqa: E402

aten = torch.ops.aten


def qkv(device: str = "meta") -> tuple[Any, ...]:
    return tuple(torch.empty(1, 2, 16, 8, device=device, dtype=torch.bfloat16) for _ in range(3))


CALLS: dict[str, Any] = {
    "flash": lambda: aten._scaled_dot_product_flash_attention(*qkv(), 0.0, True),
    "cudnn": lambda: aten._scaled_dot_product_cudnn_attention(*qkv(), None, True, 0.0, True),
    "cudnn with a mask": lambda: aten._scaled_dot_product_cudnn_attention(
        *qkv(), torch.empty(1, 2, 16, 16, device="meta", dtype=torch.bfloat16), True
    ),
    "efficient": lambda: aten._scaled_dot_product_efficient_attention(*qkv(), None, True, 0.0, True),
    "math": lambda: torch.nn.functional.scaled_dot_product_attention(*qkv("cpu"), is_causal=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_is_known_by_its_operator(name: str) -> None:
    with sdpa_kernel(SDPBackend.MATH), KernelsSeen() as seen:
        CALLS[name]()
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert seen.names == (name,)


def test_kernels_of_a_backward_are_those_that_recompute() -> None:
    q, k, v = (x.requires_grad_() for x in qkv("cpu"))
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)
        with KernelsSeen() as seen:
            out.sum().backward()
    assert seen.names == ("math",)


def test_kernels_are_told_in_words() -> None:
    assert in_words(("cudnn with a mask", "flash")) == "cuDNN's kernel with a mask and FlashAttention-2"
