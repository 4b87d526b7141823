"""The record of removals: each is executed once, all nodes learn of it, and a node admits which it has forgotten."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonserve.kvstore.node.removal_store import RECORD_BYTES, LastContactFile, RemovalFile, Timestamp
from moonserve.kvstore.state.catalog_tables import COARSE_S, FINE_S, GenerationClock
from moonserve.kvstore.state.removals import CLOCK_DRIFT, RemovalLog, ReportedRemoval
from tests.kvstore.node.nodes import key
from tests.thoroughness import examples

KEPT_S = 100.0


def make(life: int = 1, now: float = 0.0, max_count: int = 1000) -> RemovalLog:
    return RemovalLog(life, now, kept_s=KEPT_S, max_count=max_count)


def told(removals: RemovalLog, now: float, next_seq: int = 1) -> list[ReportedRemoval]:
    """Returns the removals of all pages."""
    heard: list[ReportedRemoval] = []
    while True:
        page = removals.page_from(next_seq, 3, now)
        heard += page.removals
        next_seq = page.next_seq
        if not page.more:
            return heard


def test_a_removal_is_executed_once_from_any_source() -> None:
    removals = make()
    assert removals.execute([key(1), key(1), key(2)], 7, 5.0) == [key(1), key(2)]
    assert removals.execute([key(2), key(3)], 7, 6.0) == [key(3)]
    assert removals.learn([ReportedRemoval(key(1), 7, 3.0)], 8.0) == []
    assert removals.learn([ReportedRemoval(key(1), 8, 3.0)], 8.0)
    assert (removals.last_id(key(1)), removals.last_id(key(9))) == (8, 0)
    removals.validate()


@given(removed_at=st.floats(0, 50), told_at=st.floats(50, 149), drifts=st.tuples(*[st.floats(-0.5, 0.5)] * 2))
def test_a_learned_removal_is_never_dated_too_early(
    removed_at: float, told_at: float, drifts: tuple[float, float]
) -> None:
    """The clocks of the two nodes run at different rates. Else objects stored just before the removal would stay."""
    near, far = (1 + CLOCK_DRIFT * drift for drift in drifts)
    there, here = make(), make()
    there.execute([key(1)], 7, far * removed_at)
    for fresh in here.learn(told(there, far * told_at), near * told_at):
        assert near * removed_at - 1e-9 <= fresh.at <= near * removed_at + 3 * CLOCK_DRIFT * told_at


def test_the_count_of_removed_objects_is_kept_as_long_as_the_removal() -> None:
    """A repeated removal, also at a node that learned it from others, returns the same number of removed objects."""
    removals = make(max_count=2)
    removals.learn([ReportedRemoval(key(1), 7, 3.0), ReportedRemoval(key(2), 7, 3.0)], 8.0)
    removals.mark_effective([key(1), key(3)], 7)  # the removal of key 3 is unknown
    assert removals.execute([key(1), key(2)], 7, 9.0) == []
    assert removals.num_effective([key(1), key(1), key(2), key(3)], 7) == 1
    assert removals.num_effective([key(1)], 8) == 0
    removals.execute([key(4)], 9, 10.0)  # leaves no room for the first
    assert removals.num_effective([key(1)], 7) == 0
    removals.validate()


def test_old_removals_are_neither_sent_nor_executed() -> None:
    removals = make()
    removals.execute([key(1)], 7, 0.0)
    assert told(removals, KEPT_S - 1) == [ReportedRemoval(key(1), 7, KEPT_S - 1)]
    assert told(removals, KEPT_S) == []
    assert make().learn([ReportedRemoval(key(1), 7, KEPT_S)], 500.0) == []
    removals.expire(KEPT_S)
    assert removals.execute([key(1)], 7, KEPT_S) == [], "done again"
    removals.expire(2 * KEPT_S)
    assert len(removals) == 0
    removals.validate()


def test_removals_dropped_at_the_limit_shorten_the_coverage() -> None:
    removals = make(max_count=2)
    assert removals.covered_s(50.0) == 50.0
    for number in range(3):
        removals.execute([key(number)], 7, 10.0 * number)
    assert removals.covered_s(50.0) == 50.0 - 0.0
    removals.execute([key(3)], 7, 30.0)
    assert removals.covered_s(50.0) == 40.0
    removals.extend_coverage(90.0, 50.0)
    assert removals.covered_s(50.0) == 40.0, "what was forgotten came back"


def test_coverage_learned_from_others_is_bounded() -> None:
    removals = make(now=1000.0)
    assert removals.covered_s(1000.0) == 0.0
    removals.extend_coverage(60.0, 1000.0)
    assert removals.covered_s(1010.0) == 70.0
    assert removals.covered_s(9000.0) == KEPT_S
    removals.limit_coverage(5.0, 1010.0)
    assert removals.covered_s(1010.0) == 5.0


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.001, FINE_S, 1.0, COARSE_S]), st.floats(0.0, 1.0)), max_size=40
    )
)
@settings(max_examples=examples(50), deadline=None)
def test_no_generation_before_an_instant_is_above_its_bound_and_none_well_after_it_below(
    steps: list[tuple[int, float, float]],
) -> None:
    """The bound of an instant is above all generations before it, and not above generations from FINE_S after it on."""
    reserving, now, next_generation = GenerationClock(), 0.0, 1
    reserved: list[tuple[float, int]] = []
    for count, seconds, share in steps:
        if count:
            reserving.record(now, next_generation)
        reserved += [(now, next_generation + number) for number in range(count)]
        next_generation += count
        now += seconds
        at = share * now
        bound = reserving.bound_before(at, next_generation)
        assert all(number < bound for given_at, number in reserved if given_at < at)
        assert all(number >= bound for given_at, number in reserved if given_at >= at + FINE_S)


def test_old_generations_are_dated_coarsely_but_never_too_late() -> None:
    reserving = GenerationClock()
    for step in range(20_000):
        reserving.record(step * FINE_S, step)
    assert reserving.bound_before(399.9, 20_000) in range(19_995, 20_001)
    bound = reserving.bound_before(100.0, 20_000)
    assert 5_000 <= bound <= 5_000 + COARSE_S / FINE_S


def test_intact_removals_are_loaded_and_torn_or_damaged_ones_skipped(tmp_path: Path) -> None:
    file = RemovalFile(tmp_path)
    assert file.load() == []
    file.append([ReportedRemoval(key(1), 7, 0.0), ReportedRemoval(key(2), 8, 5.0)])
    file.append([ReportedRemoval(key(3), 9, 0.0)])
    path = tmp_path / "removals"
    content = bytearray(path.read_bytes())
    content[8 + RECORD_BYTES + 3] ^= 1
    path.write_bytes(content[:-1])
    [kept] = file.load()
    assert (kept.key, kept.removal_id) == (key(1), 7)
    file.rewrite([ReportedRemoval(key(4), 1, 60.0)])
    [kept] = file.load()
    assert (kept.key, round(kept.age_s)) == (key(4), 60)


@pytest.mark.parametrize(
    ("later", "passed_s"),
    [
        (Timestamp(boot="a", boot_s=160.0, wall_s=0.0), 60.0),
        (Timestamp(boot="b", boot_s=1.0, wall_s=5030.0), 30.0),
        (Timestamp(boot="b", boot_s=1.0, wall_s=4999.0), None),
    ],
)
def test_an_absence_is_measured_by_the_time_since_boot_or_an_advancing_wall_clock(
    later: Timestamp, passed_s: float | None
) -> None:
    assert Timestamp(boot="a", boot_s=100.0, wall_s=5000.0).until(later) == passed_s


def test_the_last_contact_file_is_read_only_if_it_is_valid(tmp_path: Path) -> None:
    presence = LastContactFile(tmp_path)
    assert presence.read() is None
    presence.write(12.0)
    seen = presence.read()
    assert seen is not None
    seen_at, covered_s = seen
    assert seen_at.until(Timestamp.now()) is not None
    assert covered_s == 12.0
    (tmp_path / "presence.json").write_text("{}")
    assert presence.read() is None
