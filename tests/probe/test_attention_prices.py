"""Eager torch's attention is priced as the kernels that its ranks run, which are written down."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from planner.layout.evaluate import evaluate  # noqa: E402
from planner.physics.layer.attention import attention  # noqa: E402
from planner.physics.operators import Operator, operators_of  # noqa: E402
from planner.probe.evidence import in_words  # noqa: E402
from planner.probe.model.attention import KernelsSeen, Visibility, core_attention  # noqa: E402
from planner.probe.model.peers import TensorPeers  # noqa: E402
from planner.probe.run_price import EAGER  # noqa: E402
from planner.shape import Shape  # noqa: E402
from planner.specs.cluster import ClusterSpec  # noqa: E402
from planner.specs.model import ModelSpec  # noqa: E402
from planner.specs.registry import load_hardware, load_model  # noqa: E402
from planner.specs.training import Parallelism, TrainingSpec  # noqa: E402
from planner.trainers.documents import kernel_of  # noqa: E402

KERNELS: dict[
    tuple[str, str, int, int], set[str],
] = {
    ("8b", "h200", 1, 8192): {"cudnn"}, ("8b", "h200", 4, 131072): {"flash"}, ("8b", "a100", 1, 8192): {"flash"},
    ("8b", "mi300x", 1, 8192): {"flash"}, ("deepseek-v2-lite", "h200", 1, 4096): {"cudnn"},
    ("gemma-3-27b", "h200", 1, 8192): {"cudnn", "flash"}, ("gpt-oss-20b", "b200", 1, 8192): {"flash"},
    ("bloom-176b", "h200", 1, 2048): {"mask"}, ("llama-4-scout", "h200", 1, 8192): {"cudnn"},
    ("llama-4-scout", "h200", 1, 16384): {"cudnn", "mask"},
}  # fmt: skip


@pytest.mark.parametrize("case", KERNELS, ids=str)
def test_the_kernel_follows_from_layer_split_and_silicon(case: tuple[str, str, int, int]) -> None:
    name, gpu, cp, seq_length = case
    model, hardware = load_model(name), load_hardware(gpu)
    assert {kernel_of(model, kind, hardware, cp, seq_length) for kind in model.kinds} == KERNELS[case]


def test_wide_heads_are_left_to_flash() -> None:
    model = ModelSpec(name="wide", num_hidden_layers=1, hidden_size=1024, intermediate_size=1024, vocab_size=64,
        num_attention_heads=4, head_dim=256)  # fmt: skip
    assert kernel_of(model, model.kinds[0], load_hardware("h200"), 1, 4096) == "flash"


def test_split_sequences_are_priced_as_flash_on_a_gpu_that_has_cudnn() -> None:
    """8B at 131,072 tokens over cp 4 was judged against cuDNN's kernel: ranks would have been 59% too slow."""

    def seconds(hardware: Any) -> list[float]:
        plan = evaluate(
            load_model("8b"), ClusterSpec(hardware=hardware, num_gpus=8),
            TrainingSpec(seq_length=131072, global_batch_size=4), Parallelism(tp=2, cp=4), runtime="torch-eager",
        )  # fmt: skip
        return [plan.best.stages[0].forward_s, plan.best.stages[0].backward_s]

    h200 = load_hardware("h200")
    without = h200.model_copy(update={"efficiency": h200.efficiency.model_copy(update={"cudnn": None})})
    assert seconds(h200) == pytest.approx(seconds(without))


class Moved(TorchDispatchMode):
    """Counts the bytes that kernels other than attention's read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not (func.is_view or "attention" in name or "empty" in name):
            reads = 0 if "zero" in name else _bytes(args)
            # a pad fills its whole output, then copies
            self.num_bytes += reads + _bytes([made]) + (reads if "pad" in name else 0)
        return made


def _bytes(values: Any) -> int:
    tensors = [x for value in values for x in (value if isinstance(value, list | tuple) else [value])]
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))


class Silent(TensorPeers):
    """Peers whose exchanges move nothing here: links have a price of their own."""

    def all_gather(self, x: Any) -> Any:
        x.contiguous()
        return x.new_empty(x.shape[0] * self.size, *x.shape[1:])

    def reduce_scatter(self, x: Any) -> Any:
        return x.new_empty(x.shape[0] // self.size, *x.shape[1:])


MLA = {"kv_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
AROUND: dict[str, tuple[dict[str, Any], int]] = {
    "cp 2": ({"num_key_value_heads": 8}, 2),
    "cp 4": ({"num_key_value_heads": 8}, 4),
    "sinks": ({"num_key_value_heads": 8, "attention_sinks": True, "bias": True}, 1),
    "latent, cp 2": ({"mla": MLA}, 2),
    "window": ({"num_key_value_heads": 8, "sliding_window": 512}, 1),
}


@pytest.mark.parametrize("case", AROUND)
def test_copies_and_sums_around_flash_move_as_many_bytes_as_priced(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, cp = AROUND[case]
    model = ModelSpec(name="case", num_hidden_layers=1, hidden_size=1024, intermediate_size=1024, vocab_size=64,
        num_attention_heads=8, head_dim=128, **changes)  # fmt: skip
    monkeypatch.setattr("planner.probe.model.attention.takes_flash", lambda x: True)
    seq, (qk_dim, v_dim) = 4096 // cp, (192, 128) if "mla" in changes else (128, 128)
    q, k = (torch.empty(seq, 1, 8, qk_dim, device="meta", dtype=torch.bfloat16) for _ in range(2))
    v = torch.empty(seq, 1, 8, 2 * v_dim, device="meta", dtype=torch.bfloat16)[..., v_dim:]
    sinks = torch.empty(8, device="meta", dtype=torch.bfloat16) if model.attention_sinks else None
    inputs = [x.requires_grad_() for x in (q, k, v, sinks) if x is not None]
    with Moved() as forward:
        out = core_attention(q, k, v, Visibility(None, model.sliding_window or 0, sinks), Silent(cp))
    with Moved() as backward:
        torch.autograd.grad(out, inputs, torch.empty_like(out))
    shape = Shape.of(cp=cp, seq_length=4096)
    operators: list[Operator] = operators_of(attention(model, model.kinds[0], shape, EAGER))
    around = [op for op in operators if op.name in ("gathered keys and values", "padded values", "sinks")]
    assert sum(op.forward_bytes for op in around) == pytest.approx(forward.num_bytes, rel=0.05)
    assert sum(op.backward_bytes for op in around) == pytest.approx(backward.num_bytes, rel=0.05)


aten = torch.ops.aten


def qkv(device: str = "meta") -> tuple[Any, ...]:
    return tuple(torch.empty(1, 2, 16, 8, device=device, dtype=torch.bfloat16) for _ in range(3))


CALLS: dict[str, Any] = {
    "flash": lambda: aten._scaled_dot_product_flash_attention(*qkv(), 0.0, True),
    "cudnn": lambda: aten._scaled_dot_product_cudnn_attention(*qkv(), None, True, 0.0, True),
    "cudnn with a mask": lambda: aten._scaled_dot_product_cudnn_attention(
        *qkv(), torch.empty(1, 2, 16, 16, device="meta", dtype=torch.bfloat16), True
    ),
    "efficient": lambda: aten._scaled_dot_product_efficient_attention(*qkv(), None, True, 0.0, True),
    "math": lambda: torch.nn.functional.scaled_dot_product_attention(*qkv("cpu"), is_causal=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_is_known_by_its_operator(name: str) -> None:
    with sdpa_kernel(SDPBackend.MATH), KernelsSeen() as seen:
        CALLS[name]()
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert seen.names == (name,)


def test_kernels_of_a_backward_are_those_that_recompute() -> None:
    q, k, v = (x.requires_grad_() for x in qkv("cpu"))
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)
        with KernelsSeen() as seen:
            out.sum().backward()
    assert seen.names == ("math",)


def test_kernels_are_told_in_words() -> None:
    assert in_words(("cudnn with a mask", "flash")) == "cuDNN's kernel with a mask and FlashAttention-2"
