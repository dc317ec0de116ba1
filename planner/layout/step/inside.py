"""The exchanges inside a stage's passes: which runs when, and how much of it shows.

The operator list says their order, the computing between them, and the seconds of each. Whatever hides more or less of
all of them at once (a host that is late, another micro-batch, late ranks) is shared out, so that what shows adds up to
the prices of each part of the stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple

from planner.layout.candidate import Candidate
from planner.layout.split import FULL, held_parts
from planner.physics.compute import operator_seconds
from planner.physics.cost import PartCost
from planner.physics.operators import Collective, Item, Operator
from planner.physics.passes import COMM_GROUPS
from planner.specs.model import LayerKind
from planner.specs.training import Recompute

LATE = {
    "tp": "wait for the latest rank",
    "cp": "wait for the latest rank",
    "ep": "slower beside another micro-batch",
}
"""Reasons why more of a group's exchanges shows than they take."""
KINDS = ("F", "B", "I")
"""The kinds of actions that exchange something; weight gradients do not."""

Together = Literal["", "part", "pass"]


@dataclass(frozen=True, slots=True)
class PassExchange:
    """An exchange of a pass, or all those of a group in a part of it."""

    group: str
    """One of COMM_GROUPS."""
    name: str
    part: str
    """`layer 17`, `embedding`, `mtp` or `head`; empty for a whole pass."""
    exposed_s: float
    """Seconds for which the rank does nothing else, as the plan's breakdown counts them."""
    hidden_s: float
    """Seconds that it runs beside computing."""
    leads: bool = False
    """True where it hides beside what follows it, else beside what precedes it."""
    start_s: float = 0.0
    """Seconds from the start of the pass to the time from which it shows."""


Passes = Mapping[tuple[int, str], tuple[PassExchange, ...]]
"""Exchanges of one micro-batch by virtual stage and kind of action, in their order."""


@dataclass(frozen=True, slots=True)
class _Beat:
    """Seconds of computing, and the exchange behind them."""

    compute_s: float
    exchange: PassExchange | None = None


def exchanges_of_passes(candidate: Candidate, together: Together = "") -> Passes:
    """The exchanges of each virtual stage's passes; `together` makes one of all those of a group in a part or pass."""
    beats_of, factors = Beats(candidate), candidate.rank_factors
    passes = {}
    for stage, rank in enumerate(candidate.placement):
        parts = list(beats_of.parts(stage))
        for kind in KINDS:
            beats = [beats_of.of(part, kind) for part in (parts if kind == "F" else parts[::-1])]
            if together == "part":
                beats = [_merged(part) for part in beats]
            flat = [beat for part in beats for beat in part]
            flat = _merged(flat, "") if together == "pass" else flat
            passes[stage, kind] = tuple(_timed(flat, factors[rank] if factors else 1.0))
    return passes


def _merged(beats: Sequence[_Beat], part: str | None = None) -> list[_Beat]:
    """All computing, and behind it one exchange for each group."""
    exchanges = [beat.exchange for beat in beats if beat.exchange is not None]
    merged = [_Beat(sum(beat.compute_s for beat in beats))]
    for group in COMM_GROUPS:
        own = [exchange for exchange in exchanges if exchange.group == group]
        if own:
            exposed_s, hidden_s = sum(one.exposed_s for one in own), sum(one.hidden_s for one in own)
            name = f"{len(own)} exchanges" if len(own) > 1 else own[0].name
            where = own[0].part if part is None else part
            merged.append(_Beat(0.0, PassExchange(group, name, where, exposed_s, hidden_s)))
    return merged


def _timed(beats: Iterable[_Beat], factor: float) -> Iterator[PassExchange]:
    """The exchanges one after the other, on a rank that takes `factor` times as long as the prices say."""
    time_s = 0.0
    for beat in beats:
        time_s += factor * beat.compute_s
        if beat.exchange is not None:
            exposed_s, hidden_s = factor * beat.exchange.exposed_s, factor * beat.exchange.hidden_s
            yield replace(beat.exchange, start_s=time_s, exposed_s=exposed_s, hidden_s=hidden_s)
            time_s += exposed_s


class Part(NamedTuple):
    """A part of a virtual stage: a layer, or what stands before or behind all of them."""

    name: str
    layer: LayerKind | None
    mode: Recompute
    cost: PartCost


class Beats:
    """The beats of all parts of a candidate's stages; layers of one kind and mode have the same."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate, self._pricing, self._shape = candidate, candidate.pricing, candidate.shape
        self._known: dict[tuple[object, ...], list[_Beat]] = {}

    def parts(self, stage: int) -> Iterator[Part]:
        """The parts of a virtual stage, front to back."""
        candidate, model = self._candidate, self._pricing.model
        table, split = candidate.table, candidate.split
        held = dict(held_parts(table, split, stage, candidate.placement[0] == candidate.placement[-1]))
        if "embedding" in held:
            yield Part("embedding", None, "none", held["embedding"])
        seen = [0] * len(model.kinds)
        for number in range(*split.chunks[stage]):
            layer = model.layers[number]
            kind = model.kinds.index(layer)
            is_full = bool(split.recomputed) and seen[kind] < split.recomputed[stage][kind]
            seen[kind] += 1
            mode = FULL if is_full else split.base
            yield Part(f"layer {number}", layer, mode, table.layers[layer, mode])
        for name in ("mtp", "head"):
            if name in held:
                mode = split.mtp_mode if name == "mtp" and self._pricing.runtime.recomputes_mtp else "none"
                yield Part(name, None, mode, held[name])

    def of(self, part: Part, kind: str) -> list[_Beat]:
        """The beats of a part in one kind of action."""
        key = (part.layer or part.name, part.mode, kind)
        if key not in self._known:
            self._known[key] = _priced(part.cost, kind, list(self._raw(part, kind)))
        return [
            beat if beat.exchange is None else replace(beat, exchange=replace(beat.exchange, part=part.name))
            for beat in self._known[key]
        ]

    def _raw(self, part: Part, kind: str) -> Iterator[_Beat]:
        """Each operator and exchange of a part in an action, as long as if it were alone."""
        items, replayed = self.items(part)
        if kind == "F":
            yield from self._pass(items, items, "forward", ("forward_s",))
            return
        yield from self._pass(replayed, replayed, "forward", ("forward_s",), replayed=True)
        runs = [list(run) for _, run in groupby(items, lambda item: isinstance(item, Collective))]
        # an exchange behind products in the forward is before them in the backward; neighbours keep their order
        backward = [item for run in runs[::-1] for item in (run if isinstance(run[0], Collective) else run[::-1])]
        gradients = ("dgrad_s",) if kind == "I" else ("dgrad_s", "wgrad_s")
        yield from self._pass(items, backward, "backward", gradients)

    def items(self, part: Part) -> tuple[Sequence[Item], Sequence[Item]]:
        """The operators and exchanges of a part, and those whose forward runs again in the backward."""
        pricing, shape = self._pricing, self._shape
        model = pricing.model
        if part.name == "embedding":
            return pricing.embedding_items(shape), ()
        if part.name == "head":
            return pricing.head_items(shape, model.tie_word_embeddings), ()
        layer = pricing.layer(part.layer or model.layers[-1], shape)
        replayed = pricing.replayed_items(layer, part.mode)
        if part.layer is not None:
            return layer, replayed
        blocks = model.num_nextn_predict_layers
        own = pricing.embedding_items(shape) if int(shape.pp) > 1 else ()
        return (*own, *pricing.mtp_block(shape) * blocks), [*replayed] * blocks

    def _pass(
        self, items: Sequence[Item], ordered: Sequence[Item], way: str, gradients: Sequence[str], replayed: bool = False
    ) -> Iterator[_Beat]:
        """One way through `items`, which run in the order of `ordered`."""
        pricing, compute_s = self._pricing, 0.0
        hardware, dtype = pricing.cluster.hardware, pricing.training.dtype
        priced = {id(one.exchange): one for one in pricing.passes.each_exchange(items, self._shape, replayed)}
        for index, item in enumerate(ordered):
            if isinstance(item, Operator):
                passes = operator_seconds(item, hardware, dtype, pricing.runtime)
                compute_s += float(sum(getattr(passes, name) for name in gradients))
            elif (one := priced[id(item)]).way == way and float(one.exchanged_s) > 0:
                hidden_s = float(one.hidden_s)
                leads = any(beside in ordered[index:] for beside in item.beside)
                exposed_s = float(one.exchanged_s) - hidden_s
                yield _Beat(compute_s, PassExchange(one.group, item.name, "", exposed_s, hidden_s, leads))
                compute_s = 0.0
        yield _Beat(compute_s)


def _priced(cost: PartCost, kind: str, beats: Sequence[_Beat]) -> list[_Beat]:
    """The beats, as long together as the part's price says for their computing and for each group's exchanges."""
    computing = {"F": ("forward_s",), "I": ("input_grad_s",), "B": ("input_grad_s", "weight_grad_s")}[kind]
    compute_s, alone_s = sum(float(getattr(cost, name)) for name in computing), sum(beat.compute_s for beat in beats)
    late, shares = [], {}
    for group in COMM_GROUPS:
        priced_s = float(cost.exchanges_s[group][kind != "F"])
        shown_s = sum(beat.exchange.exposed_s for beat in beats if beat.exchange and beat.exchange.group == group)
        shares[group] = min(1.0, priced_s / shown_s) if shown_s else 1.0
        if priced_s > shown_s * (1 + 1e-12):
            late.append(_Beat(0.0, PassExchange(group, LATE[group], "", priced_s - shown_s, 0.0)))
    pace = compute_s / alone_s if alone_s else 1.0
    return [*(_paced(beat, pace, shares) for beat in beats), *late]


def _paced(beat: _Beat, pace: float, shares: Mapping[str, float]) -> _Beat:
    exchange = beat.exchange
    if exchange is not None:
        exposed_s = shares[exchange.group] * exchange.exposed_s
        hidden_s = exchange.hidden_s + exchange.exposed_s - exposed_s
        exchange = replace(exchange, exposed_s=exposed_s, hidden_s=hidden_s)
    return _Beat(pace * beat.compute_s, exchange)
