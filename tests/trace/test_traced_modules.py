"""Modules that no table knows, traced and planned: parameters and FLOPs in closed form, bytes that grow as they do."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from tables import beside

from planner.cli import main
from planner.errors import SpecError
from planner.physics.layers import decoder_layer, model_totals
from planner.physics.operators import collectives_of, num_parameters, operators_of, saved_bytes
from planner.shape import Shape
from planner.specs.architectures import from_config
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model
from planner.trace.trace import LENGTHS, fitted, trace
from planner.trainers.load import load_runtime
from planner.trainers.spec import RuntimeSpec

pytest.importorskip("torch")

import odd_models
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.probe.model.peers import Surroundings
from planner.probe.model.traced import TracedLayer
from planner.trace import run
from tools.counted_bytes import BytesAlive, gpu_kernels

TABLES = beside(__file__)

ODD = Path(__file__).parent / "odd_models.py"
EAGER = load_runtime("torch-eager")
H, L, V, S = 256, 4, 1000, 2048
ATTENTION, FEED = 4 * H * H, 8 * H * H
CONV = 3 * H * H
CLOSED = {
    # parameters beside embedding, head and final norm; FLOPs of a token's forward through each kind of layer
    "hybrid": (
        L * (2 * H + FEED) + 2 * ATTENTION + 2 * (CONV + 5 * H),
        [2 * (CONV + FEED), 2 * (ATTENTION + FEED) + 2 * H * S],
    ),
    "experts": (
        L * (2 * H + ATTENTION + 8 * H + 8 * 4 * H * H) + H * H,
        [2 * (ATTENTION + 8 * H + 5 * H * H) + 2 * H * S, 2 * (ATTENTION + 8 * H + 4 * H * H) + 2 * H * S],
    ),
    "chunked": (L * (2 * H + ATTENTION + FEED), [2 * (ATTENTION + FEED) + 4 * 2 * H * 64]),
    "looped": (
        4 * (2 * H + FEED) + 2 * ATTENTION + 2 * (CONV + 5 * H),
        [2 * (CONV + FEED), 3 * (2 * (ATTENTION + FEED) + 2 * H * S)],
    ),
    "unfused": (L * (2 * H + ATTENTION + FEED), [2 * (ATTENTION + FEED) + 4 * H * S]),
}


@cache
def traced(name: str, *shards: tuple[str, str]) -> ModelSpec:
    """A model of the odd ones, traced in this process, which has imported torch."""

    def told(source: str) -> Any:
        return json.loads(json.dumps({length: run.traced(source, length) for length in LENGTHS}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.trace.trace._told", told)
        return trace(f"module:{ODD}:{name}", name, dict(shards))


@pytest.mark.parametrize("name", CLOSED)
def test_parameters_and_flops_are_those_of_the_closed_form(name: str) -> None:
    model, (in_layers, flops) = traced(name), CLOSED[name]
    ends = H + V * H * (1 if name == "unfused" else 2)
    assert model.tie_word_embeddings == (name == "unfused")
    assert model_totals(model, EAGER, S).num_parameters == in_layers + ends
    layers = (operators_of(decoder_layer(model, kind, Shape(seq_length=S), EAGER)) for kind in model.kinds)
    found = [sum(op.forward_flops for op in operators) / S for operators in layers]
    assert found == pytest.approx(flops)


def test_scores_of_plain_attention_are_kept_and_grow_with_the_square() -> None:
    model = traced("unfused")
    short, long = (
        float(saved_bytes(decoder_layer(model, model.kinds[0], Shape(seq_length=length), EAGER)))
        for length in (S, 2 * S)
    )
    scores = 4 * S * S * 2  # heads · s² · 2 bytes; the softmax keeps its output, the product of values reads it
    assert long - 2 * short == pytest.approx(2 * scores, rel=0.01)


def test_the_backward_has_the_bytes_that_autograd_moved() -> None:
    layers = traced("hybrid").traced
    assert layers is not None
    rows = [row for layer in layers.layers for row in layer if not row.weight]
    # gelu: the gradient and what was kept are read, one is written; the second product of two rows: each has its own
    for name, share, kernels in (("mlp gelu", 2 / 3, (2, 2)), ("mixer mul", 3 / 6, (1, 2))):
        of_name = [row for row in rows if row.name.startswith(name)]
        assert sum(row.bytes[1] for row in of_name) / sum(row.backward_bytes[1] for row in of_name) == share
        assert (sum(row.kernels for row in of_name), sum(row.backward_kernels for row in of_name)) == kernels
    # half of the gate's product is read in place: a strided read; gelu reads the whole of its own
    assert {row.family for row in rows if row.name in ("mixer mul", "mlp gelu")} == {"strided", "residual"}


def test_a_trace_without_a_backward_is_none_of_free_ones() -> None:
    layers = traced("hybrid").traced
    assert layers is not None
    said = layers.model_dump()
    for row in (row for layer in said["layers"] for row in layer):
        row["backward_bytes"] = (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="no operation has backward_bytes"):
        type(layers).model_validate(said)


@pytest.mark.parametrize("name", ["chunked", "hybrid"])
def test_a_layer_and_its_operators_keep_what_the_module_does(name: str) -> None:
    """Of three sequences, which a loop's slices copy where those of one are views, by torch's account of a GPU."""
    model, account, shape = traced(name), BytesAlive(), Shape(micro_batch_size=3, seq_length=S)
    planned = [float(saved_bytes(decoder_layer(model, kind, shape, EAGER))) for kind in model.layers]

    def kept_by(layers: Any, *inputs: Any) -> list[int]:
        x, kept = inputs[0], []
        for layer in layers:
            before = account.num_bytes
            x = layer(x, *inputs[1:])
            kept.append(account.num_bytes - before)
        return kept

    torch.set_default_dtype(torch.bfloat16)
    try:
        with gpu_kernels(fuses_norms=True), FakeTensorMode(), account:
            blocks = getattr(odd_models, name)().blocks
            module = kept_by(blocks, torch.empty(3, S, H, requires_grad=True))
            layers = [TracedLayer(model, kind, Surroundings()) for kind in model.layers]
            probed = kept_by(layers, torch.empty(S, 3, H, requires_grad=True), None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert planned == pytest.approx(module, rel=2e-3)
    assert probed == pytest.approx(module, rel=2e-3)


def test_a_plan_of_sharding_splits_what_lies_between_columns_and_rows() -> None:
    styles = {"*.qkv": "colwise", "*.mixer.out": "rowwise", "*.up": "ColwiseParallel", "*.down": "RowwiseParallel"}
    model = traced("unfused", *styles.items())
    shapes = (Shape(seq_length=S), Shape(seq_length=S, tp=2, sequence_parallel=True))
    whole, half = (decoder_layer(model, model.kinds[0], shape, EAGER) for shape in shapes)
    assert num_parameters(whole) - num_parameters(half) == (ATTENTION + FEED) / 2
    assert sum(op.forward_flops for op in operators_of(half)) == sum(op.forward_flops for op in operators_of(whole)) / 2
    assert {one.group for one in collectives_of(half)} == {"tp"}
    # transformers' plans leave out what stands before the layers
    assert traced("unfused", ("mixer.qkv", "colwise"), ("mixer.out", "rowwise"), ("norm", "sequence")).traced
    for wrong, word in {
        ("*.qkv", "diagonal"): "no style",
        ("*.qkw", "colwise"): "qkw",
        ("*.qkv", "colwise"): "by rows",
    }.items():
        with pytest.raises(SpecError, match=word):
            traced("unfused", wrong)


def test_a_traced_file_plans_without_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    assert main(["models", "trace", f"module:{ODD}:experts", "-o", str(path)]) == 0
    assert load_model(str(path)).traced == traced("experts").traced
    words = ["--model", str(path), "--gpus", "8", "-s", "2048", "-b", "16", "--pp", "1", "--tp", "2"]
    assert main([*words, "--runtime", "torch-eager"]) == 3
    assert "traced" in capsys.readouterr().err
    plan, folder = str(tmp_path / "plan.json"), tmp_path / "job"
    assert main([*words[:-2], "--runtime", "torch-eager", "-o", plan]) == 0
    assert main(["export", plan, "--to", "megatron", "-o", str(folder)]) == 2
    assert "--pp 1, and export that plan --to torch" in capsys.readouterr().err
    assert main(["export", plan, "--to", "torch", "-o", str(folder)]) == 0
    assert "-m planner.trace.run" in (folder / "launch.sh").read_text()
    runs = ["run", "--config", str(folder / "plan.torch.yaml"), "--steps", "3", "--seq-length", "32"]
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", runs)
        run.main()
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[5].strip(",")) for line in lines if line.startswith("step")]
    assert len(losses) == 3
    assert losses[2] < losses[0], "it learns"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        *TABLES["a_module_that_cannot_be_traced_is_refused"],
        (f"module:{ODD}:waits", "cannot be traced"),
        (f"module:{ODD}:no_such", "no attribute 'no_such'"),
        (f"module:{ODD}:weights", "is no torch module"),
    ],
)
def test_a_module_that_cannot_be_traced_is_refused(source: str, word: str) -> None:
    with refused(word):
        trace(source, "bad")


def test_three_lengths_say_a_polynomial() -> None:
    assert fitted([3 + 2 * s + 0.5 * s * s for s in LENGTHS]) == pytest.approx((3, 2, 0.5))


GQA = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}
SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 4,
         "head_dim": 64}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 512, "num_experts_per_tok": 4}
LATENT = {"q_lora_rank": 384, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
          "num_key_value_heads": 16, "head_dim": 32}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sizes", "bytes_per_token"),
    [
        *TABLES["a_layer_of_transformers_keeps_what_was_traced"],
        ("deepseek_v3", SMALL | EXPERTS | LATENT | {"n_routed_experts": 16, "n_group": 4, "topk_group": 2}, 75_060),
    ],
)
def test_a_layer_of_transformers_keeps_what_was_traced(
    kind: str, sizes: dict[str, int], bytes_per_token: float
) -> None:
    model = from_config({"model_type": kind, "num_hidden_layers": 4, "vocab_size": 32000, **sizes}, "config.json")
    kept = saved_bytes(decoder_layer(model, model.layers[-1], Shape(seq_length=2048), load_runtime("hf")))
    assert kept / 2048 == pytest.approx(bytes_per_token, rel=1e-3)


def test_what_is_fused_compiled_or_shared_has_no_passes_of_eager_code() -> None:
    eager, wide = load_runtime("hf"), load_model("olmo-2-32b")
    compiled, fused = (eager.model_copy(update={name: True}) for name in ("compiled", "fused_rotary"))

    def passes(model: ModelSpec, runtime: RuntimeSpec) -> dict[str, float]:
        items = decoder_layer(model, model.layers[0], Shape(seq_length=S), runtime)
        return {item.name: float(item.forward_bytes) for item in operators_of(items)}

    assert passes(wide, eager)["rotary"] == 11 * passes(wide, compiled)["rotary"] == 11 * passes(wide, fused)["rotary"]
    assert {"qkv gradient sums", "mlp up gradient sums"} <= passes(wide, eager).keys() - passes(wide, compiled).keys()
    # queries alone are one product, too, of which nothing is cut
    shared = load_model("llama-3.1-8b").model_copy(update={"shares_keys": True})
    assert "qkv slices" not in passes(shared, eager)
    assert "qkv slices" in passes(load_model("phi-3-mini"), eager)
