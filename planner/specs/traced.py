"""Layers as lists of operators that were traced from a user's own module (`plan models trace`)."""

from typing import Literal

from pydantic import Field

from planner.specs.base import NonNegativeInt, Spec

Polynomial = tuple[float, float, float]
"""A size of one sequence of s tokens: c₀ + c₁·s + c₂·s², as three lengths that were traced have it."""


class TracedTensor(Spec):
    """A tensor that is kept for the backward."""

    num_bytes: Polynomial
    """Bytes of one sequence."""
    is_sharded: bool = False
    """Each tensor-parallel rank keeps its share."""


class TracedOperator(Spec):
    """One operation of a layer on one sequence, or several element by element one after another."""

    name: str = Field(max_length=200)
    kind: Literal["gemm", "attention", "elementwise"]
    count: Polynomial = (1.0, 0.0, 0.0)
    m: Polynomial = (0.0, 0.0, 0.0)
    n: Polynomial = (0.0, 0.0, 0.0)
    k: Polynomial = (0.0, 0.0, 0.0)
    weight: bool = False
    """The product is by a weight."""
    heads: NonNegativeInt = 0
    kv_heads: NonNegativeInt = 0
    q_len: Polynomial = (0.0, 0.0, 0.0)
    kv_len: Polynomial = (0.0, 0.0, 0.0)
    qk_dim: NonNegativeInt = 0
    v_dim: NonNegativeInt = 0
    bytes: Polynomial = (0.0, 0.0, 0.0)
    """Bytes that element-by-element kernels move in a forward."""
    kernels: NonNegativeInt = 0
    parameters: NonNegativeInt = 0
    split: Literal["", "columns", "rows", "inside"] = ""
    """Its share on a tensor-parallel rank: columns or rows of a weight, or what lies between them; empty: all of it."""
    kept: tuple[TracedTensor, ...] = ()


class TracedSpec(Spec):
    """The layers of a model that no table knows, as torch runs them, and the rest of its parameters."""

    source: str = Field(max_length=2000)
    """The module that was traced, and with which torch."""
    layers: tuple[tuple[TracedOperator, ...], ...]
    """The operators of each kind of layer: `traced0` first."""
    other_parameters: NonNegativeInt = 0
    """Parameters beside the layers, the embedding and the head."""
    is_split: bool = False
    """A plan of sharding was given, so that tensor parallelism can split the layers."""
    is_looped: bool = False
    """Some layers run more than once, one after all others: they stand on one pipeline stage."""
