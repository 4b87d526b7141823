"""Gateway between HTTP and the cluster: accepts requests, owns their generations, dispatches workers' events.

Everything runs in one event loop. A batch of events from a worker is grouped by request and delivered to each
generation synchronously, so that a reply's writer wakes once per batch. This module does not know HTTP.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from moonserve.gateway.cluster.cluster_client import ClusterClient
from moonserve.gateway.cluster.history import InstanceEvents
from moonserve.gateway.cluster.request_metrics import DecodeMetrics, RecentFigures, RequestMetrics
from moonserve.gateway.config import GatewayConfig
from moonserve.gateway.generation.events import (
    Choice,
    Event,
    GenerationRequest,
    InstanceLost,
    Reported,
    TokensArrived,
    WorkerFailed,
)
from moonserve.gateway.generation.output_queue import Answer
from moonserve.gateway.generation.request_runner import Generation, GenerationContext
from moonserve.gateway.generation.request_state import LIVE, choice_id
from moonserve.gateway.generation.session_returns import SessionReturns
from moonserve.gateway.text.detokenizer import TextOutput
from moonserve.gateway.text.tokenizer import Tokenizer
from moonserve.protocol.errors import MoonserveError, NoWorker
from moonserve.protocol.pb import conductor_pb2, worker_pb2
from moonserve.protocol.process.event_loop import LoggedTasks
from moonserve.protocol.process.logs import request_extra
from moonserve.protocol.process.machine import host_identity
from moonserve.protocol.process.tracing import Tracer
from moonserve.protocol.request import DecodeReport, GatewayId, PrefillReport, new_id
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.protocol.rpc.wire import failure_from_wire, from_message, token_from_wire

log = logging.getLogger(__name__)

_MAX_BATCH = 32  # choices whose tokens are delivered without a break; takes half a millisecond
_CANCEL_TIMEOUT_S = 1.0


class Gateway:
    """Accepts requests and follows them to their end."""

    def __init__(
        self,
        config: GatewayConfig,
        channels: Channels,
        tokenizer: Tokenizer,
        metrics: RequestMetrics,
        tracer: Tracer,
        rpc_address: str,
    ) -> None:
        """`rpc_address`: where other processes of this host read the metrics; "" = nowhere."""
        assert config.conductor is not None
        self._config = config
        self._instance_id = config.instance_id
        self.figures = RecentFigures()
        self.events = InstanceEvents()
        self._decode_metrics = DecodeMetrics(metrics)
        self._rpc_address = rpc_address
        self._tokenizer = tokenizer
        self._routes: dict[str, Generation] = {}  # keyed by the current attempt's id
        self._tasks = LoggedTasks()
        # A new id per start: streams of an earlier run of this gateway must not be mistaken for this one's.
        gateway_id = GatewayId(new_id(config.instance_id))
        self.cluster = ClusterClient(
            channels,
            config.conductor,
            gateway_id,
            on_batch=self._on_batch,
            on_lost=self._on_lost,
            on_view=self._on_view,
            describe_self=self._describe_self,
        )
        self._context = GenerationContext(
            gateway_id=gateway_id,
            cluster=self.cluster,
            tasks=self._tasks,
            metrics=metrics,
            routes=self._routes,
            tracer=tracer,
            figures=self.figures,
            returns=SessionReturns(),
        )
        self.is_draining = False
        self._refuses = False

    @property
    def is_ready(self) -> bool:
        return self.cluster.is_ready and not self.is_draining

    @property
    def num_live(self) -> int:
        """Number of generations that have not ended."""
        return len(self._routes)

    def phases(self) -> Counter[str]:
        """Returns the number of generations in each live phase (`gateway.generation.request_state.Phase`), including
        zeros."""
        counts = Counter({phase.value: 0 for phase in sorted(LIVE)})
        counts.update(generation.state.phase.value for generation in self._routes.values())
        return counts

    @property
    def num_live_elsewhere(self) -> int:
        """Number of requests at the other gateways, about a second ago."""
        gateways = self.cluster.view.gateways if self.cluster.view is not None else ()
        return sum(g.num_requests for g in gateways if g.instance_id != self._instance_id)

    def generate(self, request: GenerationRequest) -> Answer:
        """Starts the generations of a request. Raises NoWorker if the gateway is stopping."""
        if self._refuses:
            raise NoWorker("this gateway is shutting down")
        request = self._with_return(request)
        metrics = self._context.metrics
        answer = Answer(request, self._context.tracer.begin("request", request.traceparent), metrics)
        metrics.num_choices.add(len(request.choices))
        metrics.max_tokens.add(request.choices[0].sampling.max_tokens)
        answer.generations = [self._generation(request, choice, answer) for choice in request.choices]
        self._start(request, answer.generations)
        return answer

    def _with_return(self, request: GenerationRequest) -> GenerationRequest:
        """Returns the request with a predicted return in its hints if it names a session and no time. A time counts
        from the end of the reply, for which the mean duration of replies is added."""
        hints, returns, predicted = request.cache_hints, self._context.returns, None
        if request.session:
            kind = "requests with tools" if request.has_tools else "requests without tools"
            predicted = returns.began(request.session, kind, request.arrived_at)
        if not hints.store or hints.low_priority:
            return request
        if hints.return_within_s is not None:
            within_s, source = hints.return_within_s + returns.reply_s, "the client's hint"
        elif predicted is not None:
            within_s, source = predicted.within_s, f"the pauses of {predicted.source}"
        else:
            return request
        text = f"within {within_s:.1f} s, by {source}"
        return replace(request, cache_hints=replace(hints, return_within_s=within_s), expected_return=text)

    def _start(self, request: GenerationRequest, generations: Sequence[Generation]) -> None:
        """Starts choices so that equal prompts share blocks, if they fill more than one, and log-probabilities: the
        first choice computes them for the others."""
        block_size = self.cluster.model_info().layout.block_size
        leaders: dict[tuple[int, ...], Generation] = {}
        for choice, generation in zip(request.choices, generations, strict=True):
            leader = leaders.setdefault(choice.token_ids, generation)
            is_short = len(choice.token_ids) <= block_size
            is_scored = leader.is_scored and choice.sampling.num_prompt_logprobs is None
            if leader is generation or (is_short and not is_scored):
                generation.start()
            else:
                generation.start_after(leader)

    def drain(self, *, refuses: bool) -> None:
        """Announces that this gateway is about to stop. `refuses`: reject new requests; another gateway can answer
        them."""
        self.is_draining = True
        self._refuses = refuses

    async def close(self) -> None:
        """Fails all running generations, notifies the workers, then closes the streams."""
        self.drain(refuses=True)
        for generation in list(self._routes.values()):
            generation.abort(NoWorker("this gateway was shut down"))
        await self._tasks.drain(_CANCEL_TIMEOUT_S)
        await self._tasks.cancel()
        await self.cluster.close()

    def _describe_self(self) -> conductor_pb2.GatewayView:
        """Returns what other gateways should know about this one."""
        return conductor_pb2.GatewayView(
            instance_id=self._instance_id,
            rpc_address=self._rpc_address,
            host=host_identity(),
            num_requests=self.num_live,
        )

    def _generation(self, request: GenerationRequest, choice: Choice, answer: Answer) -> Generation:
        return Generation(
            request_id=choice_id(request.request_id, choice.index),
            request=request,
            choice=choice,
            output=TextOutput(
                self._tokenizer.decoder(skip_special_tokens=choice.skip_special_tokens),
                choice.stops,
                choice.sampling.min_tokens,
                includes_stop=choice.includes_stop,
            ),
            listener=answer,
            context=self._context,
            timeout_s=self._config.request_timeout_s,
            patience_s=self._config.worker_patience_s,
            traceparent=answer.root.traceparent if answer.root is not None else "",
        )

    def _on_view(self, view: conductor_pb2.ClusterView) -> None:
        self._decode_metrics.take(view)
        self.events.take(view, time.time())

    async def _on_batch(self, instance_id: str, batch: worker_pb2.EventBatch) -> None:
        """Delivers a batch of events. Tokens come in groups, between which slow writers and new requests get their
        turn."""
        reports: list[PrefillReport | DecodeReport] = [
            *(from_message(PrefillReport, each) for each in batch.prefills),
            *(from_message(DecodeReport, each) for each in batch.decodes),
        ]
        for report in reports:
            if (generation := self._routes.get(report.request_id)) is not None:
                self._deliver(generation, Reported(attempt=generation.state.attempt, report=report))
        if batch.tokens:
            self._context.metrics.step_tokens.add(len(batch.tokens))
        for number, (generation, arrived) in enumerate(self._group_tokens(batch), start=1):
            self._deliver(generation, arrived)
            if number % _MAX_BATCH == 0:
                await asyncio.sleep(0)
        for failed in batch.failures:
            if (generation := self._routes.get(failed.request_id)) is not None:
                failure = WorkerFailed(
                    attempt=generation.state.attempt, instance_id=instance_id, error=failure_from_wire(failed.failure)
                )
                self._deliver(generation, failure)

    def _group_tokens(self, batch: worker_pb2.EventBatch) -> Iterator[tuple[Generation, TokensArrived]]:
        """Yields each generation's tokens together, converted when their turn comes."""
        by_request: dict[str, list[worker_pb2.TokenEvent]] = {}
        for event in batch.tokens:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, events in by_request.items():
            generation = self._routes.get(request_id)
            if generation is None:
                continue  # the request has ended, or its attempt was abandoned
            state = generation.state
            with_logprobs = state.sampling.num_logprobs is not None
            tokens = tuple([token_from_wire(e, with_logprobs=with_logprobs) for e in events])
            yield generation, TokensArrived(attempt=state.attempt, tokens=tokens)

    def _on_lost(self, instance_id: str, error: MoonserveError) -> None:
        num_moved = 0
        for generation in list(self._routes.values()):
            attempt = generation.state.attempt
            self._deliver(generation, InstanceLost(instance_id=instance_id, error=error))
            num_moved += generation.state.attempt > attempt
        if num_moved:
            text = "%s is lost; %d of its requests continue on other workers, or on it when it returns: %s"
            log.warning(text, instance_id, num_moved, error.message)

    def _deliver(self, generation: Generation, event: Event) -> None:
        try:
            generation.deliver(event)
        except Exception:  # a bug in one request must not end the stream of all others
            log.exception("a bug in the gateway ended the request", extra=request_extra(generation.state.request_id))
            generation.abort(MoonserveError("internal error"))
