"""The simulation finds deliberate defects of the product within MOST_WORLDS seeds."""

import logging
import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock

import pytest

from moonserve.decode_worker.block_verifier import BlockVerifier
from moonserve.decode_worker.decisions.sequence import Sequence
from moonserve.decode_worker.service import DecodeService
from moonserve.engine.model.batch import Sampled, Slice
from moonserve.gateway.generation.ordered_tokens import OrderedTokens
from moonserve.kvstore.node.event_log import EventLog
from moonserve.kvstore.node.removal_store import RemovalStore
from moonserve.kvstore.node.verification import PutVerifier
from moonserve.protocol.request import Token
from tests.simulation.terms import Terms
from tests.simulation.transfer import SimulatedTransfer
from tests.simulation.world import World

MOST_WORLDS = 150


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def accept_all(self: Sequence, sampled: Sampled, piece: Slice, max_model_len: int) -> list[Token]:
    return [self.append(each, max_model_len) for each in (sampled, *sampled.after_draft)]


@pytest.mark.parametrize(
    ("owner", "name", "broken", "problem", "of_pools"),
    [
        (BlockVerifier, "corrupt", lambda self, blocks: (), "wrong KV", False),
        (OrderedTokens, "in_order", lambda self, tokens: list(tokens), "", False),
        (Sequence, "accept", accept_all, "", False),
        (SimulatedTransfer, "close_window", lambda self, window_id: None, "", False),
        (DecodeService, "_send_failure", lambda self, action: None, "", False),
        (PutVerifier, "corrupt_keys", lambda self, landed: (), "has other bytes", True),
        (RemovalStore, "learn", AsyncMock(return_value=0), "", True),
        (EventLog, "removed", lambda self, key: None, "the directory says", True),
    ],
    ids=[
        "blocks that nobody verifies",
        "a gateway that takes tokens as they come",
        "drafts that are accepted though they are wrong",
        "windows that stay open",
        "a decode worker that forgets to say that a request failed",
        "a pool node that does not compare what it was sent",
        "a pool node that hears of no removal",
        "a pool node whose events say no removal",
    ],
)
def test_the_simulation_finds_a_planted_bug(
    owner: type, name: str, broken: Any, problem: str, of_pools: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    for seed in range(MOST_WORLDS):
        if Terms(seed, random.Random(seed)).is_pool is of_pools:
            world = World(seed)
            world.run()
            if world.problems:
                assert problem in world.problems[0]
                return
    raise AssertionError("no world has a problem")
