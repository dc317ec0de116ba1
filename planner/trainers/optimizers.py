"""Optimizers as rows: the states that each keeps of a parameter, and the bytes that its update moves.

Bytes moved were counted operation by operation, each tensor read and written once, in torch 2.13 and transformers 5.23
(tests/huggingface/test_optimizers_against_torch.py). A kernel that is fused reads and writes everything once.
"""

from __future__ import annotations

from typing import Literal

from planner.record import record

OptimizerName = Literal[
    "adamw",
    "adamw-8bit",
    "paged-adamw",
    "paged-adamw-8bit",
    "adafactor",
    "muon",
    "muon-distributed",
    "muon-blockwise",
    "sgd",
    "sgd-momentum",
]

BLOCK = 256
"""Values of a state that share a scale in fp32 (bitsandbytes, optim/optimizer.py: blocksize)."""
LEAST_NARROW = 4096
"""Elements below which a tensor's states stay in fp32 (bitsandbytes: min_8bit_size)."""
LEAST_PAGED = 100_000
"""Elements below which a tensor's states stay on the GPU (bitsandbytes: get_state_buffer)."""


@record
class Optimizer:
    """One optimizer; what it keeps and moves of matrices, and of all other parameters."""

    name: OptimizerName
    says: str
    moved: tuple[float, float]
    """Bytes that the update of a matrix moves per parameter, where it updates weights of 16 bits, and of 32."""
    moments: int = 2
    """States as large as a matrix."""
    other_moments: int = 2
    """States as large as an embedding, a head, a norm or a bias."""
    bits: Literal[0, 8, 32] = 0
    """Bits of a state; 0 for those of the weights that are updated."""
    is_factored: bool = False
    """A matrix's second moment is a row and a column."""
    is_paged: bool = False
    """States are in managed memory, which leaves a GPU that is full."""
    newton_schulz_steps: int = 0
    """Steps of three products each that make a matrix's update orthogonal."""
    splits_products: bool = False
    """Tensor-parallel ranks share those products, and sum small ones, where others each compute all of them."""
    splits_matrix: bool = False
    """They each make their own slice of the matrix orthogonal."""
    other_moved: tuple[float, float] | None = None
    """`moved` of other parameters, where these are not updated as matrices are."""
    workspace: tuple[float, float] = (0.0, 0.0)
    """Bytes per element of the largest tensor that the update needs for a moment, likewise by the weights' bits."""
    source: str = ""

    def moved_bytes(self, weight_bytes: int, is_matrix: bool = True) -> float:
        """Bytes that an update moves per parameter where it updates weights of `weight_bytes`."""
        moved = self.moved if is_matrix or self.other_moved is None else self.other_moved
        return moved[weight_bytes > 2]

    def workspace_bytes(self, weight_bytes: int) -> float:
        """Bytes per element of the largest tensor that an update needs for a moment."""
        return self.workspace[weight_bytes > 2]


_FUSED_ADAMW = (14.0, 28.0)
_ROWS = (
    Optimizer(
        "adamw", "Adam with decoupled weight decay", _FUSED_ADAMW,
        source="torch.optim.AdamW(fused=True), which transformers 5 takes unasked (adamw_torch_fused)",
    ),
    Optimizer(
        "adamw-8bit", "AdamW, whose states are 8-bit codes with a scale for 256 of them", (10.1, 16.1), bits=8,
        source="Dettmers et al. 2021; bitsandbytes 0.50, AdamW(optim_bits=8): gradient, weight and codes in one kernel",
    ),
    Optimizer(
        "paged-adamw", "AdamW, whose fp32 states leave a GPU that is full", (22.0, 28.0), bits=32, is_paged=True,
        source="bitsandbytes 0.50, AdamW(is_paged=True); Dettmers et al. 2023, section 3",
    ),
    Optimizer(
        "paged-adamw-8bit", "AdamW, whose 8-bit states leave a GPU that is full", (10.1, 16.1), bits=8, is_paged=True,
        source="bitsandbytes 0.50, AdamW(optim_bits=8, is_paged=True)",
    ),
    Optimizer(
        "adafactor", "a row and a column of second moments for a matrix, and no first moment", (102.2, 84.2), moments=0,
        other_moments=0, is_factored=True, workspace=(16.0, 8.0),
        source="Shazeer and Stern 2018; transformers.optimization.Adafactor, whose 27 passes a tensor are not fused",
    ),
    Optimizer(
        "muon", "one momentum for a matrix, whose update Newton and Schulz make orthogonal; AdamW for others",
        (28.0, 54.0), moments=1, newton_schulz_steps=5, other_moved=_FUSED_ADAMW,
        source="Jordan et al. 2024 (kellerjordan.github.io/posts/muon), Liu et al. 2025 (arXiv 2502.16982)",
    ),
    Optimizer(
        "muon-distributed", "muon, whose products tensor-parallel ranks share",
        (28.0, 54.0), moments=1, newton_schulz_steps=5, splits_products=True, other_moved=_FUSED_ADAMW,
        source="Megatron-LM 0.19, --muon-tp-mode distributed (core/optimizer/emerging_optimizers.py)",
    ),
    Optimizer(
        "muon-blockwise", "muon, of which each tensor-parallel rank makes its own slice of a matrix orthogonal",
        (28.0, 54.0), moments=1, newton_schulz_steps=5, splits_matrix=True, other_moved=_FUSED_ADAMW,
        source="Megatron-LM 0.19, --muon-tp-mode blockwise (core/optimizer/emerging_optimizers.py)",
    ),
    Optimizer(
        "sgd", "gradient descent without momentum", (6.0, 12.0), moments=0, other_moments=0,
        source="torch.optim.SGD, as transformers calls it (optim=sgd)",
    ),
    Optimizer(
        "sgd-momentum", "gradient descent with momentum", (16.0, 32.0), moments=1, other_moments=1,
        source="torch.optim.SGD(momentum=0.9), as Megatron-LM has it (--sgd-momentum)",
    ),
)  # fmt: skip

OPTIMIZERS: dict[str, Optimizer] = {row.name: row for row in _ROWS}
"""All optimizers, by name."""
