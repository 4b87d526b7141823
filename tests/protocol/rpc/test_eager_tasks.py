"""Tests of eager start: a coroutine runs at once as if in a task, and becomes a task when it first waits."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import pytest

from moonserve.protocol.rpc.eager_tasks import EagerStarter

T = TypeVar("T")
VARIABLE = contextvars.ContextVar("VARIABLE", default=0)


@pytest.fixture
async def eager() -> AsyncIterator[EagerStarter]:
    eager = EagerStarter()
    yield eager
    await eager.close()


async def in_callback(call: Callable[[], T]) -> T:
    """Returns the result of `call` when the loop calls it, like a protocol callback. Wraps its error in `Raised`."""
    outcome = asyncio.get_running_loop().create_future()

    def callback() -> None:
        try:
            outcome.set_result(call())
        except (Exception, asyncio.CancelledError) as error:
            outcome.set_exception(Raised(error))

    asyncio.get_running_loop().call_soon(callback)
    return await outcome


class Raised(Exception):
    """Wraps an error that the call raised at once."""


async def fails(waits: bool) -> None:
    if waits:
        await asyncio.sleep(0)
    raise KeyError("k")


async def test_coroutine_without_wait_ends_at_once_and_leaves_no_task(eager: EagerStarter) -> None:
    async def body() -> bool:
        return asyncio.current_task() is not None

    assert await in_callback(lambda: eager.start(body())) is True
    with pytest.raises(Raised) as caught:
        await in_callback(lambda: eager.start(fails(waits=False)))
    assert isinstance(caught.value.args[0], KeyError)
    assert await in_callback(asyncio.current_task) is None


async def many_waits() -> str:
    got = [await asyncio.sleep(0, "a")]
    got.append(await asyncio.to_thread(lambda: "b"))
    got.append(await asyncio.create_task(asyncio.sleep(0, "c")))
    return "".join(got)


async def handles_a_failed_wait() -> str:
    try:
        await asyncio.create_task(fails(waits=True))
    except KeyError:
        await asyncio.sleep(0)
        return "handled"
    return "not reached"


async def times_out() -> str:
    """Runs into a timeout that began before the first wait."""
    try:
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
    except TimeoutError:
        return "timed out"
    return "not reached"


async def cancels_itself() -> str:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return "caught"
    return "not reached"


async def keeps_its_context() -> int:
    token = VARIABLE.set(1)
    await asyncio.sleep(0)
    seen = VARIABLE.get()
    VARIABLE.reset(token)
    return seen


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (many_waits, "abc"),
        (handles_a_failed_wait, "handled"),
        (times_out, "timed out"),
        (cancels_itself, "caught"),
        (keeps_its_context, 1),
    ],
)
async def test_coroutine_that_waits_continues_as_a_task(
    eager: EagerStarter, body: Callable[[], Coroutine[Any, Any, Any]], expected: object
) -> None:
    task = await in_callback(lambda: eager.start(body()))
    assert isinstance(task, asyncio.Task)
    assert await task == expected
    assert VARIABLE.get() == 0


async def test_task_is_current_before_and_after_the_first_wait(eager: EagerStarter) -> None:
    async def body() -> tuple[Any, Any]:
        before = asyncio.current_task()
        await asyncio.sleep(0)
        return before, asyncio.current_task()

    task = await in_callback(lambda: eager.start(body()))
    assert await task == (task, task)
    with pytest.raises(KeyError):
        await (await in_callback(lambda: eager.start(fails(waits=True))))


@pytest.mark.parametrize("shielded", [False, True])
async def test_cancellation_in_the_iteration_of_the_start(eager: EagerStarter, shielded: bool) -> None:
    """A task can be cancelled before it waits for the coroutine's future, and before it ever ran."""
    inner, log = asyncio.create_task(asyncio.Event().wait()), []

    async def body() -> None:
        try:
            await (asyncio.shield(inner) if shielded else inner)
        except asyncio.CancelledError:
            log.append("caught")
            raise

    def start_and_cancel() -> list[asyncio.Task[None]]:
        tasks = []
        for _ in range(2):  # the second task has not even begun
            tasks.append(eager.start(body()))
            tasks[-1].cancel()
        return tasks

    tasks = await in_callback(start_and_cancel)
    await asyncio.wait(tasks)
    assert log == ["caught"] * 2
    assert all(task.cancelled() for task in tasks)
    assert inner.cancelled() is not shielded
    inner.cancel()


async def test_coroutine_that_cancels_itself_does_not_cancel_the_next(eager: EagerStarter) -> None:
    async def body() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "done"

    assert await in_callback(lambda: eager.start(body())) == "done"
    assert await (await in_callback(lambda: eager.start(many_waits()))) == "abc"


async def test_many_coroutines_may_await_one_future_in_one_iteration(eager: EagerStarter) -> None:
    shared = asyncio.get_running_loop().create_future()

    async def body() -> str:
        return str(await shared)

    tasks = await in_callback(lambda: [eager.start(body()) for _ in range(3)])
    shared.set_result("x")
    assert await asyncio.gather(*tasks) == ["x", "x", "x"]
