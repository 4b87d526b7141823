"""What the simulation is for: a product that is broken on purpose is found out within a few worlds."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from decode_worker.service import DecodeService
from decode_worker.verify import BlockVerifier
from gateway.generation.arrivals import Arrivals
from kvstore.event_log import EventLog
from kvstore.remembering import Remembering
from kvstore.verification import Landings
from tests.simulation.terms import Terms
from tests.simulation.transfer import SimulatedTransfer
from tests.simulation.world import World

MOST_WORLDS = 150


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def first_problem(*, of_pools: bool = False) -> str:
    for seed in range(MOST_WORLDS):
        if Terms.draw(seed, random.Random(seed)).is_pool is not of_pools:
            continue
        world = World(seed)
        world.run()
        if world.problems:
            return world.problems[0]
    return ""


def test_blocks_that_nobody_verifies_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockVerifier, "corrupt", lambda self, blocks: ())
    assert "wrong KV" in first_problem()


def test_a_gateway_that_takes_tokens_as_they_come_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Arrivals, "in_order", lambda self, tokens: list(tokens))
    assert first_problem()


def test_windows_that_stay_open_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedTransfer, "close_window", lambda self, window_id: None)
    assert first_problem()


def test_a_decode_worker_that_forgets_to_say_that_a_request_failed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DecodeService, "_send_failure", lambda self, action: None)
    assert first_problem()


def test_a_pool_node_that_does_not_compare_what_it_was_sent_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Landings, "corrupt", lambda self, landed: ())
    assert "has other bytes" in first_problem(of_pools=True)


def test_a_pool_node_that_hears_of_no_removal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(self: Remembering, heard: object) -> int:
        return 0

    monkeypatch.setattr(Remembering, "learn", deaf)
    assert first_problem(of_pools=True)


def test_a_pool_node_whose_events_say_no_removal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventLog, "removed", lambda self, key: None)
    assert "the directory says" in first_problem(of_pools=True)
