"""The gateway between HTTP and the cluster: accepts wishes, keeps their generations, hands out what workers send.

Everything runs in one event loop. A batch of events from a worker is sorted by request and given to each generation
synchronously, so that a reply's writer wakes once per batch. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

from gateway.cluster.figures import DecodeFigures, Figures
from gateway.cluster.view import Cluster
from gateway.config import GatewayConfig
from gateway.generation.answer import Answer
from gateway.generation.attempts import Generation, Surroundings
from gateway.generation.detokenize import TextOutput
from gateway.generation.events import (
    Choice,
    Event,
    InstanceLost,
    Reported,
    TokensArrived,
    Wish,
    WorkerFailed,
)
from gateway.generation.state import LIVE, choice_id
from gateway.tasks import LoggedTasks
from gateway.text.tokenizer import Tokenizer
from protocol.errors import MoonserveError, NoWorker
from protocol.ids import GatewayId, new_id
from protocol.logs import of
from protocol.machine import host_identity
from protocol.metrics import RequestMetrics
from protocol.pb import conductor_pb2, worker_pb2
from protocol.request import DecodeReport, PrefillReport
from protocol.rpc import Channels, failure_from_wire
from protocol.tracing import Tracer
from protocol.wire import from_message, token_from_wire

log = logging.getLogger(__name__)

_GROUP = 32  # choices whose tokens are handed over in one go: half a millisecond
_GOODBYE_S = 1.0


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
        """`rpc_address`: where others of this host read its metrics; "" = nowhere."""
        assert config.conductor is not None
        self._config = config
        self._instance_id = config.instance_id
        self.figures = Figures()
        self._rpc_address = rpc_address
        self._tokenizer = tokenizer
        self._routes: dict[str, Generation] = {}  # by the id under which workers know them now
        self._tasks = LoggedTasks()
        # Streams of an earlier life must not be taken for ours.
        gateway_id = GatewayId(new_id(config.instance_id))
        self.cluster = Cluster(
            channels,
            config.conductor,
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
            tracer=tracer,
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
        """How many generations are in which phase (`gateway.generation.state.Phase`), all named."""
        counts = Counter({phase.value: 0 for phase in sorted(LIVE)})
        counts.update(generation.state.phase.value for generation in self._routes.values())
        return counts

    @property
    def num_live_elsewhere(self) -> int:
        """Number of requests at the other gateways, a second ago."""
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
        block_size = self.cluster.facts().layout.block_size
        leaders: dict[tuple[int, ...], Generation] = {}
        for choice, generation in zip(wish.choices, generations, strict=True):
            leader = leaders.setdefault(choice.token_ids, generation)
            is_short = len(choice.token_ids) <= block_size
            is_scored = leader.is_scored and choice.sampling.num_prompt_logprobs is None
            if leader is generation or (is_short and not is_scored):
                generation.start()
            else:
                generation.start_after(leader)

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
        for generation in list(self._routes.values()):
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
            answer=answer,
            surroundings=self._surroundings,
            timeout_s=self._config.request_timeout_s,
            patience_s=self._config.worker_patience_s,
            traceparent=answer.root.traceparent if answer.root is not None else "",
        )

    async def _on_batch(self, instance_id: str, batch: worker_pb2.EventBatch) -> None:
        """Tokens in groups, between which others have their turn: those who wrote no faster, and new requests."""
        reports: list[PrefillReport | DecodeReport] = [
            *(from_message(PrefillReport, each) for each in batch.prefills),
            *(from_message(DecodeReport, each) for each in batch.decodes),
        ]
        for report in reports:
            if (generation := self._routes.get(report.request_id)) is not None:
                event = Reported(attempt=generation.state.attempt, report=report)
                self._deliver(generation, event)
        for number, (generation, arrived) in enumerate(self._arrivals(batch), start=1):
            self._deliver(generation, arrived)
            if number % _GROUP == 0:
                await asyncio.sleep(0)
        for failed in batch.failures:
            if (generation := self._routes.get(failed.request_id)) is not None:
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
            generation = self._routes.get(request_id)
            if generation is None:
                continue  # ended, or an abandoned attempt
            state = generation.state
            with_logprobs = state.sampling.num_logprobs is not None
            tokens = tuple([token_from_wire(e, with_logprobs=with_logprobs) for e in events])
            yield generation, TokensArrived(attempt=state.attempt, tokens=tokens)

    def _on_lost(self, instance_id: str, error: MoonserveError) -> None:
        moved = 0
        for generation in list(self._routes.values()):
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
