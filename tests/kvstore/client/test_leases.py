"""Leases over a pool of real nodes: renewed for as long as they are open, and discarded with what they held."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from kvstore.client import store_lease
from protocol.errors import StaleLease
from tests.kvstore.client.pools import TCP, fresh
from tests.kvstore.faults.pool import Pool
from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.slow

VALUE = os.urandom(100_000)


def test_a_lease_that_could_not_be_renewed_makes_its_reader_discard(shared_pool: Pool) -> None:
    name = fresh()
    first = shared_pool.rank_of(name)[0]
    with shared_pool.store() as store:
        store.put(name, VALUE)
        lease = store.lease([name], ttl_s=0.6)
        with pytest.raises(StaleLease), lease, shared_pool.frozen(first):
            until(lambda: _is_stale(lease))
        assert lease.views[0] is not None
        until(lambda: not any(each.resting for each in store.nodes()))


def test_a_lease_is_renewed_for_as_long_as_it_is_open(shared_pool: Pool) -> None:
    name = fresh()
    with shared_pool.store() as store:
        store.put(name, VALUE)
        with store.lease([name], ttl_s=5.0) as lease:
            [held] = lease._leases
            first_end = held.held.expires_at
            until(lambda: time.monotonic() > first_end + 0.5)
            lease.check()
            assert lease.views[0] == VALUE


def _is_stale(lease: object) -> bool:
    try:
        lease.check()  # type: ignore[attr-defined]
    except StaleLease:
        return True
    return False


def test_a_lease_at_a_node_that_died_before_it_was_read_does_not_count(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be renewed, and what was read elsewhere need not be discarded for it."""
    name = fresh()
    first, second, _ = pool.rank_of(name)
    pool.put_at(first, name, VALUE)
    pool.put_at(second, name, VALUE)
    read = store_lease.read

    def read_too_late(*args: Any) -> None:
        monkeypatch.setattr(store_lease, "read", read)
        pool.kill(first)
        read(*args)

    with pool.store(TCP) as store:
        monkeypatch.setattr(store_lease, "read", read_too_late)
        with store.lease([name], timeout_s=PATIENCE_S) as lease:
            assert lease.views == (VALUE,)
            assert [held.node.node_id for held in lease._leases] == [second]
