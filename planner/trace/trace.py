"""A user's module as a model of the planner: traced in a child process, read as lists of operators."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from itertools import groupby
from typing import Any

from planner.errors import PlannerError, SpecError
from planner.specs.base import Fields
from planner.specs.model import ModelSpec
from planner.specs.model_parts import Polynomial, TracedOperator, TracedTensor
from planner.specs.problems import checked

LENGTHS = (512, 1024, 2048)
"""Tokens of the sequences that are traced: three, since attention in plain torch grows with their square."""
MOST_KINDS = 8
MOST_S, MOST_BYTES = 600, 16 << 30
"""Seconds and bytes of address space that the process of a user's module may take."""
STYLES = {
    **dict.fromkeys(("colwise", "colwiseparallel"), "columns"), **dict.fromkeys(("rowwise", "rowwiseparallel"), "rows"),
    **dict.fromkeys(("sequence", "sequence_parallel", "sequenceparallel", "replicate"), ""),
}  # fmt: skip
"""Styles of sharding by torch's own names and those of transformers' `base_model_tp_plan`; the last are whole."""


def trace(source: str, name: str, shards: Mapping[str, str] | None = None) -> ModelSpec:
    """The model that `module:FILE.py:FACTORY` builds, or the code in `hf-code:DIR`.

    `shards` says how modules are split over tensor-parallel ranks: patterns of their names, each colwise or rowwise.
    Raises SpecError where the module cannot be built or traced without data, with the module's own last line.
    """
    styles = {pattern: _style(pattern, style) for pattern, style in (shards or {}).items()}
    told = _told(source)
    first = told[str(LENGTHS[0])]
    products = {row["module"] for row in first["rows"] if row["kind"] == "gemm" and row["weight"]}
    unmet = next((one for one in styles if styles[one] and not any(_is_called(name, one) for name in products)), None)
    if unmet is not None:
        raise SpecError(
            f"--shard: {unmet}: no product by a weight is in a module of that name",
            f"modules with one: {', '.join(sorted(products, key=len)[:4])}, …",
        )
    if any(len(told[str(length)]["rows"]) != len(first["rows"]) for length in LENGTHS):
        for one in told.values():
            one["rows"] = _gathered(one["rows"])
        # masks that only a long sequence needs are made once, before the layers
        common = set.intersection(*({_place(row) for row in one["rows"]} for one in told.values()))
        for one in told.values():
            one["rows"] = [row for row in one["rows"] if row["layer"] >= 0 or _place(row) in common]
    if any([_place(row) for row in told[str(length)]["rows"]] != [*map(_place, first["rows"])] for length in LENGTHS):
        raise SpecError(f"{source}: its operations change with the length of the sequence", "pad inside of the module")
    if first["hidden_size"] is None:
        raise SpecError(
            f"{source}: has no nn.Embedding, whose width is that of the layers", "embed tokens in the module"
        )
    rows = _within(
        [_row([told[str(length)]["rows"][i] for length in LENGTHS], styles) for i in range(len(first["rows"]))], first
    )
    lists = [_merged([row for number, row in rows if number == layer]) for layer in first["layers"]]
    lists = _alike([_settled(operators, styles) for operators in lists])
    kinds = list(dict.fromkeys(lists))
    if len(kinds) > MOST_KINDS:
        raise SpecError(f"{source}: {len(kinds)} kinds of layers, at most {MOST_KINDS}", "trace one of each by itself")
    return checked(ModelSpec, _model(source, name, first, lists, kinds, bool(styles)), source)


def _style(pattern: str, style: str) -> str:
    known = STYLES.get(style.lower())
    if known is None:
        raise SpecError(f"--shard: {pattern}: {style!r} is no style", f"one of {', '.join(STYLES)}")
    return known


def _is_called(module: str, pattern: str) -> bool:
    """A module's name, or its end from a point on, is of a pattern: transformers' plans leave out `model.`."""
    return fnmatch(module, pattern) or fnmatch(module, f"*.{pattern}")


def _told(source: str) -> Fields:
    """The answer of the process that builds and traces the module."""
    kind, _, rest = source.partition(":")
    if kind not in ("module", "hf-code") or not rest or (kind == "module" and ":" not in rest):
        raise SpecError(f"{source!r:.80} names no module", "write module:FILE.py:FACTORY or hf-code:DIR")
    path = rest.rpartition(":")[0] if kind == "module" else rest
    if not os.path.exists(path):
        raise SpecError(f"{path[:80]}: no such file or folder", "check the path")
    words = [sys.executable, "-m", "planner.trace.run", "--trace", source, *map(str, LENGTHS)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=MOST_S, preexec_fn=_limited, check=False)
    except subprocess.TimeoutExpired:
        raise SpecError(f"{source}: takes over {MOST_S} s to trace", "give a factory of a smaller model") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        if "No module named 'torch'" in last or "No module named 'transformers'" in last:
            raise PlannerError(
                f"plan models trace needs what is not installed: {last}", "pip install torch transformers"
            )
        is_missing = last.startswith("AttributeError: module")
        raise SpecError(
            f"{source}: cannot be traced: {last[:200]}",
            "name a function of the file that returns the module: module:FILE.py:FACTORY"
            if is_missing
            else "shapes must not depend on data: give experts a fixed capacity or a grouped product",
        )
    found: Fields = json.loads(done.stdout)
    return found


def _limited() -> None:
    """Limits of the child: its code is the user's."""
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, MOST_S))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))


def fitted(values: Sequence[float]) -> Polynomial:
    """The polynomial c₀ + c₁·s + c₂·s² that has these values at `LENGTHS`."""
    a, b, c = LENGTHS
    first = (values[1] - values[0]) / (b - a)
    second = (values[2] - values[1]) / (c - b)
    square = (second - first) / (c - a)
    linear = first - square * (a + b)
    constant = values[0] - linear * a - square * a * a
    return tuple(round(one, 6) + 0.0 for one in (constant, linear, square))  # type: ignore[return-value]


def _row(same: Sequence[Mapping[str, Any]], styles: Mapping[str, str]) -> tuple[int, TracedOperator]:
    """One operation at all lengths: its layer, and its sizes as polynomials."""
    one = same[0]
    sizes: Fields = {
        name: fitted([row[name] for row in same])
        for name in ("count", "m", "n", "k", "bytes", "backward_bytes")
        if name in one
    }
    if one["kind"] == "attention":
        sizes |= {name: fitted([row[name] for row in same]) for name in ("q_len", "kv_len")}
        sizes |= {name: one[name] for name in ("heads", "kv_heads", "qk_dim", "v_dim")}
    kept = [fitted([sum(row["kept"]) for row in same])] if any(row["kept"] for row in same) else []
    split = next((style for pattern, style in styles.items() if _is_called(one["module"], pattern)), "")
    operator = TracedOperator(
        name=f"{_local(one['module'])} {one['name']}".strip(), kind=one["kind"], weight=one.get("weight", False),
        kernels=one.get("kernels", 0), backward_kernels=one.get("backward_kernels", 0),
        parameters=one.get("parameters", 0), family=one.get("family", "residual"),
        split=split if one["kind"] == "gemm" else "",  # type: ignore[arg-type]
        kept=tuple(TracedTensor(num_bytes=size) for size in kept), **sizes,
    )  # fmt: skip
    return one["layer"], operator


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["layer"], row["module"], row["name"], row["kind"]


def _gathered(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operations of one name in one module as one: a loop over parts of a sequence has more of them in long ones."""
    gathered: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        found = gathered.setdefault(_place(row), row)
        if found is row:
            continue
        for name in ("bytes", "backward_bytes", "kernels", "backward_kernels", "parameters", "kept"):
            if name in found:
                found[name] = found[name] + row[name]
        if "m" in found and row["m"] * row["n"] * row["k"]:
            # as many products of the first one's size as take the same FLOPs
            found["count"] += row["count"] * row["m"] * row["n"] * row["k"] / (found["m"] * found["n"] * found["k"])
    return [*gathered.values()]


def _within(rows: list[tuple[int, TracedOperator]], told: Mapping[str, Any]) -> list[tuple[int, TracedOperator]]:
    """The operations with products by weights between layers among those of the next; the head's stay outside."""
    settled = list[tuple[int, TracedOperator]]()
    following, is_behind = told["layers"][-1], True
    for layer, one in reversed(rows):
        following, is_behind = (layer, False) if layer >= 0 else (following, is_behind)
        is_head = is_behind and one.n[0] == told["vocab_size"]
        settled.append((following if layer < 0 and one.weight and not is_head else layer, one))
    return settled[::-1]


def _local(module: str) -> str:
    """A module's name inside of its layer: behind the number."""
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[0] + 1 :]) if numbers else module


def _merged(operators: Sequence[TracedOperator]) -> tuple[TracedOperator, ...]:
    """Operations element by element one after another as one: their bytes, kernels and tensors added up."""
    return tuple(_joined(kind, list(group)) for kind, group in groupby(operators, key=_group))


def _group(operator: TracedOperator) -> tuple[str, str, int]:
    """Products and attention stay by themselves; all others join their neighbours of one family."""
    alone = 0 if operator.kind == "elementwise" else id(operator)
    return operator.kind, operator.name if alone else operator.family, alone


def _joined(kind: tuple[str, str, int], group: list[TracedOperator]) -> TracedOperator:
    if len(group) == 1:
        return group[0]
    forward, backward = (
        tuple(sum(getattr(one, name)[power] for one in group) for power in range(3))
        for name in ("bytes", "backward_bytes")
    )
    return group[0].model_copy(
        update={
            "name": f"{group[0].name} … {group[-1].name}", "bytes": forward, "backward_bytes": backward,
            "kernels": sum(one.kernels for one in group),
            "backward_kernels": sum(one.backward_kernels for one in group),
            "parameters": sum(one.parameters for one in group),
            "kept": tuple(tensor for one in group for tensor in one.kept),
        }
    )  # fmt: skip


def _settled(operators: Sequence[TracedOperator], styles: Mapping[str, str]) -> tuple[TracedOperator, ...]:
    """Operations between a product split by columns and the next split by rows are split too, and keep a share."""
    if not styles:
        return tuple(operators)
    settled = list[TracedOperator]()
    is_inside = False
    for one in operators:
        # what an operation keeps is what went into it
        kept = tuple(tensor.model_copy(update={"is_sharded": is_inside}) for tensor in one.kept)
        is_inside = one.split == "columns" or (is_inside and one.split != "rows")
        # weights between them, of norms say, are whole on every rank only where nothing is split
        split = one.split or ("inside" if is_inside else "")
        settled.append(one.model_copy(update={"split": split, "kept": kept}))
    if is_inside:
        last = next(one.name for one in reversed(operators) if one.split == "columns")
        raise SpecError(
            f"--shard: {last}: split by columns, and no product behind it by rows",
            "give the layer's next product rowwise: its sum makes the rows whole again",
        )
    return tuple(settled)


def _alike(lists: Sequence[tuple[TracedOperator, ...]]) -> list[tuple[TracedOperator, ...]]:
    """Layers that differ in nothing but the tensors that they keep are of the kind that most of them are.

    The first layer keeps what all of them read, rotary tables say.
    """
    plain = [tuple(one.model_copy(update={"kept": ()}) for one in operators) for operators in lists]
    most = {one: Counter(full for full, other in zip(lists, plain, strict=True) if other == one) for one in set(plain)}
    return [most[one].most_common(1)[0][0] for one in plain]


def _model(
    source: str, name: str, told: Mapping[str, Any], lists: list[Any], kinds: list[Any], is_split: bool
) -> Fields:
    """The fields of the model: sizes of its embedding and head, and its layers as traced."""
    heads = next((one.heads for operators in kinds for one in operators if one.kind == "attention"), 1)
    hidden = told["hidden_size"]
    vocab = told["vocab_size"]
    ends = vocab * hidden * (1 if told["is_tied"] else 2) + hidden * (2 if told["norm_bias"] else 1)
    own = sum(one.parameters for operators in lists for one in operators)
    return {
        "name": name, "source": f"plan models trace {source}", "num_hidden_layers": len(lists),
        "hidden_size": hidden, "num_attention_heads": heads, "head_dim": max(hidden // heads, 1), "vocab_size": vocab,
        "tie_word_embeddings": told["is_tied"], "position_embedding": "none", "bias": told["norm_bias"],
        "norm": "layernorm" if told["norm_bias"] else "rmsnorm",
        "layer_types": [f"traced{kinds.index(operators)}" for operators in lists], "mlp_layer_types": ["none"],
        "traced": {
            "source": f"{source}, torch {metadata.version('torch')}", "is_split": is_split,
            "is_looped": told["is_looped"],
            "layers": [[one.model_dump(exclude_defaults=True) for one in operators] for operators in kinds],
            "other_parameters": max(told["num_parameters"] - ends - own, 0),
        },
    }  # fmt: skip
