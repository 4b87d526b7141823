"""A prefix is read unless computing it is predicted to be clearly faster. Waiting requests' prefixes are prefetched."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given
from prometheus_client import CollectorRegistry, generate_latest

from moonserve.prefill_worker.decisions import events as ev
from moonserve.prefill_worker.decisions.load_or_compute import LayerTurns, LoadChoice, PrefixLoads, choose
from moonserve.prefill_worker.worker import PrefixLoadCollector
from moonserve.protocol.errors import PeerLost
from moonserve.protocol.request import Endpoint, RequestId
from moonserve.protocol.step_time import PrefillProfile
from moonserve.worker.events import Action
from moonserve.worker.store_speed import FORGET_AFTER_S
from tests.prefill_worker.builders import BLOCK_BYTES, HOME, Walk, all_of, endpoint, kinds, make_request, only

FAR = endpoint("store-1")
NUM_TOKENS = 9  # two blocks of four can be read


@pytest.mark.parametrize(
    ("part_s", "compute_s", "busy_s", "gains_s", "num_parts"),
    [
        pytest.param([0.1], [1.0, 0.2], 0.0, None, 1, id="reading is cheaper"),
        pytest.param([2.0], [1.0, 0.2], 0.0, None, 0, id="reading is dearer"),
        pytest.param([0.9], [1.0, 0.2], 0.0, None, 1, id="dearer, but within the margin"),
        pytest.param([1.1], [1.0, 0.2], 0.0, None, 0, id="beyond the margin"),
        pytest.param([0.04], [0.01, 0.001], 0.0, None, 1, id="nobody would notice"),
        pytest.param([0.1, 5.0], [2.0, 1.0, 0.5], 0.0, None, 1, id="only the first part"),
        pytest.param([1.1, 0.1], [9.0, 8.0, 0.5], 0.0, None, 2, id="worth a slow first part"),
        pytest.param([2.0], [1.0, 0.2], 2.0, None, 1, id="hidden behind earlier work"),
        pytest.param([2.0], [2.1, 1.0], 0.0, None, 0, id="slow, and read first"),
        pytest.param([2.0], [2.1, 1.0], 0.0, [0.0, 0.95], 1, id="slow, hidden by computing"),
    ],
)
def test_the_leading_parts_are_read_that_make_the_prompt_ready_soonest(
    part_s: list[float], compute_s: list[float], busy_s: float, gains_s: list[float] | None, num_parts: int
) -> None:
    choice = choose(part_s, compute_s, busy_s, gains_s)
    assert (choice.num_parts, choice.num_skipped) == (num_parts, len(part_s) - num_parts)


def loads_of(layers: LayerTurns, reads: str = "auto") -> PrefixLoads:
    return PrefixLoads(
        PrefillProfile(c0=0.0, c1=0.001, c2=0.0),
        layers,
        reads=reads,
        block_bytes=1 << 20,
        block_size=4,
        chunk_tokens=64,
    )


def chosen(loads: PrefixLoads, num_blocks: int = 200, busy_s: float = 0.0) -> LoadChoice:
    """Returns the choice for a prefix at HOME that is followed by 50 tokens. A block takes 0.2 ms to read at first."""
    return loads.choose(
        [(HOME, num_blocks)],
        reader_host=HOME.host,
        num_tokens=4 * num_blocks + 50,
        num_cached=0,
        busy_s=busy_s,
        now=0.0,
    )


def test_missing_blocks_and_immediate_failures_do_not_change_the_speed() -> None:
    loads = loads_of(LayerTurns(1))
    choice = chosen(loads)
    for seconds, num_bytes, failed in ((5.0, 0, False), (1e-5, 2000, True)):
        read = ev.PartRead(store=HOME, num_bytes=num_bytes, seconds=seconds, failed=failed)
        loads.record_reads([read], choice, HOME.host, 0.0)
    assert not loads.speeds()
    stalled = ev.PartRead(store=HOME, num_bytes=2000, seconds=5.0, failed=True)
    loads.record_reads([stalled], choice, HOME.host, 0.0)
    assert loads.speeds()[HOME.instance_id].seconds(2000) > 0.01
    figures = loads.read_stats()[HOME.instance_id]
    assert (figures.reads, figures.failures, figures.num_bytes) == (3, 2, 0)
    assert figures.seconds == 10.00001


class Requests:
    """Sends requests with distinct stored prefixes, one after another, to an idle worker."""

    def __init__(self, **options: int) -> None:
        self.walk = Walk(home=None, **options)
        self.num_sent = 0

    def send(self, now: float, *, read_s: float, store: Endpoint = HOME) -> bool:
        """Sends a request and completes it. Returns True if the prefix was read, which takes `read_s`."""
        self.num_sent += 1
        name, sources = f"r{self.num_sent}", [(store, 0, 2)]
        actions = self.walk.submit(name, NUM_TOKENS, first=1000 * self.num_sent, sources=sources, max_tokens=1, at=now)
        was_read = bool(all_of(actions, ev.LoadPrefix))
        if was_read:
            read = ev.PartRead(store=store, num_bytes=2 * BLOCK_BYTES, seconds=read_s)
            loaded = ev.PrefixLoaded(request_id=RequestId(name), checksums=(1, 2), reads=(read,))
            actions = self.walk.handle(loaded)
        else:
            only(actions, ev.SkipPrefix)
        while steps := all_of(actions, ev.RunStep):
            actions = self.walk.done(steps[0])
        return was_read


def test_a_slow_store_is_avoided_and_tried_again_later() -> None:
    requests = Requests()
    was_read = [requests.send(1.0, read_s=10.0) for _ in range(6)]
    num_tried = was_read.index(False)
    assert 1 <= num_tried <= 3
    assert not any(was_read[num_tried:])
    assert requests.walk.state.counters["loads_skipped"] == 6 - num_tried
    assert requests.send(1.0, read_s=0.001, store=FAR), "another store is not to blame"

    assert not requests.send(1.0 + FORGET_AFTER_S, read_s=0.001)
    assert requests.send(1.1 + FORGET_AFTER_S, read_s=0.001)
    assert requests.send(1.2 + FORGET_AFTER_S, read_s=0.001)
    assert requests.walk.state.is_idle


def test_a_request_behind_others_reads_what_it_would_compute_on_an_idle_engine() -> None:
    requests = Requests(num_blocks=64, budget=64)
    while requests.send(1.0, read_s=0.3):
        pass
    requests.walk.submit("long", 40, max_tokens=1, at=2.0)
    behind = requests.walk.submit("behind", 9, first=50, max_tokens=1, sources=[(HOME, 0, 2)])
    choice = only(behind, ev.LoadPrefix).choice
    assert choice.totals_s[1] < choice.totals_s[0]


def test_prometheus_sees_reads_predictions_and_skips_by_store() -> None:
    requests = Requests()
    while requests.send(1.0, read_s=10.0):
        pass
    registry = CollectorRegistry()
    registry.register(PrefixLoadCollector(requests.walk.state.prefix_loads))
    text = generate_latest(registry).decode()
    num_read = requests.num_sent - 1
    assert f'moonserve_prefix_load_reads_total{{store="store-0"}} {num_read}.0' in text
    assert 'moonserve_prefix_load_skipped_total{store="store-0"} 1.0' in text
    assert f'moonserve_prefix_load_seconds_total{{store="store-0"}} {10.0 * num_read}' in text
    assert 'moonserve_prefix_load_predicted_seconds_total{store="store-0"} 0.' in text
    assert 'moonserve_prefix_load_latency_seconds{store="store-0"}' in text


@given(
    read_s=st.floats(1e-4, 100),
    first_s=st.floats(1e-4, 100),
    rest_s=st.floats(0, 100),
    busy_s=st.floats(0, 100),
    num_turns=st.integers(1, 80),
)
def test_the_gain_is_that_of_a_pipeline_of_turns(
    read_s: float, first_s: float, rest_s: float, busy_s: float, num_turns: int
) -> None:
    """With g turns, turn k of a read of L seconds ends at k/g · L. Turn k of the first step takes C1/g seconds. It
    begins when that read turn and its own turn k − 1 have ended."""
    ends_s = busy_s
    for turn in range(1, num_turns + 1):
        ends_s = max(ends_s, read_s * turn / num_turns) + first_s / num_turns
    serial_s = max(busy_s, read_s) + first_s
    gain_s = LayerTurns(num_turns).gain_s(1, read_s, first_s, busy_s)
    assert serial_s - ends_s == pytest.approx(gain_s, abs=1e-9 + 1e-9 * serial_s)


def test_small_prefixes_are_read_in_few_turns_or_at_once() -> None:
    assert LayerTurns(12).at_once(96 << 20) == 1
    assert LayerTurns(12).at_once(12 << 20) == 2
    assert LayerTurns(12).at_once(1 << 20) == 12
    assert LayerTurns(12).gain_s(12, 1.0, 1.0, 0.0) == 0.0
    assert LayerTurns(12, "never").at_once(1 << 30) == 12
    assert LayerTurns(12, "always").at_once(1) == 1


@pytest.mark.parametrize(("num_blocks", "busy_s", "expected"), [(200, 0.0, 1), (200, 10.0, None), (2, 0.0, None)])
def test_prefix_without_gain_is_read_at_once(num_blocks: int, busy_s: float, expected: int | None) -> None:
    choice = chosen(loads_of(LayerTurns(8)), num_blocks, busy_s)
    assert (choice.num_parts, choice.layers_at_once) == (1, expected)


@pytest.mark.parametrize(
    ("reads", "seconds", "num_parts"),
    [("auto", 100.0, 0), ("always", 100.0, 1), ("auto", 0.001, 1), ("never", 0.001, 0)],
)
def test_slow_prefix_is_computed_unless_reads_are_forced(reads: str, seconds: float, num_parts: int) -> None:
    loads = loads_of(LayerTurns(1), reads)
    for _ in range(20):
        read = ev.PartRead(store=HOME, num_bytes=200 << 20, seconds=seconds)
        loads.record_reads([read], chosen(loads), HOME.host, 0.0)
    assert chosen(loads).num_parts == num_parts


def busy(*, max_prefetch_blocks: int = 8, policy: str = "fcfs") -> Walk:
    """Returns a walk whose pool is full, so that further requests wait."""
    walk = Walk(num_blocks=4, max_prefetch_blocks=max_prefetch_blocks, policy=policy, home=None)
    walk.submit("running", 16)
    return walk


def fetched(actions: Sequence[Action]) -> list[str]:
    return [action.request_id for action in all_of(actions, ev.PrefetchPrefix)]


def come(walk: Walk, number: int, *, num_blocks: int = 2, priority: int = 0) -> Sequence[Action]:
    """Submits an unrelated request whose first blocks are in the home store."""
    return walk.submit(
        f"r{number}", 4 * num_blocks + 1, first=1000 * number, sources=[(HOME, 0, num_blocks)], priority=priority
    )


def test_a_waiting_request_has_its_prefix_fetched_from_all_its_stores() -> None:
    walk, far = busy(), endpoint("store-1")
    keys = make_request("r", range(100, 113)).block_keys
    assert walk.submit("r", 13, first=100, sources=[(HOME, 0, 2), (far, 2, 1)]) == [
        ev.PrefetchPrefix(
            request_id=RequestId("r"),
            parts=(ev.PrefetchPart(store=HOME, keys=keys[:2]), ev.PrefetchPart(store=far, keys=keys[2:3])),
        )
    ]
    assert walk.state.counters["prefetched_blocks"] == 3


def test_prefix_read_at_once_or_stored_nowhere_is_not_prefetched() -> None:
    assert kinds(come(Walk(), 1)) == [ev.ReserveLanding, ev.LoadPrefix]
    assert busy().submit("r", 9) == []


def test_cached_blocks_are_not_prefetched() -> None:
    walk = Walk(num_blocks=4, home=None)
    walk.done(walk.start("first", 5))
    prefetch = only(walk.submit("r", 13, sources=[(HOME, 0, 3)]), ev.PrefetchPrefix)
    keys = make_request("r", range(13)).block_keys
    assert prefetch.parts == (ev.PrefetchPart(store=HOME, keys=keys[1:3]),)


@pytest.mark.parametrize(("max_blocks", "num_asked"), [(0, 0), (4, 2), (8, 4)])
def test_of_a_long_queue_only_the_head_is_fetched(max_blocks: int, num_asked: int) -> None:
    """More prefixes would evict each other from the store's memory. The next ones follow as the queue advances."""
    walk = busy(max_prefetch_blocks=max_blocks)
    asked = [number for number in range(1, 101) if come(walk, number)]
    assert asked == list(range(1, num_asked + 1))
    assert fetched(walk.cancel("r1")) == ([f"r{num_asked + 1}"] if num_asked else [])
    assert not fetched(walk.cancel("r99"))


def test_an_admitted_request_makes_room_for_the_next() -> None:
    walk = busy(max_prefetch_blocks=2)
    come(walk, 1)
    assert come(walk, 2) == []
    assert not fetched(walk.cancel("running"))  # it still holds its blocks
    withdrawn = ev.LandingRefused(request_id=RequestId("running"), error=PeerLost("withdrawn"))
    actions = walk.handle(withdrawn)
    assert [load.request_id for load in all_of(actions, ev.LoadPrefix)] == ["r1"]
    assert fetched(actions) == ["r2"]


def test_a_prefix_larger_than_the_limit_is_fetched_up_to_it_and_alone() -> None:
    walk = busy(max_prefetch_blocks=2)
    prefetch = only(come(walk, 1, num_blocks=3), ev.PrefetchPrefix)
    assert [len(part.keys) for part in prefetch.parts] == [2]
    assert come(walk, 2, num_blocks=1) == []


def test_urgent_requests_are_fetched_for_first() -> None:
    walk = busy(max_prefetch_blocks=4, policy="priority")
    for number, priority in ((1, 0), (2, 0), (3, 0), (4, -1)):
        come(walk, number, priority=priority)
    assert fetched(walk.cancel("r1")) == ["r4"]
