"""Prefill worker's state machine without failures, from a request's arrival to its end, tested without I/O."""

from collections import abc
from dataclasses import replace

import pytest

from moonserve.prefill_worker.decisions import events as ev
from moonserve.prefill_worker.decisions.sequence import IllegalTransition, Phase
from moonserve.protocol.errors import PeerLost
from moonserve.protocol.kv_blocks import BlockKey
from moonserve.protocol.request import NO_HINTS, CacheHints, FinishReason, RequestId
from moonserve.protocol.step_time import PrefillProfile
from tests.prefill_worker.builders import HOME, Walk, all_of, endpoint, kinds, make_request, make_sequence, only, spans

# c0 equals the time of five tokens.
PROFILE = PrefillProfile(c0=0.005, c1=0.001, c2=0.0)
R = RequestId("r")


def test_a_request_goes_through_all_phases_and_leaves_no_block_held() -> None:
    walk = Walk(home=None)
    submission = walk.submit()
    reserve = only(submission, ev.ReserveLanding)
    assert (reserve.num_tokens, reserve.block_keys) == (6, make_request("r", range(6)).block_keys)

    actions = walk.grant(submission, at=1.0)
    assert kinds(actions) == [ev.RunStep]
    step = only(actions, ev.RunStep)
    [plan] = step.plans
    assert (plan.slice.start, plan.slice.end, plan.send_from) == (0, 6, 0)
    assert plan.complete == (0, 1)
    assert plan.slice.samples

    first = only(walk.done(step, 3.0), ev.SendFirstToken)
    assert (first.token.index, first.token.token_id, first.token.finish_reason) == (0, 42, None)
    report = first.report
    assert (report.queue_s, report.load_s, report.compute_s) == (0.0, 1.0, 2.0)

    commit = only(walk.written(at=4.0), ev.CommitHandoff)
    assert commit.checksums == (1000, 1001)
    assert commit.timeout_s == 596.0
    assert walk.accept() == []
    assert walk.state.pool.num_cached == 1
    walk.assert_drained()


def test_a_long_prompt_runs_in_chunks_that_send_only_their_own_tokens() -> None:
    walk = Walk(budget=6)
    step = walk.start(num_tokens=10)
    again = only(walk.done(step), ev.RunStep)
    [first], [second] = step.plans, again.plans
    assert spans([step, again]) == [("r", 0, 6), ("r", 6, 10)]
    assert (first.complete, first.slice.samples) == ((0,), False)
    assert (second.send_from, second.complete, second.slice.samples) == (6, (1, 2), True)


@pytest.mark.parametrize(
    ("lengths", "in_step"),
    [
        ([6, 2], "bc"),  # both fit into the step's eight tokens, and two more tokens delay little
        ([6, 3], "b"),  # "c" does not fit: a step in which a prompt ends is not filled up with part of another
        ([2, 4, 2], "bcd"),  # delays of 4 · c1 for one prompt and 2 · c1 for two: at most c0 each
        ([2, 6], "b"),  # a delay of 6 · c1 is more than the c0 = 5 · c1 of a separate step
    ],
)
def test_short_prompts_share_a_step_where_total_waiting_is_less(lengths: list[int], in_step: str) -> None:
    walk = Walk(budget=8, num_blocks=64, profile=PROFILE)
    first = walk.start("a", 4)
    for name, length in zip("bcd", lengths, strict=False):
        assert walk.grant(walk.submit(name, length, first=50)) == []  # one step at a time
    plans = only(walk.done(first), ev.RunStep).plans
    assert [plan.slice.request_id for plan in plans] == list(in_step)
    assert all(plan.slice.samples for plan in plans)


def test_a_prompt_reports_its_share_of_a_shared_step_and_the_rest_as_queueing() -> None:
    """Queueing, loading and computing add up to the time since the submission, and shares of a step to its duration."""
    walk = Walk(budget=8, num_blocks=64, profile=PROFILE)
    first = walk.start("a", 4)
    for name, length in (("b", 2), ("c", 3)):
        walk.grant(walk.submit(name, length, first=50, at=0.0), at=1.0)
    step = only(walk.done(first, 2.0), ev.RunStep)
    reports = [action.report for action in all_of(walk.done(step, 5.0), ev.SendFirstToken)]
    shares = [pytest.approx(3.0 * own / 15) for own in (7, 8)]
    assert [report.compute_s for report in reports] == shares
    for report in reports:
        assert report.queue_s + report.load_s + report.compute_s == pytest.approx(5.0)


def test_number_of_requests_prepared_ahead_is_bounded() -> None:
    """While a step runs, requests reserve and load until `prepare_ahead` of them have a step's tokens in all."""
    walk = Walk(num_blocks=64, prepare_ahead=2, budget=8)
    walk.start("a")
    prepared = [kinds(walk.submit(name, 8, first=50, sources=[(HOME, 0, 2)])) for name in "bcd"]
    assert prepared[:2] == [[ev.ReserveLanding, ev.LoadPrefix]] * 2
    assert prepared[2] == [ev.PrefetchPrefix]
    assert (walk.state.num_waiting, walk.state.num_running) == (3, 1)


def test_few_prompts_are_computed_while_no_landing_is_granted() -> None:
    walk = Walk(num_blocks=64, prepare_ahead=2, budget=8, computes_before_grant=True)
    for number, name in enumerate("abcd"):
        for step in all_of(walk.submit(name, 8, first=100 * number), ev.RunStep):
            walk.done(step)
    assert (walk.state.num_waiting, walk.state.num_running) == (2, 2)


def test_prefix_blocks_come_from_the_stores_that_the_placement_names() -> None:
    walk, far = Walk(), endpoint("store-1")
    # Three blocks are usable, since the last token must be computed.
    actions = walk.submit("r", 16, sources=[(HOME, 0, 2), (far, 2, 2)])
    load = only(actions, ev.LoadPrefix)
    assert [(part.store, len(part.keys)) for part in load.parts] == [(HOME, 2), (far, 1)]

    walk.grant(actions)
    actions = walk.handle(ev.PrefixLoaded(request_id=R, checksums=(5, 6)))
    send, step = only(actions, ev.SendBlocks), only(actions, ev.RunStep)
    assert send.pairs == tuple(zip(load.parts[0].blocks, (100, 101), strict=True))
    assert (step.plans[0].slice.start, step.plans[0].send_from) == (8, 8)
    assert walk.state.counters["store_hit_blocks"] == 2
    assert only(walk.done(step), ev.SendFirstToken).report.cached_tokens == 8
    assert not walk.written()
    assert only(walk.written(), ev.CommitHandoff).checksums == (5, 6, 1002, 1003)


def test_a_failed_load_means_computing_and_not_failing() -> None:
    walk = Walk()
    walk.grant(walk.submit("r", 8, sources=[(HOME, 0, 1)]))
    failed = ev.PrefixLoadFailed(request_id=R, error=PeerLost("gone"))
    assert spans(walk.handle(failed)) == [("r", 0, 8)]


def test_a_second_request_reuses_the_device_cache_and_keeps_the_writers_checksums() -> None:
    walk = Walk(home=None)
    walk.commit("a", 8)
    walk.accept("a")
    actions = walk.grant(walk.submit("b", 8))
    assert kinds(actions) == [ev.SendBlocks, ev.RunStep]
    assert spans(actions) == [("b", 4, 8)]
    walk.done(only(actions, ev.RunStep))
    walk.written("b")
    assert only(walk.written("b"), ev.CommitHandoff).checksums == (1000, 1001)


def test_blocks_computed_while_a_request_waited_are_found_before_it_runs() -> None:
    walk = Walk(budget=12)
    step = walk.start("a", 9)
    walk.grant(walk.submit("b", 9))
    actions = walk.done(step)
    assert spans(actions) == [("b", 8, 9)]
    assert only(actions, ev.SendBlocks).pairs == ((0, 100), (1, 101))


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(10, 1), (8, 2)])
def test_blocks_that_the_target_already_has_are_not_sent(num_tokens: int, num_cached: int) -> None:
    """If the target has all blocks, the commit follows at once."""
    walk = Walk(budget=16)
    step = walk.start(num_tokens=num_tokens, num_cached=num_cached)
    [plan] = step.plans
    assert plan.slice.start == 0
    actions = walk.done(step)
    if plan.landing is not None:
        assert plan.send_from == 4
        actions = walk.written()
    assert (plan.landing is None) == (num_tokens == 8)
    commit = only(actions, ev.CommitHandoff)
    assert commit.checksums == tuple(range(1000 + num_cached, 1000 + -(-num_tokens // 4)))


def test_a_request_for_one_token_never_reserves() -> None:
    walk = Walk(home=None)
    step = only(walk.submit(max_tokens=1), ev.RunStep)
    assert step.plans[0].landing is None
    actions = walk.done(step)
    assert kinds(actions) == [ev.SendFirstToken]
    assert only(actions, ev.SendFirstToken).token.finish_reason is FinishReason.LENGTH
    walk.assert_drained()


def test_a_request_that_stops_with_its_first_token_gives_its_landing_back_after_the_writes() -> None:
    walk = Walk(home=None)
    step = walk.start(stop_token_ids=frozenset({42}))
    first = only(walk.done(step), ev.SendFirstToken)
    assert first.token.finish_reason is FinishReason.STOP
    assert walk.state.num_held_blocks == 2  # still read by the writes
    assert only(walk.written(), ev.ReleaseLanding).lease_id == "lease-1"
    walk.assert_drained()


def test_a_continued_request_numbers_its_token_after_those_already_sent() -> None:
    walk = Walk(home=None, budget=16)
    step = only(walk.submit("r", 9, num_emitted=3, max_tokens=4), ev.RunStep)
    token = only(walk.done(step), ev.SendFirstToken).token
    assert (token.index, token.finish_reason) == (3, FinishReason.LENGTH)
    walk.assert_drained()


@pytest.mark.parametrize(("num_tokens", "word"), [(80, "blocks"), (101, "tokens")])
def test_a_prompt_that_can_never_fit_is_refused_clearly(num_tokens: int, word: str) -> None:
    walk = Walk(num_blocks=16, max_model_len=100)
    error = only(walk.submit("r", num_tokens), ev.Fail).error
    assert error.code == "invalid_request"
    assert word in error.message
    walk.assert_drained()


def test_priority_policy_runs_the_lower_number_first() -> None:
    walk = Walk(num_blocks=4, policy="priority", prepare_ahead=1, budget=16)
    walk.commit("a", 16)
    walk.submit("late", 8, priority=5)
    walk.submit("soon", 8, priority=1)
    reserved = all_of(walk.accept("a"), ev.ReserveLanding)
    assert [action.request_id for action in reserved] == ["soon", "late"]


def test_full_blocks_go_to_the_home_store_after_the_handoff_and_only_once() -> None:
    walk = Walk()
    walk.handle(ev.StoreFound(store=HOME))
    walk.commit(num_tokens=8)
    put = only(walk.accept(), ev.PutBlocks)
    keys = make_request("r", range(8)).block_keys
    items = [(item.key, item.parent, item.checksum) for item in put.items]
    assert items == [(keys[0], None, 1000), (keys[1], keys[0], 1001)]
    assert walk.state.num_held_blocks == 2
    walk.handle(ev.PutDone(put_id=put.put_id, num_refused=0, corrupt=()))
    walk.assert_drained()
    step = only(walk.submit("s", 8, max_tokens=1), ev.RunStep)
    assert ev.PutBlocks not in kinds(walk.done(step))


def test_blocks_that_came_from_the_home_store_are_not_put_back() -> None:
    walk = Walk()
    walk.handle(ev.StoreFound(store=HOME))
    walk.submit("r", 9, sources=[(HOME, 0, 1)], max_tokens=1)
    loaded = ev.PrefixLoaded(request_id=R, checksums=(5,))
    put = only(walk.done(only(walk.handle(loaded), ev.RunStep)), ev.PutBlocks)
    assert [item.key for item in put.items] == [make_request("r", range(9)).block_keys[1]]


def test_puts_are_bounded_and_excess_is_dropped_and_counted() -> None:
    walk = Walk(max_put_blocks=1, max_pending_puts=2)
    for name, first in (("r", 0), ("s", 50)):
        walk.done(only(walk.submit(name, 8, first=first, max_tokens=1), ev.RunStep))
    assert walk.state.counters["put_dropped_blocks"] == 2
    put = only(walk.handle(ev.StoreFound(store=HOME)), ev.PutBlocks)
    assert len(put.items) == 1
    assert walk.handle(ev.PutFailed(put_id=put.put_id, error=PeerLost("gone"))) == []
    assert walk.state.needs_home_store
    restarted = ev.StoreFound(store=endpoint("store-0", epoch=2))
    put = only(walk.handle(restarted), ev.PutBlocks)
    walk.handle(ev.PutDone(put_id=put.put_id, num_refused=0, corrupt=(put.items[0].key,)))
    assert walk.state.counters["integrity_failures"] == 1
    assert walk.state.counters["put_dropped_blocks"] == 3
    walk.assert_drained()


def test_only_shared_blocks_are_hot_and_eviction_resets_the_count() -> None:
    """A block's use count is lost when the block is evicted, so that counts need no memory of their own."""
    walk = Walk(num_blocks=3, store_writes="hot")
    walk.handle(ev.StoreFound(store=HOME))
    shared = [0, 1, 2, 3]
    assert put_behind(walk, "a", [*shared, *range(100, 105)]) == []
    keys = make_request("b", shared).block_keys
    assert put_behind(walk, "b", [*shared, *range(200, 205)]) == list(keys)
    assert put_behind(walk, "c", range(50, 62)) == []  # evicts all blocks
    assert put_behind(walk, "d", range(9)) == []
    assert len(put_behind(walk, "e", range(9))) == 2
    walk.assert_drained()


def test_a_prompts_last_put_says_when_it_returns_and_hints_are_not_mixed() -> None:
    walk = Walk(num_blocks=32, max_put_blocks=3)
    hints = CacheHints(return_within_s=9.0, ttl_s=60.0)
    for name, first, given in (("a", 0, hints), ("b", 50, NO_HINTS), ("c", 100, CacheHints(store=False))):
        request = replace(make_request(name, range(first, first + 17), max_tokens=1), cache_hints=given)
        actions = walk.request(request)
        while steps := all_of(actions, ev.RunStep):
            actions = walk.done(steps[0])
    assert walk.state.pool.num_cached == 8  # nothing of "c"
    put, puts = only(walk.handle(ev.StoreFound(store=HOME)), ev.PutBlocks), []
    while put is not None:
        puts.append((len(put.items), put.items[-1].hints))
        following = walk.handle(ev.PutDone(put_id=put.put_id, num_refused=0, corrupt=()))
        put = only(following, ev.PutBlocks) if following else None
    assert puts == [(3, hints.without_return()), (1, hints), (3, NO_HINTS), (1, NO_HINTS)]
    walk.assert_drained()


def put_behind(walk: Walk, name: str, tokens: abc.Sequence[int]) -> list[BlockKey]:
    """Computes a whole prompt and returns the keys of the blocks that are put afterwards."""
    keys: list[BlockKey] = []
    actions = list(walk.request(make_request(name, tokens, max_tokens=1)))
    while actions:
        action = actions.pop(0)
        if isinstance(action, ev.PutBlocks):
            keys += [item.key for item in action.items]
            done = ev.PutDone(put_id=action.put_id, num_refused=0, corrupt=())
            actions += walk.handle(done)
        elif isinstance(action, ev.RunStep):
            actions += walk.done(action)
    return keys


def test_an_illegal_step_raises_with_the_history_and_changes_nothing() -> None:
    sequence = make_sequence("r")
    sequence.enter(Phase.RESERVING, 1.0)
    with pytest.raises(IllegalTransition, match=r"r: reserving → committing.*reserving@1\.000"):
        sequence.enter(Phase.COMMITTING, 2.0)
    assert sequence.phase is Phase.RESERVING
    walk = Walk()
    with pytest.raises(KeyError):
        walk.written("nobody")
