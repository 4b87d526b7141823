"""Speed estimates of a store follow the durations of its reads."""

import pytest

from moonserve.worker import store_speed
from tests.prefill_worker.builders import endpoint

STORE = endpoint("store-0")
MIB = 2**20


def test_reads_of_all_sizes_teach_both_latency_and_rate() -> None:
    true, speed = store_speed.Speed(0.02, 1e-8), store_speed.Speed(store_speed.LATENCY_S, 1e-9)
    for _ in range(40):
        for num_bytes in (1000, MIB, 100 * MIB):
            speed = speed.after(num_bytes, true.seconds(num_bytes))
    assert speed.latency_s == pytest.approx(true.latency_s, rel=0.05)
    assert speed.s_per_byte == pytest.approx(true.s_per_byte, rel=0.05)


def test_small_reads_do_not_say_much_about_the_rate() -> None:
    speed = store_speed.Speed(1e-3, 1e-9)
    for _ in range(10):
        speed = speed.after(1000, 0.1)
    assert speed.latency_s > 0.09
    assert speed.s_per_byte < 1.1e-9


def test_one_stall_does_not_make_a_store_slow_and_three_slow_reads_do() -> None:
    usual, stalled_s = store_speed.Speed(1e-3, 1e-9), 100.0
    num_bytes = 100 * MIB
    once = usual.after(num_bytes, stalled_s)
    assert once.seconds(num_bytes) < 0.2 * stalled_s
    thrice = once.after(num_bytes, stalled_s).after(num_bytes, stalled_s)
    assert thrice.seconds(num_bytes) > 0.2 * stalled_s


def test_a_measurement_is_forgotten_when_none_follows_it() -> None:
    speeds, slow = store_speed.StoreSpeeds(), store_speed.Speed(10.0, 1e-6)
    speeds.measured(STORE, slow, 100.0)
    assert speeds.of(STORE, STORE.host, 100.0 + store_speed.FORGET_AFTER_S) == slow
    near, far = (speeds.of(STORE, at, 100.1 + store_speed.FORGET_AFTER_S) for at in (STORE.host, "elsewhere"))
    assert near == store_speed.Speed(store_speed.LATENCY_S, 1 / store_speed.LOCAL_BYTES_PER_S)
    assert far == store_speed.Speed(store_speed.LATENCY_S, 1 / store_speed.REMOTE_BYTES_PER_S)
    assert not speeds.all()


def test_a_read_in_no_time_at_all_is_a_fast_one() -> None:
    assert 0 < store_speed.Speed(1e-3, 1e-9).after(MIB, 0.0).seconds(MIB) < 1e-3
