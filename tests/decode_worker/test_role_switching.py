"""Tests of when a turn in a role ends, and of the role that follows it."""

import asyncio

import pytest

from moonserve.decode_worker.role_switching import RolePeriod, RoleSwitchingConfig
from moonserve.protocol.errors import ConfigError, Overloaded
from moonserve.protocol.process.event_loop import background_task
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.request import Role

FOREVER_S = 3600.0


def turn() -> tuple[RolePeriod, Lifecycle]:
    process = Lifecycle(status_fd=None)
    return RolePeriod(Role.DECODE, process, drain_s=FOREVER_S), process


async def test_switch_command_ends_the_period_and_cannot_be_reversed() -> None:
    decode, _ = turn()
    decode.switch_to(Role.DECODE)  # its own role is no switch
    assert not decode.stopping.is_set()
    assert decode.next_role is None
    for _ in range(2):
        decode.switch_to(Role.PREFILL)
        await decode.wait_for_stop()
        assert decode.next_role is Role.PREFILL
    with pytest.raises(Overloaded):
        decode.switch_to(Role.DECODE)
    assert decode.next_role is Role.PREFILL


async def test_process_stop_ends_the_period_without_a_next_role() -> None:
    decode, process = turn()
    decode.switch_to(Role.PREFILL)
    async with background_task(decode.end_with_process()):
        process.stopping.set()
        await decode.wait_for_stop()
    assert decode.next_role is None


@pytest.mark.parametrize("is_switched", [True, False])
async def test_a_drain_for_a_switch_or_until_idle_ends_with_the_work(is_switched: bool) -> None:
    decode, process = turn()
    idle = asyncio.Event()
    if is_switched:
        decode.switch_to(Role.PREFILL)
    else:
        process.stop_when_idle()
    draining = asyncio.create_task(decode.wait_until_drained(idle.wait(), timeout_s=0.0))
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
    assert not await decode.wait_until_drained(asyncio.Event().wait(), timeout_s=timeout_s)


def test_options_invalid_for_one_role_are_rejected_at_the_start() -> None:
    with pytest.raises(ConfigError, match="max-num-seqs"):
        RoleSwitchingConfig(instance_id="w", model="m", role="prefill", max_num_batched_tokens=8, max_num_seqs=16)
    with pytest.raises(ConfigError, match="role-drain-s"):
        RoleSwitchingConfig(instance_id="w", model="m", role="prefill", role_drain_s=-1.0)
