"""Drives an `UndividedState` without I/O: loads, checksums and puts end at a test's command, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from decode_worker.actions import SendTokens
from decode_worker.events import StoreFound
from deploy.undivided.publishing import Publishing, PutEnded, SealBlocks, Sealed
from deploy.undivided.state import UndividedState
from engine.block_pool import BlockPool
from prefill_worker.actions import LoadPrefix, PutBlocks
from prefill_worker.events import PrefixLoaded, PrefixLoadFailed, PutDone, PutFailed
from protocol.errors import PeerLost
from protocol.keys import BlockKey
from protocol.profile import DecodeProfile, PrefillProfile
from protocol.request import Endpoint, Placement, PrefillReport, PrefixSource
from protocol.step_budget import StepBudget
from tests.decode_worker.driver import BLOCK_SIZE, Driver, keys_of, limits, request_of
from tests.scores import is_whole
from worker.events import Submitted

STORE = Endpoint(instance_id="store", epoch=1, rpc_address="s:1", transfer_address="s:2", host="host")
# A decode step takes 4 ms and a millisecond per sequence, a token of a prompt 1 ms.
BUDGET = StepBudget(
    decode=DecodeProfile(c0=0.004, c1=0.001, c2=0.0),
    prefill=PrefillProfile(c0=0.0, c1=0.001, c2=0.0),
    most_step_s=0.025,
)


class UndividedDriver(Driver):
    """Its prompts are submitted; landings go on as before."""

    def __init__(self, num_blocks: int = 16, budget: StepBudget | None = BUDGET, **changes: int) -> None:
        super().__init__(num_blocks, **changes)
        self.pool = BlockPool(num_blocks, on_added=lambda key, parent: None, on_removed=self._removed)
        self.publishing = Publishing(self.pool, max_in_flight=2, max_pending=4)
        self.state = UndividedState(self.pool, replace(limits(**changes), budget=budget), self.publishing)
        self.loads: list[LoadPrefix] = []
        self.seals: list[SealBlocks] = []
        self.puts: list[PutBlocks] = []
        self.stored: dict[BlockKey, int] = {}  # checksums by key
        self._contents: dict[BlockKey, Sequence[int]] = {}  # tokens of every block that was named
        self.reports: dict[str, PrefillReport] = {}
        self._scored: dict[str, int] = {}  # tokens of prompts that are scored, by their latest wish

    def _removed(self, key: BlockKey) -> None:
        self.publishing.evicted(key)

    def handle(self, event: Any) -> list[Any]:
        done: list[Any] = super().handle(event)
        sent = [a for a in done if isinstance(a, SendTokens)]
        for token in (token for action in sent for token in action.tokens):
            assert isinstance(self.state, UndividedState)
            report = self.state.report(token.request_id, self.now)
            if report is not None:
                assert token.index == 0, "a report comes with the first token"
                self.reports[token.request_id] = report
                self._check_scores(report)
        return done

    def _check_scores(self, report: PrefillReport) -> None:
        """All of the prompt's tokens are scored, where that was wanted, and it was computed for that."""
        num_tokens = self._scored.get(report.request_id)
        if num_tokens is None:
            assert report.prompt_logprobs is None
            return
        assert is_whole(report.prompt_logprobs, num_tokens)
        assert report.cached_tokens == 0

    def _perform(self, action: Any) -> None:
        match action:
            case LoadPrefix():
                for part in action.parts:
                    assert all(self.pool.references_of(block) == 1 for block in part.blocks)
                self.loads.append(action)
            case SealBlocks():
                assert all(self.pool.references_of(block) for block in action.blocks)
                self.seals.append(action)
            case PutBlocks():
                self.puts.append(action)
            case _:
                super()._perform(action)

    # -- what the world does

    def submit(self, prompt: Sequence[int], request_id: str = "r", *, num_stored: int = 0, **wishes: Any) -> list[Any]:
        """`num_stored`: leading blocks that the store has."""
        for index, key in enumerate(keys_of(prompt)):
            self._contents[key] = prompt[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        committed = request_of(prompt, request_id, **wishes)
        request = replace(committed, token_ids=tuple(prompt))
        self._scored.pop(request_id, None)
        if request.scores_prompt:
            self._scored[request_id] = len(prompt)
        source = PrefixSource(store=STORE, first_block=0, num_blocks=num_stored)
        placement = Placement(
            request_id=request.request_id, prefill=STORE, decode=STORE, prefix_sources=(source,) if num_stored else ()
        )
        return self.handle(Submitted(request=request, placement=placement))

    def load(self, num_good: int | None = None) -> list[Any]:
        """The oldest load ends with so many good blocks; None = all. Checksums are first bytes of keys."""
        action = self.loads.pop(0)
        keys = [key for part in action.parts for key in part.keys][:num_good]
        blocks = [block for part in action.parts for block in part.blocks]
        for key, block in zip(keys, blocks, strict=False):
            self.memory.fill(block, self._contents[key])
        checksums = tuple(key[0] for key in keys)
        return self.handle(PrefixLoaded(request_id=action.request_id, checksums=checksums))

    def fail_load(self) -> list[Any]:
        action = self.loads.pop(0)
        return self.handle(PrefixLoadFailed(request_id=action.request_id, error=PeerLost("gone")))

    def seal(self) -> list[Any]:
        action = self.seals.pop(0)
        return self.handle(Sealed(seal_id=action.seal_id, checksums=tuple(action.blocks)))

    def put(self, *, fails: bool = False) -> list[Any]:
        action = self.puts.pop(0)
        outcome: PutDone | PutFailed = PutDone(put_id=action.put_id, num_refused=0, corrupt=())
        if fails:
            outcome = PutFailed(put_id=action.put_id, error=PeerLost("gone"))
        else:
            self.stored.update((item.key, item.checksum) for item in action.items)
        return self.handle(PutEnded(store_id=action.store.instance_id, outcome=outcome))

    def find_home(self) -> list[Any]:
        return self.handle(StoreFound(store=STORE))

    def settle(self) -> None:
        """Loads, checksums and puts end."""
        while self.loads or self.seals or self.puts:
            if self.loads:
                self.load()
            elif self.seals:
                self.seal()
            else:
                self.put()

    def advance(self) -> bool:
        self.settle()
        return super().advance()

    @property
    def step_s(self) -> float:
        """How long the step under way takes by the budget's own formulae."""
        assert self.step is not None
        slices = self.step.slices
        decoding = [piece for piece in slices if piece.num_tokens == 1]
        chunks = sum(piece.num_tokens for piece in slices if piece.num_tokens > 1)
        decode_s = 0.004 + 0.001 * len(decoding) if decoding else 0.0
        return decode_s + 0.001 * chunks
