"""The operator lists of `torch-eager` against real torch modules: parameters, FLOPs and saved bytes, exactly.

Run in bf16 on the CPU. What its kernels keep otherwise than a GPU's is written down in `cpu_extra_bytes`, kernel by
kernel; nothing is compared within a tolerance. On an H200 the bytes kept by the same layers are the lists' plus
1,024: two states of the random number generator that attention keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from tables import beside

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count  # noqa: E402

from planner.physics.layers import decoder_layer, embedding, head, mtp_block  # noqa: E402
from planner.physics.operators import BF16, FP32, Item, num_parameters, operators_of, saved_bytes  # noqa: E402
from planner.probe.model.attention import AttentionTables  # noqa: E402
from planner.probe.model.chunk import (  # noqa: E402
    DecoderLayer,
    Embedding,
    Head,
    MTPBlock,
    initialise,
)
from planner.probe.model.peers import (  # noqa: E402
    EmulatedPeers,
    ExpertPeers,
    Surroundings,
)
from planner.shape import Shape  # noqa: E402
from planner.specs.model import ModelSpec  # noqa: E402
from planner.trainers.load import load_runtime  # noqa: E402

TABLES = beside(__file__)

EAGER = load_runtime("torch-eager")
SEQ = 64

BASE: dict[str, Any] = TABLES["base"]
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MLA = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
GPT = {"gated_mlp": False, "activation": "gelu", "norm": "layernorm", "position_embedding": "none"}

MODELS = TABLES["models"]


def hidden(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def model_of(name: str) -> ModelSpec:
    return ModelSpec(name=name, **{**BASE, **MODELS[name]})


class Measured:
    """What one forward and backward of a module kept and computed."""

    def __init__(self, module: Any, inputs: Callable[[], tuple[Any, ...]], constants: Iterable[Any] = ()) -> None:
        module.to(torch.bfloat16)
        initialise(module, 0)
        excluded = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *constants)}
        kept: dict[int, Any] = {}

        def keep(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in excluded:
                kept[storage.data_ptr()] = storage
            return tensor

        with FlopCounterMode(display=False, custom_mapping=CPU_FLOPS) as counter:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                output = module(*inputs())
            self.saved_bytes = sum(storage.nbytes() for storage in kept.values())
            self.forward_flops = counter.get_total_flops()
            output.backward(torch.randn_like(output))
        self.backward_flops = counter.get_total_flops() - self.forward_flops
        self.num_parameters = sum(p.numel() for p in module.parameters())


def _cpu_attention(q: Any, k: Any, v: Any, *rest: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _cpu_attention_backward(grad: Any, q: Any, k: Any, v: Any, *rest: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad, q, k, v))


def _grouped(a: Any, b: Any, offs: Any = None, *rest: Any, **kwargs: Any) -> int:
    """2·rows·k·n, whether the rows are grouped (forward, input gradient) or summed over (weight gradient)."""
    return 2 * a[0] * a[1] * b[-1]


aten = torch.ops.aten
CPU_FLOPS = {
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    **({aten._grouped_mm: _grouped} if hasattr(aten, "_grouped_mm") else {}),
}
"""FLOPs of kernels that the counter does not know, by its own formulas."""


def cpu_extra_bytes(items: Iterable[Item], model: ModelSpec) -> float:
    """What the CPU's kernels keep beyond a GPU's.

    RMSNorm: the input and the normalised rows in fp32 (8 bytes an element), not the bf16 input. LayerNorm:
    statistics in bf16, not fp32. Attention with values narrower than keys: the values are padded, which frees the
    buffer they were a view of; the padded output is kept beside the contiguous part of it.
    """
    extra = 0.0
    for op in operators_of(items):
        saved = {tensor.name: tensor.num_bytes for tensor in op.saved}
        if op.family == "norm" and model.norm == "layernorm":
            extra -= saved["statistics"] / 2
        elif op.family == "norm":
            rows, width = saved["statistics"] / FP32, op.parameters / (2 if op.name == "qk norm" else 1)
            extra += 2 * FP32 * rows * width - saved.get("input", 0) - saved.get("kv down", 0)
    mla = model.mla
    if mla is not None and mla.v_head_dim < mla.qk_nope_head_dim + mla.qk_rope_head_dim:
        attention = next(op for op in operators_of(items) if op.kind == "attention")
        elements = attention.batch * attention.heads * attention.q_len
        qk_dim = attention.qk_dim
        extra += BF16 * elements * (2 * qk_dim - (mla.qk_nope_head_dim + mla.v_head_dim))
    return extra


def cpu_flops(items: Iterable[Item], model: ModelSpec) -> tuple[float, float]:
    """Forward and backward FLOPs as the counter counts: all of the attention square, values as wide as keys."""
    forward = backward = 0.0
    for op in operators_of(items):
        if op.kind == "attention":
            op = replace(op, v_dim=op.qk_dim)
        forward += op.forward_flops / (op.attended_fraction if op.kind == "attention" else 1)
        backward += op.backward_flops / (op.attended_fraction if op.kind == "attention" else 1)
    return float(forward), float(backward)


def assert_same(measured: Measured, items: Iterable[Item], model: ModelSpec, extra_bytes: float = 0.0) -> None:
    items = list(items)
    assert measured.num_parameters == num_parameters(items)
    assert (measured.forward_flops, measured.backward_flops) == cpu_flops(items, model)
    assert measured.saved_bytes == saved_bytes(items) + cpu_extra_bytes(items, model) + extra_bytes


def tables_of(model: ModelSpec, around: Surroundings) -> tuple[AttentionTables, list[Any]]:
    tables = AttentionTables.of(model, SEQ, around, torch.empty(0, dtype=torch.bfloat16))
    return tables, [t for t in (tables.cos, tables.sin, tables.window_mask, tables.alibi) if t is not None]


@pytest.mark.thorough(3)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_decoder_layer(name: str, batch: int, tp: int) -> None:
    model = model_of(name)
    kind = model.layers[-1]
    shape = Shape(tp=tp, sequence_parallel=int(tp > 1), micro_batch_size=batch, seq_length=SEQ)
    around = Surroundings(tp=EmulatedPeers(size=tp, sequence_parallel=tp > 1))
    tables, constants = tables_of(model, around)

    def inputs() -> tuple[Any, ...]:
        return hidden(SEQ // tp, batch, model.hidden_size), tables

    measured = Measured(DecoderLayer(model, kind, around), inputs, constants)
    assert_same(measured, decoder_layer(model, kind, shape, EAGER), model)


@pytest.mark.parametrize("experts_per_rank", [1, 4])
def test_experts_spread_over_ranks(experts_per_rank: int) -> None:
    model = model_of("moe-shared")
    assert model.moe is not None
    ep = model.moe.num_experts // experts_per_rank
    shape = Shape(ep=ep, dp=ep, micro_batch_size=2, seq_length=SEQ)
    around = Surroundings(ep=ExpertPeers(size=ep), balanced_routing=True)
    tables, constants = tables_of(model, around)

    def inputs() -> tuple[Any, ...]:
        return hidden(SEQ, 2, model.hidden_size), tables

    kind = model.layers[-1]
    measured = Measured(DecoderLayer(model, kind, around), inputs, constants)
    assert_same(measured, decoder_layer(model, kind, shape, EAGER), model)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["gqa", "gpt-learned-positions", "bloom"])
def test_embedding(name: str, batch: int, tp: int) -> None:
    model = model_of(name)
    shape = Shape(tp=tp, sequence_parallel=int(tp > 1), micro_batch_size=batch, seq_length=SEQ)
    around = Surroundings(tp=EmulatedPeers(size=tp, sequence_parallel=tp > 1))
    module = FollowedByNorm(Embedding(model, around))
    measured = Measured(module, lambda: (torch.randint(0, model.vocab_size, (SEQ, batch)),))
    # the norm of the first layer keeps the output, and with it what the output is a view of
    output_bytes = BF16 * float(shape.shard_tokens) * model.hidden_size
    # which of the ids are another rank's, a byte each
    masked_bytes = SEQ * batch if tp > 1 else 0
    assert_same(measured, embedding(model, shape, EAGER), model, extra_bytes=output_bytes + masked_bytes)


class FollowedByNorm(torch.nn.Module):
    """A module whose output is kept by what comes next."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Any) -> Any:
        x = self.module(tokens)
        return x * x


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["gqa", "gpt"])
def test_head(name: str, batch: int, tp: int) -> None:
    model = model_of(name)
    shape = Shape(tp=tp, sequence_parallel=int(tp > 1), micro_batch_size=batch, seq_length=SEQ)
    around = Surroundings(tp=EmulatedPeers(size=tp, sequence_parallel=tp > 1))

    def inputs() -> tuple[Any, ...]:
        return hidden(SEQ // tp, batch, model.hidden_size), torch.randint(0, model.vocab_size, (SEQ, batch))

    measured = Measured(Head(model, around), inputs)
    # nll_loss keeps the sum of the class weights, one fp32
    assert_same(measured, head(model, shape, EAGER), model, extra_bytes=FP32)


@pytest.mark.parametrize("batch", [1, 2])
def test_multi_token_prediction(batch: int) -> None:
    model = model_of("moe-mla")
    shape = Shape(micro_batch_size=batch, seq_length=SEQ)
    around = Surroundings()
    tables, constants = tables_of(model, around)
    block, last = MTPBlock(model, around), Head(model, around)

    class WithHead(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.norm, self.last = block, last.norm, last

        def forward(self, x: Any, embedded: Any, labels: Any) -> Any:
            return self.last(self.block(x, embedded, tables), labels)

    def inputs() -> tuple[Any, ...]:
        labels = torch.randint(0, model.vocab_size, (SEQ, batch))
        return hidden(SEQ, batch, model.hidden_size), hidden(SEQ, batch, model.hidden_size), labels

    measured = Measured(WithHead(), inputs, constants)
    measured.num_parameters -= last.output.weight.numel()  # the main model's, shared
    assert_same(measured, mtp_block(model, shape, EAGER), model, extra_bytes=FP32)


@pytest.mark.parametrize("name", ["gqa", "moe-shared", "mla"])
def test_full_recompute_keeps_the_layer_input(name: str) -> None:
    model = model_of(name)
    around = Surroundings()
    tables, constants = tables_of(model, around)
    layer = DecoderLayer(model, model.layers[-1], around)

    class Recomputed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any) -> Any:
            return checkpoint(self.layer, x, tables, use_reentrant=False)

    measured = Measured(Recomputed(), lambda: (hidden(SEQ, 2, model.hidden_size),), constants)
    items = decoder_layer(model, model.layers[-1], Shape(micro_batch_size=2, seq_length=SEQ), EAGER)
    forward, backward = cpu_flops(items, model)
    assert measured.saved_bytes == BF16 * SEQ * 2 * model.hidden_size
    assert (measured.forward_flops, measured.backward_flops) == (forward, forward + backward)


def test_torch_recomputes_no_further_than_its_backward_needs() -> None:
    """What `stops_recompute_early` says of plain linear layers: the last product of a layer is not run again."""
    width = 96

    class GatedMLP(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (torch.nn.Linear(64, width, bias=False) for _ in range(2))
            self.down = torch.nn.Linear(width, 64, bias=False)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    class Recomputed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = GatedMLP()

        def forward(self, x: Any) -> Any:
            return checkpoint(self.mlp, x, use_reentrant=False)

    measured = Measured(Recomputed(), lambda: (hidden(SEQ, 2, 64),))
    product = 2 * SEQ * 2 * 64 * width
    assert measured.forward_flops == 3 * product
    assert measured.backward_flops == 2 * 3 * product + 2 * product
