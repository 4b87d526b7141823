"""Requests leave no reference cycles behind. Under overload, searches for cyclic garbage delayed rejections."""

import asyncio
import gc
from collections import Counter
from typing import Any

import aiohttp

from moonserve.protocol.pb import conductor_pb2
from tests.gateway.conftest import CHAT, CHAT_PATH, TEXT, TEXT_PATH
from tests.gateway.scripted_cluster import ScriptedCluster

NUM_REQUESTS = 5


def garbage() -> Counter[str]:
    """Returns unreachable objects of gateway and uvicorn, counted by type."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = Counter(f"{type(each).__module__}.{type(each).__name__}" for each in gc.garbage)
    gc.garbage.clear()
    return Counter({k: v for k, v in found.items() if k.startswith(("moonserve.gateway", "uvicorn"))})


REJECTED = conductor_pb2.PlaceReply(overloaded=conductor_pb2.Overloaded(reason="busy", retry_after_s=1.0))
SCENARIOS: list[tuple[str, dict[str, Any], int]] = [
    (TEXT_PATH, TEXT, 200),
    (TEXT_PATH, TEXT | {"stream": True}, 200),
    (CHAT_PATH, CHAT | {"stream": True, "n": 2}, 200),
    (TEXT_PATH, TEXT, 429),
    (TEXT_PATH, TEXT | {"stream": True}, 429),
    (TEXT_PATH, TEXT | {"max_tokens": 0}, 400),
]


async def test_requests_leave_no_reference_cycles(http: aiohttp.ClientSession, cluster: ScriptedCluster) -> None:
    async def ask_all() -> None:
        for path, body, status in SCENARIOS:
            cluster.place_replies = [REJECTED] if status == 429 else []
            async with http.post(path, json=body) as reply:
                await reply.read()
                assert reply.status == status
        await asyncio.sleep(0.05)  # the requests' last callbacks

    await ask_all()  # creates objects that only the first request needs
    gc.collect()
    gc.disable()
    try:
        for _ in range(NUM_REQUESTS):
            await ask_all()
        found = garbage()
    finally:
        gc.enable()
    assert all(count < NUM_REQUESTS for count in found.values()), found
