"""The parts that a rank holds: each decoder layer, and the embedding, multi-token prediction and head beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.layout.candidate import Candidate
from planner.layout.split import FULL, Split, held_parts
from planner.layout.tensors.kept import Held, held, kept_tensors
from planner.physics.cost import PartCost
from planner.physics.layers import around_mtp_layer
from planner.physics.operators import Item
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.training import Recompute


@dataclass(frozen=True, slots=True)
class Part:
    """A part of one virtual stage, with the operators that its price is the sum of."""

    name: str
    """`layer`, `embedding`, `mtp`, `mtp embedding` or `head`."""
    stage: int
    """The virtual stage."""
    cost: PartCost
    before: tuple[Item, ...] = ()
    """Operators of no decoder layer, and those before one."""
    layer_items: tuple[Item, ...] = ()
    """Operators of its decoder layer, which `mode` is about."""
    behind: tuple[Item, ...] = ()
    layer: int | None = None
    """Number of the decoder layer."""
    mode: Recompute = "none"

    @property
    def items(self) -> tuple[Item, ...]:
        """All of its operators."""
        return (*self.before, *self.layer_items, *self.behind)

    def kept(self, pricing: Pricing, shape: Shape) -> list[Held]:
        """The rows that add up to what the part keeps of a micro-batch."""
        if self.mode != "none":
            layer = kept_tensors(pricing, shape, self.layer_items, self.mode)
            if self.mode != FULL:
                layer = _gone_with_layer(layer)
            others = (*self.before, *self.behind)
            return layer + (kept_tensors(pricing, shape, others) if others else [])
        rows = kept_tensors(pricing, shape, self.items)
        if self.name == "layer":
            return _gone_with_layer(rows)
        if self.name == "head":
            gone = [held(logits, operator="cross-entropy") for logits in pricing.overwritten_logits(self.items)]
            rows = [row for row in rows if row.name not in {one.name for one in gone}]
        return rows


def _gone_with_layer(rows: list[Held]) -> list[Held]:
    """Rows of what a layer keeps, marked as gone where the layer is recomputed whole: all but its input."""
    given = next((row for row in rows if row.name.endswith(": input")), None)
    return [row if row is given else replace(row, modules=(*row.modules, FULL)) for row in rows]


def layer_modes(split: Split, model: ModelSpec, stage: int) -> Iterator[tuple[int, LayerKind, Recompute]]:
    """Each layer of a virtual stage, its kind and its recompute mode: the first of a kind are those of `recomputed`."""
    first, last = split.chunks[stage]
    full = list(split.recomputed[stage]) if split.recomputed else [0] * len(model.kinds)
    for layer in range(first, last):
        kind = model.layers[layer]
        place = model.kinds.index(kind)
        yield layer, kind, FULL if full[place] else split.base
        full[place] -= full[place] > 0


def parts_of(candidate: Candidate, rank: int) -> list[Part]:
    """All parts of a rank, in the order in which a micro-batch meets them."""
    pricing = candidate.pricing
    layers = {kind: pricing.layer(kind, candidate.shape) for kind in pricing.model.kinds}
    stages = (stage for stage, at in enumerate(candidate.placement) if at == rank)
    return [part for stage in stages for part in _parts(candidate, stage, layers)]


def _parts(candidate: Candidate, stage: int, layers: dict[LayerKind, tuple[Item, ...]]) -> Iterator[Part]:
    table, split, pricing, shape = candidate.table, candidate.split, candidate.pricing, candidate.shape
    model = pricing.model
    is_folded = candidate.placement[0] == candidate.placement[-1]
    others = dict(held_parts(table, split, stage, is_folded))
    if "embedding" in others:
        yield Part("embedding", stage, others["embedding"], pricing.embedding_items(shape))
    for layer, kind, mode in layer_modes(split, model, stage):
        yield Part("layer", stage, table.layers[kind, mode], (), layers[kind], (), layer, mode)
    if "mtp" in others:
        mode = split.mtp_mode if split.mtp_mode in table.mtp_recomputed else "none"
        around = around_mtp_layer(model, shape, pricing.runtime)
        before, behind = (pricing.as_trained(items, shape) for items in around)
        block = Part("mtp", stage, others["mtp"], before, layers[model.layers[-1]], behind, mode=mode)
        yield from [block] * model.num_nextn_predict_layers
        if int(candidate.shape.pp) > 1:
            yield Part("mtp embedding", stage, PartCost(), pricing.embedding_items(shape))
    if "head" in others:
        yield Part("head", stage, others["head"], pricing.head_items(shape, is_folded and model.tie_word_embeddings))
