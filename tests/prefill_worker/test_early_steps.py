"""A step may begin before its prefix has arrived. Its results count only after the prefix is verified."""

from collections.abc import Sequence

import pytest

from moonserve.prefill_worker.decisions import events as ev
from moonserve.protocol.errors import PeerError, PeerLost
from moonserve.protocol.request import RequestId
from moonserve.protocol.step_time import PrefillProfile
from moonserve.worker.events import Event
from tests.prefill_worker.builders import BLOCK_SIZE, HOME, Walk, all_of, kinds, only, spans, step_done

NAME = RequestId("r")
LOST = PeerLost("gone")
NUM_TOKENS = 4 * BLOCK_SIZE + 3  # four stored blocks
# Computing the other three tokens takes one second.
PROFILE = PrefillProfile(c0=0.1, c1=0.3, c2=0.0)


def early() -> Walk:
    return Walk(num_layers=4, layered_loads="always", home=None, budget=64, profile=PROFILE)


def load(walk: Walk, name: str = NAME, *, num_cached: int = 0, first: int = 0) -> None:
    """Submits a prompt whose first four blocks are in a store, and grants its landing."""
    actions = walk.submit(name, NUM_TOKENS, first=first, sources=[(HOME, 0, 4)])
    assert all_of(actions, ev.LoadPrefix)
    walk.grant(actions, num_cached=num_cached)


def progress(num_layers: int, *, seconds: float, name: str = NAME, num_blocks: int = 4) -> ev.PrefixProgress:
    return ev.PrefixProgress(
        request_id=RequestId(name),
        num_blocks=num_blocks,
        num_layers=num_layers,
        layers_at_once=1,
        of_layers=4,
        seconds=seconds,
    )


def loaded(num_blocks: int = 4) -> ev.PrefixLoaded:
    return ev.PrefixLoaded(request_id=NAME, checksums=tuple(range(2000, 2000 + num_blocks)))


def begin(walk: Walk, *, num_cached: int = 0) -> ev.RunStep:
    """Returns the first step, which begins when the first layer has arrived."""
    load(walk, num_cached=num_cached)
    return only(walk.handle(progress(1, seconds=0.1), 0.1), ev.RunStep)


def test_early_step_begins_when_missing_layers_will_arrive_in_time() -> None:
    """Computing takes one second, so a step begins once the remaining layers arrive within 0.75 s."""
    walk = early()
    load(walk)
    assert not walk.handle(progress(1, seconds=0.3), 0.3), "0.9 s to come"
    step = only(walk.handle(progress(2, seconds=0.6), 0.6), ev.RunStep)
    assert step.max_wait_s == pytest.approx(0.6 + 0.1)
    assert spans([step]) == [("r", 4 * BLOCK_SIZE, NUM_TOKENS)]


def test_early_step_counts_only_after_all_blocks_are_verified() -> None:
    walk = early()
    step = begin(walk)
    assert not walk.done(step)
    actions = walk.handle(loaded())
    assert only(actions, ev.SendFirstToken).token.token_id == 42
    assert [target for _, target in only(actions, ev.SendBlocks).pairs] == [100, 101, 102, 103]
    walk.written()
    commit = only(walk.written(), ev.CommitHandoff)
    assert commit.checksums == (2000, 2001, 2002, 2003, 1004)
    walk.accept()
    walk.assert_drained()
    assert walk.state.counters["early_steps"] == 1


@pytest.mark.parametrize("waited_s", [0.0, 0.25])
def test_a_prefix_that_is_good_before_the_step_ends_is_sent_at_once(waited_s: float) -> None:
    """The time that the engine waits for the prefix counts as loading."""
    walk = early()
    step = begin(walk, num_cached=1)
    sent = only(walk.handle(loaded(), 0.5), ev.SendBlocks)
    assert [target for _, target in sent.pairs] == [101, 102, 103]
    done = ev.StepDone(slices=step_done(step).slices, waited_s=waited_s)
    report = only(walk.handle(done, 1.1), ev.SendFirstToken).report
    assert report.cached_tokens == 4 * BLOCK_SIZE
    assert report.load_s == pytest.approx(0.1 + waited_s)
    assert report.compute_s == pytest.approx(1.0 - waited_s)


@pytest.mark.parametrize("load_ends_first", [True, False])
@pytest.mark.parametrize("num_good", [0, 2])
def test_blocks_after_a_corrupt_one_are_computed_again(load_ends_first: bool, num_good: int) -> None:
    """The second attempt starts after the writes of the first one, which read the same blocks, have ended."""
    walk = early()
    step = begin(walk)
    ends: list[Event] = [loaded(num_good), step_done(step, token_id=666)]
    for event in ends if load_ends_first else reversed(ends):
        assert not walk.handle(event)
    actions = walk.written()
    again = only(actions, ev.RunStep)
    assert again.max_wait_s is None
    assert again.plans[0].slice.start == again.plans[0].send_from == num_good * BLOCK_SIZE
    assert len(all_of(actions, ev.SendBlocks)) == bool(num_good)
    assert only(walk.done(again), ev.SendFirstToken).token.token_id == 42
    assert walk.state.counters["spoilt_early_steps"] == 1


def test_abandoned_step_restarts_when_all_layers_are_loaded() -> None:
    walk = early()
    begin(walk)
    assert not walk.grant(walk.submit("other", first=500)), "a step is under way"
    other = only(walk.handle(ev.StepGivenUp()), ev.RunStep)
    assert spans([other]) == [("other", 0, 6)]
    walk.done(other)
    assert not walk.handle(progress(4, seconds=0.4)), "once is enough"
    assert not walk.handle(loaded()), "writes are under way"
    again = only(walk.written(), ev.RunStep)
    assert again.max_wait_s is None
    assert again.plans[0].slice.start == 4 * BLOCK_SIZE
    assert walk.state.counters["given_up_early_steps"] == 1


def test_early_step_has_one_request() -> None:
    """An early step has one member: neither ready nor loading prompts join it. The better rank goes first."""
    walk = early()
    load(walk)
    load(walk, "later", first=500)
    step = only(walk.handle(progress(4, seconds=0.1, name="later"), 0.1), ev.RunStep)
    assert [name for name, _, _ in spans([step])] == ["later"]
    walk.handle(progress(4, seconds=0.1), 0.2)
    walk.grant(walk.submit("ready", first=900))
    assert [name for name, _, _ in spans(walk.done(step))] == [NAME]


@pytest.mark.parametrize("error_first", [True, False])
def test_a_step_that_failed_behind_good_blocks_fails_its_request(error_first: bool) -> None:
    walk = early()
    begin(walk)
    ends: list[Event] = [ev.StepFailed(error=PeerError("nan")), loaded()]
    told = [kind for e in (ends if error_first else ends[::-1]) for kind in kinds(walk.handle(e))]
    assert ev.Fail in told
    for _ in range(told.count(ev.SendBlocks) + 1):
        walk.written()
    walk.assert_drained()


def test_a_step_that_failed_behind_a_bad_block_is_computed_again() -> None:
    walk = early()
    begin(walk)
    walk.handle(ev.StepFailed(error=PeerError("nan")))
    walk.handle(ev.PrefixLoadFailed(request_id=NAME, error=LOST))
    assert ev.RunStep in kinds(walk.written())


@pytest.mark.parametrize("ends", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_cancelled_sequence_is_released_when_nothing_uses_its_blocks(ends: Sequence[int]) -> None:
    walk = early()
    step = begin(walk)
    walk.cancel()
    events: list[Event] = [step_done(step), loaded(), ev.WritesDone(request_id=NAME)]
    for position in ends:
        assert walk.state.num_held_blocks
        walk.handle(events[position])
    walk.assert_drained()


def test_a_store_that_has_fewer_blocks_means_computing_from_there() -> None:
    walk = early()
    load(walk)
    step = only(walk.handle(progress(4, seconds=0.1, num_blocks=2), 0.1), ev.RunStep)
    assert step.plans[0].slice.start == 2 * BLOCK_SIZE
    walk.done(step)
    assert ev.SendFirstToken in kinds(walk.handle(loaded(2)))
