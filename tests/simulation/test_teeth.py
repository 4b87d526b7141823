"""What the simulation is for: a product that is broken on purpose is found out within a few worlds."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from decode_worker.service import DecodeService
from decode_worker.verify import BlockVerifier
from gateway.arrivals import Arrivals
from tests.simulation.transfer import SimulatedTransfer
from tests.simulation.world import World

MOST_WORLDS = 150


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def first_problem() -> str:
    for seed in range(MOST_WORLDS):
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
    monkeypatch.setattr(DecodeService, "_fail", lambda self, action: None)
    assert first_problem()
