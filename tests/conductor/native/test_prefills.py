"""Predictions and looks at queues made in C are those of numpy and of the books themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.columns import PrefillTable, Seat
from conductor.ledger import PrefillQueue
from conductor.native.prefills import prefill_library
from conductor.policies import least_added_delay
from conductor.policies.base import Looks, Offers, Prompt, Weighed
from conductor.policies.least_added_delay import LeastAddedDelay, Terms
from protocol.ids import RequestId
from tests.compilers import need_compiler

NOW = 100.0
seconds = st.floats(0.0, 60.0)
blocks = st.integers(0, 200)


@dataclass
class Holder:
    queue: PrefillQueue


@st.composite
def queues(draw: st.DrawFn, table: PrefillTable) -> PrefillQueue:
    """With what was placed in the last seconds, some of it over, and ranks that are often equal."""
    queue = PrefillQueue(Seat(table, table.append()), draw(st.sampled_from([0.5, math.inf])))
    ranks = st.sampled_from([0.0, 1.0, 30.0]) | seconds
    for number in range(draw(st.integers(0, 8))):
        placed_at = NOW - 8.0 + number
        queue.add(RequestId(f"r{number}"), draw(seconds), 10, placed_at, draw(ranks))
    for number in draw(st.sets(st.integers(0, 7))):
        queue.remove(RequestId(f"r{number}"), NOW - 0.5)
    return queue


@st.composite
def offers(draw: st.DrawFn) -> Offers:
    table, size = PrefillTable(), draw(st.integers(1, 20))
    held = [Holder(draw(queues(table))) for _ in range(size)]
    floats = st.lists(st.floats(0.0, 1.0), min_size=size, max_size=size)
    counts = st.lists(blocks, min_size=size, max_size=size)
    device = np.array(draw(counts))
    return Offers(
        identity=np.zeros(size, np.uint64),
        chosen_at=np.zeros(size, np.int64),
        device_blocks=device,
        prefix_blocks=device + np.array(draw(counts)),
        queue_s=table.estimate_s(NOW),
        local_s_per_block=np.array(draw(floats)),
        remote_s_per_block=np.array(draw(floats)),
        c0=np.array(draw(floats)),
        c1=np.array(draw(floats)) / 100.0,
        c2=np.array(draw(floats)) / 1e6,
        now=NOW,
        wait_s=lambda row, rank: held[row].queue.wait_s(NOW, rank),
        look=Looks(held, NOW),
    )


prompts = st.builds(
    Prompt,
    num_tokens=st.integers(1, 5000),
    block_size=st.just(10),
    best_blocks=blocks,
    ttft_slo_s=st.sampled_from([0.0, 30.0, math.inf]) | seconds,
)
terms = st.builds(
    Terms,
    patience=st.sampled_from([0.0, 5.0]),
    keeps_objective=st.booleans(),
    steepness=st.sampled_from([None, 1.0, 4.0]),
)


def weighed(policy: LeastAddedDelay, prompt: Prompt, offers: Offers) -> dict[str, object]:
    found: Weighed = policy.weigh(prompt, offers)
    return {k: None if v is None else v.tolist() for k, v in found._asdict().items()}


@given(prompt=prompts, offers=offers(), terms=terms)
def test_the_policy_weighs_alike_with_and_without_a_compiler(
    prompt: Prompt, offers: Offers, terms: Terms
) -> None:
    """To the bit, since a choice between equals must not depend on the machine."""
    need_compiler()
    assert prefill_library() is not None
    policy = LeastAddedDelay(terms)
    native = weighed(policy, prompt, offers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(least_added_delay, "prefill_library", lambda: None)
        assert weighed(policy, prompt, offers) == native


@given(prompt=prompts, offers=offers())
def test_whoever_changes_a_look_is_asked(prompt: Prompt, offers: Offers) -> None:
    """A look that is not that of the books is not passed over."""
    asked: list[int] = []
    look = offers.look

    def watched(row: int, rank: float) -> tuple[float, int]:
        asked.append(row)
        return look(row, rank)

    policy = LeastAddedDelay()
    busy = [row for row, queue_s in enumerate(offers.queue_s.tolist()) if queue_s]
    assert weighed(policy, prompt, offers._replace(look=watched)) == weighed(policy, prompt, offers)
    if len(offers.queue_s) <= 16:
        assert asked == busy
