"""Simulated clients, which know the expected tokens of their requests and record the outcomes.

A request ends exactly once: with all its tokens and the right finish reason, in a `MoonserveError`, by its client's
cancellation, or with its gateway. No token may differ from those of the undisturbed run.
"""

import random
from dataclasses import dataclass, field

from moonserve.gateway.generation.events import Choice, GenerationRequest
from moonserve.protocol.errors import Cancelled, MoonserveError
from moonserve.protocol.request import SamplingParams
from tests.simulation.loop import VirtualLoop
from tests.simulation.model import VOCABULARY, undisturbed
from tests.simulation.processes.head import Front

FINISHED, LEFT, GATEWAY_DIED = "finished", "left", "gateway died"


@dataclass(eq=False)
class Asked:
    """A request of a client, its expected tokens and its outcome."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    leaves_after: int | None  # cancels after this many tokens; None = never
    tokens: list[int] = field(default_factory=list)
    asked_at: float = 0.0
    ended_at: float = 0.0
    outcome: str = ""  # empty = running
    error: MoonserveError | None = None
    problem: str = ""

    def __post_init__(self) -> None:
        self.expected, self.reason = undisturbed(self.prompt, self.sampling)

    @classmethod
    def draw(cls, number: int, rng: random.Random, max_model_len: int) -> "Asked":
        """Draws a random request. Prompts share prefixes, so that blocks are shared."""
        family = rng.randrange(3)
        shared = [(family * 7 + position) % VOCABULARY for position in range(rng.randint(0, 16))]
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
        prompt = (*shared, *own)
        sampling = SamplingParams(
            max_tokens=rng.randint(1, max_model_len - len(prompt) - 1) if rng.random() < 0.2 else rng.randint(1, 12),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.getrandbits(32),
            stop_token_ids=frozenset(rng.sample(range(VOCABULARY), rng.choice((0, 0, 2)))),
        )
        leaves_after = rng.randint(0, 4) if rng.random() < 0.1 else None
        return cls(f"r{number}", prompt, sampling, leaves_after)

    def wish(self, arrived_at: float) -> GenerationRequest:
        choice = Choice(index=0, token_ids=self.prompt, sampling=self.sampling)
        return GenerationRequest(request_id=self.request_id, choices=(choice,), arrived_at=arrived_at)

    async def run(self, front: Front, loop: VirtualLoop) -> None:
        """Runs the request in the gateway's life, as its HTTP server does."""
        self.asked_at = loop.time()
        try:
            answer = front.gateway.generate(self.wish(self.asked_at))
            while not answer.is_complete:
                if self.leaves_after is not None and len(self.tokens) >= self.leaves_after:
                    answer.cancel(Cancelled("the client left"))
                for piece in await answer.take():
                    self._take([token.token_id for token in piece.tokens], piece.finish_reason)
            self._end(FINISHED, loop)
        except Cancelled as error:
            self.error = error
            self._end(LEFT if self.leaves_after is not None else error.code, loop)
        except MoonserveError as error:
            self.error = error
            self._end(error.code, loop)

    def gateway_died(self, loop: VirtualLoop) -> None:
        if not self.outcome:
            self._end(GATEWAY_DIED, loop)

    def _take(self, tokens: list[int], reason: str | None) -> None:
        self.tokens += tokens
        if self.tokens != self.expected[: len(self.tokens)]:
            self.problem = f"{self.request_id} got {self.tokens}, not {self.expected}"
        elif reason is not None and (len(self.tokens), reason) != (len(self.expected), self.reason):
            self.problem = f"{self.request_id} ended with {reason} after {len(self.tokens)} tokens"

    def _end(self, outcome: str, loop: VirtualLoop) -> None:
        if self.outcome:
            self.problem = f"{self.request_id} ended twice: {self.outcome}, {outcome}"
        self.outcome, self.ended_at = outcome, loop.time()
