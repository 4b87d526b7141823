"""The status pipe: what is written is what is read, blocking or not, and a process that will not serve is told of."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import status
from protocol.status import Failed, NotReady, Progress, Ready, Report
from tests.patience import NEVER_S, PATIENCE_S

READY = Ready({"rpc": "127.0.0.1:1"})

reports = st.one_of(
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


def awaited(fd: int) -> dict[str, str]:
    return asyncio.run(asyncio.wait_for(status.until_ready(fd), PATIENCE_S))


both = pytest.mark.parametrize("facts_of", [status.ready_facts, awaited])
"""Blocking, and in an event loop."""

FactsOf = Callable[[int], dict[str, str]]


@given(st.lists(reports, max_size=5))
def test_what_is_written_is_read(entries: list[Report]) -> None:
    assert list(status.reports(said(*entries))) == entries
    assert asyncio.run(followed(said(*entries))) == entries


def test_a_report_that_comes_in_parts_is_one() -> None:
    read_fd, write_fd = os.pipe()
    whole = status.reports(read_fd, PATIENCE_S)
    status.write(write_fd, Progress("loading", 0.5))
    os.write(write_fd, b'{"ready": ')
    assert next(whole) == Progress("loading", 0.5)
    os.write(write_fd, b"{}}\n")
    assert next(whole) == Ready({})
    os.close(write_fd)
    assert list(whole) == []


@both
def test_a_processs_facts_come_with_its_readiness(facts_of: FactsOf) -> None:
    assert facts_of(said(Progress("loading"), READY)) == READY.facts


@both
def test_why_a_process_cannot_start_is_told_in_its_words(facts_of: FactsOf) -> None:
    with pytest.raises(NotReady, match="no such model"):
        facts_of(said(Progress("loading"), Failed("no such model")))


@both
def test_a_process_that_ends_without_a_word_is_not_ready(facts_of: FactsOf) -> None:
    with pytest.raises(NotReady, match="ended"):
        facts_of(said(Progress("loading")))


@both
def test_whoever_has_its_facts_holds_no_descriptor(facts_of: FactsOf) -> None:
    read_fd = said(READY, Progress("afterwards"))
    opened = os.fstat(read_fd)
    facts_of(read_fd)
    assert (opened.st_dev, opened.st_ino) not in descriptors()


def descriptors() -> set[tuple[int, int]]:
    """What this process has open."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        if path.exists():  # the folder's own is gone by now
            stat = path.stat()
            found.add((stat.st_dev, stat.st_ino))
    return found


def test_a_silent_process_is_not_waited_for_beyond_the_limit() -> None:
    read_fd, write_fd = os.pipe()
    with pytest.raises(TimeoutError):
        status.ready_facts(read_fd, 0.0)
    os.close(write_fd)


async def test_a_wait_for_a_silent_process_can_be_cancelled() -> None:
    read_fd, write_fd = os.pipe()
    waiting = asyncio.create_task(asyncio.wait_for(status.until_ready(read_fd), NEVER_S))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)  # the transport closes in the loop's next turn
    with pytest.raises(BrokenPipeError):
        status.write(write_fd, READY)
    os.close(write_fd)
