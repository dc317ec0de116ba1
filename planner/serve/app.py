"""The application: the page, its answers as they are found, and files to download. Nothing is kept on disk.

Pieces of HTML that a report has no use for are drawn by the macros of `static/page.html.j2`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal, NamedTuple
from urllib.parse import urlencode

from markupsafe import Markup
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from planner.answer import Plan, SearchReport
from planner.errors import Infeasible, PlannerError, SpecError, defect
from planner.export.targets import LAUNCHERS, TRAINERS
from planner.layout.evaluate import assemble, priced_as_given
from planner.plan_file import with_alternative
from planner.report.format import gibibytes, is_proven, percent, seconds
from planner.report.html import draw
from planner.report.pictures import pictures
from planner.report.view import SECTIONS, view_of
from planner.search.case import Case
from planner.search.recipes import pinned, pinned_by
from planner.serve.controls import (
    GROUPS,
    SWITCH,
    Catalogue,
    Control,
    Form,
    Options,
    Question,
    Reader,
    asked,
    changed,
    form_of,
    options_of,
)
from planner.serve.desk import NAMES, OWN_FIELDS, Desk, Found, download
from planner.serve.server import TooLarge
from planner.specs.base import Named
from planner.specs.reading import parse_json
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import Setting, broken_recipe_rules
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import switched
from planner.trainers.switches import SWITCHES, written

State = Literal["same", "so far", "final"]
_NARROWEST_GAP = 1e-4
"""The gap asked for at least, as far as the bar of progress goes."""


class Panel(NamedTuple):
    """One state of the page's side that shows the answer."""

    html: Markup
    status: str
    """The same in a sentence, for a screen reader and for the line that phones show."""
    title: str
    """The title of the browser's window."""


def _drawn(macro: str, *given: object) -> Markup:
    """A piece of the page by its macro; text is escaped."""
    known = {"wide": WIDE, "unset": _UNSET, "changed": changed, "encoded": _encoded}
    return draw(macro, *given, path="serve/static/page.html.j2", **known)


def plan_panel(plan: Plan, question: Question, form: Form, state: State, alternative: int = 0) -> Panel:
    """The panel of a plan's best layout, or of one of its alternatives."""
    alternative = alternative if 0 < alternative <= len(plan.alternatives) else 0
    shown = with_alternative(plan, alternative or None)
    ended = shown.search if state == "final" else None  # what a search has not proved yet is said above its bar alone
    view = view_of(shown.model_copy(update={"command": question.command, "search": ended}))
    query = {**form, **({"alternative": str(alternative)} if alternative else {})} if state == "final" else None
    html = _drawn(
        "answer", SECTIONS, replace(view, command=""), view_of(plan) if alternative else view, pictures(shown), form,
        plan if state == "final" else None, question.command, alternative, len(plan.alternatives), _encoded(form),
        query, TRAINERS, LAUNCHERS, _progress(plan, question, state),
    )  # fmt: skip
    status = f"{_briefly(shown, question, state)}: step {seconds(shown.step.step_s)}, {shown.parallelism}"
    return Panel(html, status, f"{seconds(shown.step.step_s)} · {view.job}")


def waiting_panel(question: Question) -> Panel:
    """The panel before the first answer."""
    case = question.case
    job = f"{case.model.name} on {case.cluster.num_gpus:,} × {case.cluster.hardware.name}"
    return Panel(_drawn("waiting", job, question.command), f"Searching: {job}", f"… · {job}")


def error_panel(error: PlannerError, form: Form, question: Question | None = None) -> Panel:
    """The reason why there is no plan, and what would help, to be applied by a click."""
    title, says, remedy, rejected = "This cannot be planned", error.message, list[str](), list[tuple[str, str]]()
    field = error.message.partition(":")[0].removeprefix("--").replace("-", "_")
    if isinstance(error, Infeasible):
        title, says, field = "Nothing fits", error.hint or error.message, ""
        remedy = [str(word) for word in error.remedy["options"]] if error.remedy is not None else []
        counts = sorted((error.rejections or {}).items(), key=lambda pair: -pair[1])
        rejected = [(f"{count:,}", reason.replace("_", " ")) for reason, count in counts]
    line, query = question.command if question else "", _encoded(changed(form, remedy)) if remedy else ""
    body = _drawn("problem", title, error, field, " ".join(remedy), query, line, rejected)
    return Panel(body, f"{title}: {says}", title)


def _progress(plan: Plan, question: Question, state: State) -> Markup:
    """How far the search is, in a line with the page's only bar, which ends with the search; nothing afterwards."""
    search, share = plan.search, None
    if state == "final":
        return Markup()
    if state == "same" or search is None:
        says = f"The layout on the screen under these controls. {_lacks(plan, question)}Looking for a better one …"
    else:
        share = max(_closed(search), min((search.seconds or 0.0) / question.case.limits.time_limit_s, 1.0))
        says = f"The best so far, within {percent(search.gap)} of the best of all layouts. The search goes on …"
    return _drawn("going", says, share)


def _closed(search: SearchReport) -> float:
    """The share of the way from a gap of one to the gap asked for, in their logarithms."""
    asked, gap = (max(each or 0.0, _NARROWEST_GAP) for each in (search.asked_gap_fraction, search.gap))
    return min(max(1 - math.log(gap / asked) / math.log(1 / asked), 0.0), 1.0) if asked < 1 else 1.0


def _lacks(plan: Plan, question: Question) -> str:
    """The memory that a layout lacks beside what the question leaves free; empty where it lacks none."""
    needs_bytes = plan.best.worst_stage.memory.total_bytes
    has_bytes = plan.cluster.hardware.memory_bytes - question.case.headroom_bytes
    if needs_bytes <= has_bytes:
        return ""
    return f"It needs {gibibytes(needs_bytes)} GiB of the {gibibytes(has_bytes)} that may be filled. "


def _briefly(plan: Plan, question: Question, state: State) -> str:
    search = plan.search
    if state == "same":
        return "The same layout does not fit" if _lacks(plan, question) else "Same layout, priced again"
    if search is None:
        return "Priced"
    gap = f"gap {percent(search.gap, 2)}"
    return f"{'So far' if state == 'so far' else 'Proven' if is_proven(search) else 'Best found'}, {gap}"


def _encoded(form: Form) -> str:
    """The form as the address of a page has it."""
    return urlencode({name: text for name, text in form.items() if text})


def whole_page(form: Form, catalogue: Catalogue, question: Question | None, answer: Markup) -> str:
    """The page as it opens; its script asks for the answer."""
    return _drawn("page", form, catalogue, GROUPS, switch_fields(form, question), answer).lstrip()


def switch_fields(form: Form, question: Question | None) -> Markup:
    """A choice for each switch of the question's trainer."""
    has = {} if question is None else switches_of(question.case.runtime)
    controls = [
        Control(f"{SWITCH}{name}", name, SWITCHES[name].says, "select", ("", *map(written, values)))
        for name, values in has.items()
    ]
    return _drawn("switches", controls, form)


def placeholders(question: Question) -> Named:
    """The defaults that empty controls show."""
    case = question.case
    tier = case.cluster.tiers[-1]
    return {
        "seq_length": str(case.training.seq_length),
        "global_batch_size": str(case.training.global_batch_size),
        "gpus_per_node": str(case.cluster.node_size),
        "network_gb_per_s": f"{tier.gb_per_s:g}",
        "oom_risk": f"{case.limits.oom_risk:g}",
        "top": str(case.limits.top),
        "time_limit": f"{case.limits.time_limit_s:g}",
    }


WIDE = ("model", "hardware", "runtime", "tier", "allow", "assume", "lora_targets", "rank_order", "switch")
"""Controls that take the whole width of the form."""
_UNSET = {"dtype": "bf16, or fp16 where it has none", "runtime": "the GPU's own"}


BODY_S = 10.0
"""Seconds in which a request's body must have arrived."""


@dataclass(frozen=True)
class Service:
    """The state that all routes share."""

    read: Reader
    start: Options
    """The options that the page opens with."""
    catalogue: Catalogue
    desk: Desk

    def question(self, form: Form) -> Question:
        """Read the controls. Raises SpecError naming the option."""
        return asked(self.read, options_of(form, self.catalogue))

    async def page(self, request: Request) -> Response:
        """The page, with the controls that the address names."""
        form = dict(request.query_params) or form_of(self.start)
        form.pop("alternative", None)
        question, before = None, Markup()
        with contextlib.suppress(PlannerError):
            question = await asyncio.to_thread(self.question, form)
            before = waiting_panel(question).html
        return HTMLResponse(whole_page(form, self.catalogue, question, before))

    async def answer(self, request: Request) -> Response:
        """Findings for the controls in the body, a line of JSON each, the last of them final."""
        try:
            body = await asyncio.wait_for(request.body(), BODY_S)
            asked = Asked.model_validate(parse_json(body, "request"))
        except (TooLarge, TimeoutError, ClientDisconnect):
            return PlainTextResponse("the request did not end in time or in size\n", 413)
        except (SpecError, ValidationError):
            return PlainTextResponse("the body is no JSON of this page\n", 400)
        lines = self._lines(asked.form, asked.shown, asked.alternative)
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def _lines(self, form: Form, shown: str, alternative: int) -> AsyncIterator[str]:
        question = None
        try:
            question = await asyncio.to_thread(self.question, form)
            yield _line(kind="asked", key=question.key, switches=switch_fields(form, question),
                placeholders=placeholders(question))  # fmt: skip
            async for line in self._found(question, form, shown, alternative):
                yield line
        except PlannerError as error:
            yield _panel_line(error_panel(error, form, question), "final")
        except Exception as error:  # the outermost frame: a defect must not look like an answer either
            yield _panel_line(error_panel(defect(error), form, question), "final")

    async def _found(self, question: Question, form: Form, shown: str, alternative: int) -> AsyncIterator[str]:
        """The layout on the screen priced again while the search runs, then what the search finds."""
        known = self.desk.known(question.key)
        if known is None:
            yield await self._before(question, form, shown)
        async with contextlib.aclosing(self.desk.follow(question)) as all_found:
            async for found in all_found:
                yield await asyncio.to_thread(self._shown, found, question, form, alternative)

    async def _before(self, question: Question, form: Form, shown: str) -> str:
        before = self.desk.known(shown)
        again = None
        if isinstance(before, Plan):
            again = await asyncio.to_thread(same_layout, before, question.case)
        if again is None:
            return _panel_line(waiting_panel(question), "waiting")
        return _panel_line(await asyncio.to_thread(plan_panel, again, question, form, "same"), "same")

    def _shown(self, found: Found, question: Question, form: Form, alternative: int) -> str:
        state: State = "final" if found.is_final else "so far"
        if isinstance(found.answer, PlannerError):
            return _panel_line(error_panel(found.answer, form, question), state)
        return _panel_line(plan_panel(found.answer, question, form, state, alternative), state)

    async def file(self, request: Request) -> Response:
        """A file of the plan that the address asks for, planned again if it is not kept any more."""
        name = request.path_params["name"]
        if name not in NAMES:
            return PlainTextResponse("no such file\n", 404)
        query = dict(request.query_params)
        own = {field: query.pop(field) for field in OWN_FIELDS if field in query}
        try:
            question = await asyncio.to_thread(self.question, query)
            plan = await _unless_gone(request, self._plan(question))
            plan = plan.model_copy(update={"command": question.command})
            saved_as, content_type, content = await asyncio.to_thread(download, name, plan, own)
        except PlannerError as error:
            page = whole_page(query, self.catalogue, None, error_panel(error, query).html)
            return HTMLResponse(page, 422, {"x-planner-exit-code": str(error.exit_code)})
        except ClientDisconnect:
            return PlainTextResponse("nobody waits for it\n", 408)
        headers = {"content-disposition": f'attachment; filename="{saved_as}"'}
        return Response(content, media_type=content_type, headers=headers)

    async def _plan(self, question: Question) -> Plan:
        async with contextlib.aclosing(self.desk.follow(question)) as all_found:
            async for found in all_found:
                if found.is_final:
                    break
        if isinstance(found.answer, PlannerError):
            raise found.answer
        return found.answer


def application(read: Reader, start: Options, defaults: Options, desk: Desk | None = None) -> Starlette:
    """The page as an ASGI application; `serve` puts a guard before it."""
    service = Service(read, start, Catalogue.shipped(start, defaults), desk or Desk())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await service.desk.close()

    def fixed(name: str, content_type: str, before: str = "") -> Any:
        content = before + files("planner.serve").joinpath("static", name).read_text(encoding="utf-8")

        async def respond(_: Request) -> Response:
            return Response(content, media_type=content_type)

        return respond

    return Starlette(
        routes=[
            Route("/", service.page),
            Route("/answer", service.answer, methods=["POST"]),
            Route("/files/{name}", service.file),
            Route("/page.css", fixed("page.css", "text/css", draw("style"))),
            Route("/page.js", fixed("page.js", "text/javascript")),
            Route("/icon.svg", fixed("icon.svg", "image/svg+xml")),
        ],
        lifespan=lifespan,
    )


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Plan]) -> Plan:
    """The plan that is worked on. Raises ClientDisconnect, and ends the work, where nobody waits for it any more."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class Asked(BaseModel, strict=True):
    """A request of the page for an answer."""

    form: Named
    """The controls."""
    shown: str = ""
    """The answer on the screen."""
    alternative: int = 0
    """The alternative looked at."""


def _panel_line(panel: Panel, state: str) -> str:
    return _line(kind="panel", state=state, html=panel.html, status=panel.status, title=panel.title)


def _line(**data: object) -> str:
    return json.dumps(data) + "\n"


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
