"""Pin changes that a restart must find: in the log, in footers, and after compaction."""

import asyncio
import contextlib
import dataclasses
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.kvstore.disk.base import DiskObject, Pin
from moonserve.protocol.kv_blocks import BlockKey
from tests.kvstore.disk.tiers import Stand, opened, written
from tests.thoroughness import examples


def change(about: DiskObject, number: int, pin: Pin) -> DiskObject:
    return dataclasses.replace(about, generation=number, pin=pin)


def found_pins(stand: Stand) -> dict[BlockKey, Pin]:
    return {about.key: about.pin for about in stand.owner.places}


async def test_a_pin_does_not_pass_to_a_later_object_of_the_key(tmp_path: Path) -> None:
    first, second = written(1, generation=1), written(1, generation=3)
    async with opened(tmp_path) as stand:
        await stand.put([first])
        await stand.tier.repin([change(first.object, 2, Pin.HARD)])
        await stand.forget(first.object)
        await stand.put([second])
    async with opened(tmp_path) as stand:
        assert found_pins(stand) == {first.object.key: Pin.NONE}


async def test_pins_outlast_compaction_of_their_objects_and_of_themselves(tmp_path: Path) -> None:
    pinned = [written(number, generation=number) for number in range(1, 4)]
    async with opened(tmp_path) as stand:
        await stand.put(pinned)
        await stand.tier.repin([change(write.object, 10 + n, Pin.HARD) for n, write in enumerate(pinned)])
        before = {stand.owner.places[write.object] for write in pinned}
        # Writes and releases objects at random in a full folder until all pinned ones have moved.
        rng, number = random.Random(1), 100
        fillers: list[DiskObject] = []
        while before & {stand.owner.places[write.object] for write in pinned}:
            number += 1
            filler = written(number, 5_000, generation=number)
            room = stand.tier.live_limit - stand.tier.usage().live
            if fillers and room < 2 * stand.tier.space(5_000):
                stand.release(fillers.pop(rng.randrange(len(fillers))))
            if (await stand.put([filler]))[0]:
                fillers.append(filler.object)
            assert number < 5_000
    async with opened(tmp_path) as stand:
        pins = found_pins(stand)
        assert [pins[write.object.key] for write in pinned] == [Pin.HARD] * 3


@settings(max_examples=examples(15), deadline=None)
@given(steps=st.lists(st.tuples(st.integers(1, 5), st.sampled_from(Pin), st.booleans()), min_size=1, max_size=12))
def test_any_order_of_changes_and_restarts_keeps_the_last_value(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, Pin, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("pins")

    async def play() -> None:
        wanted = {written(n).object.key: Pin.NONE for n in range(1, 6)}
        generation = 10
        stack = contextlib.AsyncExitStack()
        stand = await stack.enter_async_context(opened(folder))
        await stand.put([written(n, generation=n) for n in range(1, 6)])
        for number, pin, restarts in steps:
            generation += 1
            about = written(number, generation=number).object
            await stand.tier.repin([change(about, generation, pin)])
            wanted[about.key] = pin
            if restarts:
                await stack.aclose()
                stand = await stack.enter_async_context(opened(folder))
                assert found_pins(stand) == wanted
        await stack.aclose()

    asyncio.run(play())
