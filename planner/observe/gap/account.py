"""An account of a step, one rank's seconds by what it did: as a plan prices it, or a log times it; and differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from planner.layout.candidate import Candidate
from planner.layout.seconds import Pipeline, exchanged_dp_s
from planner.layout.step import LATE, compute_by_kernels, exchanges_of_passes
from planner.observe.describe import DATA_TIMERS
from planner.observe.observation import Observation, Term

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
EXCHANGE_TERMS = {
    ("tp", LINK_RATE): "tp_link_rate", ("tp", SKEW): "tp_skew", ("tp", EXCHANGES): "tp_exchanges",
    ("tp", OVERLAP): "tp_overlap", ("cp", LINK_RATE): "cp_link_rate", ("cp", SKEW): "cp_skew",
    ("cp", EXCHANGES): "cp_exchanges", ("cp", OVERLAP): "cp_overlap", ("ep", LINK_RATE): "ep_link_rate",
    ("ep", SKEW): "ep_skew", ("ep", EXCHANGES): "ep_exchanges", ("ep", OVERLAP): "ep_overlap",
    ("dp", LINK_RATE): "dp_link_rate", ("dp", SKEW): "dp_skew", ("dp", EXCHANGES): "dp_exchanges",
    ("dp", OVERLAP): "dp_overlap",
}  # fmt: skip
"""The term of each kind of seconds of a group's exchanges; expert tensor parallelism counts with ep, as in a plan."""
STEP_TERMS = {
    PASSES: "passes, with exchanges and bubble",
    PRODUCTS: "compute: products",
    ATTENTION: "compute: attention",
    MEMORY_BOUND: "compute: memory-bound kernels",
    OTHER: "compute: other kernels",
    "tp_link_rate": "tensor-parallel: transfers",
    "tp_skew": "tensor-parallel: late ranks",
    "tp_exchanges": "tensor-parallel: exchanges",
    "tp_overlap": "tensor-parallel: overlap",
    "cp_link_rate": "context-parallel: transfers",
    "cp_skew": "context-parallel: late ranks",
    "cp_exchanges": "context-parallel: exchanges",
    "cp_overlap": "context-parallel: overlap",
    "ep_link_rate": "expert-parallel: transfers",
    "ep_skew": "expert-parallel: late ranks",
    "ep_exchanges": "expert-parallel: exchanges",
    "ep_overlap": "expert-parallel: overlap",
    "dp_link_rate": "data-parallel: transfers",
    "dp_skew": "data-parallel: late ranks",
    "dp_exchanges": "data-parallel: exchanges",
    "dp_overlap": "data-parallel: overlap",
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
"""Terms of the step, measured less predicted seconds, in the order of a waterfall, and how people call them."""
WALL_TERMS = {
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


@dataclass(frozen=True, slots=True)
class GroupExchanges:
    """All exchanges of one group on a rank in a step."""

    busy_s: float
    """Seconds in which one of them runs, waits for other ranks included."""
    hidden_s: float
    """Seconds of these in which the rank computes, or another group's exchange shows."""
    late_s: float | None = None
    """Seconds of these before the last rank has come; None where nothing tells."""


@dataclass(frozen=True, slots=True)
class Account:
    """The seconds of a step of one rank."""

    where: str
    """The place that the numbers come from, as a sentence goes on: `in the trace of rank 3`."""
    parts: Mapping[str, float]
    """Seconds by term, of what is one number on either side."""
    exchanges: Mapping[str, GroupExchanges] = field(default_factory=dict)
    """Exchanges by group."""
    details: Mapping[str, str] = field(default_factory=dict)
    """More words on a part."""

    @property
    def total_s(self) -> float:
        """Seconds of all parts, and of exchanges as far as they show."""
        return sum(self.parts.values()) + sum(one.busy_s - one.hidden_s for one in self.exchanges.values())


_NONE = GroupExchanges(0.0, 0.0, 0.0)


def differences(measured: Account, expected: Account) -> Iterator[Term]:
    """Terms that add up to the total of what was measured less the total of what was expected."""
    for name in dict.fromkeys((*expected.parts, *measured.parts)):
        was_s, is_s = expected.parts.get(name, 0.0), measured.parts.get(name, 0.0)
        details = dict.fromkeys(side.details[name] for side in (measured, expected) if name in side.details)
        more = "".join(f"; {words}" for words in details)
        said = f"{_both('', is_s, measured, was_s, expected)}{more}"
        yield Term(term=name, seconds=is_s - was_s, evidence=said, recoverable_s=max(0.0, is_s - was_s))
    for group in dict.fromkeys((*expected.exchanges, *measured.exchanges)):
        pair = measured.exchanges.get(group, _NONE), expected.exchanges.get(group, _NONE)
        yield from _of_exchanges(group, pair[0], pair[1], measured, expected)


def _of_exchanges(
    group: str, found: GroupExchanges, wanted: GroupExchanges, measured: Account, expected: Account
) -> list[Term]:
    """Transfers, waits for late ranks and overlap of a group: what shows of them less what was to show.

    Δshown = Δtransfers + Δwaits − Δhidden. A longer transfer of which more hides, and a shorter one of which less does,
    cost nothing as far as they cancel.
    """
    told: dict[str, tuple[str, float, float]] = {}
    if found.late_s is None or wanted.late_s is None:
        told[EXCHANGES] = ("transfers and waits for other ranks together took ", found.busy_s, wanted.busy_s)
    else:
        told[LINK_RATE] = ("transfers took ", found.busy_s - found.late_s, wanted.busy_s - wanted.late_s)
        told[SKEW] = ("waits for late ranks took ", found.late_s, wanted.late_s)
    raw = {kind: is_s - was_s for kind, (_, is_s, was_s) in told.items()}
    shown = netted(raw | {OVERLAP: wanted.hidden_s - found.hidden_s}, OVERLAP)
    hid = (
        f"{in_seconds(found.hidden_s)} of {in_seconds(found.busy_s)} hid behind computing {measured.where}, "
        f"{in_seconds(wanted.hidden_s)} of {in_seconds(wanted.busy_s)} {expected.where}"
    )
    says = {kind: _both(words, is_s, measured, was_s, expected) for kind, (words, is_s, was_s) in told.items()}
    says = {kind: f"{text}; {hid}" if shown[kind] != raw[kind] else text for kind, text in says.items()}
    says[OVERLAP] = hid
    return [
        Term(term=EXCHANGE_TERMS[group, kind], seconds=cost_s, evidence=says[kind], recoverable_s=max(0.0, cost_s))
        for kind, cost_s in shown.items()
    ]


def netted(terms: Mapping[str, float], name: str) -> dict[str, float]:
    """The terms with the one of that name set against those of the other sign, in proportion to them.

    >>> netted({"rate": 1.0, "overlap": -0.75}, "overlap")
    {'rate': 0.25, 'overlap': 0.0}
    """
    net, own = dict(terms), terms[name]
    opposite = {other: value for other, value in terms.items() if other != name and value * own < 0}
    if not opposite:
        return net
    total = sum(opposite.values())
    share = min(1.0, abs(own / total))
    for other, value in opposite.items():
        net[other] = value * (1 - share)
    net[name] = own + share * total if share == 1.0 else 0.0
    return net


def _both(words: str, is_s: float, measured: Account, was_s: float, expected: Account) -> str:
    return f"{words}{in_seconds(is_s)} {measured.where}, {in_seconds(was_s)} {expected.where}"


def in_seconds(value_s: float) -> str:
    """Seconds as evidence has them: `0.5512 s`."""
    return f"{value_s:.4g} s"


def planned(candidate: Candidate, pipeline: Pipeline, rank: int, where: str) -> Account:
    """The account of a pipeline rank; it adds up to the candidate's step."""
    pricing, shape, cost = candidate.pricing, candidate.shape, candidate.rank_costs[rank]
    kernels, outside = compute_by_kernels(candidate, rank), candidate.outside
    busy_s, transfer_s = float(pipeline.busy_s[rank]), float(pipeline.transfer_s[rank])
    issued_s = busy_s - candidate.num_microbatches * float(cost.total_s)
    alone_s, uneven_s = float(pricing.unpaired_s(shape)), float(pricing.uneven_s(shape))
    step_overhead_s = float(pricing.runtime.step_overhead_s)
    parts = {
        PRODUCTS: kernels["products_s"],
        ATTENTION: kernels["attention_s"],
        MEMORY_BOUND: kernels["memory_bound_s"],
        OTHER: 0.0,
        BUBBLE: pipeline.makespan_s - busy_s - transfer_s,
        PP_LINK_RATE: transfer_s,
        OPTIMIZER: float(cost.optimizer_s),
        HOST_GAPS: kernels["host_s"] + issued_s + step_overhead_s,
        COPIES: 0.0,
        # ranks end their step together: with the slowest optimizer, and the one whose documents take most attention
        WAITS: outside.optimizer_s - float(cost.optimizer_s) + uneven_s,
        EXCHANGES: outside.tail_s - alone_s - uneven_s - step_overhead_s,
    }
    exchanges = _inside(candidate, rank, alone_s)
    whole_s = max(exchanged_dp_s(shape, cost), outside.exposed_dp_s)
    if whole_s:
        exchanges["dp"] = GroupExchanges(whole_s, whole_s - outside.exposed_dp_s, 0.0)
    return Account(where, parts, exchanges)


def _inside(candidate: Candidate, rank: int, alone_s: float) -> dict[str, GroupExchanges]:
    """The exchanges inside a rank's passes; those that have no other micro-batch beside them show."""
    cost, times = candidate.rank_costs[rank], candidate.num_microbatches
    passes = exchanges_of_passes(candidate)
    own = [
        one
        for (stage, kind), ones in passes.items()
        for one in ones
        if candidate.placement[stage] == rank and kind in "FB"
    ]
    inside_s = {
        "tp": cost.tp_forward_s + cost.tp_backward_s,
        "cp": cost.cp_forward_s + cost.cp_backward_s,
        "ep": cost.ep_forward_s + cost.ep_backward_s,
    }
    found = {}
    for group, seconds in inside_s.items():
        shown_s = times * float(seconds)
        hidden_s = times * sum(one.hidden_s for one in own if one.group == group)
        late_s = times * sum(one.exposed_s for one in own if one.group == group and one.name == LATE[group])
        if group == "ep":
            moved_s = min(alone_s, hidden_s)
            shown_s, hidden_s, late_s = shown_s + alone_s, hidden_s - moved_s, 0.0
        if shown_s or hidden_s:
            found[group] = GroupExchanges(shown_s + hidden_s, hidden_s, late_s)
    return found


_TIMED = {
    PASSES: ("forward_backward_s", "forward_s", "backward_s"),
    GRADIENTS: ("gradients_s", "parameters_s"),
    OPTIMIZER: ("optimizer_s",),
}
"""The seconds of an observation's breakdown that each term adds up."""
_INSIDE_PASSES = ("compute_s", "tp_comm_s", "cp_comm_s", "ep_comm_s")
_BETWEEN_PASSES = ("pp_comm_s", "bubble_s")
_LEAST_COVERED = 0.5
"""Timers that cover less of a step are of micro-batches, or of parts of it."""


def timed(observation: Observation, where: str) -> Account | None:
    """The account of a run by its timers; None where they do not tell passes apart, or cover too little."""
    breakdown, step_s = observation.breakdown, observation.step_s or 0.0
    parts = {
        term: sum(breakdown[name] for name in names if name in breakdown)
        for term, names in _TIMED.items()
        if any(name in breakdown for name in names)
    }
    if PASSES not in parts or sum(parts.values()) < _LEAST_COVERED * step_s:
        return None
    waited_s = max((timer.max_s for timer in observation.timers if timer.name in DATA_TIMERS), default=0.0)
    if 0 < waited_s < parts[PASSES]:
        parts |= {PASSES: parts[PASSES] - waited_s, DATA: waited_s}
    return Account(where, parts)


def priced(breakdown: Mapping[str, float], tail_s: float, observed: Mapping[str, float], where: str) -> Account:
    """The account of a plan's breakdown, with the terms that timers tell of an observed one.

    A timer of both passes together holds the waits between them; `tail_s` is the end of a step, behind the optimizer.
    """
    waits = _BETWEEN_PASSES if "forward_backward_s" in observed else ()
    issued_s = max(0.0, breakdown.get("overhead_s", 0.0) - tail_s)
    parts = {PASSES: sum(breakdown.get(name, 0.0) for name in (*_INSIDE_PASSES, *waits)) + issued_s}
    if any(name in observed for name in _TIMED[GRADIENTS]):
        parts[GRADIENTS] = breakdown.get("exposed_dp_s", 0.0)
    if OPTIMIZER + "_s" in observed:
        parts[OPTIMIZER] = breakdown.get("optimizer_s", 0.0)
    return Account(where, parts)
