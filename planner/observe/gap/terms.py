"""The names of the terms of a gap, in the order in which a waterfall shows them, and how people call them."""

from __future__ import annotations

GROUPS = {
    "tp": "tensor-parallel",
    "cp": "context-parallel",
    "ep": "expert-parallel",
    "dp": "data-parallel",
}
"""Groups whose exchanges have terms of their own; expert tensor parallelism counts with ep, as in a plan."""
LINK_RATE, SKEW, OVERLAP, EXCHANGES = "link_rate", "skew", "overlap", "exchanges"
PASSES, GRADIENTS, OPTIMIZER, UNATTRIBUTED = "passes", "gradients", "optimizer", "unattributed"
PRODUCTS, ATTENTION, MEMORY_BOUND, OTHER = (
    "compute_products",
    "compute_attention",
    "compute_memory_bound",
    "compute_other",
)
BUBBLE, PP_LINK_RATE, PIPELINE = "bubble", "pp_link_rate", "pipeline_waits"
HOST_GAPS, DATA, COPIES, WAITS, PROFILER = "host_gaps", "data_loading", "copies", "waits", "profiler"

TERMS = {
    PASSES: "passes, with exchanges and bubble",
    PRODUCTS: "compute: products",
    ATTENTION: "compute: attention",
    MEMORY_BOUND: "compute: memory-bound kernels",
    OTHER: "compute: other kernels",
    **{
        f"{group}_{kind}": f"{words}: {what}"
        for group, words in GROUPS.items()
        for kind, what in {
            LINK_RATE: "transfers",
            SKEW: "late ranks",
            EXCHANGES: "exchanges",
            OVERLAP: "overlap",
        }.items()
    },
    EXCHANGES: "exchanges of unnamed groups",
    BUBBLE: "pipeline bubble",
    PP_LINK_RATE: "pipeline transfers",
    PIPELINE: "pipeline bubble and transfers",
    GRADIENTS: "gradients and parameters",
    OPTIMIZER: "optimizer",
    HOST_GAPS: "GPU waits for the host",
    DATA: "waits for data",
    COPIES: "copies",
    WAITS: "launched work that waits",
    PROFILER: "the profiler",
    UNATTRIBUTED: "not attributed",
}
"""Terms of the step: measured less predicted seconds."""

BESIDE = {
    "jitter": "jitter of steady steps",
    "slow_unexplained": "slow steps now and then",
    "slow_periodic": "slow steps, regularly",
    "slow_spells": "slow spells",
    "slow_after_checkpoints": "slow steps after checkpoints",
    "slow_after_evaluations": "slow steps after evaluations",
    "warm_up": "warm-up",
    "checkpoints": "checkpoints",
    "evaluation": "evaluation",
    "start_up": "start-up",
    "interruptions": "interruptions",
    "steps_made_again": "steps made again",
    "idle": "idle, or not said",
    "counted_twice": "counted twice",
    "log_clock": "clock of the log",
}
"""Terms of the wall time: seconds per step beside the steady step."""
