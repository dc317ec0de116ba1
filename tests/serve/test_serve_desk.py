"""The desk runs few searches, shares them, ends those that nobody waits for, and forgets the oldest answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest
from served import SMALL

from planner.answer import Plan
from planner.cli.views import read_question
from planner.errors import Infeasible, PlannerError, SolverError
from planner.serve import desk as desk_module
from planner.serve.controls import Question
from planner.serve.desk import KEPT, MAX_WAITING, Desk, Found, first, start, whole

NOTHING = Infeasible("nothing fits", "add GPUs")


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Searches that end when they are told to; how many run, and how many were ended."""
    state: dict[str, Any] = {"may_end": asyncio.Event(), "running": 0, "most": 0, "ended": 0}

    async def fake(search: object, case: object) -> AsyncGenerator[Found, None]:
        if search is first:
            yield Found(SolverError("no time"), is_final=False, of_all=False)
            return
        state["running"] += 1
        state["most"] = max(state["most"], state["running"])
        try:
            await state["may_end"].wait()
        except asyncio.CancelledError:
            state["ended"] += 1
            raise
        finally:
            state["running"] -= 1
        yield Found(NOTHING, is_final=True)

    monkeypatch.setattr(desk_module, "found_by", fake)
    return state


def question(gpus: int) -> Question:
    return read_question({**SMALL, "gpus": str(gpus)})


async def follow(desk: Desk, asked: Question) -> list[Found]:
    return [found async for found in desk.follow(asked)]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def test_the_same_question_is_searched_once_and_then_known(searches: dict[str, Any]) -> None:
    async def test() -> None:
        desk = Desk()
        both = [asyncio.create_task(follow(desk, question(8))) for _ in range(2)]
        await asyncio.sleep(0.01)
        searches["may_end"].set()
        assert [[found.answer for found in each] for each in await asyncio.gather(*both)] == [[NOTHING], [NOTHING]]
        assert searches["most"] == 1
        assert desk.known(question(8).key) is NOTHING

    run(test)


def test_a_search_that_nobody_waits_for_is_ended(searches: dict[str, Any]) -> None:
    async def test() -> None:
        desk = Desk()
        stays, leaves = (asyncio.create_task(follow(desk, question(8))) for _ in range(2))
        await asyncio.sleep(0.01)
        leaves.cancel()
        await asyncio.sleep(0.01)
        assert (searches["running"], searches["ended"]) == (1, 0)
        stays.cancel()
        await asyncio.sleep(0.01)
        assert (searches["running"], searches["ended"], desk.num_searches) == (0, 1, 0)

    run(test)


def test_few_searches_run_and_few_wait(searches: dict[str, Any]) -> None:
    async def test() -> None:
        desk = Desk(num_searches=2)
        waiting = [asyncio.create_task(follow(desk, question(8 * n))) for n in range(1, MAX_WAITING + 1)]
        await asyncio.sleep(0.05)
        assert searches["most"] == 2
        with pytest.raises(PlannerError, match="other questions"):
            await follow(desk, question(8 * MAX_WAITING + 8))
        searches["may_end"].set()
        await asyncio.gather(*waiting)
        assert searches["most"] == 2

    run(test)


def test_the_oldest_answers_are_forgotten(searches: dict[str, Any]) -> None:
    async def test() -> None:
        desk = Desk()
        searches["may_end"].set()
        asked = [question(8 * n) for n in range(1, KEPT + 2)]
        for each in asked:
            await follow(desk, each)
        assert desk.known(asked[0].key) is None
        assert desk.known(asked[1].key) is NOTHING

    run(test)


def test_a_search_in_a_process_ends_when_it_is_killed() -> None:
    process, connection = start(first, question(8).case)
    process.kill()
    with pytest.raises(EOFError):
        connection.recv()
    process.join(10)
    assert not process.is_alive()


def test_an_answer_never_gets_slower_until_it_is_final() -> None:
    told: list[Plan] = []
    final = whole(question(8).case, told.append)
    so_far = told[0]
    assert so_far.search.lower_bound_s <= final.search.lower_bound_s * (1 + 1e-9)
    assert so_far.step.step_s >= final.step.step_s * (1 - 1e-9)
    few = Found(final, is_final=False, of_all=False)
    shown = Found(so_far, is_final=False).after(few)
    assert isinstance(shown.answer, Plan)
    assert shown.of_all
    assert shown.answer.step.step_s == min(so_far.step.step_s, final.step.step_s)
    bound_s = shown.answer.search.lower_bound_s
    assert shown.answer.search.gap == pytest.approx(shown.answer.step.step_s / bound_s - 1)
    assert bound_s <= so_far.search.lower_bound_s
    assert Found(NOTHING, is_final=True).after(few).answer is NOTHING
