"""A hardware profile: one GPU, the links between GPUs by tier, and how much of the data sheet kernels reach.

Corrections are the numbers of a profile that were measured, before and after, and why some of them stay.
"""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from planner.specs.base import Achieved, Fraction, Name, NonNegativeFloat, Overhead, PositiveInt, Rate, Spec, Width
from planner.specs.efficiency import Efficiency
from planner.specs.units import GB, GIB, MICRO, TERA

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
    oversubscription: Annotated[float, Field(ge=1, le=1000)] = 1.0
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
