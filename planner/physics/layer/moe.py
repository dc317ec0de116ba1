"""A mixture of experts: the router, the exchanges of tokens, the experts' products, shared experts beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from planner.physics.layer.blocks import activation_of, cast_copy, dense_mlp, gradient_sums, norm
from planner.physics.operators import BF16, FP32, Collective, Item, Operator, Saved, matmul
from planner.shape import Number, Shape, minimum
from planner.specs.model import ModelSpec
from planner.specs.model_parts import MoESpec
from planner.trainers.spec import RuntimeSpec

MODULES = ("moe", "op")
"""Modules whose recomputing runs an operator of a mixture again: torchtitan's `op` keeps what exchanges give, and no
product of experts, which torch's list of operators that are dear to repeat lacks."""
MOE = MODULES[:1]
"""The module alone, of what exchanges give."""


def mixture(model: ModelSpec, moe: MoESpec, shape: Shape, runtime: RuntimeSpec, imbalance: Number) -> Iterator[Item]:
    """Router, permute, dispatch over ep (and etp), grouped GEMMs, combine, un-permute; shared expert beside them.

    ms tokens enter a rank, and each visits topk experts. Expert parallelism moves tokens between ranks and removes
    none, so a rank computes ms·topk·etp rows for every ep (the most loaded rank: times the imbalance).
    """
    # a rank that holds all experts has all rows, wherever they go
    fullest: Number = imbalance ** (1.0 * (shape.ep > 1))
    tokens, hidden, sent = shape.shard_tokens, model.hidden_size, moe.latent_size or model.hidden_size
    # a choice that falls on a zero expert stays where it is
    pairs = tokens * moe.num_experts_per_tok * (moe.num_experts / (moe.num_experts + moe.num_zero_experts))
    # router, experts and the shared expert read one input
    readers = 2 + (moe.shared_expert_intermediate_size > 0) + moe.shared_expert_gate
    yield from gradient_sums("mixture", readers, BF16 * tokens * hidden, runtime)
    yield from _router(model, moe, tokens, pairs, runtime)
    if moe.expert_norms:
        yield from _expert_norms(model, moe, shape, runtime)
    if moe.latent_size is not None:
        yield _latent("latent down", hidden, sent, shape)
    pair_bytes = BF16 * pairs * sent
    moved_bytes = runtime.permute_factor * (BF16 * tokens * sent + pair_bytes)
    yield _move("permute", moved_bytes)
    exchanged = _exchange(moe, sent, pair_bytes * fullest, runtime)
    yield from _both_ways("dispatch", exchanged)
    yield from _experts(model, moe, shape, runtime, pairs * shape.etp * fullest)
    yield from _both_ways("combine", exchanged)
    if runtime.weights_expert_outputs and not runtime.fused_permute:
        yield _row_weights(pairs, sent, moe.num_experts / shape.ep, 0, runtime, "expert outputs")
    unpermute = _move("unpermute", moved_bytes)
    if runtime.weights_expert_outputs and runtime.fused_permute:
        # of what combining gives, summed up where tokens are sent once, recomputing by operators keeps what was sent
        combined = (tokens if runtime.sends_tokens_once else pairs) * (shape.ep > 1)
        summed, sums = Saved("expert outputs", (pairs - combined, sent), MODULES), Saved("sums", (combined, sent), MOE)
        unpermute = replace(unpermute, saved=(summed, sums))
    yield unpermute
    if _in_fp32(model, runtime, moe.row_weights_in_fp32, moe.router_in_fp32):
        yield _wide_rows(BF16 * pairs * sent, BF16 * tokens * sent)
    if moe.latent_size is not None:
        if moe.latent_norm:
            yield norm("latent norm", sent, tokens, model, runtime, saves_output=False)
        yield _latent("latent up", sent, hidden, shape)
    yield from _shared_expert(model, moe, shape, runtime)
    if moe.output_norm:
        yield norm("expert output norm", hidden, tokens, model, runtime, saves_output=False)


def _router(model: ModelSpec, moe: MoESpec, tokens: Number, pairs: Number, runtime: RuntimeSpec) -> Iterator[Operator]:
    """Scores of every expert for every token, and the choice of the best."""
    scored, hidden = moe.num_experts + moe.num_zero_experts, model.hidden_size
    has_bias = moe.router_bias and (model.has_mlp_bias or not runtime.balances_in_buffers)
    copied = (Saved("input in fp32", (tokens, hidden), MODULES, dtype="fp32"),) * _in_fp32(
        model, runtime, moe.router_in_fp32
    )
    yield Operator(
        name="router", kind="gemm", wide=True, modules=MODULES, m=tokens, n=scored, k=hidden,
        parameters=scored * (hidden + has_bias) * (1 + (moe.image_expert_intermediate_size > 0)),
        saved=(Saved("scores", (2 if runtime.fused_permute else 1, tokens, scored), MODULES, dtype="fp32"), *copied),
    )  # fmt: skip
    yield Operator(
        name="route", kind="elementwise", family="router", modules=MODULES, forward_bytes=4 * FP32 * tokens * scored,
        backward_bytes=3 * FP32 * tokens * scored, forward_kernels=8, backward_kernels=6,
        saved=_routing(tokens, pairs, runtime),
    )  # fmt: skip


def _in_fp32(model: ModelSpec, runtime: RuntimeSpec, *said: bool | None) -> bool:
    """True where transformers computes in fp32: as the first field that says it has it, else where a bias balances.

    Logits in fp32 cast the router's input; weights in fp32 make fp32 of the rows that they weight.
    """
    casts = next((one for one in said if one is not None), model.balances_by_bias)
    return casts and runtime.runs_transformers


def _wide_rows(pair_bytes: Number, token_bytes: Number) -> Operator:
    """The bytes that weighted rows, their way back and their sums move in fp32 beyond 16 bits, as torch's trace has it.

    Forward, rows are written, read and written, and read once more at twice the width, and sums are cast. Backward, two
    products and a sum of fp32 take the place of those of 16 bits, and rows' gradients are copied, put back and cast.
    """
    return Operator(
        name="rows in fp32", kind="elementwise", family="activation", modules=MODULES, forward_kernels=1,
        backward_kernels=4, forward_bytes=4 * (pair_bytes + token_bytes),
        backward_bytes=17 * pair_bytes + 2 * token_bytes, working_bytes=0,
    )  # fmt: skip


def _exchange(moe: MoESpec, sent: int, num_bytes: Number, runtime: RuntimeSpec) -> Collective:
    """The all-to-all of `num_bytes` of rows of `sent` numbers among the ranks that share experts, without a name."""
    in_rows = runtime.visits_experts_in_rows
    return Collective(
        name="", kind="all_to_all", group="ep", num_bytes=num_bytes, overlap="ep",
        choices=moe.num_experts_per_tok if runtime.sends_tokens_once else 0,
        row_fraction=(moe.num_experts_per_tok - 1) / (moe.num_experts + moe.num_zero_experts) if in_rows else 0.0,
        inner_factor=max(1.0, runtime.ep_row_bytes / (BF16 * sent)), row_bytes=BF16 * sent,
        transport=runtime.dispatcher_transport,
    )  # fmt: skip


def _shared_expert(model: ModelSpec, moe: MoESpec, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """The dense MLP beside the experts, and the gate of its output."""
    tokens, hidden = shape.shard_tokens, model.hidden_size
    if moe.shared_expert_intermediate_size:
        yield cast_copy("shared experts", (tokens, hidden), ("shared_experts",))
        yield from dense_mlp(model, moe.shared_expert_intermediate_size, shape, runtime, "shared_experts")
    if moe.shared_expert_gate:
        yield Operator(
            name="shared expert gate", kind="gemm", wide=True, m=tokens, n=1, k=hidden, parameters=hidden,
            saved=(Saved("shared output", (tokens, hidden)), Saved("gate", (tokens,))),
        )  # fmt: skip


def with_fullest_kept(items: Iterable[Item], ratio: float, shape: Shape) -> tuple[Item, ...]:
    """Items of a layer whose experts keep `ratio` times the rows: those of the fullest rank in its fullest step."""
    fuller: Number = ratio ** (1.0 * (shape.ep > 1))
    return tuple(
        _fuller(item, fuller) if isinstance(item, Operator) and item.name in _OF_ROWS else item for item in items
    )


_OF_ROWS = ("experts up", "experts down", "moe_act", "row weights", "row biases")
"""Operators of a mixture that keep the rows which a rank's experts got."""


def _fuller(operator: Operator, ratio: Number) -> Operator:
    return replace(
        operator, saved=tuple(kept._replace(dims=(kept.dims[0] * ratio, *kept.dims[1:])) for kept in operator.saved)
    )


def _expert_norms(model: ModelSpec, moe: MoESpec, shape: Shape, runtime: RuntimeSpec) -> Iterator[Operator]:
    """Three norms around experts and shared expert; the router's scales of its input and of each expert count here."""
    hidden = model.hidden_size
    for name, extra in (("expert norm", hidden + moe.num_experts), ("expert post norm", 0), ("shared post norm", 0)):
        operator = norm(name, hidden, shape.shard_tokens, model, runtime, saves_output=name == "expert norm")
        yield replace(operator, parameters=operator.parameters + extra)


def _latent(name: str, inputs: int, outputs: int, shape: Shape) -> Operator:
    """The projection of tokens to the width in which experts work, or back from it; every rank holds all of it."""
    kept = (Saved("combined", (shape.shard_tokens, inputs), gemm_input=True),) if name == "latent up" else ()
    return matmul(name, shape.shard_tokens, outputs, inputs, *kept)


def _experts(model: ModelSpec, moe: MoESpec, shape: Shape, runtime: RuntimeSpec, rows: Number) -> Iterator[Item]:
    """Grouped GEMMs of the num_experts / ep experts that a rank holds, for `rows` token-expert pairs in all."""
    local = moe.num_experts / shape.ep
    hidden = moe.latent_size or model.hidden_size
    width: Number = moe.moe_intermediate_size / shape.etp
    both: Number = 1.0
    if moe.image_expert_intermediate_size:
        # experts for images stand beside those for text: rows meet the mean width of what a sequence has of both
        tower, ratio = model.vision, moe.image_ratio
        seen = 0 if tower is None else tower.image_tokens * tower.images_per_sequence
        mean = 1 - minimum(seen / shape.seq_length, 1.0) * (1 - ratio)
        width, both = width * mean, (1 + ratio) / mean
    up, bias = (2 if model.gated_mlp else 1) * width, model.has_mlp_bias
    gathered = BF16 * rows * hidden
    for name, kind, backward in _ETP_EXCHANGES:
        recomputed = () if backward else MOE
        yield Collective(name=name, kind=kind, group="etp", num_bytes=gathered, backward=backward, modules=recomputed)
    # with several local experts, received rows are sorted by expert before the GEMMs and back after them, unless the
    # dispatcher that sends tokens once has laid them out so
    laid_out = runtime.sends_tokens_once & (shape.ep * shape.etp > 1)
    several = 1.0 * ((local > 1) & (laid_out == 0))
    received = rows * (shape.ep * shape.etp > 1)
    if runtime.sends_tokens_once:  # a rank gets a token once, however many of its experts visit it
        visits = moe.num_experts_per_tok
        received = received * (1 - (1 - 1 / shape.ep) ** visits) * shape.ep / visits
    product = partial(Operator, kind="gemm", modules=MODULES, count=local, m=rows / local, expert=True)
    yield _move("sort rows", 2 * gathered * several)
    kept = (
        Saved("rows", (rows - received, hidden), MODULES, gemm_input=True),
        Saved("received rows", (received, hidden), MOE, gemm_input=True), Saved("up", (rows, up), MODULES),
    )  # fmt: skip
    yield product(
        name="experts up", n=up, k=hidden, parameters=local * up * (hidden + bias) * both, saved=kept,
        takes_cast_gradient=runtime.fuses_experts,
    )  # fmt: skip
    activation = activation_of("moe_act", model, rows, width, runtime, ("moe", "moe_act"))
    yield _inside_products(activation, BF16 * rows * up) if runtime.fuses_experts else activation
    if not (runtime.fused_permute or runtime.weights_expert_outputs):
        yield _row_weights(rows, width, local, several * (shape.ep > 1), runtime, "weighted rows")
    yield product(
        name="experts down", n=hidden, k=width, parameters=local * hidden * (width * both + bias),
        takes_cast_input=runtime.fuses_experts,
    )  # fmt: skip
    if model.has_mlp_bias:
        biases = _row_biases(rows * hidden)
        if runtime.is_runner:  # the product with the router's weights keeps them
            kept_biases = Saved("biases", (rows, hidden), MODULES)
            biases = replace(biases, saved=(kept_biases,), working_bytes=3 * kept_biases.num_bytes)
        yield _in_epilogue(biases, rows * hidden) if runtime.fuses_experts else biases
    yield _move("unsort rows", 2 * gathered * several)


def _inside_products(activation: Operator, input_bytes: Number) -> Operator:
    """An activation that the products before and behind it compute, with the casts of what it gives.

    Forward, it takes no pass over memory of its own; backward, its input is read again.
    """
    return replace(
        activation, forward_bytes=0, forward_kernels=0, backward_bytes=input_bytes, backward_kernels=0,
        working_bytes=activation.backward_bytes * 2 / 3,
    )  # fmt: skip


def _row_biases(elements: Number) -> Operator:
    """Adds to each row, after the product, the bias of its expert times its router weight.

    This runs in eager fp32. In the forward the product is written, the sum read and written, the rows of all experts
    joined, and the result cast. In the backward the gradient is cast back, the row's gradient is cast again, and two
    products with sums give the gradients of the weights and of the biases.
    """
    return Operator(
        name="row biases",
        kind="elementwise",
        family="activation",
        modules=MODULES,
        forward_bytes=(FP32 + (BF16 + 2 * FP32) + 2 * FP32 + (FP32 + BF16)) * elements,
        backward_bytes=((BF16 + FP32) + (FP32 + BF16) + 2 * 3 * FP32) * elements,
        forward_kernels=4,
        backward_kernels=6,
    )


def _in_epilogue(biases: Operator, elements: Number) -> Operator:
    """Biases of rows that the product before them adds; one kernel of the backward reads the gradient to sum it."""
    return replace(
        biases, forward_bytes=0, forward_kernels=0, backward_bytes=2 * BF16 * elements, backward_kernels=2
    )  # fmt: skip


def _routing(tokens: Number, pairs: Number, runtime: RuntimeSpec) -> tuple[Saved, ...]:
    """Tensors that routing keeps: the map of token-expert pairs and their probabilities.

    Eager torch keeps for each pair its expert, its token, its place among the rows and the way back, all in int64, and
    the top-k scores and their sum in fp32.
    """
    modules = MODULES
    if runtime.fused_permute:
        names = (("routing map", "int32"), ("probabilities", "fp32"))
        return tuple(Saved(name, (pairs,), modules, dtype) for name, dtype in names)
    places = ("expert of each pair", "token of each pair", "place of each pair", "way back of each pair")
    return (
        *(Saved(name, (pairs,), modules, "int64") for name in places),
        Saved("top scores", (pairs,), modules, "fp32"),
        Saved("sums of top scores", (tokens,), modules, "fp32"),
    )


def _row_weights(
    rows: Number, width: Number, local: Number, sorts: Number, runtime: RuntimeSpec, kept: str
) -> Operator:
    """The product of rows and their router weights, which eager torch computes by itself.

    It keeps weighted rows beside the activated ones, or the outputs of experts which it weights, the weights, the
    offsets, and the two permutations of a second sort by local expert.
    """
    num_bytes, modules = BF16 * rows * width, ("moe", "moe_act")
    return Operator(
        name="row weights",
        kind="elementwise",
        family="activation",
        modules=modules,
        forward_bytes=2 * num_bytes,
        backward_bytes=6 * num_bytes,
        forward_kernels=1,
        backward_kernels=3,
        saved=(
            Saved(kept, (rows, width), modules, gemm_input=kept == "weighted rows"),
            Saved("weights", (rows,), ("moe",)),
            Saved("offsets", (local,), ("moe",), "int32"),
            Saved("order", (rows * sorts,), ("moe",), "int64"),
            Saved("order back", (rows * sorts,), ("moe",), "int64"),
        ),
        # gradients of weighted and unweighted rows, and a product that is summed for the weights' gradient, as the
        # weighted rows go
        working_bytes=2 * num_bytes if runtime.is_runner else None,
    )


_ETP_EXCHANGES: tuple[tuple[str, Literal["all_gather", "reduce_scatter"], bool], ...] = (
    ("etp gather", "all_gather", False),
    ("etp scatter", "reduce_scatter", False),
    ("etp grad gather", "all_gather", True),
    ("etp grad scatter", "reduce_scatter", True),
)


def _both_ways(name: str, exchanged: Collective) -> Iterator[Collective]:
    """The exchange in which a rank sends its rows to the ep ranks, and another that brings their gradient back.

    The rank's own share of the bytes stays in place.
    """
    yield replace(exchanged, name=name, modules=("moe",))
    yield replace(exchanged, name=f"{name} grad", backward=True)


def _move(name: str, num_bytes: Number) -> Operator:
    """A permutation of rows, which moves `num_bytes` (reads and writes together) in each pass."""
    return Operator(
        name=name, kind="elementwise", family="permute", modules=MODULES, forward_bytes=num_bytes,
        backward_bytes=num_bytes, forward_kernels=1, backward_kernels=1,
    )  # fmt: skip
