"""The kernels that ran, beside those that the plan expected and those that profiles have numbers of."""

from __future__ import annotations

from collections.abc import Sequence

from planner.probe.result import RankResult
from planner.probe.run import ProbeRun
from planner.specs.hardware import HardwareSpec
from planner.trainers.torch_attention import PRICED, kernel_of

WORDS = {
    "flash": "FlashAttention-2",
    "cudnn": "cuDNN's kernel",
    "efficient": "torch's memory-efficient kernel",
    "math": "matrix products written out",
    "mask": "a kernel that takes a mask",
    "other": "a kernel of this build's own",
    "experts": "one product after another for experts",
}


def seen_kernels(ranks: Sequence[RankResult]) -> tuple[str, ...]:
    return tuple(sorted({kernel for rank in ranks for kernel in rank.attention_kernels}))


def unpriced(ranks: Sequence[RankResult], hardware: HardwareSpec) -> tuple[str, ...]:
    """Kernels that ran and that the profile has no numbers of: of attention, and products of experts one by one."""
    priced = PRICED if hardware.efficiency.cudnn is not None else ("flash",)
    attention = tuple(kernel for kernel in seen_kernels(ranks) if kernel not in priced)
    return (*attention, "experts") if any(rank.experts_one_by_one for rank in ranks) else attention


def kernel_notes(run: ProbeRun, ranks: Sequence[RankResult], hardware: HardwareSpec) -> tuple[str, ...]:
    """Sentences about kernels that ran and that the plan did not expect, or that nothing prices."""
    ran, unknown = seen_kernels(ranks), unpriced(ranks, hardware)
    if unknown:
        return (
            f"{in_words(unknown)} ran, of which the profile has no numbers: forward, backward, pipeline and peak are "
            "shown, not judged",
        )
    expected = expected_kernels(run, ranks, hardware)
    if not ran or expected == set(ran):
        return ()
    return (
        f"attention ran in {in_words(ran)} where the plan expected {in_words(sorted(expected))}: it is held against "
        "the price of what ran",
    )


def expected_kernels(run: ProbeRun, ranks: Sequence[RankResult], hardware: HardwareSpec) -> set[str]:
    """The kernels that the layers of these ranks were expected to run; `mask` for any that takes one."""
    chunks = [run.chunk_of(stage) for rank in ranks for stage in run.stages_of(rank.stage)]
    kinds = {kind for chunk in chunks for kind in run.model.layers[chunk.first_layer : chunk.last_layer]}
    return {kernel_of(run.model, kind, hardware, run.cp, run.whole_seq_length) for kind in kinds}


def in_words(kernels: Sequence[str]) -> str:
    names = (kernel.partition(" ") for kernel in kernels)
    return " and ".join(f"{WORDS.get(name, name)} {rest}".strip() for name, _, rest in names)
