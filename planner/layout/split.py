"""A split says which layers every virtual stage holds, and how many of them it recomputes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from planner.errors import SpecError
from planner.physics.cost import CostTable, PartCost, sum_parts
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.reading import printable
from planner.specs.training import Recompute
from planner.trainers.layout_string import expanded

Modes = dict[tuple[LayerKind, Recompute], int]
"""Number of layers of each kind and recompute mode."""

FULL: Recompute = "full"

_OWN_SECONDS = tuple(
    f.name for f in fields(PartCost) if f.name.endswith("_s") and f.name not in ("reduce_s", "gather_s")
)


@dataclass(frozen=True, slots=True)
class Split:
    """Layers of each virtual stage; virtual stage j runs on rank j mod pp.

    The embedding is on the first virtual stage, the head on the last, multi-token-prediction blocks on `mtp_stage`.
    """

    counts: tuple[int, ...]
    """Number of decoder layers of each virtual stage, in model order."""
    base: Recompute = "none"
    """Recompute mode of the layers that are not recomputed in full."""
    recomputed: tuple[tuple[int, ...], ...] = ()
    """Number of layers recomputed in full, per virtual stage and layer kind (in model order); they are the first layers
    of their kind. Empty where there are none."""
    mtp_stage: int | None = None
    """Virtual stage of the multi-token-prediction blocks; None for the last."""

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """First layer of each virtual stage, and the layer behind its last."""
        bounds = [0]
        for count in self.counts:
            bounds.append(bounds[-1] + count)
        return tuple(pairwise(bounds))

    @property
    def priced_modes(self) -> tuple[Recompute, ...]:
        """The recompute modes whose prices it needs."""
        modes: tuple[Recompute, ...] = ("none", *({self.base} - {"none"}))
        return (*modes, FULL) if self.recomputed else modes

    @property
    def mtp_mode(self) -> Recompute:
        """Recompute mode of the multi-token-prediction layers: full only if all decoder layers are."""
        all_layers = bool(self.recomputed) and tuple(map(sum, self.recomputed)) == self.counts
        return FULL if all_layers else self.base

    def modes(self, model: ModelSpec) -> list[Modes]:
        """Number of layers of each kind and recompute mode on every virtual stage."""
        stages = []
        for stage, (first, last) in enumerate(self.chunks):
            modes: Modes = {}
            for kind, count in Counter(model.layers[first:last]).items():
                full = self.recomputed[stage][model.kinds.index(kind)] if self.recomputed else 0
                modes.update({key: n for key, n in (((kind, FULL), full), ((kind, self.base), count - full)) if n})
            stages.append(modes)
        return stages


def even_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as equal as possible; longer stages are in the middle, away from embedding and head."""
    least, more = divmod(num_layers, num_stages)
    start = (num_stages - more) // 2
    return tuple(least + (1 if start <= stage < start + more else 0) for stage in range(num_stages))


def stage_costs(
    table: CostTable, model: ModelSpec, split: Split, placement: Sequence[int], rank_factors: Sequence[float] = ()
) -> list[PartCost]:
    """Cost of each virtual stage: its layers, and the embedding, head and MTP blocks that it holds.

    `rank_factors` multiply the seconds of each rank; if they are empty, all ranks take as long as the table says.
    """
    folded = placement[0] == placement[-1]
    known: dict[tuple[tuple[tuple[LayerKind, Recompute], int], ...], PartCost] = {}
    costs = []
    for stage, modes in enumerate(split.modes(model)):
        key = tuple(modes.items())
        if key not in known:
            known[key] = sum_parts(table.layers[mode].times(count) for mode, count in key)
        others = [part for _, part in held_parts(table, split, stage, folded)]
        costs.append(sum(others, known[key]))
    if not rank_factors:
        return costs
    return [slowed(cost, rank_factors[rank]) for cost, rank in zip(costs, placement, strict=True)]


def slowed(cost: PartCost, factor: float) -> PartCost:
    """Cost of the same work on a rank that takes `factor` times as long.

    Exchanges over data-parallel ranks take as long as before.
    """
    return replace(cost, **{name: factor * getattr(cost, name) for name in _OWN_SECONDS})


def held_parts(table: CostTable, split: Split, stage: int, folded: bool) -> list[tuple[str, PartCost]]:
    """Names and costs of the parts of a virtual stage beside its decoder layers.

    Where `folded`, one rank has both the first stage and the last.
    """
    last = len(split.counts) - 1
    parts = []
    if stage == 0:
        parts.append(("embedding", table.embedding))
    if table.mtp is not None and stage == (last if split.mtp_stage is None else split.mtp_stage):
        parts.append(("mtp", table.mtp_recomputed.get(split.mtp_mode, table.mtp)))
    if stage == last:
        parts.append(("head", table.head_beside_embedding if folded else table.head))
    return parts


def parse_layout(layout: str, model: ModelSpec, num_stages: int) -> Split:
    """Read the value of Megatron's --pipeline-model-parallel-layout.

    E is the embedding, t a decoder layer, m an MTP block, L the loss, | stands between virtual stages, and (…)*n and
    x*n repeat.
    Raises SpecError when it does not parse, or does not hold every layer once, E first and L last.
    """
    stages = expanded(layout).split("|")
    text = f"layout {printable(layout)!r}"
    bad = set("".join(stages)) - set("EtmL")
    if bad:
        raise SpecError(f"{text}: unknown symbol {sorted(bad)[0]!r}", "use E, t, m, L, | and (…)*n")
    if len(stages) != num_stages:
        raise SpecError(f"{text}: {len(stages)} stages, expected pp·vpp = {num_stages}", "separate virtual stages by |")
    flat = "".join(stages)
    expected = "E" + "t" * model.num_hidden_layers + "m" * model.num_nextn_predict_layers + "L"
    if flat != expected:
        raise SpecError(
            f"{text}: holds {flat.count('E')} E, {flat.count('t')} t, {flat.count('m')} m and {flat.count('L')} L",
            f"the model is E, {model.num_hidden_layers} t, {model.num_nextn_predict_layers} m and L, in this order",
        )
    mtp = [stage for stage, symbols in enumerate(stages) if "m" in symbols]
    if len(mtp) > 1:
        raise SpecError(f"{text}: m on stages {mtp}", "put all m on one virtual stage")
    return Split(tuple(symbols.count("t") for symbols in stages), mtp_stage=mtp[0] if mtp else None)


def splits_from_counts(counts: Sequence[int], model: ModelSpec, placement: Sequence[int]) -> tuple[int, ...]:
    """Layers of each virtual stage from `layers_per_stage`; `placement` has the rank of each virtual stage.

    One entry per virtual stage is taken as given. With one entry per rank, each entry is cut evenly over the rank's
    chunks.
    Raises SpecError when the layers do not add up to the model's.
    """
    if sum(counts) != model.num_hidden_layers:
        raise SpecError(
            f"layers_per_stage: {'+'.join(map(str, counts))} = {sum(counts)} layers, "
            f"{model.name} has {model.num_hidden_layers}",
            "every layer belongs to exactly one stage",
        )
    if len(counts) == len(placement):
        return tuple(counts)
    chunks = [iter(even_counts(count, len(placement) // len(counts))) for count in counts]
    return tuple(next(chunks[rank]) for rank in placement)
