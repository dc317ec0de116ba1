"""A hardware profile: one GPU, the links between GPUs by tier, and how much of the data sheet kernels reach.

Efficiency is the share of its data sheet (peak of the dtype, HBM bandwidth, number of SMs) that a GPU reaches, in a few
numbers per kind of kernel, so that one block describes a silicon generation: what is measured on one GPU carries over
to its siblings. Corrections are the numbers of a profile that were measured, before and after, and why some stay.
"""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from planner.specs.base import (
    Achieved,
    Fraction,
    Name,
    NonNegativeFloat,
    Overhead,
    PositiveInt,
    Rate,
    Spec,
    Width,
    retired,
)
from planner.specs.units import GB, GIB, MICRO, TERA

SLOW_FAMILIES = ("norm", "loss", "optimizer", "accumulate", "permute", "strided", "cast")
"""Memory-bound kernels that may reach less than a plain copy; strided ones are on views."""


def _slow_family(name: str) -> str:
    if name not in SLOW_FAMILIES:
        raise PydanticCustomError("family", f"is none of {', '.join(SLOW_FAMILIES)}")
    return name


SlowFamily = Annotated[str, AfterValidator(_slow_family)]
Share = Annotated[float, Field(ge=1e-6, le=1.2, allow_inf_nan=False, strict=True)]
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

    _retired = retired("sink_factor")

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

    _retired = retired("untuned_factor")

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


Unit = Literal["factor", "fraction", "gib", "s"]
Verdict = Literal["corrected", "confirmed", "refused"]
"""`confirmed`: the profile's own number is as near to the measured one as that repeats. `refused`: the measured number
is not to be believed."""
By = Literal["probe", "run", "history"]
"""The measurement: a probe, a run that was observed, or the runs that a user keeps (`plan validate --add`)."""


class Correction(Spec):
    """One number that a probe or a run measured."""

    name: str
    """The thing measured: a kind of kernel, a link's tier, a part of memory, the host."""
    unit: Unit
    """The unit of the three numbers; a factor is one on the seconds that the profile predicts."""
    before: NonNegativeFloat
    """The number of the profile."""
    measured: NonNegativeFloat
    """The number that the measurement asks for."""
    after: NonNegativeFloat
    """The number that plans are made with: the measured one where the profile was corrected, else the profile's own."""
    source: str
    """The measurement."""
    verdict: Verdict = "corrected"
    reason: str = ""
    """The reason why the profile's number stays; empty where it was corrected."""
    by: By = "probe"

    @property
    def brief(self) -> str:
        """The correction by name, with the numbers before and after alone."""
        if self.verdict != "corrected":
            return f"{self.name} {self.verdict}"
        return f"{self.name} {_text(self.before, self.unit)} → {_text(self.after, self.unit)}"

    @property
    def says(self) -> str:
        """The correction in one line, without its name."""
        before, measured = _text(self.before, self.unit), _text(self.measured, self.unit)
        if self.verdict == "refused":
            return f"refused, stays at {before}, measured {measured}: {self.reason}"
        if self.verdict == "confirmed":
            return f"stays at {before}, measured {measured}: {self.reason}"
        return f"{before} → {measured} ({self.source})"


def _text(value: float, unit: Unit) -> str:
    if unit == "factor":
        return f"× {value:.3f}"
    if unit == "fraction":
        return f"{value:.1%}"
    return f"{value:.2f} GiB" if unit == "gib" else f"{value / MICRO:.0f} µs"


FABRICS = {"nvlink": "NVLink", "infinity-fabric": "xGMI", "pcie": "PCIe"}
"""The vendors' names of the links inside a node, by the name of the innermost tier."""
HOST_USABLE_FRACTION = 0.85
"""Share of the host's memory that a trainer may fill; the rest is for the operating system, loaders of data and the
page cache. Estimated."""


class LinkTier(Spec):
    """One level of the network: the fastest link between any two GPUs whose ranks lie within `num_gpus`."""

    name: str
    """A short name, such as nvlink or infiniband."""
    num_gpus: PositiveInt | None = Field(default=None, le=10**7)
    """GPUs under this tier (an NVLink domain, a pod); null for the outermost."""
    gb_per_s: Rate
    """Per GPU and direction, as the data sheet has it, 10^9 bytes a second."""
    latency_us: Overhead
    """Microseconds that a message of no bytes takes over one link."""
    efficiency_fraction: Achieved = 0.8
    """Share of gb_per_s that large collectives reach."""
    oversubscription: Annotated[float, Field(ge=1, le=1000, strict=True)] = 1.0
    """Uplink contention: bandwidth per GPU is divided by this."""
    link_gb_per_s: Rate | None = None
    """Rate of the link between two GPUs where no switch joins them: among n GPUs each has n − 1 such links."""
    through_host: bool = False
    """GPUs do not reach each other's memory over this tier: drivers give them no peer-to-peer, and bytes pass through
    host memory."""
    start_us: Overhead = 0.0
    """Microseconds by which a collective that uses this tier is longer than its hops and its bytes, however many."""
    pipelined: bool = False
    """Pieces of a collective cross this tier while others cross the tiers inside it, so that the slowest tier decides;
    without: one tier after the other."""
    all_to_all_fraction: Achieved = 1.0
    """Share of the achieved rate that is left to an all-to-all, in which every pair of ranks exchanges at once."""
    all_to_all_gb_per_s: Rate | None = None
    """The most that an all-to-all among two units of this tier reaches per GPU; among more it reaches less
    (physics/communication.py). Null where the link's rate is the limit."""
    all_to_all_us: Overhead = 0.0
    """Microseconds by which an all-to-all over this tier is longer whatever its bytes."""
    is_host_driven: bool = False
    """Threads of the host hand messages to this network (EFA, TCP): GPUs cannot, and the thread that launches kernels
    gains nothing on an exchange meanwhile."""
    message_us: Overhead = 0.0
    """Microseconds in which such a thread hands on one row of a token, where a dispatcher sends row by row."""
    source: str = ""
    """Source of the tier's numbers."""

    @property
    def bytes_per_s(self) -> float:
        """Achieved bytes per second and GPU of a large transfer."""
        return self.gb_per_s * GB * self.efficiency_fraction / self.oversubscription

    @property
    def latency_s(self) -> float:
        return self.latency_us * MICRO

    @property
    def start_s(self) -> float:
        return self.start_us * MICRO

    def start_s_of(self, kind: str) -> float:
        """Seconds by which a collective of a kind is longer on this tier than its hops and its bytes."""
        return self.start_s + (self.all_to_all_us * MICRO if kind == "all_to_all" else 0.0)


class ReservedMemory(Spec):
    """Device memory that no tensor holds: CUDA context, communicator buffers, allocator fragmentation."""

    context_gib: Overhead = 1.0
    """CUDA context and libraries."""
    communicator_gib: Overhead = 0.3
    """NCCL buffers, per communicator that spans more than one rank."""
    expert_peer_gib: Overhead = 0.0
    """Buffers for each rank of its node that a rank sends experts' tokens to: pairs have channels of their own."""
    fragmentation_fraction: Fraction = 0.03
    """Share of allocated memory that the allocator holds beside it and nobody can use."""
    width: Width = 0.0
    """Half-width that these numbers add to the 80% interval of a rank's memory, in natural logarithms."""
    source: str = ""
    """Source of these numbers."""

    @property
    def context_bytes(self) -> float:
        return self.context_gib * GIB

    @property
    def communicator_bytes(self) -> float:
        return self.communicator_gib * GIB

    @property
    def expert_peer_bytes(self) -> float:
        return self.expert_peer_gib * GIB


class HostSpec(Spec):
    """The host beside a GPU: the link between them, and the GPU's share of the host's memory bandwidth."""

    kind: str = ""
    """The kind of CPU (specs/machines.yaml), whose speed is the profile's host_us; empty where nobody says it."""
    link_gb_per_s: Rate = 64.0
    """Per GPU and direction, as the data sheet has it: 64 for PCIe 5.0 x16."""
    link_efficiency_fraction: Achieved = 0.8
    """Share of link_gb_per_s that large copies reach: 50 to 53 GB/s over PCIe 5.0 x16."""
    memory_gb_per_s: Rate = 76.8
    """Bandwidth of the host's memory over the number of its GPUs."""
    memory_gib: Rate = 256.0
    """The host's memory over the number of its GPUs: 256 on DGX H100."""
    is_shared: bool = False
    """GPU and host have one memory: what goes to the host stays where it was, and frees nothing."""
    source: str = ""
    """Source of these numbers."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second that a GPU copies to the host, or back, while the other GPUs do so too."""
        return min(self.link_gb_per_s * self.link_efficiency_fraction, self.memory_gb_per_s) * GB

    @property
    def memory_bytes_per_s(self) -> float:
        return self.memory_gb_per_s * GB

    @property
    def usable_bytes(self) -> float:
        """A GPU's share of the host's memory that a trainer may fill."""
        return HOST_USABLE_FRACTION * self.memory_gib * GIB


class HardwareSpec(Spec):
    """One kind of GPU in one kind of node, as `hardware_profiles/*.yaml` describes it."""

    name: Name
    """The profile's name, which is that of its file."""
    aliases: tuple[str, ...] = ()
    """Other names, in lower case."""
    source: str
    """The data sheet."""
    architecture: str
    """Silicon generation (volta, turing, ampere, ada, hopper, blackwell, cdna3, cdna4, cdna5)."""
    memory_gib: Rate
    """Total memory as the driver reports it."""
    hbm_gb_per_s: Rate
    """Memory bandwidth as the data sheet has it, 10^9 bytes a second."""
    peak_tflops: dict[str, Rate]
    """Dense peak per dtype, without sparsity."""
    num_sms: PositiveInt = Field(le=10**6)
    """Streaming multiprocessors (compute units on AMD)."""
    gpus_per_node: PositiveInt = Field(default=8, le=10**7)
    """GPUs of a node."""
    tiers: tuple[LinkTier, ...] = Field(min_length=1)
    """Links, innermost first."""
    network: str = ""
    """The kind of network outside a node: ib, roce, efa, slingshot or tcp; empty where nobody says it."""
    host: HostSpec = HostSpec()
    """The host; given none, one of DGX H100. A name alone is its kind."""
    reserved: ReservedMemory = ReservedMemory()
    """Device memory that no tensor holds."""
    efficiency: Efficiency = Efficiency()
    """Given none, what a GPU commonly reaches of its data sheet."""
    corrections: tuple[Correction, ...] = ()
    """The numbers above that a probe or a run measured, and what became of each."""
    usd_per_gpu_hour: Rate | None = None
    """Price of one GPU for an hour."""
    watts_per_gpu: Rate | None = None
    """Facility power per GPU, CPUs and network included."""
    price_source: str = ""
    """Source of price and power."""

    @field_validator("host", mode="before")
    @classmethod
    def _named_host(cls, host: object) -> object:
        return {"kind": host} if isinstance(host, str) else host

    @model_validator(mode="after")
    def _tiers_widen(self) -> Self:
        sizes = [tier.num_gpus for tier in self.tiers[:-1]]
        if None in sizes or any(a >= b for a, b in pairwise(sizes) if a and b):
            raise ValueError("tiers: every tier but the last needs num_gpus, each larger than the one before")
        if "bf16" not in self.peak_tflops and "fp16" not in self.peak_tflops:
            raise ValueError("peak_tflops: needs bf16 or fp16")
        return self

    def peak_flops(self, dtype: str) -> float | None:
        """Dense FLOP/s of `dtype`, or None where this GPU has none; fp16 and bf16 stand in for each other."""
        other = {"bf16": "fp16", "fp16": "bf16"}.get(dtype, dtype)
        tflops = self.peak_tflops.get(dtype, self.peak_tflops.get(other))
        return None if tflops is None else tflops * TERA

    @property
    def usual_dtype(self) -> str:
        """The dtype of a job that states none: fp16 where there is no bf16 (V100, T4)."""
        return "bf16" if "bf16" in self.peak_tflops else "fp16"

    @property
    def is_amd(self) -> bool:
        return self.architecture.lower().startswith("cdna")

    @property
    def is_through_host(self) -> bool:
        """True where not even the innermost tier lets a GPU reach another one's memory."""
        return self.tiers[0].through_host

    @property
    def fabric(self) -> str:
        """The vendor's name of the innermost links, for messages; the tier's own name where it has none."""
        return FABRICS.get(self.tiers[0].name, self.tiers[0].name)

    @property
    def a_domain(self) -> str:
        """The innermost tier with its article: an NVLink domain, a PCIe domain."""
        return f"{'an' if self.fabric[0] in 'AEINOxaeio' else 'a'} {self.fabric} domain"

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * GIB)

    @property
    def hbm_bytes_per_s(self) -> float:
        return self.hbm_gb_per_s * GB

    @property
    def nvlink_domain_size(self) -> int:
        """GPUs of the innermost tier; all of a node where there is only one tier."""
        return self.tiers[0].num_gpus or self.gpus_per_node
