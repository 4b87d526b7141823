"""I/O of one choice: runs the actions that its state requests and delivers the results to it as events.

The shell around `request_state`. Everything runs in one event loop; the gateway's task group holds the tasks.
"""

import asyncio
import hashlib
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol

from moonserve.gateway.cluster.cluster_client import ClusterClient
from moonserve.gateway.cluster.request_metrics import RecentFigures, RequestMetrics
from moonserve.gateway.generation import request_log
from moonserve.gateway.generation.events import (
    Aborted,
    Action,
    CancelAttempt,
    Choice,
    Event,
    Fail,
    GenerationRequest,
    Pause,
    Piece,
    Place,
    Placed,
    PlaceDue,
    PlaceFailed,
    Report,
    Submit,
    SubmitFailed,
)
from moonserve.gateway.generation.request_state import RequestState
from moonserve.gateway.generation.request_timing import RequestTiming
from moonserve.gateway.generation.session_returns import SessionReturns
from moonserve.gateway.text.detokenizer import TextOutput
from moonserve.protocol.errors import DeadlineExceeded, MoonserveError
from moonserve.protocol.kv_blocks import BlockKey, block_keys, pack_keys, pack_tokens, root_key
from moonserve.protocol.pb import conductor_pb2
from moonserve.protocol.process.event_loop import LoggedTasks
from moonserve.protocol.process.tracing import Tracer
from moonserve.protocol.request import GatewayId, PromptLogprobs, Request, RequestId, RequestPhase
from moonserve.protocol.rpc.wire import submission_to_wire, to_message

_TICKET_BYTES = 16
_REPORT_AFTER_S = 0.005
"""Delay of the report of a first token, so that the conductor's work does not compete with the token's delivery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationContext:
    """Objects shared by all generations of a gateway."""

    gateway_id: GatewayId
    cluster: ClusterClient
    tasks: LoggedTasks
    metrics: RequestMetrics
    routes: "dict[str, Generation]"  # keyed by the request id of the current attempt
    tracer: Tracer
    figures: RecentFigures
    returns: SessionReturns


class OutputListener(Protocol):
    """Receives the output of a generation, up to its last piece or its failure."""

    def on_piece(self, piece: Piece) -> None: ...

    def on_failure(self, error: MoonserveError) -> None: ...


class Generation:
    """One choice, from acceptance to end."""

    def __init__(
        self,
        *,
        request_id: RequestId,
        request: GenerationRequest,
        choice: Choice,
        output: TextOutput,
        listener: OutputListener,
        context: GenerationContext,
        timeout_s: float,
        patience_s: float,
        traceparent: str = "",
    ) -> None:
        """`patience_s`: time to wait while no worker is there. `traceparent`: of its span; empty = not traced."""
        self._loop = asyncio.get_running_loop()
        self._request = request
        self._choice = choice
        self._listener: OutputListener | None = listener  # None after the end
        self._context = context
        arrived_at = request.arrived_at
        deadline_at = arrived_at + timeout_s
        self.state = RequestState(
            request_id=request_id,
            prompt=choice.token_ids,
            sampling=choice.sampling,
            output=output,
            deadline_at=deadline_at,
            index=choice.index,
            num_known=choice.num_known,
            patience_s=patience_s,
        )
        self.timings = RequestTiming(
            self.state, context.metrics, context.figures, context.tracer, traceparent, arrived_at
        )
        self._keys: tuple[BlockKey, ...] = ()  # block keys of the current attempt's tokens
        self._route_id: RequestId | None = None
        self._reporting: asyncio.Task[None] | None = None  # the last report's task
        self._deadline = self._loop.call_at(deadline_at, self._expire)
        self._awaits_first_piece = True  # until the first token
        self._followers: list[Generation] = []  # generations that wait until this prompt's blocks can be found
        self._leader: Generation | None = None  # generation with the same prompt that runs first

    def start(self) -> None:
        """Requests a placement now."""
        self.timings.accepted()
        self.deliver(PlaceDue())

    def start_after(self, leader: "Generation") -> None:
        """Requests a placement once the blocks of `leader`, which has the same prompt, can be found at both workers.
        That is at the leader's second token, which the decode worker makes, or at its end. The blocks are then shared
        instead of recomputed."""
        self.timings.accepted()
        leader._followers.append(self)
        self._leader = leader

    def deliver(self, event: Event) -> None:
        """Passes an event to the state and runs the resulting actions."""
        for action in self.state.handle(event, self._loop.time()):
            self._run(action)

    def abort(self, error: MoonserveError) -> None:
        """Ends the generation now. Does nothing if it has already ended."""
        self.deliver(Aborted(error=error))

    @property
    def is_scored(self) -> bool:
        """True if log-probabilities of the prompt's tokens are requested."""
        return self._choice.sampling.num_prompt_logprobs is not None

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Log-probabilities of the prompt's tokens, if requested; from the first token on. A leader's are the same."""
        report = self.state.report
        own = None if report is None else report.prompt_logprobs
        return self._leader.prompt_logprobs if own is None and self._leader is not None else own

    def _run(self, action: Action) -> None:
        match action:
            case Piece():
                self._emit(action)
            case Place():
                self._route(action.request_id)
                self.timings.placing(action.attempt)
                self._start(self._place(action))
            case Submit():
                self.timings.placed()
                self._start(self._submit(action))
            case Pause():
                event = PlaceDue(attempt=action.attempt)
                self._loop.call_later(action.delay_s, self.deliver, event)
            case CancelAttempt():
                for endpoint in action.endpoints:
                    self._start(self._context.cluster.cancel(endpoint, action.request_id))
            case Report():
                self._reporting = self._start(self._report(action, self._reporting))
            case Fail():
                self._end()
                self.timings.failed(action.error)
                request_log.failed(self.state, action.error)
                self._release_listener().on_failure(action.error)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        whose = self.state.request_id
        return self._context.tasks.start(coroutine, name=self.state.attempt_id, request_id=whose)

    def _emit(self, piece: Piece) -> None:
        self.timings.tokens(len(piece.tokens))
        if self._awaits_first_piece:
            self._awaits_first_piece = False
            self._reused(self._loop.time())
            piece = replace(piece, prompt_logprobs=self.prompt_logprobs)
        if piece.finish_reason is not None:
            self._end()
            self.timings.finished(piece.finish_reason)
            request_log.finished(self.state, piece.finish_reason, self.timings.phase_times)
        if self._followers and (piece.finish_reason or len(self.state.generated) > 1):
            followers, self._followers = self._followers, []
            for follower in followers:
                follower.deliver(PlaceDue())
        listener = self._listener if piece.finish_reason is None else self._release_listener()
        assert listener is not None, "output behind the last one"
        listener.on_piece(piece)

    def _reused(self, now: float) -> None:
        """Records which prefix was reused, which instances held it, and where its tokens went."""
        placement, report = self.state.placement, self.state.last_report
        if placement is None or report is None:
            return
        prompt, figures = self._choice.token_ids, self._context.figures
        block_size = self._context.cluster.model_info().layout.block_size
        cached = min(report.cached_tokens, len(prompt))
        loaded = figures.placed(placement, len(prompt), cached, block_size)
        self._context.metrics.prefilled(len(prompt), cached - loaded, loaded)
        num_blocks = report.cached_tokens // block_size
        if 0 < num_blocks <= len(self._keys):
            sources = (source.store.instance_id for source in placement.prefix_sources)
            holders = (placement.prefill.instance_id, *sources)
            leaf = self._keys[num_blocks - 1]
            figures.reused(leaf, prompt, report.cached_tokens, holders, now)

    async def _place(self, action: Place) -> None:
        cluster = self._context.cluster
        try:
            self._keys = self._chain(action.token_ids)
            placement = await cluster.place(self._place_request(action), action.timeout_s)
        except MoonserveError as error:
            failed = PlaceFailed(
                attempt=action.attempt,
                error=_without_traceback(error),
                may_return=cluster.was_ready_within(self.state.patience_s),
                open_since=cluster.open_since(),
            )
            self.deliver(failed)
            return
        endpoints = (placement.prefill, placement.decode)
        await cluster.wait_for_streams(endpoints)
        replaced = frozenset(each.instance_id for each in endpoints if not cluster.follow_events(each))
        placed = Placed(attempt=action.attempt, placement=placement, replaced=replaced, open_since=cluster.open_since())
        self.deliver(placed)

    def _chain(self, token_ids: tuple[int, ...]) -> tuple[BlockKey, ...]:
        """Returns the block keys of the tokens. Tenants with different salts never share a block."""
        info = self._context.cluster.model_info()
        root = root_key(info.fingerprint, self._request.cache_salt)
        return tuple(block_keys(root, token_ids, info.layout.block_size))

    def _place_request(self, action: Place) -> conductor_pb2.PlaceRequest:
        # A scored prompt must be computed whole now, even where its blocks are cached.
        is_computed = self.is_scored and len(action.token_ids) == len(self._choice.token_ids)
        return conductor_pb2.PlaceRequest(
            request_id=action.request_id,
            block_keys=b"" if is_computed else pack_keys(self._keys),
            num_prompt_tokens=len(action.token_ids),
            max_tokens=action.max_tokens,
            ttft_slo_s=self._request.ttft_slo_s,
            tbt_slo_s=self._request.tbt_slo_s,
            priority=self._request.priority,
            tenant=self._request.tenant,
            excluded_instances=sorted(self._context.cluster.instances_to_avoid(action.excluded)),
            session_id=self._request.session_id,
            traceparent=self.timings.traceparent,
            expected_return=self._request.expected_return,
            client_id=self._client_id(action.request_id),
            ticket=self._ticket(action),
        )

    def _ticket(self, action: Place) -> bytes:
        """Returns the ticket by which the conductor recognizes a retry by the client; empty for later attempts."""
        if action.request_id != self.state.request_id:
            return b""
        block_size = self._context.cluster.model_info().layout.block_size
        whole = len(action.token_ids) // block_size * block_size
        digest = hashlib.blake2b(digest_size=_TICKET_BYTES, person=b"moonserve-ticket")
        # The last key stands for all tokens before it, and for the salt.
        digest.update(self._keys[-1] if self._keys else self._request.cache_salt.encode())
        digest.update(pack_tokens(action.token_ids[whole:]))
        owner = (self._request.tenant, self._request.session_id, self._choice.index, action.max_tokens)
        digest.update(repr((len(action.token_ids), *owner)).encode())
        return digest.digest()

    def _client_id(self, request_id: RequestId) -> str:
        """Returns the client's own id of the request with its first placement, if it is another one; else ""."""
        is_first = request_id == self._request.request_id
        return self._request.client_id if is_first and self._request.client_id != request_id else ""

    async def _submit(self, action: Submit) -> None:
        request = Request(
            request_id=action.request_id,
            gateway_id=self._context.gateway_id,
            token_ids=action.token_ids,
            num_prompt_tokens=len(self._choice.token_ids),
            block_keys=self._keys,
            sampling=self._choice.sampling,
            priority=self._request.priority,
            timeout_s=action.timeout_s,
            tenant=self._request.tenant,
            traceparent=self.timings.traceparent,
            cache_hints=self._request.cache_hints,
        )
        message = submission_to_wire(request, action.placement)
        try:
            await self._context.cluster.submit(action.placement.prefill, message)
        except MoonserveError as error:
            self.deliver(SubmitFailed(attempt=action.attempt, error=_without_traceback(error)))
            return
        if action.attempt == self.state.attempt:
            self.timings.prefill_accepted()

    async def _report(self, action: Report, before: asyncio.Task[None] | None) -> None:
        """Sends a report after the previous one is sent. A first-token report that arrives after the final one is
        useless to the conductor."""
        if before is not None and not before.done():
            await asyncio.wait([before])
        if action.phase is RequestPhase.FIRST_TOKEN:
            await asyncio.sleep(_REPORT_AFTER_S)
        prefill = action.prefill
        await self._context.cluster.report(
            to_message(
                conductor_pb2.ReportRequest,
                action,
                queue_s=None if prefill is None else prefill.queue_s,
                transfer_s=None if prefill is None else prefill.load_s,
                prefill_s=None if prefill is None else prefill.compute_s,
            )
        )

    def _route(self, request_id: RequestId) -> None:
        """Routes events of this attempt to this generation and drops the route of the previous attempt."""
        previous, self._route_id = self._route_id, request_id
        self._context.routes[request_id] = self
        if previous is not None and previous != request_id:
            self._context.routes.pop(previous, None)
            request_log.retried(self.state)

    def _end(self) -> None:
        if self._route_id is not None:
            self._context.routes.pop(self._route_id, None)
        self._deadline.cancel()
        self._context.returns.ended(self._request.session, self._loop.time())

    def _release_listener(self) -> OutputListener:
        """Returns the listener and releases it, which breaks the reference cycle between the two."""
        listener, self._listener = self._listener, None
        assert listener is not None, "two ends"
        return listener

    def _expire(self) -> None:
        self.abort(DeadlineExceeded("the request took longer than its time limit"))


def _without_traceback(error: MoonserveError) -> MoonserveError:
    """Returns the error without its traceback, whose frames would reference the request that holds the error."""
    return error.with_traceback(None)
