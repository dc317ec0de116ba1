"""Efficiency: the share of its data sheet that a GPU reaches, in a few numbers per kind of kernel.

Everything is relative to the data sheet of the GPU (peak of the dtype, HBM bandwidth, number of SMs), so that one block
describes a silicon generation: what is measured on one GPU carries over to its siblings.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from planner.specs.base import Achieved, Fraction, Overhead, PositiveInt, Rate, Spec, Width, without

_RETIRED = ("untuned_factor",)

SLOW_FAMILIES = ("norm", "loss", "optimizer", "accumulate", "permute", "strided", "cast")
"""Memory-bound kernels that may reach less than a plain copy; strided ones are on views."""


def _slow_family(name: str) -> str:
    if name not in SLOW_FAMILIES:
        raise PydanticCustomError("family", f"is none of {', '.join(SLOW_FAMILIES)}")
    return name


SlowFamily = Annotated[str, AfterValidator(_slow_family)]
Share = Annotated[float, Field(ge=1e-6, le=1.2, allow_inf_nan=False)]
"""Achieved share of a data-sheet rate; a boost clock above the nominal one can carry it a little above 1."""


class GemmEfficiency(Spec):
    """Dense and grouped products: the slowest of power, clock and memory (`physics.kernels.product_s`)."""

    forward_fraction: Share = 0.69
    """Share of peak that large products sustain under the power limit: y = x·wᵀ."""
    dgrad_fraction: Share = 0.69
    """Share of peak that large products sustain for the input gradient: dx = dy·w."""
    wgrad_fraction: Share = 0.69
    """Share of peak that large products sustain for the weight gradient: dw = dyᵀ·x."""
    wave_fraction: Share = 0.93
    """Share of peak inside one full wave of tiles, before the power limit: what tile and wave quantization divide."""
    ramp_k: Overhead = 180.0
    """Prologue and epilogue of a tile, in steps of the reduction: efficiency k / (k + ramp_k), in bf16."""
    tile_overhead: Overhead = 14.0
    """Loss of small tiles: a tile of a × b runs at a·b / (a·b + tile_overhead·(a + b)), relative to 128 × 256."""
    memory_fraction: Share = 0.9
    """Share of HBM bandwidth at which thin products stream their operands."""
    accumulate_fraction: Fraction = 0.6
    """Share of the bytes moved to add a product's result to a main gradient that the product's FLOPs do not hide: 0.50
    on A100 and 0.63 on B200 (`tools/calibrate kernels a100-pcie`, `b200`)."""
    fp8_factor: Rate = 1.0
    """Factor on the bf16 fractions for 8-bit and narrower dtypes; below 1 where scaling costs more than it saves."""
    mx_factor: Rate = 1.0
    """Factor on fp8_factor for mxfp8, where every 32 values have a scale of their own."""
    fp4_factor: Rate = 1.0
    """Factor on the bf16 fractions for 4-bit dtypes."""
    grouped_factor: Rate = 0.95
    """Factor on the bf16 fractions for grouped products (several experts, or heads, in one launch)."""
    unaligned_factor: Rate = 0.1
    """Factor on the rate of products of heads whose dimension is no multiple of 8 (BLOOM's trials on A100)."""


class AttentionEfficiency(Spec):
    """One attention kernel (`physics.kernels.attention_s`)."""

    forward_fraction: Share = 0.6
    """Share of peak that long sequences reach at head dimension 128."""
    backward_fraction: Share = 0.5
    """Share of peak that the backward of long sequences reaches at head dimension 128."""
    forward_ramp_keys: Overhead = 250.0
    """Masked corners and prologue, in keys a query: efficiency s / (s + ramp_keys)."""
    backward_ramp_keys: Overhead = 450.0
    """`forward_ramp_keys` of the backward."""
    tail_fraction: Overhead = 0.4
    """Idle SMs at the end, in rows of 128 queries over all keys: causal rows differ in length."""
    half_head_dim: Overhead = 50.0
    """The loss to softmax beside the products: efficiency d / (d + half_head_dim)."""
    wide_factor: Rate = 0.9
    """Factor on the fractions where keys are wider than 128: tiles must shrink."""
    sink_row_ns: Overhead = 0.0
    """Nanoseconds of the backward for each row of a head with a learned sink (gpt-oss): all add to its gradient."""
    head_dim_multiple: PositiveInt = Field(default=64, le=4096)
    """Head dimensions are padded to a multiple of this."""
    seconds_factor: Rate = 1.0
    """Factor on this kernel's seconds alone; 1 unless a probe that ran it asks for more."""

    @model_validator(mode="before")
    @classmethod
    def _without_retired_fields(cls, data: Any) -> Any:
        return without(data, ("sink_factor",))

    @property
    def relative_s(self) -> float:
        """Seconds of long sequences at head dimension 128, relative to those of a forward at the peak: the backward has
        2.5 times its FLOPs."""
        return self.seconds_factor * (1 / self.forward_fraction + 2.5 / self.backward_fraction)


class Efficiency(Spec):
    """Achieved shares of the data sheet, the floor of small kernels, and the correction that whole steps ask for."""

    evidence: Literal["probed", "measured", "family", "spec_sheet"] = "spec_sheet"
    """Corrected or confirmed by a probe or by a run, measured on this GPU, on another of its silicon generation, or on
    neither."""
    source: str = ""
    """Source of the block's numbers."""
    gemm: GemmEfficiency = GemmEfficiency()
    """Products."""
    flash: AttentionEfficiency = AttentionEfficiency(
        forward_fraction=0.36, backward_fraction=0.34, half_head_dim=20.0, head_dim_multiple=32
    )
    """FlashAttention-2; on AMD's GPUs AITER's kernels."""
    flash1_factor: Rate = 1.5
    """Seconds of the first FlashAttention (until July 2023) over those of the second: at 512 to 65,536 tokens on A100,
    by MosaicML's tables of MPT. 1.85 on Hopper, whose instructions it does not know."""
    cudnn: AttentionEfficiency | None = None
    """cuDNN's fused attention (FlashAttention-3 is alike), where the GPU has it."""
    stream_fraction: Achieved = 0.85
    """Share of HBM bandwidth of a plain copy of large tensors; families not named below run at it."""
    family_fraction: dict[SlowFamily, Achieved] = Field(default_factory=dict)
    """Share of HBM bandwidth of families that reach less."""
    launch_us: Overhead = 3.0
    """A kernel's own start and drain when kernels follow each other without gaps."""
    host_us: Overhead = 12.0
    """Host time to issue one kernel of a layer in eager torch, Python included: small layers are bound by it.

    46 µs beside the H200 that was timed, taken for all x86 hosts of its day; 57 beside an A100 (vTrain's 1,440 runs of
    small GPTs, half of them bound so); 55 on Grace (small GPTs of Megatron-LM's CI run 1.2 times slower there than on
    DGX H100)."""
    sustained_fraction: Share = 0.98
    """Rate of products and attention inside a training step relative to the same kernels timed alone: power, clocks."""
    backward_sustained_fraction: Share = 0.96
    """`sustained_fraction` of the backward, which draws more power: gradients of both operands, and accumulation beside
    them."""
    narrow_sustained_fraction: Share = 1.0
    """A further factor on these two for products in 8 and 4 bits."""
    gemm_factor: Rate = 1.0
    """Factor on seconds of products; 1 unless whole steps ask for more. Likewise below."""
    attention_factor: Rate = 1.0
    """Factor on seconds of attention."""
    stream_factor: Rate = 1.0
    """Factor on seconds of memory-bound kernels."""
    launch_factor: Rate = 1.0
    """Factor on launch_us."""
    step_width: Width | None = None
    """Half-width of a dense model's step, in natural logarithms, by the errors that a probe, a run, or the stages
    measured by plan profile left; null where there was none. A profile without a probe or a run is never surer than its
    evidence says."""

    @model_validator(mode="before")
    @classmethod
    def _without_retired_fields(cls, data: Any) -> Any:
        return without(data, _RETIRED)

    @property
    def attention(self) -> AttentionEfficiency:
        """The faster attention kernel that this GPU has."""
        kernels = (self.flash,) if self.cudnn is None else (self.cudnn, self.flash)
        return min(kernels, key=lambda kernel: kernel.relative_s)

    def kernel(self, name: str) -> AttentionEfficiency:
        """An attention kernel by the name that a trainer has for it."""
        return {"fastest": self.attention, "cudnn": self.cudnn}.get(name) or self.flash

    def of_family(self, family: str) -> float:
        """Share of HBM bandwidth of an elementwise family."""
        return self.family_fraction.get(family, self.stream_fraction)
