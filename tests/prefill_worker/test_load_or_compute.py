"""A prefix is read where that is predicted to be faster, and computed where it clearly is not."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from prometheus_client import CollectorRegistry, generate_latest

from kvstore.store_speed import FORGET_AFTER_S
from prefill_worker import actions as act
from prefill_worker import events as ev
from prefill_worker.load_or_compute import Layers, PrefixLoads, choose
from prefill_worker.metrics import PrefixLoadCollector
from prefill_worker.state import PrefillState
from protocol.errors import PeerLost
from protocol.ids import RequestId
from protocol.profile import PrefillProfile
from protocol.request import Endpoint
from tests.prefill_worker.builders import (
    BLOCK_BYTES,
    HOME,
    PROFILE,
    endpoint,
    make_request,
    make_state,
    step_done,
    submitted,
)

FAR = endpoint("store-1")
NUM_TOKENS = 9  # two blocks of four can be read


def test_a_cheaper_read_is_chosen_and_a_dearer_one_is_not() -> None:
    assert choose([0.1], [1.0, 0.2], busy_s=0.0).num_parts == 1
    assert choose([2.0], [1.0, 0.2], busy_s=0.0).num_parts == 0


def test_computing_must_be_better_by_a_margin() -> None:
    assert choose([0.9], [1.0, 0.2], busy_s=0.0).num_parts == 1
    assert choose([1.1], [1.0, 0.2], busy_s=0.0).num_parts == 0
    assert choose([0.04], [0.01, 0.001], busy_s=0.0).num_parts == 1, "nobody would notice"


def test_a_slow_part_takes_those_behind_it_along_unless_they_are_worth_it() -> None:
    only_first = choose([0.1, 5.0], [2.0, 1.0, 0.5], busy_s=0.0)
    assert (only_first.num_parts, only_first.num_skipped) == (1, 1)
    assert only_first.totals_s == pytest.approx((2.0, 1.1, 5.6))
    assert choose([1.1, 0.1], [9.0, 8.0, 0.5], busy_s=0.0).num_parts == 2


def test_reading_that_hides_behind_earlier_work_costs_nothing() -> None:
    assert choose([2.0], [1.0, 0.2], busy_s=0.0).num_parts == 0
    assert choose([2.0], [1.0, 0.2], busy_s=2.0).num_parts == 1


@given(
    c1=st.floats(1e-6, 1e-2),
    c2=st.floats(0, 1e-5),
    latency_s=st.floats(0, 1),
    block_s=st.floats(1e-6, 1),
    num_blocks=st.integers(1, 60),
    num_cached=st.integers(0, 10),
)
def test_reading_a_part_of_a_part_is_never_better_than_all_or_nothing(
    c1: float, c2: float, latency_s: float, block_s: float, num_blocks: int, num_cached: int
) -> None:
    """The derivation in the module's docstring."""
    profile = PrefillProfile(c0=0.01, c1=c1, c2=c2)
    num_tokens = 16 * (num_cached + num_blocks) + 5

    def total(count: int) -> float:
        read_s = latency_s + count * block_s if count else 0.0
        return read_s + profile.seconds(num_tokens, 16 * (num_cached + count))

    best = min(total(count) for count in range(num_blocks + 1))
    assert min(total(0), total(num_blocks)) <= best * (1 + 1e-9)


def loads_of(profile: PrefillProfile) -> PrefixLoads:
    return PrefixLoads(profile, Layers(1), block_bytes=BLOCK_BYTES, block_size=4, chunk_tokens=1000)


def test_what_is_not_there_and_what_fails_at_once_say_nothing_about_speed() -> None:
    loads = loads_of(PROFILE)
    choice = loads.choose(
        [(HOME, 2)], reader_host="here", num_tokens=9, num_cached=0, busy_s=0.0, now=0.0
    )
    absent = ev.PartRead(store=HOME, num_bytes=0, seconds=5.0)
    refused = ev.PartRead(store=HOME, num_bytes=2000, seconds=1e-5, failed=True)
    for read in (absent, refused):
        loads.ended([read], choice, "here", 0.0)
    assert not loads.speeds()
    stalled = ev.PartRead(store=HOME, num_bytes=2000, seconds=5.0, failed=True)
    loads.ended([stalled], choice, "here", 0.0)
    assert loads.speeds()[HOME.instance_id].seconds(2000) > 0.01


class Requests:
    """Sends requests for a stored prefix one after another to an idle worker that caches nothing itself."""

    def __init__(self, state: PrefillState) -> None:
        self.state = state
        self.num_sent = 0

    def send(self, now: float, *, read_s: float, store: Endpoint = HOME) -> bool:
        """Whether the prefix was read, which takes `read_s`."""
        self.num_sent += 1
        name = f"r{self.num_sent}"
        tokens = range(1000 * self.num_sent, 1000 * self.num_sent + NUM_TOKENS)
        request = make_request(name, tokens, max_tokens=1)
        actions = self.state.handle(submitted(request, sources=[(store, 0, 2)]), now)
        [first] = [a for a in actions if isinstance(a, act.LoadPrefix | act.SkipPrefix)]
        if isinstance(first, act.LoadPrefix):
            read = ev.PartRead(store=store, num_bytes=2 * BLOCK_BYTES, seconds=read_s)
            loaded = ev.PrefixLoaded(request_id=RequestId(name), checksums=(1, 2), reads=(read,))
            actions = self.state.handle(loaded, now)
        [step] = [a for a in actions if isinstance(a, act.RunStep)]
        while step is not None:
            steps = [
                a for a in self.state.handle(step_done(step), now) if isinstance(a, act.RunStep)
            ]
            step = steps[0] if steps else None
        self.state.validate()
        return isinstance(first, act.LoadPrefix)


def test_a_slow_store_is_avoided_and_tried_again_later() -> None:
    state = make_state(home=None)
    requests = Requests(state)
    was_read = [requests.send(1.0, read_s=10.0) for _ in range(6)]
    num_tried = was_read.index(False)
    assert 1 <= num_tried <= 3
    assert not any(was_read[num_tried:])
    assert state.counters["loads_skipped"] == 6 - num_tried
    assert requests.send(1.0, read_s=0.001, store=FAR), "another store is not to blame"

    assert not requests.send(1.0 + FORGET_AFTER_S, read_s=0.001)
    assert requests.send(1.1 + FORGET_AFTER_S, read_s=0.001)
    assert requests.send(1.2 + FORGET_AFTER_S, read_s=0.001)
    assert state.is_idle


def test_a_store_that_keeps_its_promise_is_always_read() -> None:
    requests = Requests(make_state(home=None))
    assert all(requests.send(float(n), read_s=0.002) for n in range(20))


def test_a_request_behind_others_reads_what_it_would_compute_on_an_idle_engine() -> None:
    state = make_state(home=None, num_blocks=64, budget=64)
    requests = Requests(state)
    while requests.send(1.0, read_s=0.3):
        pass
    state.handle(submitted(make_request("long", range(40), max_tokens=1)), 2.0)
    behind = make_request("behind", range(50, 59), max_tokens=1)
    actions = state.handle(submitted(behind, sources=[(HOME, 0, 2)]), 2.0)
    [load] = [a for a in actions if isinstance(a, act.LoadPrefix)]
    assert load.choice.totals_s[1] < load.choice.totals_s[0]
    state.validate()


def test_a_failed_load_counts_with_the_time_that_it_took() -> None:
    state = make_state(home=None)
    request = make_request("r", range(NUM_TOKENS), max_tokens=1)
    state.handle(submitted(request, sources=[(HOME, 0, 2)]), 0.0)
    read = ev.PartRead(store=HOME, num_bytes=2 * BLOCK_BYTES, seconds=5.0, failed=True)
    failed = ev.PrefixLoadFailed(request_id=RequestId("r"), error=PeerLost("gone"), reads=(read,))
    state.handle(failed, 5.0)
    figures = state.prefix_loads.figures()["store-0"]
    assert (figures.reads, figures.failures, figures.num_bytes) == (1, 1, 0)
    assert figures.seconds == 5.0
    state.validate()


def test_prometheus_sees_reads_predictions_and_skips_by_store() -> None:
    state = make_state(home=None)
    requests = Requests(state)
    while requests.send(1.0, read_s=10.0):
        pass
    registry = CollectorRegistry()
    registry.register(PrefixLoadCollector(state.prefix_loads))
    text = generate_latest(registry).decode()
    num_read = requests.num_sent - 1
    assert f'moonserve_prefix_load_reads_total{{store="store-0"}} {num_read}.0' in text
    assert 'moonserve_prefix_load_skipped_total{store="store-0"} 1.0' in text
    assert f'moonserve_prefix_load_seconds_total{{store="store-0"}} {10.0 * num_read}' in text
    assert 'moonserve_prefix_load_predicted_seconds_total{store="store-0"} 0.' in text
    assert 'moonserve_prefix_load_latency_seconds{store="store-0"}' in text


# -- layer by layer


def test_reading_layer_by_layer_gains_what_computing_hides_of_it() -> None:
    """The formula of the module's docstring, less that of reading first."""
    layers = Layers(12)
    at_once = layers.at_once(96 << 20)
    assert at_once == 1
    assert layers.gain_s(1, 0.36, 0.6, 0.0) == pytest.approx(0.36 * 11 / 12), "computing is longer"
    assert layers.gain_s(1, 6.0, 0.6, 0.0) == pytest.approx(0.6 * 11 / 12), "reading is longer"
    assert layers.gain_s(1, 0.36, 0.6, 0.2) == pytest.approx(0.16), "hidden behind others already"
    assert layers.gain_s(1, 0.36, 0.6, 0.4) == 0.0


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
    """Turn k of reading ends at k/g · L, turn k of the first step takes C1/g and begins when that and turn k − 1 have
    ended."""
    ends_s = busy_s
    for turn in range(1, num_turns + 1):
        ends_s = max(ends_s, read_s * turn / num_turns) + first_s / num_turns
    serial_s = max(busy_s, read_s) + first_s
    gain_s = Layers(num_turns).gain_s(1, read_s, first_s, busy_s)
    assert serial_s - ends_s == pytest.approx(gain_s, abs=1e-9 + 1e-9 * serial_s)


def test_small_prefixes_are_read_in_few_turns_or_at_once() -> None:
    assert Layers(12).at_once(12 << 20) == 2
    assert Layers(12).at_once(1 << 20) == 12
    assert Layers(12).gain_s(12, 1.0, 1.0, 0.0) == 0.0
    assert Layers(12, "never").at_once(1 << 30) == 12
    assert Layers(12, "always").at_once(1) == 1


def _loads(layers: Layers, reads: str = "auto") -> PrefixLoads:
    return PrefixLoads(
        PrefillProfile(c0=0.0, c1=0.001, c2=0.0),
        layers,
        reads=reads,
        block_bytes=1 << 20,
        block_size=4,
        chunk_tokens=64,
    )


@pytest.mark.parametrize(
    ("num_blocks", "busy_s", "expected"),
    [(200, 0.0, 1), (200, 10.0, None), (2, 0.0, None)],
)
def test_what_gains_nothing_is_read_at_once(
    num_blocks: int, busy_s: float, expected: int | None
) -> None:
    """200 blocks of a MiB take 42 ms to read from a store on the same host."""
    choice = _loads(Layers(8)).choose(
        [(HOME, num_blocks)],
        reader_host=HOME.host,
        num_tokens=4 * num_blocks + 50,
        num_cached=0,
        busy_s=busy_s,
        now=0.0,
    )
    assert (choice.num_parts, choice.layers_at_once) == (1, expected)


@pytest.mark.parametrize(
    ("reads", "seconds", "num_parts"),
    [("auto", 100.0, 0), ("always", 100.0, 1), ("auto", 0.001, 1), ("never", 0.001, 0)],
)
def test_what_is_slow_to_read_is_computed_unless_told_otherwise(
    reads: str, seconds: float, num_parts: int
) -> None:
    loads = _loads(Layers(1), reads)
    wish = {"reader_host": HOME.host, "num_tokens": 850, "num_cached": 0, "busy_s": 0.0, "now": 0.0}
    for _ in range(20):
        first = loads.choose([(HOME, 200)], **wish)
        read = ev.PartRead(store=HOME, num_bytes=200 << 20, seconds=seconds)
        loads.ended([read], first, HOME.host, 0.0)
    assert loads.choose([(HOME, 200)], **wish).num_parts == num_parts


def test_a_slower_store_is_read_from_where_computing_hides_it() -> None:
    """Reading takes 2 s, computing all 2.1 and the rest 1: read first, that would not pay."""
    assert choose([2.0], [2.1, 1.0], busy_s=0.0).num_parts == 0
    layered = choose([2.0], [2.1, 1.0], busy_s=0.0, gains_s=[0.0, 0.95])
    assert layered.num_parts == 1
    assert layered.totals_s == pytest.approx((2.1, 2.05))
