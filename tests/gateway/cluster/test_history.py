"""The gateway's last hour: points of series, bounded; and instances that left or restarted."""

from moonserve.gateway.cluster.history import MAX_SERIES, NUM_POINTS, History, InstanceEvents
from moonserve.protocol.pb import common_pb2, conductor_pb2


def test_points_have_levels_and_the_growth_of_totals() -> None:
    history = History()
    for now, total in ((0.0, 5), (10.0, 25), (20.0, 3), (30.0, 4)):
        history.add(1e9 + now, now, {"queue": now}, {"tokens": total})
    history.add(1e9 + 40, 40.0, {}, {})
    history.add(1e9 + 50, 50.0, {"queue": None}, {"tokens": 14})
    shown = history.as_json(0)
    assert shown["at"] == [1e9 + now for now in range(0, 60, 10)]
    assert shown["series"]["queue"] == [0, 10, 20, 30, None, None]
    # The second process of this name counts from zero; the last rate is over both intervals.
    assert shown["series"]["tokens"] == [None, 2.0, None, 0.1, None, 0.5]
    assert history.as_json(4) == {
        "interval_s": 10.0, "number": 6, "at": [1e9 + 40, 1e9 + 50], "series": {"tokens": [None, 0.5]}
    }  # fmt: skip
    assert history.as_json(6)["at"] == history.as_json(99)["at"] == []


def test_history_is_bounded_and_forgets_series_without_values() -> None:
    history = History()
    history.add(0.0, 0.0, {"gone": 1.0}, {})
    for number in range(NUM_POINTS):
        assert "gone" in history.as_json(0)["series"]
        history.add(10.0 + number, 10.0 + number, {"stays": 1.0}, {})
    shown = history.as_json(0)
    assert (list(shown["series"]), len(shown["at"]), shown["number"]) == (["stays"], NUM_POINTS, NUM_POINTS + 1)
    history.add(1e4, 1e4, {f"{n}": 1.0 for n in range(2 * MAX_SERIES)}, {f"{n}": 1.0 for n in range(9999)})
    assert len(history.as_json(0)["series"]) == MAX_SERIES


def after(events: InstanceEvents, at: float, *present: tuple[str, int, bool]) -> list[tuple[float, str, str]]:
    """Returns the events' time, kind and instance after a view of instances given as id, epoch, draining."""
    view = conductor_pb2.ClusterView()
    for name, epoch, draining in present:
        endpoint = common_pb2.Endpoint(instance_id=name, epoch=epoch)
        view.instances.add(endpoint=endpoint, role=common_pb2.ROLE_DECODE, draining=draining)
    events.take(view, at)
    return [(e["at"], e["what"], e["instance_id"]) for e in events.latest]


def test_instances_that_leave_drain_return_and_restart_are_events() -> None:
    events = InstanceEvents()
    assert after(events, 0, ("a", 1, False), ("b", 1, True), ("c", 1, False)) == []
    assert after(events, 1, ("a", 1, False)) == [(1, "drained", "b"), (1, "left", "c")]
    assert after(events, 2, ("a", 1, False)) == [(1, "drained", "b"), (1, "left", "c")], "an absence is one event"
    assert after(events, 3, ("a", 2, False), ("c", 1, False)) == [(1, "drained", "b"), (3, "restarted", "a")]
    assert after(events, 4, ("a", 2, False), ("c", 2, False))[-1] == (4, "restarted", "c")
    for at in range(100):
        after(events, 10 + at, ("a", at, False))
    assert len(events.latest) == 32
    assert len(events._known) <= 34
