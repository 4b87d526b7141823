"""Reservations, leases and commits: events in, actions out."""

from __future__ import annotations

import pytest

from decode_worker import actions, events
from decode_worker.allotment import Prospect
from decode_worker.leases import Ending, Lease, LeasePhase
from protocol.errors import Cancelled, InvalidRequest, NoWorker, Overloaded, StaleLease
from protocol.ids import GatewayId, LeaseId, RequestId
from tests.decode_worker.driver import Driver, keys_of, only, request_of

PROMPT = list(range(10))  # two full blocks of four and a half one


def test_a_reservation_opens_a_window_and_is_granted_when_that_stands() -> None:
    driver = Driver()
    opened, granted = driver.reserve(PROMPT)
    assert opened == actions.OpenWindow(lease_id=LeaseId("lease-r"), blocks=(0, 1, 2))
    assert granted == actions.GrantLease(
        lease_id=LeaseId("lease-r"), blocks=(0, 1, 2), num_cached=0, window_id=1, ttl_s=10.0
    )
    assert (driver.state.num_leased_blocks, driver.state.num_free_blocks) == (3, 13)


def test_reserving_again_with_the_same_id_repeats_the_grant() -> None:
    driver = Driver()
    first = only(driver.reserve(PROMPT), actions.GrantLease)
    assert driver.reserve(PROMPT) == first
    assert driver.state.num_leased_blocks == 3


def test_a_lease_id_cannot_be_used_for_another_request() -> None:
    driver = Driver()
    driver.reserve(PROMPT, "a", lease_id="x")
    (refusal,) = driver.reserve(PROMPT, "b", lease_id="x")
    assert isinstance(refusal, actions.RefuseLease)
    assert isinstance(refusal.error, InvalidRequest)


def test_reservations_wait_in_order_of_arrival() -> None:
    """A small one does not overtake a large one, which would starve it."""
    driver = Driver(num_blocks=5)
    driver.reserve(PROMPT, "a")
    assert driver.reserve(PROMPT, "b") == []
    assert driver.reserve([1], "c") == []
    assert driver.state.num_waiting == 2
    driver.handle(events.LeaseReleased(lease_id=LeaseId("lease-a")))
    grants = only(driver.close(), actions.GrantLease)
    assert [grant.lease_id for grant in grants] == ["lease-b", "lease-c"]


def test_a_waiting_reservation_is_refused_when_its_callers_deadline_comes() -> None:
    driver = Driver(num_blocks=4)
    driver.reserve(PROMPT, "a")
    driver.reserve(PROMPT, "b", wait_s=2.0)
    assert driver.state.wake_at == 2.0
    (refusal,) = driver.wait(2.0)
    assert isinstance(refusal, actions.RefuseLease)
    assert isinstance(refusal.error, Overloaded)
    assert driver.state.num_waiting == 0


def test_a_withdrawn_reservation_lets_the_next_one_pass() -> None:
    driver = Driver(num_blocks=5)
    driver.reserve(PROMPT, "a")
    driver.reserve(PROMPT, "b")
    driver.reserve([1], "c")
    done = driver.handle(events.ReserveWithdrawn(lease_id=LeaseId("lease-b")))
    assert [grant.lease_id for grant in only(done, actions.GrantLease)] == ["lease-c"]


def test_a_prompt_that_never_fits_is_refused_at_once() -> None:
    driver = Driver(num_blocks=2)
    (refusal,) = driver.reserve(list(range(8)))  # the first generated token needs a third block
    assert isinstance(refusal, actions.RefuseLease)
    assert isinstance(refusal.error, InvalidRequest)


def test_running_sequences_keep_room_for_their_next_block() -> None:
    driver = Driver(num_blocks=4)
    driver.start([1, 2, 3], "a")
    assert driver.reserve(PROMPT, "b") == []
    driver.reserve([1], "c")
    driver.handle(events.ReserveWithdrawn(lease_id=LeaseId("lease-b")))
    assert driver.grant_of("lease-c") is not None


def test_blocks_of_an_expired_lease_are_free_only_after_its_window_is_closed() -> None:
    driver = Driver()
    driver.reserve(PROMPT, ttl_s=3.0)
    assert driver.wait(3.0) == [actions.CloseWindow(lease_id=LeaseId("lease-r"), window_id=1)]
    assert driver.state.num_free_blocks == 13
    driver.close()
    assert driver.state.num_free_blocks == 16


def test_an_expired_lease_is_never_revived() -> None:
    driver = Driver()
    driver.reserve(PROMPT, ttl_s=3.0)
    driver.now = 3.0
    done = driver.commit(request_of(PROMPT))
    (rejection,) = only(done, actions.RejectCommit)
    assert isinstance(rejection.error, StaleLease)
    (refusal,) = driver.handle(events.LeaseRenewed(lease_id=LeaseId("lease-r"), ttl_s=10.0))
    assert isinstance(refusal, actions.RefuseRenewal)
    (again,) = driver.reserve(PROMPT)
    assert isinstance(again, actions.RefuseLease)
    driver.drain()
    assert driver.state.counters.leases_expired == 1


def test_a_renewed_lease_outlives_its_first_expiry() -> None:
    driver = Driver()
    driver.reserve(PROMPT, ttl_s=3.0)
    driver.now = 2.0
    (confirmation,) = driver.handle(events.LeaseRenewed(lease_id=LeaseId("lease-r"), ttl_s=4.0))
    assert isinstance(confirmation, actions.ConfirmRenewal)
    assert driver.wait(3.0) == []
    assert only(driver.wait(1.0), actions.CloseWindow)


def test_a_good_commit_runs_only_after_its_window_is_closed() -> None:
    driver = Driver()
    driver.reserve(PROMPT)
    (verify,) = driver.commit(request_of(PROMPT))
    assert isinstance(verify, actions.VerifyBlocks)
    assert [(b.index, b.block, b.num_tokens, b.checksum) for b in verify.blocks] == [
        (0, 0, 4, 0),
        (1, 1, 4, 1),
        (2, 2, 2, 2),
    ]
    assert driver.verify() == [
        actions.AcceptCommit(lease_id=LeaseId("lease-r")),
        actions.CloseWindow(lease_id=LeaseId("lease-r"), window_id=1, landed=(0, 1, 2)),
    ]
    assert driver.step is None
    driver.close()
    assert driver.step_of() == [("r", 10, 11)]


def test_a_corrupt_commit_keeps_the_landing_open_for_another_attempt() -> None:
    driver = Driver()
    driver.reserve(PROMPT)
    driver.commit(request_of(PROMPT))
    assert driver.verify(corrupt=[1]) == [
        actions.ReportCorrupt(lease_id=LeaseId("lease-r"), corrupt=(1,))
    ]
    assert driver.open_windows
    assert driver.state.counters.integrity_failures == 1
    driver.commit(request_of(PROMPT))
    driver.verify()
    driver.close()
    assert driver.step_of() == [("r", 10, 11)]


def test_verification_stops_the_expiry() -> None:
    driver = Driver()
    driver.reserve(PROMPT, ttl_s=3.0)
    driver.commit(request_of(PROMPT))
    assert driver.wait(5.0) == []
    driver.verify(corrupt=[0])
    assert driver.wait(2.9) == []
    assert only(driver.wait(0.2), actions.CloseWindow)


@pytest.mark.parametrize("moment", ["verifying", "sealing", "done"])
def test_committing_again_is_accepted_once_and_starts_one_sequence(moment: str) -> None:
    driver = Driver()
    driver.reserve(PROMPT)
    driver.commit(request_of(PROMPT))
    if moment == "verifying":
        assert driver.commit(request_of(PROMPT)) == []
    driver.verify()
    if moment == "sealing":
        assert only(driver.commit(request_of(PROMPT)), actions.AcceptCommit)
    driver.close()
    if moment == "done":
        assert only(driver.commit(request_of(PROMPT)), actions.AcceptCommit)
    assert (driver.state.num_running, driver.state.num_waiting) == (1, 0)


def test_a_commit_that_contradicts_its_lease_is_rejected_and_the_lease_stays() -> None:
    driver = Driver()
    driver.reserve(PROMPT)
    (rejection,) = driver.commit(request_of([*PROMPT, 5]))
    assert isinstance(rejection, actions.RejectCommit)
    assert isinstance(rejection.error, InvalidRequest)
    assert only(driver.commit(request_of(PROMPT)), actions.VerifyBlocks)


def test_later_reservations_share_full_blocks_and_never_write_them() -> None:
    driver = Driver()
    driver.start(PROMPT, "a")
    done = driver.reserve([*PROMPT[:8], 99, 98], "b")
    (opened,) = only(done, actions.OpenWindow)
    (grant,) = only(done, actions.GrantLease)
    assert (grant.blocks, grant.num_cached) == ((0, 1, 3), 2)
    assert opened.blocks == (3,)


def test_blocks_are_shared_only_after_their_window_is_closed() -> None:
    driver = Driver()
    driver.reserve(PROMPT, "a")
    driver.commit(request_of(PROMPT, "a"))
    driver.verify()
    (grant,) = only(driver.reserve(PROMPT, "b"), actions.GrantLease)
    assert grant.num_cached == 0


def test_a_prompt_that_is_here_already_needs_no_window() -> None:
    driver = Driver()
    driver.start(PROMPT[:8], "a")
    (grant,) = driver.reserve(PROMPT[:8], "b")
    assert isinstance(grant, actions.GrantLease)
    assert (grant.num_cached, grant.window_id) == (2, None)
    assert driver.commit(request_of(PROMPT[:8], "b")) == [
        actions.AcceptCommit(lease_id=LeaseId("lease-b"))
    ]
    driver.compute()
    assert [entry[0] for entry in driver.step_of()] == ["a", "b"]


def test_a_release_before_the_reservation_refuses_it() -> None:
    driver = Driver()
    driver.handle(events.LeaseReleased(lease_id=LeaseId("lease-r")))
    (refusal,) = driver.reserve(PROMPT)
    assert isinstance(refusal, actions.RefuseLease)


def test_a_release_during_verification_rejects_the_commit() -> None:
    driver = Driver()
    driver.reserve(PROMPT)
    driver.commit(request_of(PROMPT))
    done = driver.handle(events.LeaseReleased(lease_id=LeaseId("lease-r")))
    assert only(done, actions.RejectCommit)
    assert only(done, actions.CloseWindow)
    driver.verify()
    driver.drain()


@pytest.mark.parametrize("moment", ["queued", "open", "verifying", "sealing"])
def test_a_cancelled_landing_ends_wherever_it_is(moment: str) -> None:
    driver = Driver(num_blocks=4)
    if moment == "queued":
        driver.reserve(PROMPT, "other")
    driver.reserve(PROMPT)
    if moment in ("verifying", "sealing"):
        driver.commit(request_of(PROMPT))
    if moment == "sealing":
        driver.verify()
    done = driver.cancel("r")
    answers = only(done, actions.RefuseLease) + only(done, actions.RejectCommit)
    assert all(isinstance(answer.error, Cancelled) for answer in answers)
    assert len(answers) == (1 if moment in ("queued", "verifying") else 0)
    driver.drain()
    assert not driver.tokens


def test_a_cancellation_that_overtakes_its_request_refuses_its_reservation() -> None:
    driver = Driver()
    driver.cancel("r")
    (refusal,) = driver.reserve(PROMPT)
    assert isinstance(refusal, actions.RefuseLease)
    assert isinstance(refusal.error, Cancelled)


def test_a_cancellation_of_an_unknown_request_is_forgotten_after_a_minute() -> None:
    driver = Driver()
    driver.cancel("r")
    driver.wait(60.0)
    assert only(driver.reserve(PROMPT), actions.GrantLease)


def test_a_late_cancellation_does_not_hit_the_next_attempt_at_a_request() -> None:
    driver = Driver()
    driver.start(PROMPT, max_tokens=2)
    driver.compute()
    driver.cancel("r")
    assert only(driver.reserve(PROMPT, lease_id="again"), actions.GrantLease)


def test_a_lost_gateway_ends_its_committed_landings() -> None:
    driver = Driver()
    driver.reserve(PROMPT)
    driver.commit(request_of(PROMPT))
    driver.verify()
    driver.handle(events.GatewayLost(gateway_id=GatewayId("g")))
    driver.close()
    assert driver.step is None
    assert driver.state.num_free_blocks == 16


def test_a_draining_worker_refuses_reservations_but_finishes_landings() -> None:
    driver = Driver(num_blocks=4)
    driver.reserve(PROMPT, "a")
    driver.reserve(PROMPT, "b")
    (refusal,) = driver.handle(events.DrainStarted())
    assert isinstance(refusal, actions.RefuseLease)
    assert isinstance(refusal.error, NoWorker)
    (refusal,) = driver.reserve([1], "c")
    assert isinstance(refusal, actions.RefuseLease)
    driver.commit(request_of(PROMPT, "a", max_tokens=3))
    driver.drain()
    assert [token.index for token in driver.tokens["a"]] == [1, 2]


def test_a_stopping_worker_fails_what_it_accepted() -> None:
    driver = Driver()
    driver.reserve(PROMPT)
    driver.commit(request_of(PROMPT))
    driver.verify()
    driver.handle(events.Stopped())
    assert driver.failures["r"][0].error.retryable
    driver.drain()


def test_an_illegal_transition_raises_with_the_leases_history() -> None:
    lease = Lease(
        lease_id=LeaseId("l"),
        prospect=Prospect(
            request_id=RequestId("r"),
            tenant="",
            num_prompt_tokens=10,
            max_tokens=5,
            num_tokens=11,
        ),
        num_tokens=10,
        block_keys=keys_of(PROMPT),
        blocks=(0, 1, 2),
        num_cached=0,
        ttl_s=1.0,
        expires_at=1.0,
    )
    lease.become(LeasePhase.ENDING)
    lease.ending = Ending.EXPIRED
    with pytest.raises(RuntimeError, match="opening → ending"):
        lease.become(LeasePhase.OPEN)
    assert lease.phase is LeasePhase.ENDING
