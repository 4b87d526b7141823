"""Reservations, leases and commits of a decode worker, tested as events and actions without I/O."""

import dataclasses
from collections.abc import Callable

import pytest

from moonserve.decode_worker.decisions import events
from moonserve.decode_worker.decisions.events import ReserveRequested
from moonserve.decode_worker.decisions.lease_phases import prospect_of
from moonserve.decode_worker.service import LandingServicer, LandingZone
from moonserve.prefill_worker.decisions.events import ReserveLanding
from moonserve.prefill_worker.decode_client import DecodeClient
from moonserve.protocol.errors import Cancelled, InvalidRequest, MoonserveError, NoWorker, Overloaded, StaleLease
from moonserve.protocol.pb import worker_pb2_grpc
from moonserve.protocol.request import GatewayId, LeaseId, RequestId
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from moonserve.worker.events import Action, Event
from tests.decode_worker.driver import BLOCK_SIZE, STORE, Driver, keys_of, request_of
from tests.patience import PATIENCE_S
from tests.prefill_worker.builders import all_of

PROMPT = list(range(10))  # two full blocks of four tokens and a half one
LEASE = LeaseId("lease-r")


def refusal(done: list[Action]) -> MoonserveError:
    """Returns the error with which a reservation, a renewal or a commit was refused."""
    (error,) = (action.error for action in all_of(done, events.Refuse))
    return error


def grants(done: list[Action]) -> list[str]:
    return [grant.lease_id for grant in all_of(done, events.GrantLease)]


def release(driver: Driver, name: str = "r") -> list[Action]:
    return driver.handle(events.LeaseReleased(lease_id=LeaseId(f"lease-{name}")))


def renew(driver: Driver, ttl_s: float) -> list[Action]:
    return driver.handle(events.LeaseRenewed(lease_id=LEASE, ttl_s=ttl_s))


def landed(driver: Driver, name: str = "r", *, until: str = "sealing") -> None:
    """Advances a landing of PROMPT until it is open, verifying or sealing, or has become a sequence ("done")."""
    driver.reserve(PROMPT, name)
    if until != "open":
        driver.commit(request_of(PROMPT, name))
    if until not in ("open", "verifying"):
        driver.verify()
    if until == "done":
        driver.close()


def test_a_reservation_is_granted_and_repeated_with_the_same_id() -> None:
    driver = Driver()
    granted = events.GrantLease(lease_id=LEASE, blocks=(0, 1, 2), num_cached=0, ttl_s=10.0)
    assert driver.reserve(PROMPT) == driver.reserve(PROMPT) == [granted]
    assert (driver.state.num_leased_blocks, driver.pool.num_free) == (3, 13)
    assert isinstance(refusal(driver.reserve(PROMPT, "b", lease_id=LEASE)), InvalidRequest)


def test_reservations_wait_in_order_of_arrival() -> None:
    """A small reservation does not overtake a large one, which would starve otherwise."""
    driver = Driver(num_blocks=5)
    driver.reserve(PROMPT, "a")
    assert driver.reserve(PROMPT, "b") == driver.reserve([1], "c") == []
    assert driver.state.num_waiting == 2
    release(driver, "a")
    assert grants(driver.close()) == ["lease-b", "lease-c"]


def test_running_sequences_keep_room_and_withdrawn_reservation_unblocks_others() -> None:
    driver = Driver(num_blocks=4)
    driver.start([1, 2, 3], "a")
    assert driver.reserve(PROMPT, "b") == driver.reserve([1], "c") == []
    withdrawn = events.ReserveWithdrawn(lease_id=LeaseId("lease-b"))
    assert grants(driver.handle(withdrawn)) == ["lease-c"]


@pytest.mark.parametrize(
    ("before", "num_tokens", "error"),
    [
        pytest.param(lambda d: None, 64, InvalidRequest, id="never fits with its first token"),
        pytest.param(release, 10, StaleLease, id="released before"),
        pytest.param(lambda d: d.cancel("r"), 10, Cancelled, id="cancelled before"),
        pytest.param(lambda d: d.handle(events.Draining(is_on=True)), 10, NoWorker, id="draining"),
    ],
)
def test_impossible_reservation_is_refused_at_once(
    before: Callable[[Driver], object], num_tokens: int, error: type[MoonserveError]
) -> None:
    driver = Driver()
    before(driver)
    assert isinstance(refusal(driver.reserve(list(range(num_tokens)))), error)


def test_a_waiting_reservation_is_refused_when_its_callers_deadline_comes() -> None:
    driver = Driver(num_blocks=4)
    driver.reserve(PROMPT, "a")
    driver.reserve(PROMPT, "b", wait_s=2.0)
    assert driver.state.wake_at == 2.0
    assert isinstance(refusal(driver.wait(2.0)), Overloaded)
    assert driver.state.num_waiting == 0


def test_an_expired_lease_is_never_revived_and_its_blocks_are_free_when_nobody_writes_them() -> None:
    driver = Driver()
    driver.reserve(PROMPT, ttl_s=3.0)
    assert driver.wait(3.0) == [events.CloseWindow(lease_id=LEASE)]
    assert driver.pool.num_free == 13
    for again in (driver.commit(request_of(PROMPT)), renew(driver, 10.0), driver.reserve(PROMPT)):
        assert isinstance(refusal(again), StaleLease)
    driver.close()
    assert driver.pool.num_free == 16
    assert driver.state.counters.leases_expired == 1


def test_a_lease_lives_until_its_last_renewal_runs_out_but_for_verification() -> None:
    driver = Driver()
    driver.reserve(PROMPT, ttl_s=3.0)
    driver.now = 2.0
    assert renew(driver, 4.0) == [events.ConfirmRenewal(lease_id=LEASE)]
    assert driver.wait(3.0) == []
    driver.commit(request_of(PROMPT))
    assert driver.wait(5.0) == []
    driver.verify(corrupt=[0])
    assert driver.wait(3.9) == []
    assert all_of(driver.wait(0.2), events.CloseWindow)


def test_a_good_commit_runs_only_after_its_window_is_closed() -> None:
    driver = Driver()
    driver.reserve(PROMPT)
    (verify,) = all_of(driver.commit(request_of(PROMPT)), events.VerifyBlocks)
    blocks = [(each.index, each.block, each.num_tokens, each.checksum) for each in verify.blocks]
    assert blocks == [(0, 0, 4, 0), (1, 1, 4, 1), (2, 2, 2, 2)]
    assert driver.verify() == [
        events.AnswerCommit(lease_id=LEASE),
        events.CloseWindow(lease_id=LEASE, landed=(0, 1, 2)),
    ]
    assert driver.step is None
    (early,) = all_of(driver.reserve(PROMPT, "early"), events.GrantLease)
    assert early.num_cached == 0, "nobody shares what may still be written"
    driver.close()
    assert driver.step_of() == [("r", 10, 11)]


def test_a_corrupt_commit_keeps_the_landing_open_for_another_attempt() -> None:
    driver = Driver()
    landed(driver, until="verifying")
    assert driver.verify(corrupt=[1]) == [events.AnswerCommit(lease_id=LEASE, corrupt=(1,))]
    assert driver.open_windows
    assert driver.state.counters.integrity_failures == 1
    driver.commit(request_of(PROMPT))
    driver.verify()
    driver.close()
    assert driver.step_of() == [("r", 10, 11)]


@pytest.mark.parametrize("moment", ["verifying", "sealing", "done"])
def test_committing_again_is_accepted_once_and_starts_one_sequence(moment: str) -> None:
    driver = Driver()
    landed(driver, until=moment)
    again = all_of(driver.commit(request_of(PROMPT)), events.AnswerCommit)
    assert len(again) == (moment != "verifying")
    driver.drain_landing()
    assert (driver.state.num_running, driver.state.num_waiting) == (1, 0)


def test_a_commit_that_contradicts_its_lease_is_rejected_and_the_lease_stays() -> None:
    driver = Driver()
    driver.reserve(PROMPT)
    assert isinstance(refusal(driver.commit(request_of([*PROMPT, 5]))), InvalidRequest)
    assert all_of(driver.commit(request_of(PROMPT)), events.VerifyBlocks)


def test_later_reservations_share_full_blocks_and_need_no_window_for_them() -> None:
    driver = Driver()
    driver.start(PROMPT, "a")
    (grant,) = all_of(driver.reserve([*PROMPT[:8], 99, 98], "b"), events.GrantLease)
    assert (grant.blocks, grant.num_cached) == ((0, 1, 3), 2)
    (grant,) = all_of(driver.reserve(PROMPT[:8], "c"), events.GrantLease)
    assert grant.num_cached == len(grant.blocks) == 2
    accepted = driver.commit(request_of(PROMPT[:8], "c"))
    assert accepted == [events.AnswerCommit(lease_id=LeaseId("lease-c"))]
    driver.compute()
    assert [entry[0] for entry in driver.step_of()] == ["a", "c"]


@pytest.mark.parametrize(
    ("end", "moment", "error"),
    [
        (Driver.cancel, "queued", Cancelled),
        (Driver.cancel, "open", None),
        (Driver.cancel, "verifying", Cancelled),
        (Driver.cancel, "sealing", None),
        (release, "verifying", StaleLease),
    ],
)
def test_a_cancelled_or_released_landing_ends_wherever_it_is(
    end: Callable[[Driver, str], list[Action]], moment: str, error: type[MoonserveError] | None
) -> None:
    driver = Driver(num_blocks=4)
    if moment == "queued":
        driver.reserve(PROMPT, "other")
    landed(driver, until="open" if moment == "queued" else moment)
    done = end(driver, "r")
    assert error is None or isinstance(refusal(done), error)
    driver.drain()
    assert not driver.tokens


def test_a_cancellation_counts_for_a_minute_and_not_for_an_attempt_that_comes_after_an_end() -> None:
    driver = Driver()
    driver.cancel("r")
    driver.wait(60.0)
    driver.start(PROMPT, max_tokens=2)
    driver.compute()
    driver.cancel("r")
    assert grants(driver.reserve(PROMPT, lease_id="again"))


@pytest.mark.parametrize(
    ("event", "is_told"), [(events.GatewayLost(gateway_id=GatewayId("gateway-0")), False), (events.Stopped(), True)]
)
def test_a_committed_landing_ends_with_its_gateway_and_with_its_worker(event: Event, is_told: bool) -> None:
    driver = Driver()
    landed(driver)
    driver.handle(event)
    assert [fail.error.retryable for fail in driver.failures.get("r", ())] == [True] * is_told
    driver.close()
    assert driver.step is None
    assert driver.pool.num_free == 16


def test_draining_worker_refuses_waiting_reservations_but_finishes_landings() -> None:
    driver = Driver(num_blocks=4)
    driver.reserve(PROMPT, "a")
    driver.reserve(PROMPT, "b")
    assert isinstance(refusal(driver.handle(events.Draining(is_on=True))), NoWorker)
    driver.commit(request_of(PROMPT, "a", max_tokens=3))
    driver.drain()
    assert [token.index for token in driver.tokens["a"]] == [1, 2]


TOKEN = "secret"
ASKED = ReserveRequested(
    lease_id=LeaseId("lease"),
    request_id=RequestId("r"),
    num_tokens=10,
    block_keys=keys_of(range(10)),
    ttl_s=3.0,
    deadline_at=5.0,
    num_prompt_tokens=7,  # continues an attempt that generated three tokens
    max_tokens=20,
    tenant="alice",
)


class FullWorker:
    """Service that records a reservation and refuses it."""

    now = 0.0

    async def reserve(self, event: ReserveRequested) -> None:
        self.asked = event
        raise Overloaded("full", retry_after_s=1.0)


async def test_a_prefill_workers_reservation_says_limit_prompt_and_tenant() -> None:
    worker, server = FullWorker(), RpcServer(TOKEN)
    zone = LandingZone(transfer_address="t", segment_id=1, num_blocks=4, block_size=BLOCK_SIZE, fingerprint="f")
    servicer = LandingServicer(worker, zone)
    worker_pb2_grpc.add_LandingServicer_to_server(servicer, server.grpc)
    fields = dataclasses.asdict(ASKED)
    del fields["ttl_s"], fields["deadline_at"]
    async with server.serving("127.0.0.1", 0, 0) as address, Channels(TOKEN) as channels:
        decode = dataclasses.replace(STORE, rpc_address=address)
        wish = ReserveLanding(decode=decode, timeout_s=PATIENCE_S, **fields)
        with pytest.raises(Overloaded):
            await DecodeClient(channels, fingerprint="f", ttl_s=3.0).reserve(wish)
    assert dataclasses.replace(worker.asked, deadline_at=ASKED.deadline_at) == ASKED


def test_a_sequence_begins_with_a_token_more_than_lands_and_ends_within_the_models_length() -> None:
    found = prospect_of(ASKED, max_model_len=100)
    assert (found.num_tokens, found.num_prompt_tokens) == (11, 7)
    assert (found.max_tokens, found.tenant) == (20, "alice")
    assert prospect_of(ASKED, max_model_len=15).max_tokens == 8
    unlimited = dataclasses.replace(ASKED, max_tokens=None, num_prompt_tokens=None)
    assert prospect_of(unlimited, max_model_len=15).max_tokens == 5
