"""The hypotheses as data: what may be wrong with a run, how likely before anything is seen, and the signs it leaves.

Probabilities are round numbers: a sign that a cause nearly always leaves has 0.9, one that it leaves in one of its
forms 0.3 to 0.7. What a cause does not speak of is as likely as without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One cause that a run may have."""

    name: str
    says: str
    """The cause in words, as a report names it."""
    prior: float
    """Probability before anything is seen: of a hundred jobs that somebody looks at, how many have it."""
    source: str
    """The reason for the prior."""
    leaves: Mapping[str, float] = field(default_factory=dict)
    """Probability of each sign where this cause alone is at work."""
    axis: str = ""
    """The axis of the grid without which it cannot be."""
    is_choice: bool = False
    """True for what the job was told to do: its plan, priced the same way, does not count as a run as it should be."""


HYPOTHESES: Mapping[str, Hypothesis] = {
    row.name: row
    for row in (
        Hypothesis(
            "straggler_rank", "one rank is slower than the others", 0.05,
            "0.3 to 1 slow node per 1,000 GPU-days; BLOOM's one bad GPU took 6% of the job",
            {"computes_longer": 0.7, "comes_late": 0.4, "stage_longer": 0.5, "ranks_apart": 0.7, "longer_bubble": 0.4,
             "slower": 0.8, "exposed_tp": 0.2, "exposed_dp": 0.2, "passes_longer": 0.3, "spells": 0.2, "uneven": 0.1},
        ),
        Hypothesis(
            "slow_link", "a link is slower than it should be", 0.04,
            "cables, ports and routes are the most frequent repairs of networks; half a group's links set its rate",
            {"slow_exchange": 0.9, "exposed_tp": 0.3, "exposed_cp": 0.2, "exposed_ep": 0.4, "exposed_dp": 0.4,
             "longer_bubble": 0.2, "slower": 0.8, "passes_longer": 0.3, "uneven": 0.2, "spells": 0.2},
        ),
        Hypothesis(
            "no_ep_overlap", "exchanges of experts are not hidden", 0.05,
            "off by default; 15 to 24% of a step where it is (Megatron-Bridge, pull requests 5094 and 3862)",
            {"exposed_ep": 0.9, "unhidden_ep": 0.9, "slower": 0.8, "passes_longer": 0.4}, axis="ep",
        ),
        Hypothesis(
            "host_bound", "the host launches work too slowly", 0.05,
            "usual for mixtures and small micro-batches without CUDA graphs",
            {"host_gaps": 0.95, "short_kernels": 0.6, "slower": 0.8, "passes_longer": 0.6, "uneven": 0.2},
        ),
        Hypothesis(
            "unfused_kernels", "kernels are not fused", 0.03, "a fusion that is off, or an extension that is missing",
            {"small_slower": 0.9, "many_small": 0.6, "slower": 0.7, "passes_longer": 0.7, "short_kernels": 0.3},
        ),
        Hypothesis(
            "attention_kernel", "attention runs in a slow kernel", 0.02, "a backend that falls back without an error",
            {"attention_slower": 0.9, "softmax_apart": 0.5, "slower": 0.7, "passes_longer": 0.7},
        ),
        Hypothesis(
            "exposed_dp", "gradients and parameters are not exchanged behind computing", 0.04,
            "off by default in Megatron-LM (--overlap-grad-reduce, --overlap-param-gather)",
            {"exposed_dp": 0.95, "unhidden_dp": 0.8, "slower": 0.8}, axis="dp",
        ),
        Hypothesis(
            "expert_imbalance", "experts get uneven numbers of tokens", 0.05,
            "routers balance late in training, and never fully",
            {"late_changes": 0.8, "experts_differ": 0.5, "computes_longer": 0.4, "ranks_apart": 0.4, "exposed_ep": 0.6,
             "slower": 0.7, "passes_longer": 0.4, "above_plan": 0.3, "uneven": 0.2}, axis="ep",
        ),
        Hypothesis(
            "data_stall", "training waits for data", 0.04, "loaders with few workers, or slow storage",
            {"waits_for_data": 0.7, "data_timer": 0.8, "begins_late": 0.6, "comes_late": 0.2, "slower": 0.7,
             "uneven": 0.3, "at_times": 0.3, "regularly": 0.2, "host_gaps": 0.2},
        ),
        Hypothesis(
            "clocks", "all GPUs run at a lower clock", 0.02,
            "1 to 2% by day and night (Llama 3); caps of power and heat more",
            {"all_slower": 0.9, "passes_longer": 0.9, "slower": 0.8, "spells": 0.2, "drifting": 0.15},
        ),
        Hypothesis(
            "bubble", "stages wait for each other longer than their order says", 0.04,
            "transfers that block, or another order than was planned",
            {"longer_bubble": 0.9, "large_bubble": 0.5, "slower": 0.7}, axis="pp",
        ),
        Hypothesis(
            "fragmentation", "the allocator's memory is in fragments", 0.04,
            "usual where sizes change, unless segments expand",
            {"reserved": 0.8, "retried": 0.5, "refused": 0.3, "above_plan": 0.3, "at_times": 0.2},
        ),
        Hypothesis(
            "leak", "memory is kept that is not needed any more", 0.02, "a tensor that is logged with its graph",
            {"grows": 0.95, "above_plan": 0.2, "drifting": 0.15},
        ),
        Hypothesis(
            "recompute_unneeded", "layers are recomputed although memory is left", 0.05,
            "switched on for another batch or GPU, and kept",
            {"recomputes_with_room": 0.95}, is_choice=True,
        ),
        Hypothesis(
            "checkpoint_stall", "training waits for its checkpoints", 0.04,
            "written by the ranks themselves, and not behind their work",
            {"saving": 0.95},
        ),
        Hypothesis(
            "garbage_collection", "Python collects garbage at different times on different ranks", 0.03,
            "the reason for --manual-gc in Megatron-LM", {"collecting": 0.9, "uneven": 0.2},
        ),
    )
}  # fmt: skip
"""Every hypothesis by its name; the likeliest come first where nothing tells them apart."""
