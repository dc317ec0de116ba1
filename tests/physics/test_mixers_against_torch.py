"""The operator lists of layers that scan against torch modules: FLOPs of the forward and saved bytes, exactly."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from reference_mixers import GatedDelta, Lightning, Mamba2, ShortConv  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from planner.physics.layers import MIXERS  # noqa: E402
from planner.physics.operators import BF16, num_parameters, operators_of, saved_bytes  # noqa: E402
from planner.shape import Shape  # noqa: E402
from planner.specs.model import LayerKind, ModelSpec  # noqa: E402
from planner.trainers.load import load_runtime  # noqa: E402

SEQ, HIDDEN = 128, 48
BASE: dict[str, Any] = {
    "name": "tiny", "num_hidden_layers": 1, "hidden_size": HIDDEN, "intermediate_size": 64, "num_attention_heads": 4,
    "vocab_size": 64,
}  # fmt: skip
MAMBA = {"state_size": 16, "intermediate_size": 96, "num_heads": 6, "n_groups": 2, "chunk_size": 32}
DELTA = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 12, "conv_kernel": 4,
         "chunk_size": 32}  # fmt: skip
LIGHTNING = {"num_key_heads": 4, "num_value_heads": 4, "key_head_dim": 12, "value_head_dim": 12, "chunk_size": 32}


def tiny(kind: str, **section: Any) -> ModelSpec:
    return ModelSpec(layer_types=(kind,), **BASE, **section)


MODELS = {
    "mamba2": (tiny("mamba2", mamba=MAMBA), lambda m: Mamba2(HIDDEN, m.mamba)),
    "mamba2-one-group": (tiny("mamba2", mamba=MAMBA | {"n_groups": 1}), lambda m: Mamba2(HIDDEN, m.mamba)),
    "gated-delta": (tiny("gated_delta", linear_attention=DELTA), lambda m: GatedDelta(HIDDEN, m.linear_attention)),
    "lightning": (tiny("lightning", linear_attention=LIGHTNING), lambda m: Lightning(HIDDEN, m.linear_attention)),
    "short-conv": (tiny("conv", short_conv_kernel=3), lambda m: ShortConv(HIDDEN, 3)),
}


@pytest.mark.thorough(2)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_mixer_computes_and_keeps_what_torch_does(name: str, batch: int) -> None:
    model, build = MODELS[name]
    module = build(model).to(torch.bfloat16)
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    x = torch.randn(batch, SEQ, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = module(x)
    flops = sum(
        count for operator, count in counter.get_flop_counts()["Global"].items() if "convolution" not in str(operator)
    )
    assert output.isfinite().all()
    output.backward(torch.randn_like(output))

    kind: LayerKind = model.layers[0]
    shape = Shape(micro_batch_size=batch, seq_length=SEQ)
    items = [item for mixer in MIXERS[kind.attention] for item in mixer(model, kind, shape, load_runtime("megatron"))]
    assert num_parameters(items) == sum(parameter.numel() for parameter in module.parameters())
    assert sum(op.forward_flops for op in operators_of(items)) == flops
    # beside the mixer's input, which the norm before it keeps
    assert saved_bytes(items) + BF16 * x.numel() == sum(storage.nbytes() for storage in kept.values())


def test_a_scan_in_chunks_is_the_recurrence() -> None:
    """Mamba-2's chunks give what the state gives when it is handed on token by token."""
    from reference_mixers import ssd

    x, decay = torch.randn(1, 64, 4, 8), -torch.rand(1, 64, 4)
    b, c = torch.randn(1, 64, 2, 16), torch.randn(1, 64, 2, 16)
    state, outputs = torch.zeros(1, 4, 8, 16), []
    for token in range(64):
        keys, queries = (t[:, token].repeat_interleave(2, 1) for t in (b, c))
        state = state * decay[:, token].exp()[..., None, None] + x[:, token, ..., None] * keys[:, :, None]
        outputs.append((state * queries[:, :, None]).sum(-1))
    torch.testing.assert_close(ssd(x, decay, b, c, 16), torch.stack(outputs, 1), rtol=1e-4, atol=1e-4)
