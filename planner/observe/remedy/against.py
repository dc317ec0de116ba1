"""The table of what may help against each cause: a row for each, with switches, layouts and advice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.layout.candidate import Candidate
from planner.observe.case import Case
from planner.observe.observation import Cause, Remedy
from planner.observe.remedy import machine
from planner.observe.remedy.moves import (
    Move,
    after,
    consented,
    dropping,
    fewer_expert_ranks,
    fewer_recomputed,
    interleaved,
    micro_batch,
    schedules,
    sharded,
    switch,
    where,
)


@dataclass(frozen=True, slots=True)
class Against:
    """The changes of a job that may help against one cause; the fastest is taken."""

    switches: tuple[str, ...] = ()
    """Switches whose want is the cause itself."""
    helpers: tuple[str, ...] = ()
    """Switches that help against it, too."""
    layouts: tuple[Move, ...] = ()
    """Layouts near the run's own."""
    consented: tuple[Move, ...] = ()
    """Changes of what is trained or checked: offered where nothing else helps."""
    as_seen: Callable[[Candidate, Cause], Candidate | None] = lambda now, cause: now
    """The layout as the cause makes it, under which changes are priced; None where they have no price."""
    otherwise: Callable[[Case, Cause], Remedy | None] = lambda case, cause: None
    """The remedy that is no change of layout or recipe."""
    also: str = ""
    """Advice beside a change, without a price."""
    advice: str = ""
    """Advice where no plan is known that could be changed."""


AGAINST: Mapping[str, Against] = {
    "no_ep_overlap": Against(
        ("ep_overlap",), ("dispatcher", "shared_expert_overlap"),
        (
            after(switch("ep_overlap"), switch("cuda_graph")),
            after(interleaved, switch("ep_overlap")),
            after(interleaved, switch("ep_overlap"), switch("cuda_graph")),
        ),
        advice="exchanges of experts beside another micro-batch's products",
    ),
    "exposed_dp": Against(
        ("overlap_grad_reduce", "overlap_param_gather"),
        layouts=(sharded, where(lambda now: int(now.shape.dp) > 1, micro_batch(larger=False))),
        advice="exchanges of gradients and weights behind computing",
    ),
    "exposed_tp": Against(
        helpers=("tp_comm_overlap", "async_tp"),
        layouts=(where(lambda now: int(now.shape.tp) > 1, micro_batch(larger=True)),),
    ),
    "exposed_cp": Against(helpers=("cp_comm_type",)),
    "exposed_pp": Against(helpers=("p2p_overlap",)),
    "attention_kernel": Against(
        ("attention_kernel", "flash_attention"), ("deterministic",), advice="a fused kernel for attention"
    ),
    "unfused_kernels": Against(
        ("compile", "cross_entropy_fusion", "activation_fusion", "gradient_accumulation_fusion", "grouped_gemm"),
        ("sync_free_moe",), consented=(consented("fused_experts"),), advice="fused kernels, or torch.compile",
    ),
    "host_bound": Against(
        ("cuda_graph", "sync_free_moe"), ("compile", "grouped_gemm"), (micro_batch(larger=True),),
        (consented("cuda_graph"),), as_seen=lambda now, cause: machine.slow_host(now, cause) or now,
        advice="CUDA graphs, torch.compile, larger micro-batches, or free cores on the hosts",
    ),
    "bubble": Against(
        helpers=("p2p_overlap",), layouts=(schedules, micro_batch(larger=False)),
        advice="more chunks on a rank, or more micro-batches",
    ),
    "recompute_unneeded": Against(layouts=(fewer_recomputed,), advice="fewer layers recomputed"),
    "expert_imbalance": Against(
        layouts=(fewer_expert_ranks,), consented=(dropping,), as_seen=machine.uneven, otherwise=machine.of_imbalance,
        also=machine.BALANCE,
    ),
    "straggler_rank": Against(otherwise=machine.of_straggler),
    "slow_link": Against(otherwise=machine.of_link),
    "data_stall": Against(otherwise=machine.of_data),
    "clocks": Against(otherwise=machine.of_clocks),
    "fragmentation": Against(otherwise=machine.of_fragments),
    "leak": Against(otherwise=machine.of_leak),
    "checkpoint_stall": Against(otherwise=machine.of_checkpoints),
    "garbage_collection": Against(otherwise=machine.of_garbage),
}  # fmt: skip
"""A row for each cause."""
CAUSE_OF = {name: cause for cause, row in AGAINST.items() for name in row.switches}
"""The cause that a switch at the wrong value is, where it has a name; others are a `recipe`."""
RECIPE = "recipe"
"""The cause that is any other switch, which its `where` names."""


def against(cause: Cause) -> Against:
    """The row of a cause; an empty one where nothing is known to help."""
    if cause.name == RECIPE and cause.where:
        return Against((cause.where,))
    return AGAINST.get(cause.name, Against())
