"""`rehearse()`: the bytes of a plan's stages, counted without a GPU while the probe's own step runs on fake tensors."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.answer import Plan, PricedLayout
from planner.layout.candidate import Candidate
from planner.layout.price import order_of
from planner.physics.stage_memory import products_workspace_bytes
from planner.probe import torch_build
from planner.probe.model.peers import apply
from planner.probe.plan_runs import real_run, stage_asked_for, stand_in_stages
from planner.probe.plan_slice import ProbeOptions, RankGrid, real_chunks, sharing_dp, slice_schedule
from planner.probe.rank.training import RankTrainer, trainer_alone
from planner.probe.result import ComparedQuantity
from planner.probe.run import Place, ProbeRun
from planner.probe.run_price import in_eager_torch, knows_peak, repriced, static_bytes
from planner.schedule.actions import Schedule
from planner.schedule.orders import SCHEDULES, build_schedule, in_flight_chunks, violation
from planner.specs.model import LayerKind


@contextmanager
def rehearsed_build(architecture: str) -> Iterator[torch_build.TorchBuild]:
    """Tensors are taken for those of a GPU of `architecture`, wherever they are."""
    build = (
        torch_build._rocm(torch.version.hip or "7.0")
        if architecture.startswith("cdna")
        else torch_build._cuda(torch.version.cuda)
    )
    if not architecture.startswith("cdna"):
        build = replace(build, takes_groups=lambda device: architecture in ("hopper", "blackwell"))
    torch_build._rehearsed = build
    try:
        yield build
    finally:
        torch_build._rehearsed = None


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


BF16, FP32 = 2, 4
"""Bytes of an element."""
EMBEDDING_ROWS = 10
"""Rows of one token that a thread of the embedding's backward sums (NROWS_PER_THREAD, EmbeddingBackwardKernel.cu)."""
MOST_UNSORTED = 3072
"""The most tokens whose embedding gradients are summed without sorting (aten/src/ATen/native/cuda/Embedding.cu)."""


class FusedNorm(torch.autograd.Function):
    """RMSNorm in one kernel: keeps its input and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


class FusedAttention(torch.autograd.Function):
    """Attention in one kernel: keeps its operands, its output in their layout, the log-sum-exp and a random state."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = _laid_out_as(q, (*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        seed, offset = (q.new_empty((), dtype=torch.int64) for _ in range(2))
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *_ = ctx.saved_tensors
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        moment = q.new_empty(attention_backward_bytes(q.transpose(1, 2), k.transpose(1, 2)), dtype=torch.uint8)
        del moment
        return grads


def _laid_out_as(like: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty tensor whose dimensions lie in memory in the order of `like`'s."""
    order = sorted(range(like.dim()), key=lambda dim: like.stride(dim), reverse=True)
    dense = like.new_empty([shape[dim] for dim in order])
    return dense.permute([order.index(dim) for dim in range(like.dim())])


def attention_backward_bytes(q: Tensor, k: Tensor) -> int:
    """Bytes of a fused attention's backward for itself; q and k are [batch, seq, heads, dim].

    The gradient of q is summed in fp32, each row has the sum of its gradient times its output, and where heads share
    keys each query head has gradients of keys and values of its own until they are summed (flash_api.cpp's mha_bwd;
    cuDNN's graph has the same tensors, sdpa backward of cudnn-frontend).
    """
    batch, seq, heads, dim = q.shape
    rows = batch * -(-seq // 128) * 128 * heads
    unit = 32 if dim <= 128 else 64
    shared = 2 * BF16 * batch * k.shape[1] * heads * dim if k.shape[2] != heads else 0
    return FP32 * rows * (-(-dim // unit) * unit + 1) + shared


def _flash_backward_bytes(grad: Tensor, q: Tensor, k: Tensor, *_: Any, **__: Any) -> int:
    return attention_backward_bytes(q, k)


def _embedding_backward_bytes(grad: Tensor, indices: Tensor, num_weights: int, *_: Any, **__: Any) -> int:
    """Sums of up to ten rows of one token, in fp32, before they are added up."""
    tokens = indices.numel()
    if tokens <= MOST_UNSORTED:
        return 0
    return FP32 * (tokens // EMBEDDING_ROWS + min(tokens, num_weights)) * grad.shape[-1]


MOMENTS: dict[Any, MomentBytes] = {
    torch.ops.aten._flash_attention_backward.default: _flash_backward_bytes,
    torch.ops.aten.embedding_dense_backward.default: _embedding_backward_bytes,
}
"""Bytes that kernels allocate for themselves, by operator."""


@contextmanager
def gpu_kernels(fuses_norms: bool) -> Iterator[None]:
    """Attention, and norms where they are one kernel, allocate what a GPU's kernels do."""

    def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        assert weight is not None
        return apply(FusedNorm, x, weight)

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        dropout: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if mask is not None and enable_gqa:  # no fused kernel takes both
            written: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
                q, k, v, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
            return written
        return apply(FusedAttention, q, k, v)

    library = cast(Any, torch.library).Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
    if fuses_norms:
        library.impl("rms_norm", rms_norm, "AutogradCPU")
    try:
        yield
    finally:
        library._destroy()


KEPT, MOMENT = "kept by forwards", "made by the backward"
"""Labels of what a step allocates; before it, the label is empty."""


@dataclass
class CountedStage:
    """Bytes of one rank, as torch's allocator would count them."""

    static_bytes: int = 0
    """Bytes before the first forward."""
    peak_bytes: int = 0
    """Bytes at the step's fullest moment."""
    at_peak: dict[str, int] = field(default_factory=dict)
    """The peak's bytes by label."""
    layers: dict[tuple[LayerKind, str], int] = field(default_factory=dict)
    """Bytes that a layer keeps of a micro-batch, by its kind and by what is recomputed of it."""


def count_stage(run: ProbeRun, stage: int, architecture: str) -> CountedStage:
    """Build one stage of a run and run a step of it, its peers emulated, as on a GPU of `architecture`."""
    counted, account = CountedStage(), BytesAlive(MOMENTS)
    was_initialised = dist.is_initialized()
    with ExitStack() as stack:
        stack.enter_context(rehearsed_build(architecture))
        stack.enter_context(gpu_kernels(fuses_norms=True))
        stack.enter_context(account.resized())
        stack.enter_context(FakeTensorMode())
        stack.enter_context(account)
        try:
            trainer = trainer_alone(run, run.rank(Place(stage, 0, 0, 0)), "cpu")
            gc.collect()  # what building needed for a moment is no part of the run
            counted.static_bytes = account.num_bytes
            account.reset_peak()

            def on_action(text: str) -> None:
                # an update of sharded parameters is first tried on whole ones, by their shapes
                account.counts = not (run.fully_sharded and text.startswith("optimizer"))
                account.label = KEPT if text.lstrip("0123456789").startswith("F") else MOMENT

            with _kept_by_layers(trainer, account, counted):
                trainer.step(0, on_action)
        finally:
            if dist.is_initialized() and not was_initialised:
                dist.destroy_process_group()
    workspace_bytes = products_workspace_bytes(architecture)
    counted.peak_bytes, counted.at_peak = account.peak_bytes + workspace_bytes, account.at_peak
    return counted


@contextmanager
def _kept_by_layers(trainer: RankTrainer, account: BytesAlive, counted: CountedStage) -> Iterator[None]:
    """Write down what the first forward of each kind of layer leaves behind."""
    before: list[int] = []

    def enter(module: nn.Module, _: object) -> None:
        before.append(account.num_bytes)

    def leave(key: tuple[LayerKind, str]) -> None:
        kept = account.num_bytes - before.pop()
        if account.label == KEPT:  # not when the layer is recomputed
            counted.layers.setdefault(key, kept)

    handles = []
    for chunk in trainer.chunks.values():
        for number, (index, layer) in enumerate(chunk.layers.items()):
            base = "selective" if trainer.run.recompute_modules else "none"
            mode = "full" if number < chunk.spec.num_recomputed else base
            key = trainer.run.model.layers[int(index)], mode
            handles.append(layer.register_forward_pre_hook(enter, prepend=True))
            handles.append(layer.register_forward_hook(lambda *_, key=key: leave(key)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


OPTIONS = ProbeOptions(device="cpu", stages="all")
ROUNDS = 3
"""Rounds of as many micro-batches as there are stages."""
BYTES_TOLERANCE = 0.01
"""Fraction of a plan's bytes by which a count may differ: stages measured on an H200 are planned within 1%."""


class RehearsalResult(NamedTuple):
    """Bytes that the probe's own stages allocate, beside the planner's price of eager torch."""

    comparisons: tuple[ComparedQuantity, ...]
    """Planned and counted; of stages those before a step and at its peak are judged, all else is shown."""


def rehearse(plan: Plan, stages: Literal["all"] | int) -> RehearsalResult:
    """Run the distinct stages of the plan (or the one named) one after another on fake tensors, and compare."""
    eager = in_eager_torch(plan)
    layout, architecture = eager.best, plan.cluster.hardware.architecture
    pp = layout.parallelism.pp
    names = sorted(set(stand_in_stages(layout))) if stages == "all" else [stage_asked_for(stages, pp)]
    comparisons: list[ComparedQuantity] = []
    layers: dict[tuple[LayerKind, str], int] = {}
    for stage in names:
        counted = count_stage(stage_run(plan, eager, stage), stage, architecture)
        comparisons += compare_stage_bytes(eager, stage, counted, BYTES_TOLERANCE)
        layers |= counted.layers
    comparisons += compare_layers(repriced(eager), layers)
    return RehearsalResult(tuple(comparisons))


def stage_run(plan: Plan, eager: Plan, stage: int) -> ProbeRun:
    """The run of one of the plan's stages, with as few micro-batches as fill it."""
    order = shortest_order(eager.best, stage)
    chunks = real_chunks(eager.best, order, range(order.pp))
    return real_run(plan, OPTIONS, order, chunks, whole_grid(eager.best))


def whole_grid(layout: PricedLayout) -> RankGrid:
    """All ranks of the layout that share something."""
    asked = layout.parallelism
    return RankGrid(asked.pp, sharing_dp(layout), asked.cp, asked.tp, asked.ep)


def shortest_order(layout: PricedLayout, stage: int) -> Schedule:
    """The plan's schedule with the fewest micro-batches that hold as many in flight on a stage as all of them.

    Where backwards are split, weight gradients wait for several rounds: three are run, and of an order that was made to
    measure its first three.
    """
    if layout.actions:
        return first_microbatches(order_of(layout), ROUNDS * layout.parallelism.pp)
    asked = layout.parallelism
    name, pp, vpp, total = asked.schedule, asked.pp, asked.vpp, asked.num_microbatches
    if SCHEDULES[name].splits_backward:
        return slice_schedule(layout, pp, min(total, ROUNDS * pp))
    wanted = in_flight_chunks(name, pp, vpp, total)[stage]
    for count in range(1, total):
        if violation(name, pp, vpp, count) is None and in_flight_chunks(name, pp, vpp, count)[stage] == wanted:
            return build_schedule(name, pp, vpp, count)
    return slice_schedule(layout, pp, total)


def first_microbatches(order: Schedule, count: int) -> Schedule:
    """An order without the actions of later micro-batches, which none of the others waits for."""
    ranks = tuple([action for action in actions if action.microbatch < count] for actions in order.ranks)
    return replace(order, ranks=ranks, num_microbatches=min(count, order.num_microbatches))


def compare_stage_bytes(
    eager: Plan, stage: int, counted: CountedStage, tolerance_fraction: float
) -> Iterator[ComparedQuantity]:
    """Bytes before a step and at its peak, and what the peak is made of."""
    planned, judged = eager.stages[stage].memory, tolerance_fraction if knows_peak(eager) else None
    kept = counted.at_peak.get(KEPT, 0)
    moment = counted.peak_bytes - kept - counted.at_peak.get("", 0)
    rows = (
        ("static memory", static_bytes(eager, stage), counted.static_bytes, tolerance_fraction),
        ("peak allocated", planned.peak_allocated_bytes, counted.peak_bytes, judged),
        ("  kept by forwards", planned.activations_bytes, kept, None),
        ("  for a moment", planned.logits_bytes + planned.workspace_bytes, moment, None),
    )
    for name, predicted, measured, tolerance in rows:
        yield ComparedQuantity(
            name=name,
            stage=stage,
            unit="bytes",
            predicted=predicted,
            measured=measured,
            agrees=None if tolerance is None else abs(measured - predicted) <= tolerance * predicted,
        )


def compare_layers(priced: Candidate, layers: dict[tuple[LayerKind, str], int]) -> Iterator[ComparedQuantity]:
    """Bytes that one layer of each kind keeps of a micro-batch."""
    for (kind, mode), num_bytes in layers.items():
        planned = float(priced.table.layers[kind, mode].live_bytes)  # type: ignore[index]
        recomputed = "" if mode == "none" else f", {mode} recomputation"
        yield ComparedQuantity(
            name=f"layer: {kind.attention}, {kind.mlp}{recomputed}", unit="bytes", predicted=planned, measured=num_bytes
        )
