"""Numbers that a probe may ask for. Beyond them it measured something else than the hardware that the profile is of."""

from __future__ import annotations

from typing import TypedDict

from planner.specs.corrections import Verdict
from planner.specs.efficiency import Efficiency
from planner.specs.hardware import HardwareSpec


class Opinion(TypedDict):
    """The verdict on a measured number, and the reason why it is not taken."""

    verdict: Verdict
    reason: str


TAKEN: Opinion = {"verdict": "corrected", "reason": ""}
MOST_FACTOR = 2.0
"""Largest factor on the seconds of kernels, either way. A power limit of 500 W instead of 700 is worth 1.4 on products
(h100-sxm-96gb beside h100-sxm-80gb); the worst prediction from a data sheet alone was off by 1.5 (MI325X in published
runs). A factor of 2 is beyond both."""
MOST_SHARE = 1.1
"""Largest share of the data sheet's peak, or of its memory bandwidth, that kernels reach. No shipped profile has more
than 0.9 of either; boost clocks above the nominal one are worth a tenth."""
LEAST_LINK_SHARE, MOST_LINK_SHARE = 0.1, 1.2
"""Shares of a link's data-sheet rate: shipped tiers reach 0.65 to 1, and all-reduces that NVSwitch sums 476 GB/s of 450
(NVIDIA/nccl-tests issue 290). An exchange that took another way, through host memory instead of NVLink or through
sockets instead of InfiniBand, is slower by more than the least."""
LINK_NOISE = 0.02
"""Difference from the profile's share below which it stays."""
MOST_SPREAD = 0.1
"""Relative standard error of seconds above which they say nothing about a link or a kernel."""
LEAST_CONTEXT_GIB, MOST_CONTEXT_GIB = 0.2, 6.0
"""Memory in use outside the allocator. A CUDA context with cuBLAS and cuDNN takes 0.5 to 1 GiB, one of ROCm 2.5; NCCL's
buffers are counted apart. Above, another process is on the GPU."""
MOST_FRAGMENTATION = 0.3
"""Memory that the allocator holds beyond what is allocated, as a share of it: 0.03 to 0.06 in shipped profiles. Above,
it holds blocks of something that came before the steps."""
MOST_HOST_S = 0.02
"""Seconds of the host per micro-batch: 46 to 57 µs a kernel and some hundred kernels of messages and loops around the
layers are a few milliseconds. Above, the host was busy with something else."""


def kernel_objection(path: str, factor: float, hardware: HardwareSpec) -> str:
    """The reason why a factor on the seconds of a kind of kernel cannot be; empty where it can.

    Products that reach all of the peak are no products of this GPU. Other kinds may be drawn there by products.
    """
    if hardware.architecture == "cpu":  # one profile stands for all CPUs
        return ""
    if not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
        return f"× {factor:.2f} (between {1 / MOST_FACTOR:g} and {MOST_FACTOR:g} is plausible)"
    at_peak = path == "gemm_factor" and factor <= 1.001 * least_factor(path, hardware)
    return f"× {factor:.2f} or less (the data sheet's peak allows no more)" if at_peak else ""


def least_factor(path: str, hardware: HardwareSpec) -> float:
    """The least factor on the seconds of a kind of kernel: with it, the kind reaches all that its data sheet has."""
    return min(1.0, _share(path, hardware.efficiency) / MOST_SHARE)


def _share(name: str, own: Efficiency) -> float:
    """The largest share of its data sheet's rate that the profile has a kind of kernel reach."""
    if name == "gemm_factor":
        return own.gemm.forward_fraction * own.sustained_fraction / own.gemm_factor
    if name == "stream_factor":
        return own.stream_fraction / own.stream_factor
    kernel = getattr(own, name.partition(".")[0])
    return float(kernel.forward_fraction * own.sustained_fraction / (own.attention_factor * kernel.seconds_factor))


def opinion_of_link(share: float, own: float, spread: float) -> Opinion:
    """The opinion of a measured share of a link's rate, whose seconds have a relative standard error of `spread`."""
    if share > MOST_LINK_SHARE:
        return _refused(f"{share:.0%} of the data sheet's rate is more than the link has: check --hardware")
    if share < LEAST_LINK_SHARE:
        return _refused("less than a tenth of the data sheet's rate: NCCL_DEBUG=INFO says which way it took")
    if spread > MOST_SPREAD:
        return _refused(f"its seconds are known to {spread:.0%} only")
    if abs(share / own - 1) <= (repeats := max(LINK_NOISE, spread)):
        return {"verdict": "confirmed", "reason": f"the profile's is as near as seconds repeat ({repeats:.0%})"}
    return TAKEN


def opinion_of_context(context_gib: float) -> Opinion:
    """The opinion of an amount of memory in use outside the allocator."""
    if context_gib > MOST_CONTEXT_GIB:
        return _refused(f"more than {MOST_CONTEXT_GIB:g} GiB: other processes are on the GPUs")
    if context_gib < LEAST_CONTEXT_GIB:
        return _refused(f"less than {LEAST_CONTEXT_GIB:g} GiB: the driver does not count all memory of the ranks")
    return TAKEN


def opinion_of_fragmentation(fraction: float) -> Opinion:
    """The opinion of a share of memory that the allocator holds beside what is allocated."""
    if fraction > MOST_FRAGMENTATION:
        return _refused(f"more than {MOST_FRAGMENTATION:.0%}: the allocator keeps blocks that the steps do not use")
    return TAKEN


def opinion_of_host(seconds: float) -> Opinion:
    """The opinion of the host's seconds per micro-batch."""
    if seconds > MOST_HOST_S:
        return _refused(f"more than {1e3 * MOST_HOST_S:g} ms: the host was busy with other work")
    return TAKEN


def _refused(reason: str) -> Opinion:
    return {"verdict": "refused", "reason": reason}
