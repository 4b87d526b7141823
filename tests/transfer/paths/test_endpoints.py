"""The endpoint pool keeps what was used lately, and never lets go of what is in use."""

from __future__ import annotations

from dataclasses import dataclass

from transfer.paths.endpoints import Endpoints


@dataclass(eq=False)
class FakeEndpoint:
    idle: bool = True
    is_open: bool = True

    def disconnect_when_idle(self) -> None:
        self.is_open = False


def test_the_idle_endpoint_that_was_used_least_recently_goes_for_a_new_one() -> None:
    pool, first, second, third, fourth = Endpoints(3), *(FakeEndpoint() for _ in range(4))
    for each in (first, second, third):
        pool.opened(each)
    pool.used(first)
    second.idle = False
    pool.opened(fourth)
    assert [each.is_open for each in (first, second, third, fourth)] == [True, True, False, True]
    pool.used(third)  # too late, and ignored
    pool.closed(third)
    assert len(pool) == 3


def test_busy_endpoints_exceed_the_cap_until_they_fall_idle() -> None:
    pool, endpoints = Endpoints(1), [FakeEndpoint(idle=False) for _ in range(3)]
    for each in endpoints:
        pool.opened(each)
    pool.trim()
    assert len(pool) == 3
    endpoints[1].idle = True
    pool.trim()
    endpoints[0].idle = True
    pool.trim()
    assert [each.is_open for each in endpoints] == [False, False, True]
    pool.closed(endpoints[2])
    assert not len(pool)
