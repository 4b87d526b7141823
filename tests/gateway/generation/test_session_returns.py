"""When a session is expected again: from its own pauses, then from those of similar requests, within bounds."""

import pytest

from moonserve.gateway.generation import session_returns
from moonserve.gateway.generation.session_returns import FORGET_S, MIN_ALIKE, SessionReturns

REPLY_S = 2.0


def visit(
    returns: SessionReturns, session: str, *times: float, kind: str = "tools"
) -> session_returns.Prediction | None:
    """Sends requests of a session, with replies of REPLY_S. Returns the last prediction."""
    predicted = None
    for at in times:
        predicted = returns.began(session, kind, at)
        returns.ended(session, at + REPLY_S)
    return predicted


def test_a_session_is_predicted_from_its_own_pauses() -> None:
    returns = SessionReturns()
    assert visit(returns, "a", 0.0, 10.0, 22.0) is None
    predicted = visit(returns, "a", 42.0)  # pauses of 8, 10 and 18 seconds
    assert predicted is not None
    assert predicted.source == "the session"
    assert predicted.within_s == pytest.approx(18.0 + REPLY_S)


def test_a_new_session_is_predicted_from_requests_of_its_kind() -> None:
    returns = SessionReturns()
    for number in range(MIN_ALIKE):
        visit(returns, f"s{number}", 100.0 * number, 100.0 * number + REPLY_S + number + 1.0)
    predicted = visit(returns, "new", 3_000.0)
    assert predicted is not None
    assert predicted.source == "tools"
    assert predicted.within_s == pytest.approx(18.0 + REPLY_S)
    assert visit(returns, "other", 3_000.0, kind="chat") is None


def test_a_kind_that_seldom_returns_is_not_expected() -> None:
    returns = SessionReturns()
    for number in range(4 * MIN_ALIKE):
        times = (10.0 * number, 10.0 * number + 5.0) if number % 3 == 0 else (10.0 * number,)
        visit(returns, f"s{number}", *times)
    assert visit(returns, "new", 10.0 * 4 * MIN_ALIKE + FORGET_S + 1.0) is None


def test_a_request_during_the_reply_to_another_one_counts_as_no_pause() -> None:
    returns = SessionReturns()
    for at in range(10):
        assert returns.began("a", "tools", float(at)) is None


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_returns, "MAX_SESSIONS", 3)
    returns = SessionReturns()
    visit(returns, "a", 0.0, 10.0, 20.0, 30.0)
    for session in "bcd":
        visit(returns, session, 40.0)
    assert visit(returns, "a", 50.0) is None
