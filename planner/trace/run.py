"""A user's module: traced on the meta device for the planner, or run for a few steps on data-parallel ranks.

    python -m planner.trace.run --trace module:FILE.py:FACTORY|hf-code:DIR LENGTH…
    torchrun --nproc-per-node 8 -m planner.trace.run --config plan.torch.yaml

To trace, nothing is computed: meta tensors have shapes and no data. What is printed is one JSON object: the operators
of each layer in their order, at each length, and what the module says of its embedding and its head.

The steps are of a plan, on a CPU where torch sees no GPU. Weights are in bf16, with masters, moments and summed
gradients in fp32, as the plan was priced; tokens are random. Prints each step's seconds and the peak of the memory.
MODULE in the environment stands in for the source in the file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from planner.specs.base import grouped
from planner.specs.reading import load_yaml

VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "split",
    "split_with_sizes", "chunk", "unbind", "detach", "alias", "reshape", "as_strided", "_reshape_alias", "lift_fresh",
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "is_same_size", "sym_size",
    "unsafe_split", "view_as_real", "view_as_complex",
}  # fmt: skip
"""Operations that move no bytes."""
BATCH = 2
"""Sequences that are traced at once, and divided by: of one alone, views are what of several are copies."""
FAMILIES = {
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), "norm"), "_to_copy": "cast",
    **dict.fromkeys(("cat", "clone", "copy_", "stack", "split_with_sizes_copy", "slice_backward"), "strided"),
    **dict.fromkeys(("index", "index_put_", "index_add", "gather", "scatter", "scatter_add"), "permute"),
    **dict.fromkeys(("sort", "topk"), "permute"),
}  # fmt: skip
"""Families of operations that reach less of the memory's bandwidth; all inside of a norm are norms. What else reads a
part of a buffer, of a packed product say, is strided."""
FILLS = {"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}
"""Operations that read nothing of the tensor that they are like."""
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}


class FusedKernel(torch.autograd.Function):
    """Stands for a kernel that torch fuses on a GPU: `make` gives its output and what it keeps for the backward."""

    @staticmethod
    def forward(ctx: Any, make: Callable[..., tuple[Any, tuple[Any, ...]]], *inputs: Any) -> Any:
        output, kept = make(*inputs)
        ctx.save_for_backward(*kept)
        ctx.inputs = inputs
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *(None if one is None else torch.empty_like(one) for one in ctx.inputs)


def _attention(query: Any, key: Any, value: Any) -> tuple[Any, tuple[Any, ...]]:
    """Queries, keys, values, the output and a number for each row are kept."""
    *batch, heads, length, _ = query.shape
    # kernels write heads side by side, so that no copy is made to join them
    output = query.new_empty((*batch, length, heads, value.shape[-1])).transpose(-3, -2)
    return output, (query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))


def _norm(rows: Any, weight: Any) -> tuple[Any, tuple[Any, ...]]:
    return torch.empty_like(rows), (rows, rows.new_empty(rows.shape[:-1], dtype=torch.float32))


def _dropout(rows: Any) -> tuple[Any, tuple[Any, ...]]:
    """A mask of a byte for each element is kept."""
    return torch.empty_like(rows), (torch.empty_like(rows, dtype=torch.bool),)


_FUSED: dict[Any, tuple[str, ...]] = {
    nn.functional.rms_norm: ("rows", "normalized_shape", "weight"),
    nn.functional.dropout: ("input", "p", "training"),
    nn.functional.scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
}
"""Functions whose kernels are fused, with the names of their arguments."""


class Fused(TorchFunctionMode):
    """Puts kernels that torch fuses on a GPU in the place of what they are made of on meta tensors."""

    def __init__(self, record: Recorder) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = dict(zip(_FUSED.get(func, ()), args, strict=False)) | kwargs
        is_off = func is nn.functional.dropout and not (given.get("p", 0.5) and given.get("training", True))
        if func not in _FUSED or is_off:
            return func(*args, **kwargs)
        rows = args[0] if args else given.get("input", given.get("query"))
        record = self.record
        if func is nn.functional.rms_norm:
            output = record.made(_norm, rows, given.get("weight"))
            new = record.new(given.get("weight"))
            moved = _bytes(rows) / BATCH
            record.add("norm", "elementwise", **_passes(2 * moved, 5 * moved), parameters=new)
        elif func is nn.functional.dropout:
            output = record.made(_dropout, rows)
            moved = 2.5 * _bytes(rows) / BATCH
            record.add("dropout", "elementwise", **_passes(moved, moved), parameters=0)
        else:
            key, value = given["key"], given["value"]
            output = record.made(_attention, rows, key, value)
            record.add(
                "attention", "attention", heads=rows.shape[:-2].numel() // BATCH,
                kv_heads=key.shape[:-2].numel() // BATCH, q_len=rows.shape[-2], kv_len=key.shape[-2],
                qk_dim=rows.shape[-1], v_dim=value.shape[-1],
                is_causal=bool(given.get("is_causal")) or given.get("attn_mask") is not None,
            )  # fmt: skip
        return output


@dataclass(eq=False)
class HeldTensor:
    """A tensor that autograd keeps for the backward, and the number of the operation that reads it there."""

    tensor: torch.Tensor
    row: int


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation of a forward: its sizes, the weights that it reads, the tensors that its backward keeps."""

    def __init__(self, module: nn.Module, layers: list[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[dict[str, Any]] = []
        self.layer = -1
        self.path = [""]
        self.norms = {name for name, one in module.named_modules() if "norm" in type(one).__name__.lower()}
        self._is_hidden = False
        self.entered: list[int] = []
        self.weights = {_storage(one): one.numel() for one in module.parameters()}
        self.met: dict[int, int] = {}
        self.is_shared = False
        """Layers read weights that another layer has read, or what came before the layers."""
        self.doubts = set[int]()
        """Storages of answers whether any element is true."""
        self.saved: list[weakref.ref[HeldTensor]] = []
        self.behind: list[dict[str, Any]] = []
        """Rows of the backward's operations element by element."""
        self.numbers: list[int] = []
        """Autograd's number behind each row of the forward, once the backward runs."""
        index = {id(one): number for number, one in enumerate(layers)}
        for name, one in module.named_modules():
            one.register_forward_pre_hook(self._entering(name, index.get(id(one))))
            one.register_forward_hook(self._leaving(id(one) in index), always_call=True)

    def _entering(self, name: str, number: int | None) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self.path.append(name)
            if number is not None:
                self.layer = number
                self.entered.append(number)

        return hook

    def _leaving(self, is_layer: bool) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self.path.pop()
            if is_layer:
                self.layer = -2  # behind a layer, and before the next

        return hook

    def made(self, make: Callable[..., Any], *inputs: Any) -> Any:
        """The output of a fused kernel; what stands for it inside is not recorded."""
        self._is_hidden, before = True, self._is_hidden
        try:
            return FusedKernel.apply(make, *inputs)  # type: ignore[no-untyped-call]
        finally:
            self._is_hidden = before

    def new(self, *tensors: torch.Tensor | None) -> int:
        """Parameters of the weights among tensors that no operation has read before."""
        keys = {_storage(one) for one in tensors if one is not None} & self.weights.keys()
        found = sum(self.weights[key] for key in keys - self.met.keys())
        self.is_shared |= self.layer >= 0 and any(self.met.get(key, self.layer) != self.layer for key in keys)
        self.met = dict.fromkeys(keys, self.layer) | self.met
        return found

    def add(self, name: str, kind: str, reads: Sequence[torch.Tensor] = (), **sizes: Any) -> None:
        """Record an operation of the current layer."""
        place = {"layer": self.layer, "module": self.path[-1], "name": name, "kind": kind}
        family = "norm" if name == "norm" or self.path[-1] in self.norms else _family(name, reads)
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self.rows.append({**place, "family": family, "kept": [], "number": number, **sizes})

    def add_backward(self, name: str, reads: list[torch.Tensor], num_bytes: float, number: int) -> None:
        """Record an operation of the backward beside that of the forward whose gradient it works out.

        Autograd numbers what it records; a view's gradient belongs to what reads the view.
        """
        at = min(bisect_right(self.numbers, number), len(self.rows) - 1)
        row = self.rows[at]
        if row["kind"] == "gemm" and name == "convolution_backward":
            return
        family = row["family"] if row["family"] == "norm" else _family(name, reads)
        if row["kind"] == "elementwise" and row["family"] == family:
            row["backward_bytes"] += num_bytes
            row["backward_kernels"] += 1
            return
        place = {"layer": row["layer"], "module": row["module"], "name": f"{name} backward", "kind": "elementwise"}
        moved = {"bytes": 0.0, "kernels": 0, "backward_bytes": num_bytes, "backward_kernels": 1}
        self.behind.append({**place, "family": family, "kept": [], "parameters": 0, "number": at, **moved})

    def joined(self) -> list[dict[str, Any]]:
        """The rows, each with those of its backward that are of another family behind it."""
        beside = grouped((one["number"], one) for one in self.behind)
        return [one for at, row in enumerate(self.rows) for one in (row, *beside.get(at, ()))]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" and args[0].dtype == torch.bool:
            # masks are asked whether all tokens are there, and whether any is not
            return _storage(args[0]) not in self.doubts
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and name not in VIEWS:  # a storage may have been another's before
            (self.doubts.add if name == "any" else self.doubts.discard)(_storage(output))
        if self._is_hidden or name in VIEWS:
            return output
        read = () if name in FILLS else (args, kwargs)
        tensors = [one for one in _flat(read) if isinstance(one, torch.Tensor)]
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            if name not in PRODUCTS:
                self.add_backward(name, tensors, _moved(tensors, output) / BATCH, node._sequence_nr())
            return output
        has_weight = any(_storage(one) in self.weights for one in tensors)
        parameters = self.new(*tensors)
        if name == "convolution" and args[8] == 1:
            steps = output.numel() / output.shape[1] / BATCH
            kernel = args[1].numel() // args[1].shape[0]
            self.add(name, "gemm", count=1, m=steps, n=output.shape[1], k=kernel, weight=True, parameters=parameters)
            return output
        if name in PRODUCTS:
            left, right = [one for one in tensors if one.dim() > 1][-2:] if name != "_grouped_mm" else tensors[:2]
            grouped = name == "_grouped_mm" and right.dim() == 3
            count = right.shape[0] if grouped else left.shape[0] if left.dim() == 3 else 1
            rows = left.shape[-2] / (count if grouped else 1)
            each = left.dim() == 3 and not has_weight  # products of each sequence by itself
            self.add(
                name, "gemm", count=count / BATCH if each else count, m=rows if each else rows / BATCH,
                k=left.shape[-1], n=right.shape[-1], weight=has_weight, parameters=parameters,
            )  # fmt: skip
            return output
        if name == "embedding":
            tensors = tensors[1:]  # of the table, rows are read
        moved = _passes(_moved(tensors, output) / BATCH, 0.0)
        self.add(name, "elementwise", tensors, **moved, parameters=parameters)
        return output

    def pack(self, tensor: torch.Tensor) -> HeldTensor:
        """A hold of autograd in the place of a tensor, as long as the backward may ask for it."""
        held = HeldTensor(tensor, len(self.rows))  # inputs are kept before an operation is recorded
        self.saved.append(weakref.ref(held))
        return held

    def count_kept(self) -> None:
        """Add what is held now to the operations that it was kept by: each storage once, and no weights.

        What a part of the forward kept that nothing came of is gone, and another tensor may have its storage.
        """
        met = set(self.weights)
        for held in filter(None, (one() for one in self.saved)):
            tensor = held.tensor
            key = _storage(held.tensor)
            is_number = tensor.dtype in (torch.int64, torch.int32) and tensor.numel() == 1
            if key not in met and not is_number:
                self.rows[min(held.row, len(self.rows) - 1)]["kept"].append(tensor.untyped_storage().nbytes() / BATCH)
            met.add(key)


def _family(name: str, reads: Sequence[torch.Tensor]) -> str:
    """The family of an operation by its name, else by whether it reads a part of a buffer."""
    parts = (0 not in one.stride() and _bytes(one) < one.untyped_storage().nbytes() for one in reads)
    return FAMILIES.get(name) or ("strided" if any(parts) else "residual")


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _moved(inputs: list[torch.Tensor], output: Any) -> int:
    """Bytes that a kernel reads and writes."""
    return sum(_bytes(one) for one in (*inputs, *_flat(output)) if isinstance(one, torch.Tensor))


def _passes(forward_bytes: float, backward_bytes: float) -> dict[str, Any]:
    """A kernel's bytes in a forward, and those of its backward that is one kernel, too, where they are known."""
    return {
        "bytes": forward_bytes, "kernels": 1, "backward_bytes": backward_bytes,
        "backward_kernels": int(backward_bytes > 0),
    }  # fmt: skip


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [one for part in value.values() for one in _flat(part)]
    if isinstance(value, (list, tuple)):
        return [one for part in value for one in _flat(part)]
    return [value]


def built(source: str, device: str = "meta") -> nn.Module:
    """The module of `module:FILE.py:FACTORY` or `hf-code:DIR`, on a device, in 16 bits."""
    kind, _, rest = source.partition(":")
    with torch.device(device):
        if kind == "hf-code":
            return _of_transformers(rest)
        path, _, factory = rest.rpartition(":")
        sys.path.insert(0, str(Path(path).resolve().parent))
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = loaded
        spec.loader.exec_module(loaded)
        module = getattr(loaded, factory)()
        if not isinstance(module, nn.Module):
            raise AttributeError(f"module {spec.name!r}: what {factory!r} returns is no torch module")
    return module.to(torch.bfloat16)


def _of_transformers(folder: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    options: dict[str, Any] = {"trust_remote_code": True, "dtype": torch.bfloat16}
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **options)
    except ValueError:  # a model without torch's own attention; the config remembers what was asked of it
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        model = AutoModelForCausalLM.from_config(config, **options)
    with suppress(AttributeError, ValueError):  # experts one by one would wait for the data
        model.set_experts_implementation("grouped_mm")
    model.config.use_cache = False  # trainers keep no keys and values for later tokens
    return model  # type: ignore[no-any-return]


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks: children of the list of modules that holds most parameters, and of others like it.

    Others lie beside it, not inside of it or around it, and their blocks have at least a tenth of its blocks' size.
    """
    sizes = {
        one: sum(weight.numel() for weight in one.parameters())
        for one in module.modules()
        if isinstance(one, (nn.ModuleList, nn.Sequential)) and len(one) > 1
    }
    largest = max(sizes, key=lambda one: sizes[one], default=None)
    if largest is None or 2 * sizes[largest] < sum(weight.numel() for weight in module.parameters()) / 8:
        return [module]
    inside, each = set(largest.modules()), sizes[largest] / len(largest)

    def is_like(other: nn.ModuleList | nn.Sequential) -> bool:
        blocks = list(other.children())
        apart = isinstance(other, nn.ModuleList) and other not in inside and largest not in set(other.modules())
        return apart and all(any(block.children()) for block in blocks) and sizes[other] / len(blocks) > each / 10

    beside = [one for one in sizes if one is largest or is_like(one)]
    nested = {inner for one in beside for inner in one.modules() if inner is not one}
    return [block for one in beside if one not in nested for block in one.children()]


def traced(source: str, length: int) -> dict[str, Any]:
    """The operations of a forward of one sequence of `length` tokens, after a backward that shows it can be trained."""
    module = built(source)
    module.train()
    layers = layers_of(module)
    ids = torch.zeros((BATCH, length), dtype=torch.int64, device="meta")
    record = Recorder(module, layers)
    kept = torch.autograd.graph.saved_tensors_hooks(record.pack, lambda held: held.tensor)
    with torch.device("meta"), Fused(record), record, kept:
        found = module(ids)
    record.count_kept()
    loss = logits_of(found).float().sum()
    record.numbers = [row["number"] for row in record.rows]
    with torch.device("meta"), record:
        loss.backward()  # type: ignore[no-untyped-call]
    tables = [one for one in module.modules() if isinstance(one, nn.Embedding)]
    table = max(tables, key=lambda one: one.num_embeddings, default=None)
    heads = [one for one in module.modules() if isinstance(one, nn.Linear) and table is not None]
    head = next((one for one in heads if table is not None and one.out_features == table.num_embeddings), None)
    return {
        "rows": record.joined(),
        # those that ran, in their order
        "layers": list(dict.fromkeys(record.entered)) or [0],
        "is_looped": record.is_shared or len(record.entered) > len(set(record.entered)),
        "num_parameters": sum(weight.numel() for weight in module.parameters()),
        "vocab_size": None if table is None else table.num_embeddings,
        "hidden_size": None if table is None else table.embedding_dim,
        "is_tied": head is not None and table is not None and head.weight is table.weight,
        "norm_bias": any(isinstance(one, nn.LayerNorm) and one.bias is not None for one in module.modules()),
    }


def logits_of(found: Any) -> torch.Tensor:
    """The first tensor that a module returned; an output of transformers has it under `logits`."""
    logits = getattr(found, "logits", None)
    return next(one for one in _flat(found if logits is None else logits) if isinstance(one, torch.Tensor))


WARM_UP = 2
"""Steps that are left out of the mean."""


class Masters:
    """AdamW on masters in fp32, of which a rank has all, or with ZeRO-1 every n-th."""

    def __init__(self, module: nn.Module, ranks: int, rank: int, is_sharded: bool) -> None:
        self.weights = [weight for weight in module.parameters() if weight.requires_grad]
        self.gradients = [torch.zeros_like(weight, dtype=torch.float32) for weight in self.weights]
        self.owners = [number % ranks if is_sharded else rank for number in range(len(self.weights))]
        self.ranks, self.rank, self.is_sharded = ranks, rank, is_sharded
        self.own = {
            number: nn.Parameter(weight.detach().float())
            for number, weight in enumerate(self.weights)
            if self.owners[number] == rank
        }
        self.optimizer = torch.optim.AdamW(self.own.values(), lr=1e-4)

    def add(self) -> None:
        """Add a micro-batch's gradients to the sums in fp32."""
        for weight, total in zip(self.weights, self.gradients, strict=True):
            if weight.grad is not None:
                total += weight.grad
                weight.grad = None

    def step(self) -> None:
        """Sum gradients over the ranks, update, and hand new weights on."""
        for number, total in enumerate(self.gradients):
            if self.ranks > 1:
                dist.all_reduce(total)
            if number in self.own:
                self.own[number].grad = total / self.ranks
        self.optimizer.step()
        for number, weight in enumerate(self.weights):
            if number in self.own:
                weight.data.copy_(self.own[number].data)
            if self.is_sharded and self.ranks > 1:
                dist.broadcast(weight.data, self.owners[number])
            self.gradients[number].zero_()


def step(module: nn.Module, masters: Masters, tokens: torch.Tensor, micro_batches: int) -> float:
    """One optimizer step on random tokens; its loss."""
    total = 0.0
    for _ in range(micro_batches):
        logits = logits_of(module(tokens[:, :-1])).flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()) / micro_batches
        loss.backward()  # type: ignore[no-untyped-call]
        masters.add()
        total += float(loss.detach())
    masters.step()
    return total


def recomputed(blocks: list[nn.Module]) -> None:
    """Run the blocks again in the backward."""
    for block in blocks:
        forward = block.forward
        block.forward = partial(checkpoint, forward, use_reentrant=False)


def main() -> None:
    """Trace a module, or run one rank of a plan."""
    if sys.argv[1:2] == ["--trace"]:
        source, *lengths = sys.argv[2:]
        sys.stdout.write(json.dumps({int(length): traced(source, int(length)) for length in lengths}))
        return
    parser = argparse.ArgumentParser(prog="planner.trace.run", description="Runs one rank of a module of your own.")
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seq-length", type=int, help="shorter sequences, on a CPU say")
    given = parser.parse_args()
    plan: Any = load_yaml(given.config)
    has_gpu, ranks = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", "1"))
    rank, device = int(os.environ.get("RANK", "0")), torch.device("cpu")
    if has_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl" if has_gpu else "gloo")
    torch.manual_seed(0)
    source = os.environ.get("MODULE") or plan["model"]["traced"]["source"].rpartition(", torch ")[0]
    module = built(source, device.type).to(device).train()
    if any(chunk.get("num_recomputed") for chunk in plan["chunks"]):
        recomputed(layers_of(module))
    masters = Masters(module, ranks, rank, bool(plan["zero"]))
    length = given.seq_length or plan["seq_length"]
    shape = (plan["micro_batch_size"], length + 1)
    tokens = torch.randint(plan["model"]["vocab_size"], shape, device=device)
    seconds = list[float]()
    for number in range(given.steps):
        began = time.perf_counter()
        loss = step(module, masters, tokens, plan["num_microbatches"])
        seconds.append(time.perf_counter() - began)
        if rank == 0:
            peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if has_gpu else ""
            print(f"step {number + 1}: {seconds[-1]:.3f} s, loss {loss:.3f}{peak}", flush=True)
    counted = seconds[WARM_UP:] or seconds
    if rank == 0:
        print(f"mean of {len(counted)} steps: {sum(counted) / len(counted):.3f} s", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
