"""Requests, placements and answers for tests of the prefill worker."""

from __future__ import annotations

from collections.abc import Sequence

from engine.batch import Sampled
from engine.block_pool import BlockPool
from prefill_worker import actions as act
from prefill_worker import events as ev
from prefill_worker.ledger import Limits
from prefill_worker.state import PrefillState
from protocol.ids import GatewayId, LeaseId, RequestId
from protocol.keys import block_keys, root_key
from protocol.profile import PrefillProfile
from protocol.request import Endpoint, Placement, PrefixSource, Request, SamplingParams
from tests.scores import pretend

BLOCK_SIZE = 4
BLOCK_BYTES = 1000
PROFILE = PrefillProfile(c0=0.01, c1=0.01, c2=0.0)  # slower than any store at first


def endpoint(name: str, *, epoch: int = 1) -> Endpoint:
    return Endpoint(instance_id=name, epoch=epoch, rpc_address=f"{name}:1", transfer_address=name, host="here")


HOME = endpoint("store-0")


def make_request(
    name: str,
    token_ids: Sequence[int],
    *,
    max_tokens: int = 8,
    gateway: str = "gateway-0",
    priority: int = 0,
    timeout_s: float = 600.0,
    stop_token_ids: frozenset[int] = frozenset(),
    num_emitted: int = 0,
    block_size: int = BLOCK_SIZE,
    fingerprint: str = "test",
) -> Request:
    return Request(
        request_id=RequestId(name),
        gateway_id=GatewayId(gateway),
        token_ids=tuple(token_ids),
        num_prompt_tokens=len(token_ids) - num_emitted,
        block_keys=tuple(block_keys(root_key(fingerprint), token_ids, block_size)),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop_token_ids),
        priority=priority,
        timeout_s=timeout_s,
    )


def make_placement(
    request: Request, *, sources: Sequence[tuple[Endpoint, int, int]] = (), rank: float = 0.0
) -> Placement:
    return Placement(
        request_id=request.request_id,
        prefill=endpoint("prefill-0"),
        decode=endpoint("decode-0"),
        prefix_sources=tuple(
            PrefixSource(store=store, first_block=first, num_blocks=count) for store, first, count in sources
        ),
        rank=rank,
    )


def submitted(
    request: Request, *, sources: Sequence[tuple[Endpoint, int, int]] = (), rank: float = 0.0
) -> ev.Submitted:
    placement = make_placement(request, sources=sources, rank=rank)
    return ev.Submitted(request=request, placement=placement)


def make_state(
    *,
    num_blocks: int = 16,
    budget: int = 8,
    max_model_len: int = 1000,
    lookahead: int = 4,
    policy: str = "fcfs",
    home: str | None = "store-0",
    store_writes: str = "all",
    max_put_blocks: int = 64,
    max_pending_puts: int = 4096,
    max_prefetch_blocks: int = 8,
    profile: PrefillProfile = PROFILE,
    num_layers: int = 1,
    layered_loads: str = "auto",
    num_stages: int = 1,
) -> PrefillState:
    pool = BlockPool(num_blocks, on_added=lambda key, parent: None, on_removed=lambda key: state.evicted(key))
    state = PrefillState(
        pool,
        Limits(
            block_size=BLOCK_SIZE,
            block_bytes=BLOCK_BYTES,
            max_model_len=max_model_len,
            max_num_batched_tokens=budget,
            max_num_seqs=8,
            lookahead=lookahead,
            policy=policy,
            store_writes=store_writes,
            max_put_blocks=max_put_blocks,
            max_pending_puts=max_pending_puts,
            max_prefetch_blocks=max_prefetch_blocks,
            num_layers=num_layers,
            layered_loads=layered_loads,
            num_stages=num_stages,
        ),
        lease_prefix="lease",
        profile=profile,
        home_store=home,
    )
    return state


def granted(action: act.ReserveLanding, *, num_cached: int = 0) -> ev.LandingGranted:
    """The decode worker's answer: block i lands in its block 100 + i."""
    num_blocks = -(-action.num_tokens // BLOCK_SIZE)
    return ev.LandingGranted(
        request_id=action.request_id,
        landing=ev.Landing(
            lease_id=LeaseId(action.lease_id),
            block_ids=tuple(range(100, 100 + num_blocks)),
            num_cached_blocks=num_cached,
            transfer_address="decode-0",
            segment_id=1,
            window_id=7,
            num_blocks=200,
            ttl_s=30.0,
        ),
    )


def step_done(step: act.RunStep, *, token_id: int = 42) -> ev.StepDone:
    """Every sampling slice gives `token_id`; the checksum of block i is 1000 + i."""
    for plan in step.plans:
        pretend(plan.slice)
    return ev.StepDone(
        step_id=step.step_id,
        slices=tuple(
            ev.SliceDone(
                request_id=plan.slice.request_id,
                sampled=Sampled(request_id=plan.slice.request_id, token_id=token_id) if plan.slice.samples else None,
                checksums=tuple((index, 1000 + index) for index in plan.complete),
            )
            for plan in step.plans
        ),
    )
