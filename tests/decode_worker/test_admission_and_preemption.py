"""Admission to a decode worker's pool follows the policy, counts shared blocks once and avoids useless checks."""

import dataclasses

from moonserve.decode_worker.decisions import events
from moonserve.decode_worker.decisions.admission_and_preemption import Admission, Prospect
from moonserve.engine.admission_policy import BlockHolder, OnDemandPolicy, PoolSnapshot
from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.lookahead_policy import LookaheadPolicy
from moonserve.protocol.kv_blocks import NO_PARENT
from moonserve.protocol.request import RequestId
from tests.decode_worker.driver import BLOCK_SIZE, Driver, keys_of
from tests.engine.kv_cache.shapes import quiet_pool
from tests.prefill_worker.builders import all_of

PROMPT = list(range(12))  # 3 blocks


def asking(name: str, num_tokens: int = 13, *, max_tokens: int = 8) -> Prospect:
    return Prospect(
        request_id=RequestId(name),
        tenant="",
        num_prompt_tokens=num_tokens - 1,
        max_tokens=max_tokens,
        num_tokens=num_tokens,
    )


def with_prompt_of(owner: str, num_blocks: int = 16) -> tuple[BlockPool, BlockHolder]:
    """Returns a pool and a holder of four of its blocks: the published blocks of PROMPT and one more."""
    blocks = quiet_pool(num_blocks)
    held = blocks.allocate(4) or []
    keys = keys_of(PROMPT)
    for index, key in enumerate(keys):
        blocks.publish(held[index], key, keys[index - 1] if index else NO_PARENT, 0)
    return blocks, BlockHolder(asking(owner), held)


def test_blocks_that_several_hold_count_once() -> None:
    blocks, first = with_prompt_of("a")
    blocks.retain(first.blocks[:3])
    fresh = blocks.allocate(1) or []
    second = BlockHolder(asking("b"), [*first.blocks[:3], *fresh])
    books = PoolSnapshot(blocks, BLOCK_SIZE, [first, second])
    assert books.num_shared == 3
    assert [books.shared(each.request) for each in (first, second)] == [3, 3]
    assert len(books.holders) == 2


def test_new_sequence_shares_held_blocks_and_not_cached_ones() -> None:
    blocks, first = with_prompt_of("a")
    books = PoolSnapshot(blocks, BLOCK_SIZE, [first])
    newcomer = asking("b")
    blocks.retain(first.blocks[:3])
    books.set_prefix(newcomer, first.blocks[:3])
    assert books.shared(newcomer) == 3
    blocks.release(first.blocks)
    books.set_prefix(newcomer, first.blocks[:3])  # the only reference is the newcomer's own
    assert books.shared(newcomer) == 0


def test_sequence_that_shares_a_long_prompt_is_admitted() -> None:
    for policy in (OnDemandPolicy(), LookaheadPolicy()):
        blocks, first = with_prompt_of("a", num_blocks=8)
        allotment = Admission(blocks, BLOCK_SIZE, policy)
        allotment.claims = lambda first=first: [first]  # type: ignore[misc]
        taken = allotment.admit(asking("b", max_tokens=4), keys_of(PROMPT), 4)
        assert (len(taken[0]), len(taken[1])) == (3, 1)
        blocks.validate()


def test_refused_sequence_is_not_examined_again_before_a_change() -> None:
    policy, asked = OnDemandPolicy(), list[str]()
    policy.admits = lambda request, books: asked.append(request.request_id)  # which refuses it
    blocks, first = with_prompt_of("a")
    allotment = Admission(blocks, BLOCK_SIZE, policy)
    assert allotment.admit(asking("a"), (), 1) is not None, "nobody else holds any"
    allotment.claims = lambda: [first]
    for _ in range(3):
        assert allotment.admit(asking("b"), (), 1) is None
    assert asked == ["b"]
    for _ in range(BLOCK_SIZE):
        allotment.on_step()
    allotment.admit(asking("b"), (), 1)
    allotment.forget_refusals()
    allotment.admit(asking("b"), (), 1)
    assert asked == ["b"] * 3
    assert blocks.num_held == 4 + 1


def test_only_urgent_requests_take_the_reserve_while_others_hold_blocks() -> None:
    blocks = quiet_pool(8, reserved_share=0.25)
    allotment = Admission(blocks, BLOCK_SIZE, OnDemandPolicy(per_holder=0))
    first = asking("a", 21)
    assert allotment.admit(first, (), 6) is not None
    allotment.claims = lambda: [BlockHolder(first, range(6))]
    assert allotment.admit(asking("b", 4), (), 1) is None
    urgent = dataclasses.replace(asking("c", 4), rank=(-1, 0))
    assert allotment.admit(urgent, (), 1) is not None
    blocks.release(range(6))
    allotment.claims = lambda: ()
    allotment.forget_refusals()
    assert allotment.admit(asking("alone", 25), (), 7) is not None, "nothing else makes room"
    blocks.validate()


def test_shared_blocks_do_not_count_for_the_choice_of_a_victim() -> None:
    """Among equally urgent sequences, the victim is one whose unshared blocks are enough."""
    blocks, first = with_prompt_of("a")
    blocks.retain(first.blocks)
    sharing = BlockHolder(dataclasses.replace(asking("b", 5), rank=(0, 1)), first.blocks)
    own = blocks.allocate(4) or []
    owning = BlockHolder(dataclasses.replace(asking("c"), rank=(0, 2)), own)
    best = BlockHolder(dataclasses.replace(asking("d", 3), rank=(0, 0)), blocks.allocate(1) or [])
    allotment = Admission(blocks, BLOCK_SIZE, LookaheadPolicy())
    assert allotment.choose_victim(best.request, [best, sharing, owning]) == "c"


def test_a_landing_that_may_grow_beyond_the_pool_waits_for_the_one_before() -> None:
    driver = Driver(num_blocks=8, policy=LookaheadPolicy(), max_model_len=32)
    granted = all_of(driver.reserve(PROMPT, "a"), events.GrantLease)
    assert len(granted) == 1
    assert driver.reserve([77, 78], "b", wait_s=100.0) == []
    done = driver.wait(10.0)  # the first lease expires
    assert [grant.lease_id for grant in all_of(done, events.GrantLease)] == ["lease-b"]


def test_lengths_are_learned_from_ended_sequences() -> None:
    policy = LookaheadPolicy(until_known=OnDemandPolicy())
    driver = Driver(num_blocks=64, policy=policy)
    for number in range(12):
        driver.start([number, 1], f"r{number}", max_tokens=3 + number % 2)
        driver.drain()
    known = policy.predictor.curve(asking("next"))
    assert known.num_observed == 12
