"""The account of bytes alive: what torch's allocator would count on a GPU, while fake tensors run on this machine."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALIGNMENT = 512
"""Sizes of tensors are rounded up to a multiple of so many bytes (kMinBlockSize of torch's CUDACachingAllocator)."""
MomentBytes = Callable[..., int]
"""The bytes that a GPU's kernel allocates for itself while it runs, from the arguments of its operator."""


def allocated(num_bytes: int) -> int:
    """Bytes that the allocator gives a tensor of `num_bytes`: a multiple of 512."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class BytesAlive(cast(Any, TorchDispatchMode)):  # type: ignore[misc]
    """Counts the storages that are alive, each under the label that was current when it was made.

    A storage counts from the operator that makes it until nothing refers to it any more. Fake tensors have storages of
    the right size and no memory, and are freed at the same moments as real ones.
    """

    def __init__(self, moments: dict[Any, MomentBytes] | None = None) -> None:
        super().__init__()
        self.moments = moments or {}
        self.label = ""
        self.counts = True
        """False while torch works out shapes, which takes no memory on a GPU."""
        self.alive: Counter[str] = Counter()
        """Bytes alive by label."""
        self.peak_bytes = 0
        self.at_peak: dict[str, int] = {}
        """Bytes by label at the peak, with those of the operator that was running under its own name."""
        self.peak_label = ""
        """The label that was current at the peak."""
        self._storages: dict[int, tuple[str, int]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that are alive now."""
        return self.alive.total()

    def reset_peak(self) -> None:
        self.peak_bytes = 0
        self._see_peak("", 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor has no storage: count its rows, on which it runs the operator next
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # fake tensors have no values: any number does where the host reads one
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        moment = self.moments.get(func)
        if moment is not None:
            self._see_peak(func.overloadpacket.__name__, allocated(moment(*args, **(kwargs or {}))))
        return result

    def count(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is counted already."""
        storage: Any = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages or not self.counts:
            return
        weakref.finalize(storage, self._forget, key)
        self._enter(key, storage.nbytes())

    @contextmanager
    def resized(self) -> Iterator[None]:
        """Count storages anew that torch's fully_shard empties and fills again, which no operator shows."""
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: Any, num_bytes: int) -> Any:
            result = resize(storage, num_bytes)
            if storage._cdata in self._storages:
                self._leave(storage._cdata)
                self._enter(storage._cdata, num_bytes)
            return result

        cast(Any, torch.UntypedStorage).resize_ = resize_and_count
        try:
            yield
        finally:
            cast(Any, torch.UntypedStorage).resize_ = resize

    def _enter(self, key: int, num_bytes: int) -> None:
        self._storages[key] = self.label, allocated(num_bytes)
        self.alive[self.label] += allocated(num_bytes)
        self._see_peak("", 0)

    def _leave(self, key: int) -> None:
        label, num_bytes = self._storages[key]
        self.alive[label] -= num_bytes

    def _forget(self, key: int) -> None:
        self._leave(key)
        del self._storages[key]

    def _see_peak(self, name: str, moment_bytes: int) -> None:
        num_bytes = self.num_bytes + moment_bytes
        if num_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_label = num_bytes, self.label
            self.at_peak = dict(self.alive) | ({name: moment_bytes} if moment_bytes else {})
