"""Tests of start reports on the status pipe, and of waiting for them."""

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonserve.protocol.process import child_process
from moonserve.protocol.process.child_process import NotReady, StartFailed, StartProgress, StartReady, StartReport
from tests.patience import NEVER_S, PATIENCE_S, begin_and_cancel

READY = StartReady({"rpc": "127.0.0.1:1"})
REPORTS = st.one_of(
    st.builds(StartProgress, st.text(), st.none() | st.floats(0, 1)),
    st.builds(StartReady, st.dictionaries(st.text(), st.text())),
    st.builds(StartFailed, st.text()),
)


def pipe_with(*entries: StartReport) -> int:
    """Returns the read end of a pipe to which a process wrote `entries` before it ended."""
    read_fd, write_fd = os.pipe()
    for entry in entries:
        child_process.write_report(write_fd, entry)
    os.close(write_fd)
    return read_fd


@given(entries=st.lists(REPORTS, max_size=5))
async def test_written_reports_are_read(entries: list[StartReport]) -> None:
    assert [report async for report in child_process.read_reports(pipe_with(*entries))] == entries


async def test_wait_until_ready_returns_facts_and_closes_descriptor() -> None:
    read_fd = pipe_with(StartProgress("loading"), READY, StartProgress("afterwards"))
    opened = os.fstat(read_fd)
    assert await asyncio.wait_for(child_process.wait_until_ready(read_fd), PATIENCE_S) == READY.facts
    await asyncio.sleep(0)  # the transport closes in the loop's next turn
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
    assert not any(os.path.samestat(path.stat(), opened) for path in paths)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [([StartFailed("no such model")], "no such model"), ([], "the process ended before it was ready")],
)
async def test_not_ready_has_the_reason(entries: list[StartReport], reason: str) -> None:
    with pytest.raises(NotReady, match=reason):
        await asyncio.wait_for(
            child_process.wait_until_ready(pipe_with(StartProgress("loading"), *entries)), PATIENCE_S
        )


async def test_wait_for_silent_process_can_be_cancelled() -> None:
    read_fd, write_fd = os.pipe()
    await begin_and_cancel(asyncio.wait_for(child_process.wait_until_ready(read_fd), NEVER_S))
    await asyncio.sleep(0)  # as above
    with pytest.raises(BrokenPipeError):
        child_process.write_report(write_fd, READY)
    os.close(write_fd)
