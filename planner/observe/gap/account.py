"""An account of a step: the seconds of one rank by what it did, which add up to the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from planner.observe.gap.terms import EXCHANGES, LINK_RATE, OVERLAP, SKEW
from planner.observe.observation import Term
from planner.report.format import seconds


@dataclass(frozen=True, slots=True)
class Exchanges:
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
    exchanges: Mapping[str, Exchanges] = field(default_factory=dict)
    """Exchanges by group."""
    details: Mapping[str, str] = field(default_factory=dict)
    """More words on a part."""

    @property
    def total_s(self) -> float:
        """Seconds of all parts, and of exchanges as far as they show."""
        return sum(self.parts.values()) + sum(one.busy_s - one.hidden_s for one in self.exchanges.values())


_NONE = Exchanges(0.0, 0.0, 0.0)


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


def _of_exchanges(group: str, found: Exchanges, wanted: Exchanges, measured: Account, expected: Account) -> list[Term]:
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
        f"{seconds(found.hidden_s)} of {seconds(found.busy_s)} hid behind computing {measured.where}, "
        f"{seconds(wanted.hidden_s)} of {seconds(wanted.busy_s)} {expected.where}"
    )
    says = {kind: _both(words, is_s, measured, was_s, expected) for kind, (words, is_s, was_s) in told.items()}
    says = {kind: f"{text}; {hid}" if shown[kind] != raw[kind] else text for kind, text in says.items()}
    says[OVERLAP] = hid
    return [
        Term(term=f"{group}_{kind}", seconds=cost_s, evidence=says[kind], recoverable_s=max(0.0, cost_s))
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
    like_s = max(abs(is_s), abs(was_s))
    return f"{words}{seconds(is_s, like_s)} {measured.where}, {seconds(was_s, like_s)} {expected.where}"
