"""Tests of process helpers: configuration, start reports, tasks, timers, waits, and infrequent garbage collection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import garbage, status
from protocol.config import HelpRequested, effective, load, option, parse_bytes, to_flags
from protocol.errors import ConfigError, StaleLease
from protocol.garbage import seldom_collected
from protocol.held_tasks import HeldTasks
from protocol.process import Lifecycle, running
from protocol.status import Failed, NotReady, Progress, Ready, Report
from protocol.timer import Timer, set_within
from tests.patience import NEVER_S, PATIENCE_S

READY = Ready({"rpc": "127.0.0.1:1"})
REPORTS = st.one_of(
    st.builds(Progress, st.text(), st.none() | st.floats(0, 1)),
    st.builds(Ready, st.dictionaries(st.text(), st.text())),
    st.builds(Failed, st.text()),
)


def said(*entries: Report) -> int:
    """Returns the read end of a pipe to which a process wrote `entries` before it ended."""
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
    """NotReady has the reason that the process gave, or says that it ended without one."""
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


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_process_waits_until_it_is_told_to_stop_or_cancelled(is_cancelled: bool) -> None:
    """A stop or a cancellation ends the wait. The watched task goes on."""
    lifecycle = Lifecycle(None)
    async with running(asyncio.Event().wait()) as other:
        waiting = asyncio.create_task(lifecycle.until_stopped(other))
        await asyncio.sleep(0)
        assert not waiting.done()
        if is_cancelled:
            waiting.cancel()
        else:
            lifecycle.stopping.set()
        with pytest.raises(asyncio.CancelledError) if is_cancelled else contextlib.nullcontext():
            await asyncio.wait_for(waiting, PATIENCE_S)
        assert not other.done()
    assert other.cancelled()


async def test_what_ends_a_watched_task_ends_the_wait() -> None:
    async def refused() -> None:
        raise StaleLease("a newer incarnation is registered")

    async with running(refused()) as task:
        with pytest.raises(StaleLease):
            await asyncio.wait_for(Lifecycle(None).until_stopped(task), PATIENCE_S)


@pytest.mark.parametrize(("times", "hurries"), [(1, False), (2, False), (1, True)])
async def test_what_is_under_way_has_all_its_time_until_it_ends_or_somebody_hurries(times: int, hurries: bool) -> None:
    """Work in flight gets all its time however often `stop_when_idle` was called. Only `stop` ends the wait early."""
    lifecycle, idle = Lifecycle(None), asyncio.Event()
    for _ in range(times):
        lifecycle.stop_when_idle()
    assert lifecycle.stopping.is_set()
    waiting = asyncio.create_task(lifecycle.drained(idle.wait(), timeout_s=0.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    if hurries:
        lifecycle.stop()
    else:
        idle.set()
    assert await asyncio.wait_for(waiting, PATIENCE_S) is not hurries


async def test_a_stop_is_not_taken_back() -> None:
    lifecycle = Lifecycle(None)
    lifecycle.stop()
    lifecycle.stop_when_idle()
    never = asyncio.Event()
    assert not await asyncio.wait_for(lifecycle.drained(never.wait(), 0.0), PATIENCE_S)


async def test_a_timer_rings_at_the_last_instant_it_was_set_to() -> None:
    now, rings = 100.0, asyncio.Queue[str]()
    timer = Timer(lambda: rings.put_nowait("ring"), lambda: now)
    timer.set(1000.0)
    timer.set(99.0)  # past: rings at once
    assert await asyncio.wait_for(rings.get(), PATIENCE_S) == "ring"
    timer.set(99.0)  # set anew after it rang
    assert await asyncio.wait_for(rings.get(), PATIENCE_S) == "ring"


async def test_a_timer_that_was_unset_does_not_ring() -> None:
    rings: list[str] = []
    timer = Timer(lambda: rings.append("ring"), lambda: 0.0)
    timer.set(0.0)
    timer.set(None)
    after = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, after.set)
    await asyncio.wait_for(after.wait(), PATIENCE_S)
    assert rings == []


async def test_a_task_that_nobody_else_holds_goes_on() -> None:
    tasks, begun, ended = HeldTasks(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda: waiting.set_result(None))
        begun.set()
        await waiting
        ended.set()

    task = tasks.start(work())
    assert list(tasks) == [task]
    del task
    await begun.wait()
    gc.collect()
    await ended.wait()
    await asyncio.sleep(0)  # lets the task's callbacks run
    assert len(tasks) == 0


async def test_cancelling_waits_until_each_has_put_its_things_in_order() -> None:
    tasks, order = HeldTasks(), list[str]()

    async def work(error: Exception | None) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            order.append("put away")
            if error is not None:
                raise error

    failing = tasks.start(work(ValueError("of its own")))
    tasks.start(work(None))
    await asyncio.sleep(0)
    await tasks.cancel()
    assert order == ["put away"] * 2
    assert len(tasks) == 0
    with pytest.raises(ValueError, match="of its own"):
        failing.result()


async def test_it_tells_whether_the_event_came() -> None:
    event = asyncio.Event()
    assert not await set_within(event, 0.001)
    assert not await set_within(event, -1.0)
    asyncio.get_running_loop().call_soon(event.set)
    assert await set_within(event, NEVER_S)
    assert await set_within(event, 0.0)


@pytest.mark.parametrize("turns", range(6))
async def test_an_end_that_comes_together_with_the_event_is_not_lost(turns: int) -> None:
    """A cancellation ends the task however many turns of the loop after the event it comes."""
    event = asyncio.Event()

    async def waits_then_rests() -> None:
        await set_within(event, NEVER_S)
        await asyncio.Event().wait()

    task = asyncio.create_task(waits_then_rests())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    event.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


@pytest.fixture(autouse=True)
def _really(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the real `gc`. For other tests, tests/conftest.py replaces it so that services leave the heap alone."""
    monkeypatch.setattr(garbage, "gc", gc)


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_cycles_do_not_pile_up() -> None:
    """Cycles, such as gRPC's server leaves after its calls, are collected in batches."""
    alive: weakref.WeakSet[Cycle] = weakref.WeakSet()
    most = 0
    with seldom_collected():
        for _ in range(40_000):
            alive.add(Cycle())
            most = max(most, len(alive))
    assert 1_000 < most < 20_000, "neither a look for each of them nor one for all"


def test_what_is_there_is_never_looked_at() -> None:
    kept = [Cycle()]
    before = gc.get_threshold()
    with seldom_collected():
        assert gc.get_freeze_count() > 0
        assert not any(each is kept for each in gc.get_objects())
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


@dataclass(frozen=True, kw_only=True)
class Base:
    depth: float = option(1.5, help="how deep")


@dataclass(frozen=True, kw_only=True)
class Example(Base):
    name: str = option(help="required")
    max_model_len: int | None = option(None, help="length")
    enable_cache: bool = option(True, help="cache")
    names: tuple[str, ...] = option((), help="several")
    dram: int = option(1024, help="memory", unit="bytes")
    mode: str = option("a", help="mode", choices=("a", "b"))
    password: str = option("", help="secret", secret=True)


def parse(*argv: str, environ: dict[str, str] | None = None) -> Example:
    return load(Example, argv, prog="example", environ=environ or {})


def test_every_kind_of_value_is_read_from_flags() -> None:
    config = parse(
        "--name=x", "--max-model-len", "77", "--no-enable-cache", "--names", "p, q",
        "--dram", "2KiB", "--mode", "b", "--depth", "2",
    )  # fmt: skip
    assert config == Example(
        name="x", max_model_len=77, enable_cache=False, names=("p", "q"), dram=2048, mode="b",
        depth=2.0,
    )  # fmt: skip


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('name = "file"\nmode = "b"\nmax-model-len = 5\n')
    environ = {"MOONSERVE_NAME": "env", "MOONSERVE_MODE": "a"}
    config = parse("--config", str(file), "--name", "flag", environ=environ)
    assert (config.name, config.mode, config.max_model_len) == ("flag", "a", 5)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--nam", "x"], "did you mean --name"),
        (["--name", "x", "--mode", "c"], "one of a, b"),
        (["--name", "x", "--max-model-len", "many"], "--max-model-len"),
        (["--name"], "needs a value"),
        ([], "--name must be given"),
        (["--name", "x", "--password", "p"], "unknown argument"),
        (["--name", "x", "--dram", "1ZiB"], "--dram"),
        (["--config", "/nonexistent.toml"], "cannot read"),
    ],
)
def test_bad_input_is_one_line_that_helps(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*argv)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nane = 'x'\n", "did you mean name"),
        (b"max-model-len = [1]\n", "--max-model-len"),
        (b"max-model-len = inf\n", "--max-model-len"),
        (b"names = 5\n", "--names"),
        (b"name = '\xff'\n", "not valid TOML"),
    ],
)
def test_a_file_that_says_something_else_is_one_line_that_helps(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        parse("--config", str(file), "--name=x")


def test_secrets_come_from_the_environment_and_are_masked() -> None:
    config = parse("--name", "x", environ={"MOONSERVE_PASSWORD": "hunter2"})
    assert config.password == "hunter2"
    assert effective(config)["password"] == "***"
    assert "hunter2" not in " ".join(to_flags(config))


def test_flags_made_from_a_configuration_build_it_again() -> None:
    config = parse("--name", "x", "--no-enable-cache", "--names", "a,b", "--depth", "3")
    assert parse(*to_flags(config)) == config


def test_help_lists_every_flag() -> None:
    with pytest.raises(HelpRequested, match="--max-model-len"):
        parse("--help")


@pytest.mark.parametrize(("text", "size"), [("17", 17), ("1KiB", 1024), ("2 GB", 2 * 10**9), ("0.5MiB", 2**19)])
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size
