"""Changes of a layout that would make room in memory, each priced: what is recomputed, micro-batch, shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.answer import PricedLayout
from planner.answer.memory import MemoryChange
from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.layout.given import given_layout
from planner.layout.split import FULL, Split
from planner.specs.training import Parallelism, Recompute

LEAST_FRACTION = 0.01
"""Least share of a stage's memory that a change has to free."""


def changes(candidate: Candidate, layout: PricedLayout) -> list[MemoryChange]:
    """The changes of one setting that free memory on the fullest stage, the shortest step first.

    Seconds and bytes are those of the same layers per stage; a search may find more. An order that was made to measure
    is not changed.
    """
    if candidate.made_order is not None:
        return []
    fullest = max(range(len(candidate.memory)), key=lambda rank: candidate.memory[rank].total_bytes)
    worth_bytes = (1 - LEAST_FRACTION) * candidate.memory[fullest].total_bytes
    found = []
    for words, modules, changed in (*_recomputed(candidate), *_resized(candidate, layout)):
        if changed.memory[fullest].total_bytes < worth_bytes:
            peaks = tuple(stage.peak_allocated_bytes for stage in changed.memory)
            change = MemoryChange(
                change=words, modules=modules, step_s=changed.step_s, fits=changed.fits, peak_bytes=peaks
            )
            found.append(change)
    return sorted(found, key=lambda change: change.step_s)


Changed = tuple[str, tuple[str, ...], Candidate]


def _recomputed(candidate: Candidate) -> Iterator[Changed]:
    """One module more recomputed in every layer that keeps all else, or all layers recomputed whole."""
    pricing, split, runtime = candidate.pricing, candidate.split, candidate.pricing.runtime
    own = pricing.selective_modules if split.base == "selective" else ()
    modules = runtime.recomputable_modules if runtime.has_sequence_parallel else ()
    for module in modules if split.base != FULL else ():
        if module in own:
            continue
        chosen = tuple(name for name in modules if name in {*own, module})
        yield f"recompute {module}", (module,), _with_split(candidate, replace(split, base="selective"), chosen)
    if runtime.recomputes_layers and split.mtp_mode != FULL:
        kinds = pricing.model.kinds
        held = tuple(tuple(pricing.model.layers[a:b].count(kind) for kind in kinds) for a, b in split.chunks)
        changed = _with_split(candidate, replace(split, base="none", recomputed=held), ())
        yield "recompute all layers", (FULL,), changed


def _with_split(candidate: Candidate, split: Split, modules: tuple[str, ...]) -> Candidate:
    pricing = replace(candidate.pricing, selective_modules=modules or candidate.pricing.selective_modules)
    modes: tuple[Recompute, ...] = split.priced_modes
    return replace(candidate, pricing=pricing, split=split, table=pricing.table(candidate.shape, modes))


def _resized(candidate: Candidate, layout: PricedLayout) -> Iterator[Changed]:
    """Half the micro-batch, or twice the ranks of tp or cp, where the trainer can be told so."""
    sizes = layout.parallelism
    wanted = []
    if sizes.micro_batch_size % 2 == 0:
        half = sizes.micro_batch_size // 2
        wanted.append((f"micro-batch {half}", {"micro_batch_size": half}))
    if sizes.dp % 2 == 0 and sizes.shard_size == sizes.dp * sizes.cp:
        for axis in ("tp", "cp"):
            more = {axis: 2 * getattr(sizes, axis), "dp": sizes.dp // 2}
            wanted.append((f"{axis} {more[axis]} × dp {more['dp']}", more))
    for words, update in wanted:
        changed = _at_sizes(candidate, layout, update)
        if changed is not None:
            yield words, (), changed


def _at_sizes(candidate: Candidate, layout: PricedLayout, update: dict[str, int]) -> Candidate | None:
    """The candidate with other sizes and the same split; None where they cannot be."""
    sizes, split = layout.parallelism, candidate.split
    names = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "micro_batch_size", "zero_stage", "rank_order", "schedule")
    values = {name: getattr(sizes, name) for name in names} | update
    if candidate.pricing.model.moe is None:
        values["etp"] = None
    values["sequence_parallel"] = sizes.sequence_parallel or values["tp"] > 1
    try:
        given = given_layout(candidate.pricing, Parallelism(**values, layers_per_stage=split.counts))
    except SpecError:
        return None
    return replace(candidate, split=split, table=candidate.pricing.table(given.shape, split.priced_modes))
