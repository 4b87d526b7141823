"""Streams that go on at another connection, of this gateway or another one: what an event's id says, and what a client
that comes back with one has already.

Rule: nothing is kept anywhere. An answer is a function of its body and its seed, so a client that lost its connection
sends the body again with the last id that it saw; the answer is computed again, and what the client has is not sent.
An id is not believed: it must fit the body, and says no more than the client could ask for in the body itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from starlette.requests import Request

from gateway.generation.events import Choice, Piece
from gateway.http.errors import ApiError, unsupported
from gateway.openai.chunks import Heading
from gateway.openai.schema import SamplingBody

HEADER = "Last-Event-ID"

# What a request's id may be made of (`gateway.http.middleware`), behind the prefix of its kind.
_EVENT_ID = re.compile(
    r"(?P<id>[A-Za-z0-9._:/+=@-]{1,192});(?P<created>\d{1,12});(?P<seed>\d{1,20});(?P<digest>[0-9a-f]{16})"
    r";(?P<counts>\d{1,10}(?:,\d{1,10})*)"
)
_DIGEST_BYTES = 8

B = TypeVar("B", bound=SamplingBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventId:
    """Where a stream is: `num_tokens` of each choice have been sent, with the text that was certain by then."""

    response_id: str
    created: int  # Unix seconds
    seed: int  # of the first choice
    digest: str  # of what was asked
    num_tokens: tuple[int, ...]

    def __str__(self) -> str:
        counts = ",".join(map(str, self.num_tokens))
        return f"{self.response_id};{self.created};{self.seed};{self.digest};{counts}"


def last_event(request: Request, body: SamplingBody) -> EventId | None:
    """What the client of a stream that broke off saw last. Raises ApiError."""
    given = request.headers.get(HEADER, "")
    if not given or not body.stream:
        return None
    if request.url.path.endswith("/responses"):
        raise unsupported(
            "streams of responses cannot be resumed; GET /v1/responses/ID has those that were completed",
            HEADER,
        )
    return parse(given)


def parse(text: str) -> EventId:
    """Raises ApiError for what is no event id of ours."""
    found = _EVENT_ID.fullmatch(text)
    if found is None:
        raise _refused("it is no id of an event that this server sent")
    return EventId(
        response_id=found["id"],
        created=int(found["created"]),
        seed=int(found["seed"]),
        digest=found["digest"],
        num_tokens=tuple(map(int, found["counts"].split(","))),
    )


def seeded(body: B, last: EventId | None) -> B:
    """The body with the seed that the gateway had drawn for it."""
    if last is None or body.seed is not None:
        return body
    return body.model_copy(update={"seed": last.seed})


def without_known(choices: Sequence[Choice], last: EventId | None, fingerprint: str) -> tuple[Choice, ...]:
    """The choices, of which the client has so many tokens already. Raises ApiError where the id is of another request,
    or of a model with another `fingerprint`."""
    if last is None:
        return tuple(choices)
    if last.digest != digest_of(choices, fingerprint) or len(last.num_tokens) != len(choices):
        raise _refused("the body, or the model, is not the one that the interrupted stream had")
    return tuple(replace(choice, num_known=known) for choice, known in zip(choices, last.num_tokens, strict=True))


def digest_of(choices: Sequence[Choice], fingerprint: str) -> str:
    """Equal where the tokens must be."""
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=_DIGEST_BYTES)
    for choice in choices:
        sampling = choice.sampling
        stop_ids, bias = sorted(sampling.stop_token_ids), sorted(sampling.logit_bias.items())
        rest = replace(sampling, stop_token_ids=frozenset(), logit_bias={})
        known = (choice.token_ids, stop_ids, bias, rest, choice.stops, choice.includes_stop)
        digest.update(repr(known).encode())
    return digest.hexdigest()


class EventIds:
    """The ids of one stream's events."""

    def __init__(self, heading: Heading, choices: Sequence[Choice], fingerprint: str) -> None:
        self._begin = EventId(
            response_id=heading.id,
            created=heading.created,
            seed=choices[0].sampling.seed,
            digest=digest_of(choices, fingerprint),
            num_tokens=(0,) * len(choices),
        )
        self._num_tokens = [0] * len(choices)

    def of(self, piece: Piece) -> str:
        """The line before the event that this piece makes."""
        self._num_tokens[piece.index] += len(piece.tokens)
        return f"id: {replace(self._begin, num_tokens=tuple(self._num_tokens))}\n"


def _refused(why: str) -> ApiError:
    return ApiError(
        400,
        f"{HEADER}: {why}; send the body without the header to begin again",
        param=HEADER,
        code="invalid_event_id",
    )
