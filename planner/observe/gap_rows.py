"""The table of the gap: a row for each thing that may make a run slow or take its memory.

A row has the evidence that a file must show, what to record where no file does, and what to do about it, which the
planner prices where it can. No row is named on the seconds alone: that a step is slow says nothing of why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.observe.case import (
    Layouts,
    ObservedCase,
    chunked,
    fewer_recomputed,
    remedy_of_change,
    running,
    slower_settings,
)
from planner.observe.evidence import (
    Finding,
    RunFiles,
    collecting,
    data_waits,
    fragments,
    gradient_timers,
    growing_memory,
    host_gaps,
    hung_collective,
    low_clocks,
    out_of_memory,
    saving,
    slow_attention,
    slow_link,
    slow_rank,
    standing_stages,
    uneven_experts,
    unhidden,
)
from planner.observe.observation import GapCause, GapRemedy, Term, Verdict
from planner.specs.units import GIB

_PROFILE = "torch.profiler for 5 steps with profiler.step()"
PLAN = "hold it against its plan: plan observe … --plan plan.json, or --model, --gpus and the layout"
ONE_TRACE = f"a trace of one rank: {_PROFILE}, then plan observe rank0.json.gz"
STAGE_TRACES = f"traces of all ranks of one stage: {_PROFILE} on each, then plan observe rank*.json.gz"
PIPELINE_TRACES = f"traces of a rank of every stage: {_PROFILE} on each, then plan observe rank*.json.gz"
BATCH_TIMER = "a timer of batches: --timing-log-level 2, or a record_function around the loader in a trace"
LONG_LOG = "a log of a hundred steps with a line for each (--log-interval 1)"
MEMORY_LOG = "lines of memory: --log-memory-interval 10, or torch.cuda.memory_stats() every few steps"
SNAPSHOT = "a memory snapshot (torch.cuda.memory._record_memory_history(), _dump_snapshot()) for pytorch.org/memory_viz"
ARGUMENTS = "the arguments that the trainer prints at its start, in the same log"
DUMPS = "flight-recorder dumps of all ranks (TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1) for torchfrtrace"
OF_MEMORY = ("fragmentation", "leak", "out_of_memory")
"""Rows that answer for memory and for no seconds."""


@dataclass(frozen=True, slots=True)
class GapRow:
    """One thing that may be wrong with a run."""

    name: str
    says: str
    """The row in words; `one rank` in it stands for the rank or stage, where one is known."""
    terms: tuple[str, ...]
    """Terms of the waterfall that hold its seconds."""
    sees: tuple[Callable[[RunFiles], Finding | None], ...]
    """Look for its mechanism, one after the other; none where only the log's own arguments can show it."""
    record: str
    """How to record what would show it."""
    helps: str
    """The advice about it, in words; empty where the priced change says it."""
    switches: tuple[str, ...] = ()
    """Switches whose other value may help, priced; a log that states a slower one is evidence."""
    layouts: Layouts | None = None
    """Layouts near the run's own that may help, priced."""
    options: tuple[str, ...] = ()
    """Words for the trainer's environment."""
    beside: bool = False
    """True where its evidence is a number beside the price: without a gap that it explains it says nothing."""

    def at(self, where: str) -> str:
        """The row in words, of a rank or stage that is known."""
        if where.split(" ")[0] in ("rank", "stage"):
            return self.says.replace("one rank", where) if "one rank" in self.says else f"{where}: {self.says}"
        return f"{self.says} ({where})" if where else self.says


def _recomputed_with_room(files: RunFiles) -> Finding | None:
    """Layers recomputed although the peak in the files leaves the memory that keeping their activations takes."""
    now, peak = running(files.case), files.case.observation.peak_memory_bytes
    if now is None or peak is None:
        return None
    best = min(fewer_recomputed(now), key=lambda one: one.step_s, default=now)
    gain_s = now.step_s - best.step_s
    free_gib = (now.pricing.cluster.hardware.memory_bytes - peak) / GIB
    if gain_s < 0.05 * now.step_s:
        return None
    says = f"the peak of {peak / GIB:.1f} GiB leaves {free_gib:.1f} GiB, and recomputing less saves {gain_s:.4g} s"
    return Finding(f"{says} of a step", gain_s)


GAP_ROWS: Mapping[str, GapRow] = {
    row.name: row
    for row in (
        GapRow("straggler_rank", "one rank is slower than the others",
               ("tp_skew", "cp_skew", "ep_skew", "dp_skew", "waits", "pipeline_waits"), (slow_rank,),
               STAGE_TRACES, "look at what runs on its node, or put another one in its place"),
        GapRow("slow_link", "a link is slower than it should be",
               ("tp_link_rate", "cp_link_rate", "ep_link_rate", "dp_link_rate"), (slow_link,),
               STAGE_TRACES, "measure the links with nccl-tests or rccl-tests (all_reduce_perf -b 64M -e 2G -f 2)",
               beside=True),
        GapRow("no_ep_overlap", "exchanges of experts are not hidden", ("ep_overlap", "ep_exchanges"),
               (unhidden("ep"),), ONE_TRACE,
               "exchanges of experts beside another micro-batch's products",
               ("ep_overlap", "dispatcher", "shared_expert_overlap"), beside=True),
        GapRow("exposed_dp", "gradients and parameters are not exchanged behind computing",
               ("dp_overlap", "dp_exchanges", "gradients"), (unhidden("dp"), gradient_timers),
               ONE_TRACE, "exchanges of gradients and weights behind computing",
               ("overlap_grad_reduce", "overlap_param_gather"), beside=True),
        GapRow("host_bound", "the host launches work too slowly", ("host_gaps",), (host_gaps,), ONE_TRACE,
               "CUDA graphs, torch.compile, larger micro-batches, or free cores on the hosts",
               ("cuda_graph", "sync_free_moe"), beside=True),
        GapRow("attention_kernel", "attention runs in a slow kernel", ("compute_attention",), (slow_attention,),
               ONE_TRACE, "a fused kernel for attention", ("attention_kernel", "flash_attention"), beside=True),
        GapRow("unfused_kernels", "kernels are not fused", ("compute_memory_bound", "compute_other"), (),
               ARGUMENTS, "fused kernels, or torch.compile",
               ("compile", "cross_entropy_fusion", "activation_fusion", "gradient_accumulation_fusion",
                "grouped_gemm"), beside=True),
        GapRow("clocks", "GPUs run at a lower clock", ("compute_products",), (low_clocks,),
               "clocks while it runs: nvidia-smi -q -d CLOCK,PERFORMANCE,POWER (amd-smi metric --clock --power)",
               "look at clocks, heat and power limits while it runs"),
        GapRow("expert_imbalance", "experts get uneven numbers of tokens", ("ep_skew",), (uneven_experts,),
               STAGE_TRACES, "balance the experts' load, by a larger auxiliary loss or by biases"),
        GapRow("bubble", "stages wait for each other longer than their order says", ("pipeline_waits",),
               (standing_stages,), PIPELINE_TRACES, "more chunks on a rank, or more micro-batches", (), chunked,
               beside=True),
        GapRow("data_stall", "training waits for data", ("data_loading",), (data_waits,), BATCH_TIMER,
               "more processes that load data (num_workers), or data on a local disk"),
        GapRow("recompute_unneeded", "layers are recomputed although memory is left", (), (_recomputed_with_room,),
               MEMORY_LOG, "fewer layers recomputed", (), fewer_recomputed),
        GapRow("recipe", "a switch has a slower value than it might", (), (), ARGUMENTS, ""),
        GapRow("checkpoint_stall", "training waits for its checkpoints", ("checkpoints", "slow_after_checkpoints"),
               (saving,), LONG_LOG, "checkpoints written beside the training (--async-save)"),
        GapRow("garbage_collection", "Python collects garbage at different times on different ranks",
               ("slow_periodic",), (collecting,), LONG_LOG,
               "garbage collected by all ranks at the same steps (--manual-gc --manual-gc-interval 100)"),
        GapRow("fragmentation", "the allocator's memory is in fragments", (), (fragments,), SNAPSHOT,
               "segments grow in place of new ones", options=("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",)),
        GapRow("leak", "memory is kept that is not needed any more", (), (growing_memory,), MEMORY_LOG,
               "a memory snapshot of a few steps names them (pytorch.org/memory_viz); "
               "tensors kept from step to step (losses without .item()) are the rule"),
        GapRow("out_of_memory", "memory ran out", (), (out_of_memory,), SNAPSHOT,
               "plan memory plan.json shows what fills the fullest stage; recompute more, or shard more"),
        GapRow("hang", "a collective never ended", (), (hung_collective,), DUMPS,
               "torchfrtrace reads the flight-recorder dumps of all ranks, which name the rank that never came"),
    )
}  # fmt: skip
"""Every row by the name that `causes` has; another is a row here and a function in `evidence`."""
LEAST_PART, LEAST_GAP = 0.25, 0.04
"""Part of the gap that a row has to explain where its evidence is a number beside a price, twice as much inside of the
predicted interval; and the share of a step that a gap has to have there."""
_MAKE_STAGES_WAIT = ("straggler_rank", "data_stall", "no_ep_overlap", "expert_imbalance", "slow_link")
"""Rows for which stages wait: their pipeline's bubble is no other thing."""
_SHOWN_BY_PRICE = ("recompute_unneeded", "recipe")
"""Rows that are a choice of the job, so that the plan's own step may have them, too."""


def shown_rows(case: ObservedCase, verdict: Verdict | None = None) -> tuple[GapCause, ...]:
    """The rows whose mechanism the files show, the one that takes most first, each with its remedy."""
    files, settings = RunFiles(case), slower_settings(case, _ROW_OF_SWITCH)
    causes = []
    for row in GAP_ROWS.values():
        found = next((one for see in row.sees if (one := see(files)) is not None), None)
        if found is not None and row.beside and not _explains(case, found, verdict):
            found = None
        stated = [Finding(term.evidence, term.seconds, name) for name, term in settings.get(row.name, ())]
        if row.name == "recipe":
            causes += [_cause(case, row, one, (one.where,)) for one in stated]
        elif found is not None or stated:
            one = found or Finding("; ".join(each.says for each in stated), sum(each.seconds or 0.0 for each in stated))
            causes.append(_cause(case, row, one, row.switches))
    if any(cause.name in _MAKE_STAGES_WAIT for cause in causes):
        causes = [cause for cause in causes if cause.name != "bubble"]
    return tuple(sorted(causes, key=lambda cause: -(cause.seconds or 0.0)))


def _explains(case: ObservedCase, found: Finding, verdict: Verdict | None) -> bool:
    """True where the step is longer than predicted, and the finding takes a fair part of that; alone, of anything."""
    step_s, prediction = case.observation.step_s, case.prediction
    if prediction is None or step_s is None:
        return True
    gap_s = step_s - prediction.step_s
    if found.seconds is None or verdict == "slow":
        return verdict == "slow" and (found.seconds is None or found.seconds >= LEAST_PART * gap_s)
    return gap_s > LEAST_GAP * step_s and found.seconds >= 2 * LEAST_PART * gap_s


_ROW_OF_SWITCH = {name: row.name for row in GAP_ROWS.values() for name in row.switches}


def _cause(case: ObservedCase, row: GapRow, found: Finding, switches: Sequence[str]) -> GapCause:
    """The row as an answer has it; its seconds are no more than the step is above what was predicted at least.

    Where no change of the job is priced there is the advice, and the step without the row, never below the prediction.
    """
    prediction, step_s, seconds = case.prediction, case.observation.step_s, found.seconds
    if prediction is not None and step_s is not None and seconds is not None and row.name not in _SHOWN_BY_PRICE:
        low_s = (prediction.step_s_interval or (prediction.step_s, 0.0))[0]
        seconds = min(seconds, max(0.0, step_s - low_s))
    remedy = remedy_of_change(case, switches, row.layouts)
    if remedy is None and row.helps:
        least_s = min(prediction.step_s, step_s or 0.0) if prediction is not None else 0.0
        without_s = max(step_s - seconds, least_s) if step_s is not None and seconds else None
        remedy = GapRemedy(options=row.options, step_s=without_s, is_priced=False, says=row.helps)
    return GapCause(name=row.name, seconds=seconds, evidence=found.says, where=found.where, remedy=remedy)


def next_recording(case: ObservedCase, gap: Sequence[Term], verdict: Verdict | None, causes: Sequence[GapCause]) -> str:
    """The recording to make of a run that is slow, or takes more memory, and of which no file shows why."""
    if verdict == "memory":
        return "" if any(cause.name in OF_MEMORY for cause in causes) else _lacking(case, (MEMORY_LOG, SNAPSHOT))
    if verdict != "slow" or any(cause.seconds for cause in causes):
        return ""
    largest = max(gap, key=lambda term: term.seconds, default=None)
    wanted = [row.record for row in GAP_ROWS.values() if largest is not None and largest.term in row.terms]
    return _lacking(case, (*dict.fromkeys(wanted), ONE_TRACE, STAGE_TRACES, ARGUMENTS))


def _lacking(case: ObservedCase, recordings: Iterable[str]) -> str:
    """The first of some recordings that the files do not have yet."""
    ranks, observation = RunFiles(case).ranks, case.observation
    has = {
        ONE_TRACE: ranks, STAGE_TRACES: ranks[1:], PIPELINE_TRACES: len({rank.stage for rank in ranks}) > 1,
        BATCH_TIMER: observation.data_s is not None, LONG_LOG: observation.series.steps,
        MEMORY_LOG: observation.memory_series, SNAPSHOT: False,
        ARGUMENTS: observation.facts.stated_switches,
    }  # fmt: skip
    return next((one for one in recordings if not has.get(one)), "")
