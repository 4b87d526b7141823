"""Resumable streams: the meaning of an event's id, and the part of the output that a returning client already has.

Rule: no state is kept anywhere. An answer is a function of its body and its seed. A client that lost its connection
sends the body again with the last id that it saw, to this gateway or another one. The answer is computed again, and the
part that the client has is not sent. An id is not trusted: it must fit the body, and it says no more than the client
could request in the body itself.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from starlette.requests import Request

from moonserve.gateway.errors import ApiError, unsupported
from moonserve.gateway.generation.events import Choice, Piece
from moonserve.gateway.openai.reply_format import ReplyHeader
from moonserve.gateway.openai.request_schema import SamplingBody

HEADER = "Last-Event-ID"

# Characters of a request's id (`gateway.http.middleware`), after the prefix of its kind.
_EVENT_ID = re.compile(
    r"(?P<id>[A-Za-z0-9._:/+=@-]{1,192});(?P<created>\d{1,12});(?P<seed>\d{1,20});(?P<digest>[0-9a-f]{16})"
    r";(?P<counts>\d{1,10}(?:,\d{1,10})*)"
)
_DIGEST_BYTES = 8

B = TypeVar("B", bound=SamplingBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventId:
    """Position in a stream: `num_tokens` of each choice have been sent, with the text that was certain by then."""

    response_id: str
    created: int  # Unix seconds
    seed: int  # seed of the first choice
    digest: str  # digest of the request
    num_tokens: tuple[int, ...]

    def __str__(self) -> str:
        counts = ",".join(map(str, self.num_tokens))
        return f"{self.response_id};{self.created};{self.seed};{self.digest};{counts}"


def last_event(request: Request, body: SamplingBody) -> EventId | None:
    """Returns the last event that the client of an interrupted stream has, or None. Raises ApiError."""
    given = request.headers.get(HEADER, "")
    if not given or not body.stream:
        return None
    if request.url.path.endswith(("/responses", "/messages")):
        raise unsupported(
            "streams of responses and messages cannot be resumed; GET /v1/responses/ID returns completed responses",
            HEADER,
        )
    return parse_event_id(given)


def parse_event_id(text: str) -> EventId:
    """Parses an event id. Raises ApiError if this server cannot have sent it."""
    found = _EVENT_ID.fullmatch(text)
    if found is None:
        raise _refused("it is not the id of an event from this server")
    return EventId(
        response_id=found["id"],
        created=int(found["created"]),
        seed=int(found["seed"]),
        digest=found["digest"],
        num_tokens=tuple(map(int, found["counts"].split(","))),
    )


def seeded(body: B, last: EventId | None) -> B:
    """Returns the body with the seed that the gateway drew for the interrupted stream."""
    return body if last is None or body.seed is not None else body.model_copy(update={"seed": last.seed})


def with_known_tokens(choices: Sequence[Choice], last: EventId | None, fingerprint: str) -> tuple[Choice, ...]:
    """Returns the choices, each with the number of tokens that the client already has. Raises ApiError if the id
    belongs to another request, or to a model with another `fingerprint`."""
    if last is None:
        return tuple(choices)
    if last.digest != digest_of(choices, fingerprint) or len(last.num_tokens) != len(choices):
        raise _refused("the body or the model differs from that of the interrupted stream")
    return tuple(replace(choice, num_known=known) for choice, known in zip(choices, last.num_tokens, strict=True))


def digest_of(choices: Sequence[Choice], fingerprint: str) -> str:
    """Returns a digest that is equal if the same tokens must result."""
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=_DIGEST_BYTES)
    for choice in choices:
        sampling = choice.sampling
        stop_ids, bias = sorted(sampling.stop_token_ids), sorted(sampling.logit_bias.items())
        rest = replace(sampling, stop_token_ids=frozenset(), logit_bias={})
        known = (choice.token_ids, stop_ids, bias, rest, choice.stops, choice.includes_stop)
        digest.update(repr(known).encode())
    return digest.hexdigest()


class EventIds:
    """Generates the ids of one stream's events."""

    def __init__(self, header: ReplyHeader, choices: Sequence[Choice], fingerprint: str) -> None:
        self._begin = EventId(
            response_id=header.id,
            created=header.created,
            seed=choices[0].sampling.seed,
            digest=digest_of(choices, fingerprint),
            num_tokens=(0,) * len(choices),
        )
        self._num_tokens = [0] * len(choices)

    def of(self, piece: Piece) -> str:
        """Returns the `id:` line that precedes this piece's event."""
        self._num_tokens[piece.index] += len(piece.tokens)
        return f"id: {replace(self._begin, num_tokens=tuple(self._num_tokens))}\n"


def _refused(why: str) -> ApiError:
    return ApiError(
        400,
        f"{HEADER}: {why}; send the body without this header to start again",
        param=HEADER,
        code="invalid_event_id",
    )
