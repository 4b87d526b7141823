"""Which way slices go: the cheapest path of the best transport that works, and what happens when it breaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transfer.rails.ways import HERE, MIB, break_down, carry, chooser, path
from transfer.rails.health import Condition, HealthEvent, RailHealth
from transfer.rails.paths import LOST_PLACE_S, Path
from transfer.rails.topology import Preference, Topology


def test_the_only_path_is_chosen_however_often_it_failed() -> None:
    only = path()
    paths = chooser(only)
    now = break_down(paths, only, 0.0)
    assert paths.choose(HERE, MIB, now) is only
    assert paths.choose(HERE, MIB, now, tried=[only]) is None


def test_slices_spread_over_equal_rails_in_order() -> None:
    ways = [path(rail="eth0"), path(rail="eth1")]
    paths = chooser(*ways)
    chosen = []
    for _ in range(6):
        way = paths.choose(HERE, MIB, 0.0)
        assert way is not None
        paths.sent(way, MIB)
        chosen.append(way)
    assert chosen == ways * 3


def test_a_rail_of_thrice_the_bandwidth_gets_thrice_the_bytes() -> None:
    slow, fast = path(rail="eth0", bandwidth=1e9), path(rail="eth1", bandwidth=3e9)
    paths = chooser(slow, fast)
    counts = {slow: 0, fast: 0}
    for _ in range(80):
        way = paths.choose(HERE, MIB, 0.0)
        assert way is not None
        paths.sent(way, MIB)
        counts[way] += 1
    assert counts == {slow: 20, fast: 60}


def test_measurement_replaces_what_the_system_says() -> None:
    boasting, modest = path(rail="eth0", bandwidth=10e9), path(rail="eth1", bandwidth=1e9)
    paths = chooser(boasting, modest)
    assert paths.choose(HERE, MIB, 0.0) is boasting
    now = carry(paths, boasting, 0.0, seconds=0.1, times=3)
    assert paths.choose(HERE, MIB, now) is modest
    terms = {term.path: term for term in paths.explain(HERE, now)}
    assert terms[boasting].bandwidth_bytes_s == pytest.approx(MIB / 0.1)
    assert terms[boasting].measured
    assert not terms[modest].measured


def test_a_slow_rail_is_measured_anew_after_a_while_without_use() -> None:
    first, second = path(rail="eth0"), path(rail="eth1")
    paths = chooser(first, second)
    now = carry(paths, first, 0.0, seconds=0.1, times=3)
    now = carry(paths, second, now, seconds=0.01, times=3)
    assert paths.choose(HERE, MIB, now) is second
    assert paths.choose(HERE, MIB, now + 11) is first


def test_a_measurement_of_long_ago_does_not_count_beside_a_new_one() -> None:
    way = path()
    paths = chooser(way, path(rail="eth1"))
    now = carry(paths, way, 0.0, seconds=0.1, times=8)
    now = carry(paths, way, now + 11, seconds=0.01)
    assert paths.explain(HERE, now)[0].bandwidth_bytes_s == pytest.approx(MIB / 0.01)


def test_a_deep_queue_does_not_look_like_a_slow_path() -> None:
    way = path()
    paths = chooser(way, path(rail="eth1"))
    for _ in range(10):
        paths.sent(way, MIB)
    for number in range(1, 11):
        paths.done(way, MIB, seconds=0.01 * number, now=0.01 * number)
    terms = paths.explain(HERE, 0.1)
    assert terms[0].bandwidth_bytes_s == pytest.approx(MIB / 0.01)


def test_small_slices_say_nothing_about_bandwidth() -> None:
    way = path(bandwidth=1e9)
    paths = chooser(way, path(rail="eth1"))
    paths.sent(way, 4096)
    paths.done(way, 4096, seconds=0.01, now=0.01)
    assert paths.explain(HERE, 0.01)[0].bandwidth_bytes_s == 1e9


def test_a_near_rail_comes_first_and_a_far_one_helps_under_load() -> None:
    far, near = path(rail="eth0"), path(rail="eth1")
    topology = Topology({HERE: Preference(("eth1",), ("eth0",))})
    paths = chooser(far, near, topology=topology)
    assert paths.choose(HERE, MIB, 0.0) is near
    assert paths.choose("cpu:1", MIB, 0.0) is far  # nothing is known of that memory
    paths.sent(near, MIB)
    assert paths.choose(HERE, MIB, 0.0) is far


def test_retries_walk_the_list() -> None:
    ways = [path(rail="eth0"), path(rail="eth1"), path("rdma", "mlx5_0:1")]
    paths = chooser(*ways)
    tried: list[Path] = []
    while (way := paths.choose(HERE, MIB, 0.0, tried)) is not None:
        tried.append(way)
    assert tried == ways


def test_a_broken_connection_with_many_slices_does_not_rest_the_rail() -> None:
    first, second = path(rail="eth0"), path(rail="eth1")
    paths = chooser(first, second)
    for _ in range(8):
        paths.sent(first, MIB)
    for _ in range(8):
        paths.failed(first, MIB, 1.0)
    assert paths.choose(HERE, MIB, 1.0) is first


def test_a_resting_rail_is_left_alone_tried_once_and_taken_back() -> None:
    health = RailHealth()
    bad, good = path(rail="eth0"), path(rail="eth1")
    paths = chooser(bad, good, health=health)
    now = break_down(paths, bad, 0.0)
    for _ in range(5):
        assert paths.choose(HERE, MIB, now) is good
        paths.sent(good, MIB)
    assert paths.choose(HERE, MIB, now + 30) is bad
    paths.sent(bad, MIB)
    assert paths.choose(HERE, MIB, now + 30) is good  # the trial is under way
    paths.done(bad, MIB, 0.01, now + 30.01)
    assert paths.choose(HERE, MIB, now + 30.01) is bad
    assert health.events[HealthEvent.HEALED] == 1


def test_the_streams_of_one_pair_of_rails_rest_together() -> None:
    ways = [path(stream=0), path(stream=1), path(rail="eth1")]
    paths = chooser(*ways)
    now = break_down(paths, ways[0], 0.0)
    assert paths.choose(HERE, MIB, now) is ways[2]
    assert paths.choose(HERE, MIB, now + 30) is ways[0]
    paths.sent(ways[0], MIB)
    assert paths.choose(HERE, MIB, now + 30) is ways[2]


def test_the_next_transport_is_taken_when_the_better_one_rests_and_left_again() -> None:
    rdma, tcp = path("rdma", "mlx5_0:1"), path("tcp")
    paths = chooser(rdma, tcp)
    assert paths.choose(HERE, MIB, 0.0) is rdma
    now = break_down(paths, rdma, 0.0)
    assert paths.choose(HERE, MIB, now) is tcp
    assert paths.choose(HERE, MIB, now + 30) is rdma


def test_when_everything_rests_the_first_to_recover_is_used() -> None:
    first, second = path(rail="eth0"), path(rail="eth1")
    paths = chooser(first, second)
    break_down(paths, second, 0.0)
    now = break_down(paths, first, 5.0)
    assert paths.choose(HERE, MIB, now) is second
    assert paths.choose(HERE, MIB, now, tried=[second]) is first
    assert paths.choose(HERE, MIB, now, tried=[first, second]) is None


def test_a_transport_that_measures_far_worse_than_the_next_loses_its_place_for_a_while() -> None:
    rdma, tcp = path("rdma", "rxe0:1"), path("tcp")
    paths = chooser(rdma, tcp)
    now = carry(paths, tcp, 0.0, seconds=0.001, times=8)
    now = carry(paths, rdma, now, seconds=0.01, times=7)
    assert paths.choose(HERE, MIB, now) is rdma
    now = carry(paths, rdma, now, seconds=0.01)
    assert paths.transports == ("tcp", "rdma")
    assert paths.choose(HERE, MIB, now) is tcp
    now = carry(paths, tcp, now + LOST_PLACE_S, seconds=0.001)
    assert paths.choose(HERE, MIB, now) is rdma
    now = carry(paths, rdma, now, seconds=0.001, times=20)
    assert paths.transports == ("rdma", "tcp")


def test_a_transport_that_got_its_place_back_is_not_judged_by_one_slice() -> None:
    rdma, tcp = path("rdma", "rxe0:1"), path("tcp")
    paths = chooser(rdma, tcp)
    now = carry(paths, tcp, 0.0, seconds=0.001, times=8)
    lost_at = carry(paths, rdma, now, seconds=0.01, times=8)
    now = carry(paths, rdma, lost_at + LOST_PLACE_S - 1, seconds=0.01, times=8)  # failed over
    now = carry(paths, tcp, now + 1, seconds=0.001, times=8)
    assert paths.transports == ("rdma", "tcp")
    now = carry(paths, rdma, now, seconds=0.01, times=7)
    assert paths.transports == ("rdma", "tcp")
    carry(paths, rdma, now, seconds=0.01)
    assert paths.transports == ("tcp", "rdma")


def test_a_transport_that_is_somewhat_slower_keeps_its_place() -> None:
    rdma, tcp = path("rdma", "rxe0:1"), path("tcp")
    paths = chooser(rdma, tcp)
    now = carry(paths, tcp, 0.0, seconds=0.001, times=20)
    carry(paths, rdma, now, seconds=0.0015, times=20)
    assert paths.transports == ("rdma", "tcp")


def test_a_measurement_of_long_ago_costs_no_transport_its_place() -> None:
    rdma, tcp = path("rdma", "rxe0:1"), path("tcp")
    paths = chooser(rdma, tcp)
    now = carry(paths, tcp, 0.0, seconds=0.001, times=8)
    carry(paths, rdma, now + LOST_PLACE_S, seconds=0.01, times=20)
    assert paths.transports == ("rdma", "tcp")


def test_a_transport_of_several_paths_is_measured_as_one() -> None:
    slow = [path("rdma", f"rxe{n}:1") for n in range(2)]
    tcp = path("tcp")
    paths = chooser(*slow, tcp)
    now = carry(paths, tcp, 0.0, seconds=0.001, times=8)
    for _ in range(10):  # each takes 1.5 ms per MiB, both together half of that
        for way in slow:
            paths.sent(way, MIB)
        now += 0.0015
        for way in slow:
            paths.done(way, MIB, 0.0015, now)
    assert paths.transports == ("rdma", "tcp")


def test_a_comparison_sends_a_few_slices_over_the_next_transport() -> None:
    rdma, tcp = path("rdma", "rxe0:1"), path("tcp")
    paths = chooser(rdma, tcp, compare_every_s=30.0)
    now, ways = 0.0, []
    for _ in range(6000):
        way = paths.choose(HERE, MIB, now)
        assert way is not None
        ways.append(way)
        now = carry(paths, way, now, seconds=0.008 if way is rdma else 0.006)
    assert ways.count(tcp) == 8
    assert paths.choose(HERE, 4096, 1e6) is rdma


def test_a_comparison_finds_the_faster_transport() -> None:
    rdma, tcp = path("rdma", "rxe0:1"), path("tcp")
    paths = chooser(rdma, tcp, compare_every_s=1.0)
    now = 0.0
    for _ in range(200):
        way = paths.choose(HERE, MIB, now)
        assert way is not None
        now = carry(paths, way, now, seconds=0.01 if way is rdma else 0.001)
    assert paths.transports == ("tcp", "rdma")


def test_a_comparison_that_fails_stops_at_once_and_is_put_off() -> None:
    rdma, tcp = path("rdma", "rxe0:1"), path("tcp")
    paths = chooser(rdma, tcp, compare_every_s=10.0)
    num_failed, now = 0, 0.0
    while now < 290.0:
        way = paths.choose(HERE, MIB, now)
        assert way is not None
        if way is tcp:
            num_failed += 1
            paths.sent(way, MIB)
            paths.failed(way, MIB, now)
            way = rdma
        now = carry(paths, way, now, seconds=0.1)
    assert num_failed == 1


def test_closing_forgets_the_rests_of_this_peer_only() -> None:
    health = RailHealth()
    mine, other = path(remote="mine"), path(remote="other")
    paths = chooser(mine, path(rail="eth1"), health=health)
    now = break_down(paths, mine, 0.0)
    for at in (now, now + 1, now + 2):
        health.failed(other.rails, at)
    paths.close()
    assert health.condition(mine.rails, now) is Condition.HEALTHY
    assert health.condition(other.rails, now + 2) is Condition.RESTING


def test_paths_are_equal_by_value_and_differ_by_stream() -> None:
    assert path() == path()
    assert len({path(), path(), path(stream=1)}) == 2


@given(
    preferred=st.sets(st.integers(0, 3)),
    load=st.lists(st.integers(0, 64), min_size=4, max_size=4),
)
def test_an_idle_near_rail_is_always_chosen_before_a_far_one(
    preferred: set[int], load: list[int]
) -> None:
    ways = [path(rail=f"eth{n}") for n in range(4)]
    near = tuple(f"eth{n}" for n in sorted(preferred))
    far = tuple(f"eth{n}" for n in range(4) if n not in preferred)
    paths = chooser(*ways, topology=Topology({HERE: Preference(near, far)}))
    for way, amount in zip(ways, load, strict=True):
        if amount:
            paths.sent(way, amount * MIB)
    chosen = paths.choose(HERE, MIB, 0.0)
    assert chosen is not None
    idle_near = [n for n in sorted(preferred) if not load[n]]
    if idle_near:
        assert chosen is ways[idle_near[0]]
