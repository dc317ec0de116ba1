"""States and bytes moved of optimizers, held against torch's, transformers' and bitsandbytes' own on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_flatten  # noqa: E402

from planner.physics.operators import Operator  # noqa: E402
from planner.physics.optimizers import state_bytes, tensors_of  # noqa: E402
from planner.trainers.load import load_runtime  # noqa: E402
from planner.trainers.optimizers import OPTIMIZERS  # noqa: E402

ROWS, COLUMNS = 512, 512
VIEWS = {"view", "t", "transpose", "unsqueeze", "detach", "expand", "alias", "permute", "_unsafe_view"}
IN_PLACE = {"_fused_adamw_": (0, 2, 3)}
"""Arguments that a list operation writes, where it is not the first alone."""


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes that operations read and write, without products, and the most that new tensors hold at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved = self.held = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in VIEWS:
            return out
        read, written = _tensors((args, kwargs)), _tensors(out)
        if not written and name.startswith("_f"):
            written = _tensors([args[place] for place in IN_PLACE.get(name, (0,))])
        if "mm" not in name:
            self.moved += sum(tensor.nbytes for tensor in (read[1:] if name == "copy_" else read) + written)
        known = {tensor.data_ptr() for tensor in read}
        for tensor in written:
            if tensor.data_ptr() not in known:
                self.held += tensor.nbytes
                self.most = max(self.most, self.held)
                weakref.finalize(tensor, self._free, tensor.nbytes)
        return out

    def _free(self, num_bytes: int) -> None:
        self.held -= num_bytes


def _tensors(values: Any) -> list[Any]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)]


def _transformers_adafactor(parameters: Any) -> Any:
    optimization = pytest.importorskip("transformers.optimization")
    return optimization.Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)


def _muon(parameters: Any) -> Any:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with torch 2.9")
    return torch.optim.Muon(parameters)


MAKERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True), "adafactor": _transformers_adafactor,
    "muon": _muon, "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}  # fmt: skip


def _stepped(make: Callable[[Any], Any], dtype: Any, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> tuple[Any, Any]:
    """A parameter and its optimizer after a step, with a gradient for the next."""
    parameter = torch.nn.Parameter(torch.randn(shape).to(dtype))
    optimizer = make([parameter])
    parameter.grad = torch.randn(shape).to(dtype)
    optimizer.step()
    return parameter, optimizer


def _kept_bytes(optimizer: Any, parameter: Any) -> int:
    """Bytes of all states but step counts and codebooks, which all tensors share."""
    states = optimizer.state[parameter].items()
    return sum(s.nbytes for name, s in states if torch.is_tensor(s) and s.numel() > 1 and not name.startswith("qmap"))


def _counted_bytes(name: str, width: int, shape: tuple[int, ...]) -> float:
    moments = {"weight_bytes": width, "optimizer_bytes": 2 * width, "optimizer": name}
    runtime = load_runtime("hf").model_copy(update=moments)
    if len(shape) == 1:
        op = Operator(name="norm", kind="elementwise", family="norm", parameters=shape[0])
    else:
        op = Operator(name="up", kind="gemm", m=1, n=shape[0], k=shape[1], parameters=shape[0] * shape[1])
    return float(state_bytes(list(tensors_of(op, 4096)), runtime))


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "adamw"])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("shape", [(ROWS, 2 * COLUMNS), (ROWS,)])
def test_states_are_as_large_as_they_are(name: str, width: int, shape: tuple[int, ...]) -> None:
    if name == "muon" and len(shape) == 1:
        pytest.skip("Muon takes matrices alone")
    parameter, optimizer = _stepped(MAKERS[name], torch.bfloat16 if width == 2 else torch.float32, shape)
    assert _kept_bytes(optimizer, parameter) == _counted_bytes(name, width, shape)


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("width", [2, 4])
def test_updates_move_as_many_bytes_as_they_do(name: str, width: int) -> None:
    parameter, optimizer = _stepped(MAKERS[name], torch.bfloat16 if width == 2 else torch.float32)
    with Counted() as counted:
        optimizer.step()
    assert counted.moved / parameter.numel() == pytest.approx(OPTIMIZERS[name].moved_bytes(width), rel=0.005)


@pytest.mark.parametrize("width", [2, 4])
def test_adafactor_needs_as_many_bytes_for_a_moment_as_it_does(width: int) -> None:
    parameter, optimizer = _stepped(MAKERS["adafactor"], torch.bfloat16 if width == 2 else torch.float32)
    with Counted() as counted:
        optimizer.step()
    assert counted.most / parameter.numel() == pytest.approx(OPTIMIZERS["adafactor"].workspace_bytes(width), rel=0.01)


@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (4095,), (4096,), (3, 2048)])
def test_codes_and_scales_are_as_large_as_bitsandbytes_has_them(shape: tuple[int, ...]) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    parameter = torch.nn.Parameter(torch.randn(shape))
    optimizer = bitsandbytes.optim.AdamW([parameter], optim_bits=8)
    optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
    assert _kept_bytes(optimizer, parameter) == _counted_bytes("adamw-8bit", 4, shape)


def test_transformers_has_the_optimizers_that_the_trainers_file_names() -> None:
    training_args = pytest.importorskip("transformers.training_args")
    known = {name.value for name in training_args.OptimizerNames}
    assert {"adamw_torch_fused", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "adafactor", "sgd"} <= known
    assert not any("muon" in name for name in known)
