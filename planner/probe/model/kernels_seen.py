"""The kernels of attention that ran: torch chooses among several, by version, GPU, shapes and masks."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

KERNELS = {
    "_flash_attention_forward": "flash",
    "_scaled_dot_product_flash_attention": "flash",
    "_cudnn_attention_forward": "cudnn",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_efficient_attention_forward": "efficient",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_fused_attention_overrideable": "other",
    # attention written out, the last resort: nothing else calls this softmax
    "_safe_softmax": "math",
}
"""Our names of torch's operators; profiles have numbers of flash and cudnn alone."""
WITH_A_MASK = " with a mask"
TAKES_MASKS = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention")
"""Operators whose fourth argument is a mask, or None."""


class KernelsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the kernels of attention that run within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._names))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = func.overloadpacket.__name__
        if operator in KERNELS:
            is_masked = operator in TAKES_MASKS and args[3] is not None
            self._names.add(KERNELS[operator] + (WITH_A_MASK if is_masked else ""))
        return func(*args, **(kwargs or {}))
