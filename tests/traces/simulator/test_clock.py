"""Virtual time: order, and who may put events where."""

from __future__ import annotations

import pytest

from traces.simulator.clock import Clock, Timed


def test_events_of_one_instant_come_in_the_order_in_which_they_were_returned() -> None:
    seen: list[tuple[float, str]] = []

    def handle(event: str, now: float) -> list[Timed[str]]:
        seen.append((now, event))
        return [Timed(2.0, "c"), Timed(now, "b")] if event == "a" else []

    clock: Clock[str] = Clock()
    clock.run([Timed(2.0, "last but one"), Timed(1.0, "a")], handle)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "last but one"), (2.0, "c")]
    assert (clock.now, clock.num_events) == (2.0, 4)


def test_an_event_of_the_past_is_refused() -> None:
    clock: Clock[str] = Clock()
    with pytest.raises(ValueError, match="before"):
        clock.run([Timed(1.0, "a")], lambda event, now: [Timed(0.5, "b")])
