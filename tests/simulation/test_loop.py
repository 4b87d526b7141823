"""Virtual time: who is stopped waits, who is dead is silent, and nothing else knows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from tests.simulation.loop import LIFE, Life, VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    problems: list[str] = []
    made = VirtualLoop(random.Random(0), lambda message, error: problems.append(message))
    yield made
    made.close()
    assert not problems


def life(loop: VirtualLoop, name: str = "p") -> Life:
    return Life(name, 1, random.Random(1), loop)


async def tick(seen: list[float], loop: VirtualLoop) -> None:
    while True:
        await asyncio.sleep(1.0)
        seen.append(loop.time())


def test_time_is_the_next_timers(loop: VirtualLoop) -> None:
    seen: list[float] = []
    life(loop).spawn(tick(seen, loop))
    loop.run_until(3.5)
    assert seen == [1.0, 2.0, 3.0]
    assert loop.time() == 3.5


def test_who_is_stopped_goes_on_where_it_was_and_late(loop: VirtualLoop) -> None:
    seen: list[float] = []
    one = life(loop)
    one.spawn(tick(seen, loop))
    loop.call_later(1.5, one.stop)
    loop.call_later(7.25, one.go_on)
    loop.run_until(9.0)
    assert seen == [1.0, 7.25, 8.25]


def test_who_is_dead_does_nothing_more_wherever_it_was_called_from(loop: VirtualLoop) -> None:
    seen: list[float] = []
    one, other = life(loop, "one"), life(loop, "other")
    answer = loop.create_future()

    async def wait() -> None:
        await answer
        seen.append(loop.time())

    for each in (one, other):
        each.spawn(wait())
    loop.call_later(1.0, one.die)
    loop.call_later(2.0, answer.set_result, None)
    loop.run_until(3.0)
    assert seen == [2.0]


def test_what_a_life_begins_is_its_own(loop: VirtualLoop) -> None:
    found: list[Life | None] = []

    async def begin() -> None:
        asyncio.get_running_loop().call_later(0.5, lambda: found.append(LIFE.get()))
        await asyncio.create_task(inner())
        await asyncio.to_thread(lambda: found.append(LIFE.get()))

    async def inner() -> None:
        found.append(LIFE.get())

    one = life(loop)
    one.spawn(begin())
    loop.run_until(1.0)
    assert found == [one, one, one]


def test_timeouts_are_virtual_too(loop: VirtualLoop) -> None:
    seen: list[float] = []

    async def wait() -> None:
        try:
            async with asyncio.timeout(600.0):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append(loop.time())

    life(loop).spawn(wait())
    loop.run_until(1_000.0)
    assert seen == [600.0]


def test_clocks_of_two_lives_differ(loop: VirtualLoop) -> None:
    dice = random.Random(2)
    one, other = Life("a", 1, dice, loop), Life("b", 1, dice, loop)
    before = one.clock(), other.clock()
    loop.run_until(100.0)
    assert abs(before[0] - before[1]) > 1.0
    assert 98.9 < one.clock() - before[0] < 101.1
