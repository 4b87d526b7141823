"""The live decode worker's own state machine in virtual time, one event per step: what the closed form must equal."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from decode_worker import actions, events
from decode_worker.limits import Limits
from decode_worker.state import DecodeState
from engine.batch import Sampled, Slice
from engine.block_pool import BlockPool
from protocol.ids import GatewayId, LeaseId, RequestId
from protocol.request import Request, SamplingParams
from traces.simulator.spec import ModelProfile

FOREVER = 1_000_000_000
STEP_FIRST, THEN_EVENTS = 0, 1


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A landing that is asked for at `at` and whose KV is there `carried_s` after it was granted."""

    at: Fraction
    carried_s: Fraction
    num_tokens: int
    num_outputs: int  # after the first token
    cancelled_after_s: Fraction | None = None  # of `at`


class LiveDecode:
    """Tokens of each request by the live worker's rules; `token_at` begins with the landing's grant."""

    def __init__(self, model: ModelProfile, block_size: int, max_batched_tokens: int) -> None:
        self._model = model
        num_blocks = model.device_tokens // block_size
        pool = BlockPool(num_blocks, on_added=lambda key, parent: None, on_removed=lambda key: None)
        limits = Limits(
            block_size=block_size,
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=max_batched_tokens,
            max_model_len=FOREVER,
        )
        self.state = DecodeState(pool, limits)
        self.token_at: dict[str, list[Any]] = {}
        self._heap: list[tuple[Any, int, int, Any]] = []
        self._num = 0
        self._prompts: dict[str, Prompt] = {}
        self._slices: Sequence[Slice] = ()

    def run(self, prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
        for number, prompt in enumerate(prompts):
            name = f"r{number}"
            self._prompts[name] = prompt
            reserve = events.ReserveRequested(
                lease_id=LeaseId(name),
                request_id=RequestId(name),
                num_tokens=prompt.num_tokens,
                block_keys=(),
                ttl_s=FOREVER,
                deadline_at=FOREVER,
            )
            self._at(prompt.at, THEN_EVENTS, reserve)
            if prompt.cancelled_after_s is not None:
                cancel = events.RequestCancelled(request_id=RequestId(name))
                self._at(prompt.at + prompt.cancelled_after_s, THEN_EVENTS, cancel)
        while self._heap:
            at, _, _, event = heapq.heappop(self._heap)
            if isinstance(event, events.StepDone):
                self._take_tokens(at)
            self._handle(event, at)
        self.state.validate()
        return self.token_at

    def _at(self, at: Any, order: int, event: Any) -> None:
        self._num += 1
        heapq.heappush(self._heap, (at, order, self._num, event))

    def _handle(self, event: Any, now: Any) -> None:
        pending = [event]
        while pending:
            for action in self.state.handle(pending.pop(0), now):
                pending += self._obey(action, now)

    def _obey(self, action: Any, now: Any) -> list[Any]:
        match action:
            case actions.GrantLease(lease_id=lease_id):
                self._granted(lease_id, now)
            case actions.VerifyBlocks(lease_id=lease_id):
                return [events.Verified(lease_id=lease_id, corrupt=())]
            case actions.CloseWindow(lease_id=lease_id):
                return [events.WindowClosed(lease_id=lease_id)]
            case actions.RunStep(slices=slices):
                self._slices = slices
                self._at(now + self._step_s(slices), STEP_FIRST, self._step_done(slices))
        return []

    def _granted(self, name: str, now: Any) -> None:
        prompt = self._prompts[name]
        self.token_at[name] = [now]
        request = Request(
            request_id=RequestId(name),
            gateway_id=GatewayId("g"),
            token_ids=(7,) * (prompt.num_tokens + 1),
            num_prompt_tokens=prompt.num_tokens,
            block_keys=(),
            sampling=SamplingParams(max_tokens=prompt.num_outputs + 1, temperature=0.0),
            timeout_s=FOREVER,
        )
        num_blocks = self.state._landings._limits.blocks_for(prompt.num_tokens)
        commit = events.CommitRequested(lease_id=LeaseId(name), request=request, checksums=(0,) * num_blocks)
        self._at(now + prompt.carried_s, THEN_EVENTS, commit)

    def _step_s(self, slices: Sequence[Slice]) -> Any:
        decoding = [s for s in slices if s.start + 1 == len(s.token_ids)]
        seconds: Any = 0
        if decoding:
            context = sum(len(s.token_ids) for s in decoding)
            seconds += self._model.decode.step_s(len(decoding), context)
        for piece in slices:
            if piece.start + 1 != len(piece.token_ids):
                seconds += self._model.prefill.seconds(piece.end, piece.start)
        return seconds

    def _step_done(self, slices: Sequence[Slice]) -> events.StepDone:
        sampled = [Sampled(request_id=s.request_id, token_id=7) if s.samples else None for s in slices]
        return events.StepDone(sampled=sampled)

    def _take_tokens(self, now: Any) -> None:
        for piece in self._slices:
            if piece.samples:
                self.token_at[piece.request_id].append(now)
