"""The hypotheses as data: what may be wrong with a run, how likely before anything is seen, and the signs it leaves.

A cause has one form or several, each of which leaves its own signs. Probabilities are round numbers: a sign that a
form nearly always leaves has 0.9, one that the files often hide 0.5. What a form does not speak of is as likely as
without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SLOW = {"slower": 0.6, "slower_run": 0.95}
"""An 80% interval of a price hides the smaller half of what is worth a word; the spread of an earlier run does not."""
PASSES = 0.4
"""Passes are told to be longer from 8% on, as prices of them err: that hides as much."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way in which a cause shows."""

    prior: float
    """Probability before anything is seen: of a hundred jobs that somebody looks at, how many have it."""
    leaves: Mapping[str, float]
    """Probability of each sign where this alone is at work."""
    axis: str = ""
    """The axis of the grid without which it cannot be."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One cause that a run may have."""

    name: str
    says: str
    """The cause in words, as a report names it; `one rank` in it stands for the rank or stage, if one is known."""
    source: str
    """The reason for its prior."""
    forms: tuple[Form, ...]
    is_choice: bool = False
    """True for what the job was told to do, so that the plan's own step has it."""

    def at(self, where: str) -> str:
        """The cause in words, of a rank or stage that is known."""
        if where.split(" ")[0] in ("rank", "stage"):
            return self.says.replace("one rank", where) if "one rank" in self.says else f"{where}: {self.says}"
        return f"{self.says} ({where})" if where else self.says

    @property
    def prior(self) -> float:
        """Probability of any of its forms, which seldom come together."""
        return sum(form.prior for form in self.forms)


HYPOTHESES: Mapping[str, Hypothesis] = {
    row.name: row
    for row in (
        Hypothesis(
            "straggler_rank", "one rank is slower than the others",
            "0.3 to 1 slow node per 1,000 GPU-days; BLOOM's one bad GPU took 6% of the job",
            (
                Form(0.03, {"computes_longer": 0.9, "stage_longer": 0.4, "ranks_apart": 0.8,
                            "longer_bubble": 0.3, "exposed_tp": 0.2, "exposed_dp": 0.2,
                            "passes_longer": 0.3, **SLOW}),
                Form(0.02, {"comes_late": 0.9, "long_tp": 0.2, "long_dp": 0.2, "longer_bubble": 0.3,
                            "exposed_dp": 0.2, "exposed_tp": 0.2, "uneven": 0.2, **SLOW}),
                # all ranks of a stage wait for the slow one in their exchanges
                Form(0.02, {"stage_longer": 0.9, "ranks_apart": 0.8, "longer_bubble": 0.4, "passes_longer": 0.2,
                            **SLOW}, "pp"),
            ),
        ),
        Hypothesis(
            "slow_link", "a link is slower than it should be",
            "cables, ports and routes are what networks have repaired most; the slowest link sets a group's rate",
            (
                *(
                    Form(0.01, {f"slow_{group}": 0.9, f"long_{group}": 0.9, f"exposed_{group}": 0.8,
                                "slower_than_before": 0.8, **SLOW} | inside, group)
                    for group, inside in (
                        ("tp", {"passes_longer": PASSES}), ("cp", {"passes_longer": PASSES}),
                        ("ep", {"passes_longer": PASSES, "unhidden_ep": 0.7}), ("dp", {"unhidden_dp": 0.7}),
                    )
                ),
                Form(0.01, {"longer_bubble": 0.8, "slower_than_before": 0.8, **SLOW}, "pp"),
            ),
        ),
        Hypothesis(
            "no_ep_overlap", "exchanges of experts are not hidden",
            "off by default; 15 to 24% of a step where it is (Megatron-Bridge, pull requests 5094 and 3862)",
            (
                Form(0.05, {"exposed_ep": 0.9, "unhidden_ep": 0.9, "off_no_ep_overlap": 0.8, **SLOW,
                            "passes_longer": PASSES}, "ep"),
            ),
        ),
        Hypothesis(
            "host_bound", "the host launches work too slowly",
            "usual for mixtures and small micro-batches without CUDA graphs",
            (
                Form(0.05, {"host_gaps": 0.95, "short_kernels": 0.4, "off_host_bound": 0.5, **SLOW,
                            "passes_longer": PASSES}),
            ),
        ),
        Hypothesis(
            "unfused_kernels", "kernels are not fused", "a fusion that is off, or an extension that is missing",
            (
                Form(0.04, {"small_slower": 0.9, "many_small": 0.3, "off_unfused_kernels": 0.7, **SLOW,
                            "passes_longer": PASSES}),
            ),
        ),
        Hypothesis(
            "attention_kernel", "attention runs in a slow kernel", "a backend that falls back without an error",
            (
                Form(0.02, {"attention_slower": 0.95, "off_attention_kernel": 0.5, **SLOW,
                            "passes_longer": PASSES}),
                # in products and a softmax, whose scores are kept
                Form(0.02, {"softmax_apart": 0.95, "off_attention_kernel": 0.8, "small_slower": 0.3,
                            "many_small": 0.2, "above_plan": 0.4, **SLOW, "passes_longer": PASSES}),
            ),
        ),
        Hypothesis(
            "exposed_dp", "gradients and parameters are not exchanged behind computing",
            "off by default in Megatron-LM (--overlap-grad-reduce, --overlap-param-gather)",
            (
                Form(0.04, {"exposed_dp": 0.95, "unhidden_dp": 0.8, "off_exposed_dp": 0.8, **SLOW}, "dp"),
            ),
        ),
        Hypothesis(
            "expert_imbalance", "experts get uneven numbers of tokens", "routers balance late in training, never fully",
            (
                Form(0.04, {"late_changes": 0.9, "slow_ep": 0.5, "exposed_ep": 0.5, "passes_longer": PASSES,
                            **SLOW, "ranks_apart": 0.3, "above_plan": 0.3, "uneven": 0.2}, "ep"),
                Form(0.02, {"computes_longer": 0.8, "experts_differ": 0.9, "exposed_ep": 0.3, "passes_longer": PASSES,
                            "ranks_apart": 0.7, **SLOW, "above_plan": 0.3}, "ep"),
            ),
        ),
        Hypothesis(
            "data_stall", "training waits for data", "loaders with few workers, slow storage",
            (
                Form(0.03, {"waits_for_data": 0.7, "data_timer": 0.9, "begins_late": 0.8, **SLOW,
                            "longer_bubble": 0.4, "uneven": 0.3, "at_times": 0.3, "regularly": 0.2}),
                # the loader of one rank
                Form(0.01, {"waits_for_data": 0.8, "data_timer": 0.8, "comes_late": 0.3, "longer_bubble": 0.3,
                            "uneven": 0.3, "at_times": 0.3, "regularly": 0.3, **SLOW}),
            ),
        ),
        Hypothesis(
            "clocks", "all GPUs run at a lower clock",
            "1 to 2% between day and night (Llama 3); caps of power and heat take more",
            (
                Form(0.03, {"all_slower": 0.9, "passes_longer": 0.6, **SLOW, "spells": 0.2,
                            "drifting": 0.15}),
            ),
        ),
        Hypothesis(
            "bubble", "stages wait for each other longer than their order says",
            "transfers that block, or another order than was planned",
            (Form(0.04, {"longer_bubble": 0.95, "large_bubble": 0.4, **SLOW}, "pp"),),
        ),
        Hypothesis(
            "fragmentation", "the allocator's memory is in fragments",
            "usual where sizes change, unless segments expand",
            (
                Form(0.04, {"reserved": 0.9, "retried": 0.4, "above_plan": 0.3, "at_times": 0.2}),
                Form(0.01, {"refused": 0.9, "reserved": 0.5, "retried": 0.7}),
                Form(0.01, {"retried": 0.95, "reserved": 0.5, "at_times": 0.4}),
            ),
        ),
        Hypothesis(
            "leak", "memory is kept that is not needed any more", "a tensor that is logged with its graph",
            (Form(0.03, {"grows": 0.95, "above_plan": 0.2, "drifting": 0.15}),),
        ),
        Hypothesis(
            "recompute_unneeded", "layers are recomputed although memory is left",
            "switched on for another batch or GPU, and kept",
            (Form(0.05, {"recomputes_with_room": 0.95}),), is_choice=True,
        ),
        Hypothesis(
            "recipe", "a switch has a slower value than it might", "defaults of trainers, which nobody looked at",
            (Form(0.05, {"off_recipe": 0.95, **SLOW}),), is_choice=True,
        ),
        Hypothesis(
            "checkpoint_stall", "training waits for its checkpoints", "written by the ranks, and not behind their work",
            (Form(0.03, {"saving": 0.95}),),
        ),
        Hypothesis(
            "garbage_collection", "Python collects garbage at different times on different ranks",
            "the reason for --manual-gc in Megatron-LM", (Form(0.03, {"collecting": 0.9, "uneven": 0.2}),),
        ),
    )
}  # fmt: skip
"""Every hypothesis by its name."""
