"""How quantities, layouts, recipes, evidence and proofs are written: every report writes them the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from planner.answer import (
    Interval,
    Layout,
    Offer,
    Plan,
    PricedLayout,
    RecipeGain,
    RecipeRefusal,
    SearchReport,
    half_width,
)
from planner.specs import expressions
from planner.specs.base import Fields, Named, Texts
from planner.specs.hardware import By, Correction
from planner.specs.reading import shipped_table
from planner.specs.units import gib
from planner.trainers.switches import SWITCHES, Value, written

SURE = "over 99%"
"""A probability that calls for no remark."""
_LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"))
_UNITS = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))


def fits_with(oom_probability: float | None) -> str:
    """The probability of having enough memory, in whole percent; empty where none is known."""
    if oom_probability is None:
        return ""
    if oom_probability < 0.01:
        return SURE
    return "under 1%" if oom_probability > 0.995 else f"{1 - oom_probability:.0%}"


def unit_for(like_s: float) -> tuple[float, str]:
    """The unit that suits `like_s`: how many of it make a second, and its name."""
    return next((factor, unit) for least, factor, unit in _UNITS if like_s >= least)


def seconds(value_s: float, like_s: float | None = None) -> str:
    """`22.08 s`, `812 ms`, `-3.120 s`, `0 s`; in the unit that suits `like_s` where columns are to be compared."""
    factor, unit = unit_for(abs(like_s or value_s))
    return f"{digits(value_s * factor) if like_s is None else f'{value_s * factor:,.2f}'} {unit}" if value_s else "0 s"


def signed_seconds(change_s: float, like_s: float) -> str:
    """`+0.24 s`, `-12.00 ms`, and `0 s` for what would round to nothing."""
    size = seconds(abs(change_s), like_s)
    return f"{'-' if change_s < 0 else '+'}{size}" if size.strip("0. µms") else "0 s"


def span(low_s: float, high_s: float, like_s: float) -> str:
    """`16.00–21.00 ms`: both ends in the unit that suits `like_s`."""
    factor, unit = unit_for(like_s)
    return f"{digits(low_s * factor)}–{digits(high_s * factor)} {unit}"


def digits(value: float) -> str:
    """A number to three digits or four, never in powers of ten: `1,234`, `412`, `41.70`, `0.812`."""
    size = abs(value)
    places = 0 if size >= 100 else 2 if size >= 10 else 3
    return f"{value:,.{places}f}"


def large(value: float) -> str:
    """Counts with a suffix from a million on: `405.9B`, `15T`, `2,048`."""
    for size, suffix in _LARGE:
        if value >= size:
            return f"{value / size:.4g}{suffix}" if value < 1e4 * size else f"{value / size:,.0f}{suffix}"
    return f"{value:,.0f}"


def percent(fraction: float, places: int = 1) -> str:
    """`41.7%`."""
    return f"{100 * fraction:.{places}f}%"


def counted(number: int, noun: str) -> str:
    """`1 run`, `1,024 runs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ends(interval: Interval | None, write: Callable[[float], str]) -> str:
    """`447–566`: both ends of an interval; empty where there is none."""
    return "" if interval is None else "–".join(map(write, interval))


def width(interval: Interval | None) -> str:
    """`3%`: the half of an interval; a dash where there is none."""
    return "–" if interval is None else percent(half_width(interval), 0)


def gibibytes(num_bytes: float) -> str:
    """`71.3`, without the unit, which stands in the column's head."""
    return f"{gib(num_bytes):,.1f}"


def bar(fraction: float, width: int, track: str = " ") -> str:
    """`fraction` of `width` cells filled, never more than all of them, and at least one where there is anything."""
    filled = min(width, max(round(fraction * width), 1 if fraction > 0 else 0))
    return "█" * filled + track * (width - filled)


def brief_digits(value: float) -> str:
    """`5.1`, `42`: two digits, or three."""
    return f"{value:,.1f}" if value < 9.95 else f"{value:,.0f}"


def duration(value_s: float) -> str:
    """`4.2 s`, `9.3 min`, `1.2 h`: a time of people rather than of kernels."""
    units = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
    size_s, unit = next((pair for pair in units if value_s >= pair[0]), units[-1])
    return f"{brief_digits(value_s / size_s)} {unit}"


def time_of(days: float) -> str:
    """`41.7 days`, and hours or minutes of what takes less than a day."""
    return f"{digits(days)} days" if days >= 1 else duration(86_400 * days)


BREAKDOWN = {
    "compute_s": "compute",
    "bubble_s": "pipeline bubble",
    "tp_comm_s": "tensor-parallel exchanges",
    "cp_comm_s": "context-parallel exchanges",
    "ep_comm_s": "expert-parallel exchanges",
    "pp_comm_s": "pipeline sends",
    "exposed_dp_s": "data-parallel exchanges",
    "optimizer_s": "optimizer",
    "overhead_s": "host and other overhead",
}
"""The items of a step's seconds."""
MEMORY = {
    "weights_bytes": "weights",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activations_bytes": "activations",
    "logits_bytes": "logits",
    "workspace_bytes": "workspace",
    "reserved_bytes": "reserved",
    "total_bytes": "total",
}
"""The items of a stage's memory, and their sum."""
ACTIONS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
"""The kinds of a pipeline's actions."""
EVIDENCE = {
    "spec_sheet": "spec sheet: peaks and typical efficiencies, nothing measured on this kind of GPU",
    "calibrated": "calibrated on measurements of this GPU, or of others of its silicon",
    "probed": "probed: corrected or confirmed by a real run on this kind of GPU",
}
EVIDENCE_IN_BRIEF = {
    "spec_sheet": "spec sheet: nothing measured on this kind of GPU",
    "calibrated": "calibrated: measured on this kind of GPU or its silicon",
    "probed": "probed: a real run on this kind of GPU corrected or confirmed it",
}
CORRECTIONS: dict[By, str] = {
    "probe": "What a probe corrected",
    "run": "What a run corrected",
    "history": "What your runs corrected",
}
"""The titles of the numbers of the hardware that were measured."""
CORRECTED: dict[By, str] = {"probe": "probed", "run": "by a run"}
"""The words before the names of numbers in one line; runs that are kept are named with their folder instead."""
NINE_OF_TEN_LOSE = 0.02
"""In nine of ten published jobs the layout ranked first took at most this much longer than the fastest, as a fraction
(`plan validate --regret`)."""
RANKED_FIRST = (
    f"in 9 of 10 published jobs the one ranked first took at most {NINE_OF_TEN_LOSE:.0%} longer than the fastest"
)
LEAST_SHARE = 0.0005
"""A smaller share of a step is not shown: it would read 0.0%."""


def corrections_title(corrections: Sequence[Correction]) -> str:
    """The title of the numbers that were measured."""
    return CORRECTIONS[corrections[-1].by if corrections else "probe"]


def corrected(corrections: Sequence[Correction]) -> Texts:
    """The measured numbers in brief, the first after the words for the measurement; empty without any."""
    briefs = [correction.brief for correction in corrections]
    if not corrections:
        return ()
    last = corrections[-1]
    if last.by == "history":
        return f"corrected by {last.source}", *briefs
    return f"{CORRECTED[last.by]}: {briefs[0]}", *briefs[1:]


def sizes(layout: Layout) -> str:
    """The sizes of a layout in few letters, to stand beside figures: `TP 8 PP 16 DP 16 · mb 1 × 128`."""
    return f"{' '.join(layout.axes)} · mb {layout.micro_batch_size} × {layout.num_microbatches}"


def recomputed_modules(layout: Layout) -> Texts:
    """The modules that selective recompute is of."""
    return layout.recompute_modules if layout.recompute == "selective" else ()


def manner(layout: Layout, is_brief: bool = False) -> Texts:
    """The ways in which a layout is run, beside its sizes: schedule, ZeRO, recompute and the like; in brief with the
    number of recomputed modules in place of their names."""
    zero = f"ZeRO-{layout.zero_stage}"
    if layout.zero_stage and layout.shard_size < layout.dp * layout.cp:
        zero += f" over {layout.shard_size:,}"
    recompute = "no recompute" if layout.recompute == "none" else f"{layout.recompute} recompute"
    if count := layout.recompute_num_layers:
        part = "chunk" if layout.vpp > 1 else "stage"
        recompute += f" of up to {count} layers a {part}" if layout.pp > 1 else f" of {count} of the layers"
    if modules := recomputed_modules(layout):
        recompute += f" of {len(modules)} modules" if is_brief and len(modules) > 2 else f" ({', '.join(modules)})"
    parts = [layout.schedule if layout.pp > 1 else "no pipeline", zero, recompute]
    if layout.tp > 1:
        parts.append("sequence parallel" if layout.sequence_parallel else "no sequence parallel")
    if layout.ep > 1:
        parts.append(f"expert TP {layout.etp}")
    if layout.dp_outermost:
        parts.append(f"ranks {layout.rank_order}")
    return (*parts, *spared(layout))


def spared(layout: Layout) -> Texts:
    """The GPUs that a layout leaves idle, and the memory of their hosts that it takes."""
    idle, host = layout.num_gpus_spare, layout.host_bytes
    says = (f"{idle:,} of {layout.num_gpus_used + idle:,} GPUs idle",) * bool(idle)
    return says + (f"{gibibytes(host)} GiB of host memory a GPU",) * bool(host)


def says_unsaid(layout: PricedLayout) -> str:
    """`ep_overlap; true would be 12% faster (dispatcher and cuda_graph too)`; empty where every switch is said."""
    if not layout.unsaid:
        return ""
    most = layout.unsaid[0]
    slower = most.other_step_s / layout.step.step_s - 1
    effect = f"{percent(abs(slower), 0)} {'faster' if slower < 0 else 'slower'}"
    says = f"{most.switch}; {written(most.other)} would be {effect}"
    _, *others = dict.fromkeys(one.switch for one in layout.unsaid)
    return f"{says}; nor {', '.join(others)}" if others else says


def says_deciding(layout: PricedLayout) -> str:
    """`±97% would be ±35% with --moe-imbalance: how uneven the experts are`; empty where the interval is not wide."""
    if (fact := layout.deciding_fact) is None:
        return ""
    now, known = (percent(math.expm1(w), 0) for w in (fact.half_width, fact.known_half_width))
    return f"±{now} would be ±{known} with {fact.option}: {fact.fact}"


OWN_TRAINER = "your own, of which no run was published: plan observe reads one of yours"


def unsure(plan: Plan) -> list[tuple[str, str]]:
    """A subject and a sentence each: a trainer of the user's, the switches left unsaid, and the fact that would make a
    wide interval narrow."""
    own = OWN_TRAINER if plan.runtime_spec.is_unmeasured_on(plan.cluster.hardware) else ""
    says = {"trainer": own, "not said": says_unsaid(plan.best), "wide": says_deciding(plan.best)}
    return [row for row in says.items() if row[1]]


def says_outcome(search: SearchReport) -> str:
    """`proven, gap 0.26%`, or `bounded` and what was asked for where the gap that was reached is wider."""
    gap, asked = percent(search.gap, 2), search.asked_gap_fraction
    if search.outcome == "feasible":
        return f"stopped by the time limit, gap {gap}"
    if is_proven(search):
        return f"proven, gap {gap}"
    return f"bounded, gap {gap}" + ("" if asked is None else f" where {percent(asked, 2)} was asked for")


def is_proven(search: SearchReport) -> bool:
    """True where the search ended within the gap that it was asked for.

    Files of earlier versions call every search that ended `proven`, whatever its gap.
    """
    asked = search.asked_gap_fraction
    # the gap is a fraction of the bound, what was asked for a fraction of the step
    return search.outcome == "proven" and (asked is None or 1 - 1 / (1 + search.gap) <= asked + 1e-9)


def says_bound(search: SearchReport) -> str:
    """The step that no layout beats, among how many kinds of layouts, and what was not searched; JSON has the names."""
    left_out = f"not searched, but around the best: {', '.join(search.unsearched)}" if search.unsearched else ""
    return f"{says_scope(search)}; {left_out}" if left_out else says_scope(search)


def says_scope(search: SearchReport, is_brief: bool = False) -> str:
    """The step that no layout beats, among how many kinds of layouts; in brief fit for two lines."""
    among = ", ".join(_among(search, is_brief))
    bound = f"no layout that fits is faster than {seconds(search.lower_bound_s)}"
    return f"{bound}, among {among}" if among else bound


def _among(search: SearchReport, is_brief: bool) -> Iterator[str]:
    """Phrases that narrow the layouts searched down."""
    searched = search.searched
    schedules = searched.schedules if searched else search.schedules
    if schedules:
        yield f"{len(schedules)} schedules" if is_brief and len(schedules) > 2 else _either(schedules)
    if searched is None:
        return
    if any(searched.recompute_modules):
        count = len(searched.recompute_modules)
        yield f"{count} set{'s' * (count > 1)} of recomputed modules"
    if total := len(searched.switches):
        free = sum(len(values) > 1 for values in searched.switches.values())
        some = f"{free} of {total} switches free" if free else f"these {total} switches"
        yield f"all values of {total} switches" if free == total else some
    if searched.chunks == "equal" and not is_brief:
        yield "equal inner chunks"


def _either(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


LEAST_GAIN = 0.001
"""A switch that saves a smaller share of the step is named without a number."""
LINE = 68
"""Characters of a sentence on a line of a terminal of 80 columns."""

Line = tuple[str, str]
"""A subject and a sentence about it."""


def recipe_lines(layout: PricedLayout, variables: Mapping[str, str], is_brief: bool = False) -> tuple[Line, ...]:
    """The lines of the recipe; none for a layout whose recipe is not known. In brief: what is on, and what consent
    would buy."""
    if not layout.recipe:
        return ()
    if not is_brief:
        return tuple(_lines(layout, variables))
    on = _some(_on(layout), ", ", 2, "more in --show recipe") or "every switch at its plainest value"
    offers = _some([says_offer(offer, layout.step.step_s) for offer in layout.offers], "; ", 1, "with --full")
    return tuple(line for line in (("recipe", on), ("consent", offers)) if line[1])


def recipe_heading(layout: PricedLayout) -> str:
    """The title of the recipe's lines, which says how gains were priced."""
    replanned = {gain.replanned for gain in layout.recipe_gains}
    if not replanned:
        return "Recipe"
    how = "of this layout" if False in replanned else "planned again without it"
    how += ", or * planned again" if len(replanned) > 1 else ""
    return f"Recipe, and the share of the step that each switch saves ({how})"


def environment_of(plan: Plan) -> Named:
    """The variables that the plan's recipe needs, as the trainer's export sets them."""
    if plan.runtime_spec.family != "megatron" or plan.runtime_spec.year is not None:
        return {}
    from planner.export.launchers import megatron_environment

    return megatron_environment(plan)


def named(switch: str, value: Value) -> str:
    """A value of a switch as short as it can be said: `ep_overlap`, `no ep_overlap`, `ep_overlap delayed`."""
    if isinstance(value, bool):
        return switch if value else f"no {switch}"
    return f"{switch} {written(value)}"


def differences(layout: PricedLayout, beside: PricedLayout) -> Iterator[str]:
    """The values of a layout's switches that another layout has otherwise, both having an effect."""
    for switch, value in layout.recipe.items():
        if switch in beside.recipe and beside.recipe[switch] != value:
            yield named(switch, value)


def saved_fraction(gain: RecipeGain, step_s: float) -> float:
    """The share of the step without the switch that the switch saves."""
    return 1 - step_s / gain.without_step_s if gain.without_step_s else 0.0


def says_offer(offer: Offer, step_s: float) -> str:
    """`--allow fp8: 4.1% faster, changes numerics`."""
    # what is priced on this layout alone may gain more in another
    least = "" if offer.replanned else "at least "
    faster = f"{least}{percent(1 - offer.step_s / step_s)} faster"
    what = named(offer.switch, offer.value)
    what = what.removeprefix(offer.switch).strip() if offer.allow == (offer.switch,) else what
    chosen = f" {what}," if what and offer.switch != "dtype" else ""
    return f"--allow {','.join(offer.allow)}:{chosen} {faster}, changes {offer.changes}"


def says_refusal(refusal: RecipeRefusal) -> str:
    """`cuda_graph full_iteration: needs nan_checks=false`."""
    name = named(refusal.switch, refusal.value)
    return f"{name}: {refusal.rule.removeprefix(f'{refusal.switch} ').removeprefix(f'{written(refusal.value)} ')}"


def _lines(layout: PricedLayout, variables: Mapping[str, str]) -> Iterator[Line]:
    yield "on", _some(_on(layout), ", ", 3) or "every switch is at its plainest value"
    if layout.recipe_refused:
        yield "refused", _some([says_refusal(refusal) for refusal in layout.recipe_refused], "; ", 2)
    if layout.offers:
        yield "consent", _some([says_offer(offer, layout.step.step_s) for offer in layout.offers], "; ", 2)
    if variables:
        yield "env", _some([f"{name}={value}" for name, value in variables.items()], ", ", 1, "more exported")


def _on(layout: PricedLayout) -> list[str]:
    """The switches that are not at their plainest value, those that save most first."""
    step_s, are_mixed = layout.step.step_s, len({gain.replanned for gain in layout.recipe_gains}) > 1
    gains = {gain.switch: saved_fraction(gain, step_s) for gain in layout.recipe_gains}
    marks = {gain.switch: "*" for gain in layout.recipe_gains if gain.replanned and are_mixed}
    on = [name for name, value in layout.recipe.items() if value != next(iter(SWITCHES[name].values), value)]
    on.sort(key=lambda name: -gains.get(name, 0.0))
    # one that costs time, for the memory that it frees, may take more than all that would be left without it
    worth = {name: percent(gain) if gain > 0 else f"takes {percent(gain / (gain - 1))}" for name, gain in gains.items()}
    shares = {name: f" {worth[name]}{marks.get(name, '')}" for name, gain in gains.items() if abs(gain) >= LEAST_GAIN}
    return [f"{named(name, layout.recipe[name])}{shares.get(name, '')}" for name in on]


def _some(texts: Sequence[str], between: str, num_lines: int, others: str = "more in --json") -> str:
    """As many of the texts as fit in some lines, the first in any case, and how many more there are elsewhere."""
    shown = list(texts[:1])
    for text in texts[1:]:
        left = len(texts) - len(shown)
        more = f"{between}{left} {others}"
        if _num_lines(between.join([*shown, text]) + (more if left > 1 else "")) > num_lines:
            said = between.join(shown)
            return said + (more if _num_lines(said + more) <= num_lines else f"{between}{left} more")
        shown.append(text)
    return between.join(shown)


def _num_lines(text: str) -> int:
    return len(wrap(text, LINE, break_long_words=False, break_on_hyphens=False))


ANSWERS = "report/answers.yaml"


def sentences(item: str, path: str = ANSWERS, /, **names: Any) -> Iterator[str]:
    """The sentences of an item of a table of words whose conditions hold; one without a condition always does."""
    return ("".join(cells) for cells in told(item, path, **names))


def sentence(item: str, path: str = ANSWERS, /, **names: Any) -> str:
    """The first of these sentences."""
    return next(sentences(item, path, **names))


def told(item: str, path: str = ANSWERS, /, **names: Any) -> Iterator[list[str]]:
    """The rows of such an item; a sentence is a row of one cell."""
    return expressions.told(shipped_table(path)[item], WORDS | names)


WORDS: Fields = {
    "percent": percent, "seconds": seconds, "signed_seconds": signed_seconds, "span": span, "digits": digits,
    "duration": duration, "days": time_of, "large": large, "gibibytes": gibibytes, "counted": counted, "ends": ends,
    "width": width, "sizes": sizes, "manner": manner, "fits_with": fits_with, "named": named, "written": written,
    "sentences": sentences, "sentence": sentence, "abs": abs, "sorted": sorted,
}  # fmt: skip
"""The names that tables of words have beside those that they are given."""
