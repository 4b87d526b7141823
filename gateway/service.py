"""The gateway between HTTP and the cluster: accepts wishes, keeps their generations, hands out what workers send.

Everything runs in one event loop. A batch of events from a worker is sorted by request and given to each generation
synchronously, so that a reply's writer wakes once per batch. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from gateway.cluster.decode_figures import DecodeFigures
from gateway.cluster.figures import Figures
from gateway.cluster.view import Cluster
from gateway.events import (
    DecodeReported,
    Event,
    InstanceLost,
    PrefillReported,
    TokensArrived,
    WorkerFailed,
)
from gateway.explanations import Explanation, choice_id, explain
from gateway.generation import Generation, Surroundings
from gateway.replies.feed import Feed, Handler, Piece
from gateway.routes import Routes
from gateway.state import LIVE, PATIENCE_S
from gateway.tasks import TaskGroup
from gateway.text.detokenize import TextOutput
from gateway.text.tokenizer import Tokenizer
from gateway.wishes.wish import Choice, Wish
from protocol.errors import Cancelled, MoonserveError, NoWorker
from protocol.ids import GatewayId
from protocol.logs import of
from protocol.metrics import RequestMetrics
from protocol.pb import conductor_pb2, worker_pb2
from protocol.process import host_identity
from protocol.request import Placement
from protocol.rpc import Channels, failure_from_wire
from protocol.tracing import NoTracer, Root, Tracer
from protocol.wire import decode_report_from_wire, prefill_report_from_wire, token_from_wire

log = logging.getLogger(__name__)

# Enough for any client that reads at all; at 1,000 tokens a second it is 4 s of output.
_MAX_UNREAD_TOKENS = 4096
_GROUP = 32  # choices whose tokens are handed over in one go: half a millisecond
_GOODBYE_S = 1.0


class Answer:
    """All choices of one wish, as the reply's writer reads them."""

    def __init__(self, wish: Wish, root: Root | None) -> None:
        """`root`: the request's span, which the answer ends; None = it is not traced."""
        self._feed = Feed(_MAX_UNREAD_TOKENS)
        self._unfinished = len(wish.choices)
        self._generating = len(wish.choices)
        self._wish = wish
        self.root = root
        self.generations: list[Generation] = []

    async def take(self, handler: Handler | None = None) -> list[Piece]:
        """New output of one or more choices. Raises the error that ended the request. `handler`: as of `Feed.take`."""
        pieces = await self._feed.take(handler)
        self._unfinished -= sum(piece.finish_reason is not None for piece in pieces)
        return pieces

    @property
    def is_complete(self) -> bool:
        """Every choice's last piece has been taken."""
        return self._unfinished == 0

    @property
    def placement(self) -> Placement | None:
        """Of the first choice."""
        return self.generations[0].placement

    def cancel(self, error: MoonserveError) -> None:
        """Ends what is still under way."""
        for generation in self.generations:
            generation.abort(error)

    def on_piece(self, piece: Piece) -> None:
        self._generating -= piece.finish_reason is not None
        if not self._generating:
            self._end_trace(None)
        if not self._feed.put(piece):
            self.cancel(Cancelled("the client reads too slowly"))

    def on_failure(self, error: MoonserveError) -> None:
        """One failed choice ends the others: a reply is whole or an error."""
        self._end_trace(error)
        self._feed.fail(error)
        self.cancel(error)

    def timing(self) -> list[dict[str, Any]]:
        """The ledger of each choice that has ended well, in their order (docs/tracing.md)."""
        ledgers = ((each.index, each.journey.ledger) for each in self.generations)
        return [{"index": i, **found.as_json()} for i, found in ledgers if found is not None]

    def _facts(self) -> dict[str, str | int]:
        """Of the request, for its span."""
        states = [generation.state for generation in self.generations]
        return {
            "request_id": self._wish.request_id,
            "num_choices": len(states),
            "prompt_tokens": sum(len(state.prompt) for state in states),
            "output_tokens": sum(len(state.generated) for state in states),
            "cached_tokens": sum(state.cached_tokens for state in states),
        }

    def _end_trace(self, error: MoonserveError | None) -> None:
        root, self.root = self.root, None
        if root is not None:
            root.end(None if error is None else error.code, **self._facts())


class Gateway:
    """Accepts requests and follows them to their end."""

    def __init__(
        self,
        *,
        channels: Channels,
        conductor_addresses: str,
        instance_id: str,
        rpc_address: str,
        gateway_id: GatewayId,
        tokenizer: Tokenizer,
        metrics: RequestMetrics,
        timeout_s: float,
        patience_s: float = PATIENCE_S,
        tracer: Tracer | None = None,
    ) -> None:
        """`gateway_id` differs from one start of `instance_id` to the next. `rpc_address`: where others of this host
        read its metrics; "" = nowhere. `patience_s`: that a request has while there is no worker for it."""
        self._instance_id = instance_id
        self.figures = Figures()
        self._rpc_address = rpc_address
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._routes: Routes[Generation] = Routes()
        self._tasks = TaskGroup()
        self.cluster = Cluster(
            channels,
            conductor_addresses,
            gateway_id,
            on_batch=self._on_batch,
            on_lost=self._on_lost,
            on_view=DecodeFigures(metrics).take,
            about=self._about,
        )
        self._surroundings = Surroundings(
            gateway_id=gateway_id,
            cluster=self.cluster,
            tasks=self._tasks,
            metrics=metrics,
            routes=self._routes,
            tracer=tracer or NoTracer(),
            figures=self.figures,
        )
        self.is_draining = False
        self._refuses = False

    @property
    def is_ready(self) -> bool:
        return self.cluster.is_ready and not self.is_draining

    @property
    def num_live(self) -> int:
        """Generations that have not ended."""
        return len(self._routes)

    def phases(self) -> Counter[str]:
        """How many generations are in which phase (`gateway.state.Phase`), all named."""
        counts = Counter({phase.value: 0 for phase in sorted(LIVE)})
        counts.update(generation.state.phase.value for generation in self._routes.all())
        return counts

    @property
    def num_live_elsewhere(self) -> int:
        """Of the other gateways, as of a second ago."""
        gateways = self.cluster.view.gateways if self.cluster.view is not None else ()
        return sum(g.num_requests for g in gateways if g.instance_id != self._instance_id)

    def ask(self, wish: Wish) -> Answer:
        """Starts a wish's generations. Raises NoWorker where the gateway stops."""
        if self._refuses:
            raise NoWorker("this gateway is shutting down")
        root = self._surroundings.tracer.begin("request", wish.traceparent)
        answer = Answer(wish, root)
        answer.generations = [self._generation(wish, choice, answer) for choice in wish.choices]
        self._start(wish, answer.generations)
        return answer

    def _start(self, wish: Wish, generations: Sequence[Generation]) -> None:
        """Choices of one prompt share its blocks, where it has whole ones, and its log-probabilities: the first makes
        them for the others."""
        block_size = self.cluster.facts().block_size
        leaders: dict[tuple[int, ...], Generation] = {}
        for choice, generation in zip(wish.choices, generations, strict=True):
            leader = leaders.setdefault(choice.token_ids, generation)
            is_short = len(choice.token_ids) <= block_size
            is_scored = leader.is_scored and choice.sampling.num_prompt_logprobs is None
            if leader is generation or (is_short and not is_scored):
                generation.start()
            else:
                generation.start_after(leader)

    async def explain(self, known_id: str) -> Explanation:
        """Why a request went where it went; `known_id` is what the client knows, from a header or from a body."""
        return await explain(known_id, self.cluster.explain)

    async def run(self) -> None:
        """Follows the cluster until cancelled."""
        await self.cluster.run()

    def drain(self, *, refuses: bool) -> None:
        """It is about to stop. `refuses`: what comes now could be answered by another one."""
        self.is_draining = True
        self._refuses = refuses

    async def close(self) -> None:
        """Fails what is under way, says so to the workers, then closes the streams."""
        self.drain(refuses=True)
        for generation in self._routes.all():
            generation.abort(NoWorker("this gateway was shut down"))
        await self._tasks.drain(_GOODBYE_S)
        await self._tasks.cancel()
        await self.cluster.close()

    def _about(self) -> conductor_pb2.GatewayView:
        """What other gateways should know of this one."""
        return conductor_pb2.GatewayView(
            instance_id=self._instance_id,
            rpc_address=self._rpc_address,
            host=host_identity(),
            num_requests=self.num_live,
        )

    def _generation(self, wish: Wish, choice: Choice, answer: Answer) -> Generation:
        return Generation(
            request_id=choice_id(wish.request_id, choice.index),
            wish=wish,
            choice=choice,
            output=TextOutput(
                self._tokenizer.decoder(skip_special_tokens=choice.skip_special_tokens),
                choice.stops,
                choice.sampling.min_tokens,
                includes_stop=choice.includes_stop,
            ),
            reader=answer,
            surroundings=self._surroundings,
            timeout_s=self._timeout_s,
            patience_s=self._patience_s,
            traceparent=answer.root.traceparent if answer.root is not None else "",
        )

    async def _on_batch(self, instance_id: str, batch: worker_pb2.EventBatch) -> None:
        """Tokens in groups, between which others have their turn: those who wrote no faster, and new requests."""
        for report in batch.prefills:
            if (generation := self._routes.find(report.request_id)) is not None:
                event = PrefillReported(
                    attempt=generation.state.attempt, report=prefill_report_from_wire(report)
                )
                self._deliver(generation, event)
        for decoded in batch.decodes:
            if (generation := self._routes.find(decoded.request_id)) is not None:
                self._deliver(
                    generation,
                    DecodeReported(
                        attempt=generation.state.attempt, report=decode_report_from_wire(decoded)
                    ),
                )
        for number, (generation, arrived) in enumerate(self._arrivals(batch), start=1):
            self._deliver(generation, arrived)
            if number % _GROUP == 0:
                await asyncio.sleep(0)
        for failed in batch.failures:
            if (generation := self._routes.find(failed.request_id)) is not None:
                failure = WorkerFailed(
                    attempt=generation.state.attempt,
                    instance_id=instance_id,
                    error=failure_from_wire(failed.failure),
                )
                self._deliver(generation, failure)

    def _arrivals(self, batch: worker_pb2.EventBatch) -> Iterator[tuple[Generation, TokensArrived]]:
        """Each generation's tokens together, made when their turn comes."""
        by_request: dict[str, list[worker_pb2.TokenEvent]] = {}
        for event in batch.tokens:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, events in by_request.items():
            generation = self._routes.find(request_id)
            if generation is None:
                continue  # ended, or an abandoned attempt
            state = generation.state
            with_logprobs = state.sampling.num_logprobs is not None
            tokens = tuple([token_from_wire(e, with_logprobs=with_logprobs) for e in events])
            yield generation, TokensArrived(attempt=state.attempt, tokens=tokens)

    def _on_lost(self, instance_id: str, error: MoonserveError) -> None:
        moved = 0
        for generation in self._routes.all():
            attempt = generation.state.attempt
            self._deliver(generation, InstanceLost(instance_id=instance_id, error=error))
            moved += generation.state.attempt > attempt
        if moved:
            text = "%s is lost; %d of its requests go on elsewhere, or there when it is back: %s"
            log.warning(text, instance_id, moved, error.message)

    def _deliver(self, generation: Generation, event: Event) -> None:
        try:
            generation.deliver(event)
        except Exception:  # a bug met by one request must not end the stream of all others
            log.exception("failed inside the gateway", extra=of(generation.state.request_id))
            generation.abort(MoonserveError("internal error"))
