"""Tests of when a turn in a role ends, and of the role that follows it."""

from __future__ import annotations

import asyncio

import pytest

from deploy.worker.config import WorkerConfig
from deploy.worker.worker import Turn
from protocol.errors import ConfigError, Overloaded
from protocol.ids import Role
from protocol.process import Lifecycle, running

FOREVER_S = 3600.0


def turn() -> tuple[Turn, Lifecycle]:
    process = Lifecycle(status_fd=None)
    return Turn(Role.DECODE, process, drain_s=FOREVER_S), process


async def test_a_command_ends_the_turn_names_the_next_role_and_is_not_turned_round() -> None:
    decode, _ = turn()
    decode.switch_to(Role.DECODE)  # its own role is no switch
    assert not decode.stopping.is_set()
    assert decode.next_role is None
    for _ in range(2):
        decode.switch_to(Role.PREFILL)
        await decode.until_stopped()
        assert decode.next_role is Role.PREFILL
    with pytest.raises(Overloaded):
        decode.switch_to(Role.DECODE)
    assert decode.next_role is Role.PREFILL


async def test_the_process_ends_the_turn_and_nothing_follows_even_if_a_switch_was_on_its_way() -> None:
    decode, process = turn()
    decode.switch_to(Role.PREFILL)
    async with running(decode.end_with_process()):
        process.stopping.set()
        await decode.until_stopped()
    assert decode.next_role is None


@pytest.mark.parametrize("is_switched", [True, False])
async def test_a_drain_for_a_switch_or_until_idle_ends_with_the_work(is_switched: bool) -> None:
    decode, process = turn()
    idle = asyncio.Event()
    if is_switched:
        decode.switch_to(Role.PREFILL)
    else:
        process.stop_when_idle()
    draining = asyncio.create_task(decode.drained(idle.wait(), timeout_s=0.0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not draining.done()
    idle.set()
    assert await draining


@pytest.mark.parametrize(("drain_s", "is_stopped", "timeout_s"), [(0.0, False, FOREVER_S), (None, True, 0.0)])
async def test_a_drain_ends_when_no_time_is_granted(drain_s: float | None, is_stopped: bool, timeout_s: float) -> None:
    """A drain ends at once if the switch command grants no time, or on a stop whose own timeout is 0."""
    decode, process = turn()
    decode.switch_to(Role.PREFILL, drain_s=drain_s)
    if is_stopped:
        process.stopping.set()
    assert not await decode.drained(asyncio.Event().wait(), timeout_s=timeout_s)


def test_options_that_forbid_one_of_the_roles_are_told_at_the_start() -> None:
    with pytest.raises(ConfigError, match="max-num-seqs"):
        WorkerConfig(instance_id="w", model="m", role="prefill", max_num_batched_tokens=8, max_num_seqs=16)
    with pytest.raises(ConfigError, match="role-drain-s"):
        WorkerConfig(instance_id="w", model="m", role="prefill", role_drain_s=-1.0)
