"""What a reservation says of its request arrives with the decode worker's state, and bounds what is expected of it."""

from __future__ import annotations

import dataclasses
from typing import cast

import pytest

from decode_worker.events import ReserveRequested
from decode_worker.leases import prospect_of
from decode_worker.service import DecodeService
from decode_worker.servicers import LandingServicer, LandingZone
from prefill_worker.actions import ReserveLanding
from prefill_worker.landing_client import LandingClient
from protocol.errors import Overloaded
from protocol.ids import LeaseId, RequestId
from protocol.pb import worker_pb2_grpc
from protocol.request import Endpoint
from protocol.rpc import Channels, RpcServer
from tests.decode_worker.driver import BLOCK_SIZE, keys_of
from tests.patience import PATIENCE_S

TOKEN = "secret"
ASKED = ReserveRequested(
    lease_id=LeaseId("lease"),
    request_id=RequestId("r"),
    num_tokens=10,
    block_keys=keys_of(range(10)),
    ttl_s=3.0,
    deadline_at=5.0,
    num_prompt_tokens=7,  # it continues an attempt that got three tokens
    max_tokens=20,
    tenant="alice",
)


class FullWorker:
    """Refuses, and remembers what it was asked."""

    now = 0.0

    async def reserve(self, event: ReserveRequested) -> None:
        self.asked = event
        raise Overloaded("full", retry_after_s=1.0)


async def test_a_prefill_workers_reservation_says_limit_prompt_and_tenant() -> None:
    worker, server, channels = FullWorker(), RpcServer(TOKEN), Channels(TOKEN)
    zone = LandingZone(transfer_address="t", segment_id=1, num_blocks=4, block_size=BLOCK_SIZE, fingerprint="f")
    servicer = LandingServicer(cast(DecodeService, worker), zone)
    worker_pb2_grpc.add_LandingServicer_to_server(servicer, server.grpc)
    address = await server.start("127.0.0.1", 0)
    decode = Endpoint(instance_id="decode-0", epoch=1, rpc_address=address, transfer_address="t", host="h")
    wish = ReserveLanding(
        priority=0,
        request_id=ASKED.request_id,
        lease_id=ASKED.lease_id,
        decode=decode,
        num_tokens=ASKED.num_tokens,
        num_prompt_tokens=7,
        max_tokens=20,
        tenant="alice",
        block_keys=ASKED.block_keys,
        timeout_s=PATIENCE_S,
    )
    with pytest.raises(Overloaded):
        await LandingClient(channels, fingerprint="f", ttl_s=3.0).reserve(wish)
    assert dataclasses.replace(worker.asked, deadline_at=ASKED.deadline_at) == ASKED
    await channels.close()
    await server.stop(0)


def test_a_sequence_begins_with_a_token_more_than_lands_and_ends_within_the_models_length() -> None:
    found = prospect_of(ASKED, max_model_len=100)
    assert (found.num_tokens, found.num_prompt_tokens) == (11, 7)
    assert (found.max_tokens, found.tenant) == (20, "alice")
    assert prospect_of(ASKED, max_model_len=15).max_tokens == 8
    unlimited = dataclasses.replace(ASKED, max_tokens=None, num_prompt_tokens=None)
    assert prospect_of(unlimited, max_model_len=15).max_tokens == 5
