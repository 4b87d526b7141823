"""Drives a `DecodeState` without I/O. The test decides when windows close, blocks are verified and steps end."""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from moonserve.decode_worker.decisions import events
from moonserve.decode_worker.decisions.limits_and_counters import Limits
from moonserve.decode_worker.decisions.offloading import OffloadCosts
from moonserve.decode_worker.decisions.speculation import Speculation
from moonserve.decode_worker.state import DecodeState
from moonserve.engine.admission_policy import AdmissionPolicy
from moonserve.engine.kv_cache.block_pool import FreeList
from moonserve.engine.model.batch import Sampled, Slice
from moonserve.protocol.errors import MoonserveError, PeerLost
from moonserve.protocol.kv_blocks import BlockKey, block_keys, root_key
from moonserve.protocol.request import BlockId, Endpoint, LeaseId, Request, RequestId, Token
from moonserve.protocol.step_time import PrefillProfile
from moonserve.worker.events import Action, Event
from tests.engine.kv_cache.shapes import quiet_pool
from tests.prefill_worker.builders import all_of, make_request
from tests.scores import pretend

BLOCK_SIZE = 4
ROOT = root_key("test")
STORE = Endpoint(instance_id="store-0", epoch=1, rpc_address="store:1", transfer_address="store:2", host="here")
CHEAP_STORE = OffloadCosts(prefill=PrefillProfile(c0=0.0, c1=1.0, c2=0.0), block_bytes=4096, host="here")
"""Costs of a worker that computes one token per second, so that any store is faster."""
A = TypeVar("A")


ALWAYS = Speculation(num_tokens=3, lookup_max=3, lookup_min=1, max_rows=12, costs=None)
"""Settings of a worker whose sequences draft whenever a repetition lets them."""


def limits(**changes: Any) -> Limits:
    usual: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 1_000,
    }
    return Limits(**{**usual, **changes})


def next_token(position: int) -> int:
    """Returns the token that the fake model generates after `position` tokens."""
    return 1_000 + position


def foretelling(length: int, wrong: int | None = None) -> list[int]:
    """Returns a prompt that contains what the fake model generates after it, with a wrong token at position `wrong`."""
    return [0 if at == wrong else next_token(length + at) for at in range(length)]


def sampled_after(piece: Slice) -> Sampled:
    """Returns what the engine samples after a slice: garbage after a wrong draft token."""
    first = piece.end - piece.num_draft
    drawn = [next_token(first)]
    for end in range(first + 1, piece.end + 1):
        drawn.append(next_token(end) if drawn[-1] == piece.token_ids[end - 1] else -1)
    token, *others = [Sampled(request_id=piece.request_id, token_id=token_id) for token_id in drawn]
    return replace(token, after_draft=tuple(others))


def request_of(
    prompt: Sequence[int], request_id: str = "r", *, stops_after: int | None = None, **wishes: Any
) -> Request:
    """Returns a request as it is committed: the prompt and the first token, which prefill sampled. With `stops_after`
    n, the n-th generated token is a stop token."""
    stops = () if stops_after is None else (next_token(len(prompt) + stops_after - 1),)
    num_scored = wishes.pop("num_prompt_logprobs", None)
    request = make_request(request_id, prompt, **{"max_tokens": 1_000, "stop_token_ids": frozenset(stops), **wishes})
    sampling = replace(request.sampling, num_prompt_logprobs=num_scored)
    return replace(request, token_ids=(*prompt, next_token(len(prompt))), sampling=sampling)


def keys_of(prompt: Sequence[int]) -> tuple[BlockKey, ...]:
    return tuple(block_keys(ROOT, prompt, BLOCK_SIZE))


def kept(put: events.StoreBlocks, **outcome: Any) -> events.BlocksStored:
    return events.BlocksStored(
        move_id=put.move_id, checksums=tuple(item.checksum or 1 for item in put.blocks), **outcome
    )


class PretendedMemory:
    """Fake KV memory and store. It records which token's KV each slot of each block holds, and fails if a sequence
    reads a slot that holds another token's KV or none."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], int] = {}
        self.store: dict[bytes, list[int]] = {}

    def land(self, tokens: Sequence[int], grant: events.GrantLease) -> None:
        for position in range(grant.num_cached * BLOCK_SIZE, len(tokens)):
            slot = (grant.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE)
            self._slots[slot] = tokens[position]

    def fill(self, block: BlockId, tokens: Sequence[int]) -> None:
        for at, token in enumerate(tokens):
            self._slots[block, at] = token

    def compute(self, piece: Slice) -> None:
        for position in range(piece.end):
            slot = (piece.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
            is_own = position >= piece.start
            token = next_token(position) if is_own and piece.token_from_previous_step else piece.token_ids[position]
            if is_own:
                self._slots[slot] = token
            assert self._slots.get(slot) == token, f"wrong KV at {position}"

    def keep(self, action: events.StoreBlocks, *, failed: bool) -> events.BlocksStored:
        for item in () if failed else action.blocks:
            self.store[item.key] = [self._slots[item.block, at] for at in range(BLOCK_SIZE)]
        error = PeerLost("the store is gone") if failed else None
        return kept(action, is_complete=not failed, error=error)

    def lose(self, block: BlockId) -> None:
        """Discards the content of a block whose page is given back."""
        for at in range(BLOCK_SIZE):
            self._slots.pop((block, at), None)

    def load(self, action: events.LoadBlocks, *, failed: bool) -> events.BlocksLoaded:
        found = [] if failed else [self.store.get(key) for key in action.keys]
        num_good = found.index(None) if None in found else len(found)
        for block, content in zip(action.blocks, found[:num_good], strict=False):
            self.fill(block, content or ())
        for block in action.blocks[num_good:]:
            self.fill(block, [-1] * BLOCK_SIZE)
        return events.BlocksLoaded(move_id=action.move_id, checksums=(1,) * num_good)


class Driver:
    """Performs the actions of a `DecodeState`. Windows open at once, as in the service; the test ends all others."""

    def __init__(
        self,
        num_blocks: int = 16,
        policy: AdmissionPolicy | None = None,
        keeping: OffloadCosts | None = None,
        free_list: FreeList | None = None,
        caches: bool = True,
        **changes: Any,
    ) -> None:
        self.pool = quiet_pool(num_blocks, free_list=free_list, enable_prefix_caching=caches)
        bounds = limits(**changes)
        self.limits = bounds
        self.most_ahead = int(bounds.runs_ahead)
        self.state = DecodeState(self.pool, bounds, policy, keeping)
        self.now = 0.0
        self.log: list[Action] = []  # all actions so far
        self.open_windows: dict[LeaseId, tuple[BlockId, ...]] = {}  # blocks that peers may write
        self.closing: list[events.CloseWindow] = []
        self.verifying: list[events.VerifyBlocks] = []
        self.steps: deque[events.RunStep] = deque()  # in flight
        self.moving: list[events.StoreBlocks | events.LoadBlocks] = []
        self.memory = PretendedMemory()
        self.tokens: dict[str, list[Token]] = {}
        self.failures: dict[str, list[events.Fail]] = {}

    def handle(self, event: Event) -> list[Action]:
        """Handles an event, performs the resulting actions and validates the state."""
        done = self.state.handle(event, self.now)
        self.log += done
        for action in done:
            self._perform(action)
        self.state.validate()
        for block in itertools.chain(*self.open_windows.values()):  # is neither free, nor shared, nor a sequence's
            assert self.pool.references_of(block) == 1
            assert self.pool.key_of(block) is None
        return done

    def _perform(self, action: Action) -> None:
        match action:
            case events.GrantLease(lease_id=lease_id) if action.blocks[action.num_cached :]:
                self.open_windows[lease_id] = action.blocks[action.num_cached :]
            case events.CloseWindow():
                self.closing.append(action)
            case events.VerifyBlocks():
                self.verifying.append(action)
            case events.RunStep():
                assert len(self.steps) <= self.most_ahead, "too many steps at once"
                self._check_step(action)
                for piece in action.slices:
                    self.memory.compute(piece)
                    pretend(piece)
                self.steps.append(action)
            case events.StoreBlocks() | events.LoadBlocks():
                self.moving.append(action)
            case events.SendTokens(tokens=tokens):
                for token in tokens:
                    self.tokens.setdefault(token.request_id, []).append(token)
            case events.Fail(request_id=request_id):
                self.failures.setdefault(request_id, []).append(action)

    def _check_step(self, step: events.RunStep) -> None:
        assert step.slices
        written: list[int] = []
        for piece in step.slices:
            assert 0 <= piece.start < piece.end <= len(piece.token_ids) + piece.token_from_previous_step
            assert not piece.token_from_previous_step or self._continues(piece), "follows nothing"
            assert piece.end <= len(piece.block_table) * BLOCK_SIZE
            first, last = piece.start // BLOCK_SIZE, (piece.end - 1) // BLOCK_SIZE
            written += piece.block_table[first : last + 1]
            assert not piece.num_draft or not piece.token_from_previous_step, "drafts behind an unknown token"
        assert sum(piece.num_tokens for piece in step.slices) <= self.limits.max_num_batched_tokens
        assert len(written) == len(set(written)), "two slices write one block"
        assert all(self.pool.references_of(block) == 1 for block in written), "writes a shared one"

    def _continues(self, piece: Slice) -> bool:
        """Returns True if the step before samples the token with which this slice begins."""
        before = self.steps[-1].slices if self.steps else ()
        return any(each.samples and (each.request_id, each.end) == (piece.request_id, piece.start) for each in before)

    # -- events

    def reserve(
        self,
        prompt: Sequence[int],
        request_id: str = "r",
        *,
        lease_id: str | None = None,
        ttl_s: float = 10.0,
        wait_s: float = 5.0,
    ) -> list[Action]:
        return self.handle(
            events.ReserveRequested(
                lease_id=LeaseId(lease_id or f"lease-{request_id}"),
                request_id=RequestId(request_id),
                num_tokens=len(prompt),
                block_keys=keys_of(prompt),
                ttl_s=ttl_s,
                deadline_at=self.now + wait_s,
            )
        )

    def commit(self, request: Request, *, lease_id: str | None = None) -> list[Action]:
        name = LeaseId(lease_id or f"lease-{request.request_id}")
        grant = self.grant_of(name)
        closing = {action.lease_id for action in self.closing}
        if grant is not None and name in self.open_windows.keys() - closing:
            self.memory.land(request.token_ids[:-1], grant)
        checksums = range(grant.num_cached, len(grant.blocks)) if grant else ()
        return self.handle(events.CommitRequested(lease_id=name, request=request, checksums=tuple(checksums)))

    def grant_of(self, lease_id: str) -> events.GrantLease | None:
        return next((a for a in self.all_of(events.GrantLease) if a.lease_id == lease_id), None)

    def verify(self, corrupt: Sequence[int] = ()) -> list[Action]:
        """Ends the oldest verification."""
        action = self.verifying.pop(0)
        return self.handle(events.Verified(lease_id=action.lease_id, corrupt=tuple(corrupt)))

    def close(self) -> list[Action]:
        """Ends the closing of the oldest window."""
        action = self.closing.pop(0)
        del self.open_windows[action.lease_id]
        return self.handle(events.WindowClosed(lease_id=action.lease_id))

    def start(self, prompt: Sequence[int], request_id: str = "r", **wishes: object) -> list[Action]:
        """Takes a prompt from its reservation to a sequence."""
        self.reserve(prompt, request_id)
        done = self.commit(request_of(prompt, request_id, **wishes))  # type: ignore[arg-type]
        if any(isinstance(action, events.VerifyBlocks) for action in done):
            self.verify()
            done = self.close()
        return done

    def find_store(self) -> list[Action]:
        return self.handle(events.StoreFound(store=STORE))

    def move(self, *, failed: bool = False) -> list[Action]:
        """Ends the oldest move to or from the store."""
        action = self.moving.pop(0)
        if isinstance(action, events.StoreBlocks):
            return self.handle(self.memory.keep(action, failed=failed))
        return self.handle(self.memory.load(action, failed=failed))

    def compute(self) -> list[Action]:
        """Ends the oldest step in flight."""
        step = self.steps.popleft()
        return self.handle(
            events.StepDone(sampled=[sampled_after(piece) if piece.samples else None for piece in step.slices])
        )

    @property
    def step(self) -> events.RunStep | None:
        """The oldest step in flight."""
        return self.steps[0] if self.steps else None

    def fail_step(self, error: MoonserveError) -> list[Action]:
        """Fails the oldest step in flight."""
        self.steps.popleft()
        return self.handle(events.StepFailed(error=error))

    def cancel(self, request_id: str) -> list[Action]:
        return self.handle(events.RequestCancelled(request_id=RequestId(request_id)))

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.handle(events.Tick())

    def advance(self) -> bool:
        """Ends the next pending action, or lets time pass until the state is due. Returns False if nothing is left."""
        if self.verifying:
            self.verify()
        elif self.closing:
            self.close()
        elif self.moving:
            self.move()
        elif self.steps:
            self.compute()
        elif not self.state.is_idle and self.state.wake_at is not None:
            self.wait(max(0.0, self.state.wake_at - self.now))
        else:
            return False
        return True

    def drain(self) -> None:
        """Advances until nothing is left. Checks that the state is idle, all blocks are free and all windows closed."""
        for _ in range(10_000):
            if not self.advance():
                break
        assert self.state.is_idle
        assert self.pool.num_free == self.pool.num_blocks
        assert not self.open_windows

    def drain_landing(self, *, also_closed: bool = True) -> None:
        """Turns committed landings into sequences. Without `also_closed`, their windows stay open."""
        while self.verifying:
            self.verify()
        while also_closed and self.closing:
            self.close()

    def drain_to_preemption(self) -> None:
        """Computes steps until a sequence has been preempted."""
        while self.state.counters.num_preemptions == 0:
            self.compute()

    # -- results

    def all_of(self, kind: type[A]) -> list[A]:
        return all_of(self.log, kind)

    def step_of(self) -> list[tuple[str, int, int]]:
        """Returns (request, start, end) of each slice of the oldest step in flight."""
        return [(piece.request_id, piece.start, piece.end) for piece in self.step.slices]
