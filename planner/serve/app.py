"""The application: the page, its answers as they are found, and files to download. Nothing is kept on disk."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import zipfile
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from planner.answer import Plan
from planner.errors import PlannerError, SpecError, defect
from planner.export.export import bundle_of
from planner.export.trainer_files import ExportFile, slug
from planner.layout.evaluate import assemble, priced_as_given
from planner.layout.price import with_microbatches
from planner.plan_file import with_alternative
from planner.report.html import Html
from planner.search.case import Case
from planner.search.recipes import pinned, pinned_by
from planner.serve.controls import Catalogue, Form, Options, Question, Reader, asked, form_of, options_of
from planner.serve.desk import Desk, Found
from planner.serve.panel import (
    ICON,
    Panel,
    State,
    error_panel,
    placeholders,
    plan_panel,
    script,
    style,
    switch_fields,
    waiting_panel,
    whole_page,
)
from planner.serve.server import TooLarge
from planner.specs.reading import parse_json
from planner.specs.units import is_count
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import Setting, broken_recipe_rules
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import switched

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
        question, before = None, Html("")
        with contextlib.suppress(PlannerError):
            question = await asyncio.to_thread(self.question, form)
            before = waiting_panel(question).html
        return HTMLResponse(whole_page(form, self.catalogue, question, before))

    async def answer(self, request: Request) -> Response:
        """Findings for the controls in the body, a line of JSON each, the last of them final."""
        try:
            form, shown, alternative = _asked_for(await asyncio.wait_for(request.body(), BODY_S))
        except (TooLarge, TimeoutError, ClientDisconnect):
            return PlainTextResponse("the request did not end in time or in size\n", 413)
        except (ValueError, RecursionError):
            return PlainTextResponse("the body is no JSON of this page\n", 400)
        lines = self._lines(form, shown, alternative)
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
        state: State = "final" if found.is_final else "all" if found.of_all else "first"
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
            made = await asyncio.to_thread(partial(download, name, plan, own))
        except PlannerError as error:
            page = whole_page(query, self.catalogue, None, error_panel(error, query).html)
            return HTMLResponse(page, 422, {"x-planner-exit-code": str(error.exit_code)})
        except ClientDisconnect:
            return PlainTextResponse("nobody waits for it\n", 408)
        headers = {"content-disposition": f'attachment; filename="{made.name}"'}
        return Response(made.content, media_type=made.content_type, headers=headers)

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

    def fixed(content: str, content_type: str) -> Any:
        async def respond(_: Request) -> Response:
            return Response(content, media_type=content_type)

        return respond

    return Starlette(
        routes=[
            Route("/", service.page),
            Route("/answer", service.answer, methods=["POST"]),
            Route("/files/{name}", service.file),
            Route("/page.css", fixed(style(), "text/css")),
            Route("/page.js", fixed(script(), "text/javascript")),
            Route("/icon.svg", fixed(ICON, "image/svg+xml")),
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


def _asked_for(body: bytes) -> tuple[dict[str, str], str, int]:
    """The controls, the answer on the screen, and the alternative looked at. Raises ValueError if it is not that."""
    try:
        data = parse_json(body, "request")
    except SpecError as error:
        raise ValueError(error.message) from None
    if not isinstance(data, dict) or not isinstance(data.get("form"), dict):
        raise ValueError("no form")
    form, shown, alternative = data["form"], data.get("shown", ""), data.get("alternative", 0)
    if not all(isinstance(text, str) for text in (*form.values(), shown)) or type(alternative) is not int:
        raise ValueError("no texts")
    return form, shown, alternative


def _panel_line(panel: Panel, state: str) -> str:
    return _line(kind="panel", state=state, html=panel.html, status=panel.status, title=panel.title)


def _line(**data: object) -> str:
    return json.dumps(data) + "\n"


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
            from planner.report.page import report_page

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
    from planner.report.schedules import shown_step
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
