"""Files of the plan on the screen, made in memory: what `plan report`, `-o`, `plan trace` and `plan export` write."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable
from typing import NamedTuple

from planner.answer import Plan
from planner.errors import PlannerError, SpecError
from planner.export.export import bundle_of
from planner.export.trainer_files import ExportFile, slug
from planner.layout.evaluate import assemble, priced_as_given
from planner.layout.price import with_microbatches
from planner.plan_file import with_alternative
from planner.search.case import Case
from planner.search.recipes import pinned, pinned_by
from planner.serve.controls import Form
from planner.specs.units import is_count
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import Setting, broken_recipe_rules
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import switched

_FIXED_DATE = (1980, 1, 1, 0, 0, 0)
"""The date of all files of an archive, so that the same plan makes the same bytes."""


class Download(NamedTuple):
    """A file for the browser to save."""

    name: str
    content_type: str
    content: bytes


NAMES = ("report.html", "plan.json", "trace.json", "export.zip")
OWN_FIELDS = ("alternative", "to", "launcher")
"""The names in a download's address that are no controls."""


def download(name: str, plan: Plan, own: Form) -> Download:
    """One of NAMES. Raises PlannerError where the plan cannot be exported so."""
    number = _number(own.get("alternative", ""))
    chosen = with_alternative(plan, number)
    stem = slug(plan.model.name) + (f"-alternative-{number}" if number else "")
    match name:
        case "report.html":
            from planner.report.page import report_page  # draws with matplotlib, which takes a while to load

            return Download(f"{stem}.html", "text/html; charset=utf-8", report_page(chosen).encode())
        case "plan.json":
            # the file keeps every alternative: commands take --alternative themselves
            return Download(f"{slug(plan.model.name)}.json", "application/json", plan.saved_text().encode())
        case "trace.json":
            return Download(f"{stem}-trace.json", "application/json", _trace(chosen).encode())
    targets = ",".join(word for word in (own.get("to", ""), own.get("launcher", "")) if word and word != "default")
    bundle = bundle_of(chosen, targets or "megatron")
    return Download(f"{stem}-{'-'.join(bundle.targets)}.zip", "application/zip", _zip(bundle.with_manifest()))


def _number(text: str) -> int | None:
    if text and not is_count(text):
        raise SpecError(f"--alternative: {text[:20]!r} is no whole number", "choose one of the alternatives")
    return int(text) or None if text else None


def _trace(plan: Plan) -> str:
    """The whole step, or a shorter one of the same pipeline where it is too long for a trace."""
    from planner.report.timeline import shown_step
    from planner.report.trace import MAX_ACTIONS, trace_text

    layout, sizes = plan.best, plan.parallelism
    if 2 * sizes.pp * sizes.vpp * sizes.num_microbatches > MAX_ACTIONS:
        layout = with_microbatches(layout, shown_step(plan).num_microbatches)
    return trace_text(plan, layout)


def _zip(files: Iterable[ExportFile]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            info = zipfile.ZipInfo(file.name, _FIXED_DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o755 if file.executable else 0o644) << 16
            archive.writestr(info, file.text)
    return packed.getvalue()


def same_layout(shown: Plan, case: Case) -> Plan | None:
    """The plan's best layout priced for another case, whether it fits or not.

    None where it cannot be run there, is not within the case's pins, or has an order that was made to measure.
    """
    layout = shown.best
    if layout.actions or shown.model.spec.num_hidden_layers != case.model.num_hidden_layers:
        return None
    if any(getattr(layout.parallelism, axis) not in values for axis, values in case.pins.items() if axis != "dp"):
        return None
    try:
        runtime = _runtime(shown, pinned(case))
        candidate, priced = priced_as_given(case.model, case.cluster, case.training, layout.stated, runtime)
    except PlannerError:
        return None
    plan = assemble(candidate.pricing, candidate.pricing.totals, [priced], ())
    return plan if "dp" not in case.pins or plan.parallelism.dp in case.pins["dp"] else None


def _runtime(shown: Plan, case: Case) -> RuntimeSpec:
    """The case's trainer with the switches on the screen, but for those that the case pins or the trainer refuses."""
    own = case.runtime
    if case.limits.switches == "default":
        return own
    kept, has = pinned_by(case), switches_of(own)
    recipe = {name: v for name, v in shown.best.recipe.items() if name not in kept and v in has.get(name, ())}
    runtime = switched(own, recipe)
    legal = not any(broken_recipe_rules(Setting(case.model, case.cluster, case.training, runtime)))
    return runtime if legal else own
