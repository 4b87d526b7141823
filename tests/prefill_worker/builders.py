"""Builders of requests, placements and answers for tests of the prefill worker."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.model.batch import Sampled
from moonserve.prefill_worker.decisions import events as ev
from moonserve.prefill_worker.decisions import sequence
from moonserve.prefill_worker.decisions.shared_state import Limits
from moonserve.prefill_worker.state import PrefillState
from moonserve.protocol.kv_blocks import block_keys, root_key
from moonserve.protocol.request import (
    Endpoint,
    GatewayId,
    LeaseId,
    Placement,
    PrefixSource,
    Request,
    RequestId,
    SamplingParams,
)
from moonserve.protocol.step_time import PrefillProfile
from moonserve.worker.events import Action, Event
from tests.scores import pretend

BLOCK_SIZE = 4
BLOCK_BYTES = 1000
PROFILE = PrefillProfile(c0=0.01, c1=0.01, c2=0.0)  # slower than the initial estimate of any store


def endpoint(name: str, *, epoch: int = 1) -> Endpoint:
    address = f"{name}@{epoch}"
    return Endpoint(instance_id=name, epoch=epoch, rpc_address=f"{name}:1", transfer_address=address, host="here")


HOME = endpoint("store-0")
LANDING = ev.Landing(
    lease_id=LeaseId("lease"),
    block_ids=(),
    num_cached_blocks=0,
    transfer_address="decode-0",
    segment_id=1,
    window_id=7,
    num_blocks=200,
    ttl_s=30.0,
)


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


def make_sequence(name: str, *, rank: float = 0.0, number: int = 1, now: float = 0.0) -> sequence.Sequence:
    request = make_request(name, range(6))
    return sequence.Sequence(
        request=request,
        placement=make_placement(request, rank=rank),
        rank=(0, now + rank, number),
        lease_id=LeaseId(f"lease-{number}"),
        submitted_at=now,
    )


def submitted(request: Request, **placed: Any) -> ev.Submitted:
    return ev.Submitted(request=request, placement=make_placement(request, **placed))


def make_state(
    *,
    num_blocks: int = 16,
    budget: int = 8,
    home: str | None = "store-0",
    profile: PrefillProfile = PROFILE,
    **limits: Any,
) -> PrefillState:
    pool = BlockPool(num_blocks, on_added=lambda key, parent: None, on_removed=lambda key: state.on_evicted(key))
    fixed = {"block_size": BLOCK_SIZE, "block_bytes": BLOCK_BYTES, "max_num_batched_tokens": budget, "max_num_seqs": 8}
    bounds = Limits(**{**fixed, "max_model_len": 1000, "max_prefetch_blocks": 8, **limits})
    state = PrefillState(pool, bounds, lease_prefix="lease", profile=profile, home_store=home)
    return state


def granted(action: ev.ReserveLanding, *, num_cached: int = 0) -> ev.LandingGranted:
    """Returns the decode worker's grant of a reservation: block i lands in its block 100 + i."""
    blocks = tuple(range(100, 100 - (-action.num_tokens // BLOCK_SIZE)))
    landing = replace(LANDING, lease_id=LeaseId(action.lease_id), block_ids=blocks, num_cached_blocks=num_cached)
    return ev.LandingGranted(request_id=action.request_id, landing=landing)


def step_done(step: ev.RunStep, *, token_id: int = 42) -> ev.StepDone:
    """Returns the result of a step. Each sampling slice yields `token_id`; the checksum of block i is 1000 + i."""
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


A = TypeVar("A")


def all_of(actions: Iterable[Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def only(actions: Iterable[Action], kind: type[A]) -> A:
    """Returns the only action of the given kind. Fails if there is none or more than one."""
    found = all_of(actions, kind)
    assert len(found) == 1, f"expected one {kind.__name__} in {list(actions)}"
    return found[0]


def kinds(actions: Iterable[Action]) -> list[type]:
    return [type(action) for action in actions]


def spans(actions: Iterable[Action]) -> list[tuple[str, int, int]]:
    """Returns (request, start, end) of each slice in the RunStep actions among `actions`."""
    slices = [plan.slice for step in all_of(actions, ev.RunStep) for plan in step.plans]
    return [(piece.request_id, piece.start, piece.end) for piece in slices]


class Walk:
    """Drives a `PrefillState` without I/O. The test sets the time, and the state is validated after every event."""

    def __init__(self, **options: Any) -> None:
        self.state = make_state(**options)
        self.now = 0.0

    def handle(self, event: Event, at: float | None = None) -> Sequence[Action]:
        self.now = self.now if at is None else at
        actions = self.state.handle(event, self.now)
        self.state.validate()
        return actions

    def submit(
        self, name: str = "r", num_tokens: int = 6, *, first: int = 0, at: float | None = None, **options: Any
    ) -> Sequence[Action]:
        """Submits a request with the given tokens. `options` are those of `make_placement` and of `make_request`."""
        placed = {option: options.pop(option) for option in ("sources", "rank") if option in options}
        return self.request(make_request(name, range(first, first + num_tokens), **options), at=at, **placed)

    def request(self, request: Request, *, at: float | None = None, **placed: Any) -> Sequence[Action]:
        return self.handle(submitted(request, **placed), at)

    def grant(self, actions: Iterable[Action], *, num_cached: int = 0, at: float | None = None) -> Sequence[Action]:
        """Handles the decode worker's grant of the one reservation among `actions`."""
        return self.handle(granted(only(actions, ev.ReserveLanding), num_cached=num_cached), at)

    def start(self, name: str = "r", num_tokens: int = 6, *, num_cached: int = 0, **options: Any) -> ev.RunStep:
        """Submits a request, grants its landing and returns its first step."""
        submission = self.submit(name, num_tokens, **options)
        return only(self.grant(submission, num_cached=num_cached), ev.RunStep)

    def done(self, step: ev.RunStep, at: float | None = None, *, token_id: int = 42) -> Sequence[Action]:
        return self.handle(step_done(step, token_id=token_id), at)

    def written(self, name: str = "r", at: float | None = None) -> Sequence[Action]:
        return self.handle(ev.WritesDone(request_id=RequestId(name)), at)

    def commit(self, name: str = "r", num_tokens: int = 6) -> ev.CommitHandoff:
        """Takes a request from its submission to its commit. The prompt is computed in one step."""
        self.done(self.start(name, num_tokens))
        return only(self.written(name), ev.CommitHandoff)

    def accept(self, name: str = "r", at: float | None = None) -> Sequence[Action]:
        return self.handle(ev.HandoffAccepted(request_id=RequestId(name)), at)

    def corrupt(self, *indexes: int, name: str = "r", at: float | None = None) -> Sequence[Action]:
        return self.handle(ev.HandoffCorrupt(request_id=RequestId(name), indexes=indexes), at)

    def cancel(self, name: str = "r", at: float | None = None) -> Sequence[Action]:
        return self.handle(ev.RequestCancelled(request_id=RequestId(name)), at)

    def assert_drained(self) -> None:
        assert self.state.is_idle
        assert self.state.num_held_blocks == 0
