"""The status pipe: what is written is what is read, and a process that will not serve is told of."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import status
from protocol.status import Failed, NotReady, Progress, Ready, Report
from tests.patience import NEVER_S, PATIENCE_S

READY = Ready({"rpc": "127.0.0.1:1"})
REPORTS = st.one_of(
    st.builds(Progress, st.text(), st.none() | st.floats(0, 1)),
    st.builds(Ready, st.dictionaries(st.text(), st.text())),
    st.builds(Failed, st.text()),
)


def said(*entries: Report) -> int:
    """The reading end of a pipe on which a process that has ended said them."""
    read_fd, write_fd = os.pipe()
    for entry in entries:
        status.write(write_fd, entry)
    os.close(write_fd)
    return read_fd


async def followed(fd: int) -> list[Report]:
    return [report async for report in status.follow(fd)]


@given(st.lists(REPORTS, max_size=5))
def test_what_is_written_is_read(entries: list[Report]) -> None:
    assert asyncio.run(followed(said(*entries))) == entries


async def test_a_processs_facts_come_with_its_readiness_and_no_descriptor_stays_open() -> None:
    read_fd = said(Progress("loading"), READY, Progress("afterwards"))
    opened = os.fstat(read_fd)
    assert await asyncio.wait_for(status.until_ready(read_fd), PATIENCE_S) == READY.facts
    await asyncio.sleep(0)  # the transport closes in the loop's next turn
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
    assert not any(os.path.samestat(path.stat(), opened) for path in paths)


@pytest.mark.parametrize(("entries", "reason"), [([Failed("no such model")], "no such model"), ([], "it ended")])
async def test_why_a_process_will_not_serve(entries: list[Report], reason: str) -> None:
    """In its own words, or that there were none."""
    with pytest.raises(NotReady, match=reason):
        await asyncio.wait_for(status.until_ready(said(Progress("loading"), *entries)), PATIENCE_S)


async def test_a_wait_for_a_silent_process_can_be_cancelled() -> None:
    read_fd, write_fd = os.pipe()
    waiting = asyncio.create_task(asyncio.wait_for(status.until_ready(read_fd), NEVER_S))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)  # as above
    with pytest.raises(BrokenPipeError):
        status.write(write_fd, READY)
    os.close(write_fd)
