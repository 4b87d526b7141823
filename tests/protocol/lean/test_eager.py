"""A coroutine that is started at once cannot tell that it is not a task's, and becomes one when it waits."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from protocol.lean.eager import EagerStart

Start = Callable[[Coroutine[Any, Any, Any]], asyncio.Future[Any]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a coroutine from a callback, as a protocol does, and gives what `EagerStart.start` gave."""
    eager = EagerStart()

    def call(body: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        outcome = asyncio.get_running_loop().create_future()

        def callback() -> None:
            try:
                outcome.set_result(eager.start(body))
            except (Exception, asyncio.CancelledError) as error:
                outcome.set_exception(Raised(error))

        asyncio.get_running_loop().call_soon(callback)
        return outcome

    yield call
    await eager.close()


class Raised(Exception):
    """By the coroutine, at once."""


async def test_what_does_not_wait_is_over_at_once(start: Start) -> None:
    async def body() -> int:
        return 7

    assert await start(body()) == 7


async def test_an_error_before_the_first_wait_is_raised_at_once(start: Start) -> None:
    async def body() -> None:
        raise KeyError("k")

    with pytest.raises(Raised) as caught:
        await start(body())
    assert isinstance(caught.value.args[0], KeyError)


async def test_what_waits_goes_on_as_a_task_through_any_number_of_waits(start: Start) -> None:
    async def body() -> str:
        got = [await asyncio.sleep(0, "a")]
        got.append(await asyncio.to_thread(lambda: "b"))
        got.append(await asyncio.create_task(asyncio.sleep(0, "c")))
        return "".join(got)

    task = await start(body())
    assert isinstance(task, asyncio.Task)
    assert await task == "abc"


async def test_an_error_after_a_wait_is_the_tasks(start: Start) -> None:
    async def body() -> None:
        await asyncio.sleep(0)
        raise KeyError("k")

    with pytest.raises(KeyError):
        await (await start(body()))


async def test_a_failed_wait_can_be_handled(start: Start) -> None:
    failed = asyncio.get_running_loop().create_future()

    async def body() -> str:
        try:
            await failed
        except KeyError:
            await asyncio.sleep(0)
            return "handled"
        return "not reached"

    task = await start(body())
    failed.set_exception(KeyError("k"))
    assert await task == "handled"


async def test_the_current_task_is_the_same_before_and_after_the_first_wait(start: Start) -> None:
    async def body() -> tuple[Any, Any]:
        before = asyncio.current_task()
        await asyncio.sleep(0)
        return before, asyncio.current_task()

    task = await start(body())
    assert await task == (task, task)


async def test_there_is_no_current_task_left_behind(start: Start) -> None:
    async def body() -> None:
        assert asyncio.current_task() is not None

    await start(body())
    seen = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: seen.set_result(asyncio.current_task()))
    assert await seen is None


async def test_a_timeout_that_began_before_the_first_wait_ends_it(start: Start) -> None:
    async def body() -> str:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            return "timed out"
        return "not reached"

    assert await (await start(body())) == "timed out"


async def test_cancelling_ends_the_wait_and_what_is_waited_for(start: Start) -> None:
    inner = asyncio.create_task(asyncio.Event().wait())

    async def body() -> None:
        await inner

    task = await start(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inner.cancelled()


@pytest.mark.parametrize("shielded", [False, True])
async def test_cancelling_in_the_turn_it_was_started_in(shielded: bool) -> None:
    """Before the task has come to wait for what the coroutine waits for, and before it ever ran."""
    eager, log = EagerStart(), []
    inner = asyncio.create_task(asyncio.Event().wait())
    over = asyncio.get_running_loop().create_future()

    async def body() -> None:
        try:
            await (asyncio.shield(inner) if shielded else inner)
        except asyncio.CancelledError:
            log.append("told")
            raise

    def callback() -> None:
        for _ in range(2):  # the second one's task has not even begun
            task = eager.start(body())
            assert isinstance(task, asyncio.Task)
            task.cancel()
            task.add_done_callback(lambda task: log.append(task.cancelled()))
        task.add_done_callback(over.set_result)

    asyncio.get_running_loop().call_soon(callback)
    await over
    assert log.count("told") == log.count(True) == 2
    assert inner.cancelled() is not shielded
    inner.cancel()
    await eager.close()


async def test_cancelling_itself_without_waiting_does_not_reach_the_next(start: Start) -> None:
    async def cancels_itself() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "done"

    async def waits() -> str:
        await asyncio.sleep(0)
        return "done too"

    assert await start(cancels_itself()) == "done"
    assert await (await start(waits())) == "done too"


async def test_cancelling_itself_before_waiting_ends_the_wait(start: Start) -> None:
    async def body() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "told"
        return "not reached"

    assert await (await start(body())) == "told"


async def test_context_variables_are_kept_through_the_first_wait(start: Start) -> None:
    variable = contextvars.ContextVar("variable", default=0)

    async def body() -> int:
        token = variable.set(1)
        await asyncio.sleep(0)
        seen = variable.get()
        variable.reset(token)
        return seen

    assert await (await start(body())) == 1
    assert variable.get() == 0


async def test_many_may_begin_to_wait_for_one_future_in_one_turn() -> None:
    eager, shared = EagerStart(), asyncio.get_running_loop().create_future()
    started: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

    async def body() -> str:
        return str(await shared)

    asyncio.get_running_loop().call_soon(
        lambda: started.set_result([eager.start(body()) for _ in range(3)])
    )
    tasks = await started
    shared.set_result("x")
    assert await asyncio.gather(*tasks) == ["x", "x", "x"]
    await eager.close()
