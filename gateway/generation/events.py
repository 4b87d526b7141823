"""What one request asks of the cluster, what happens to it (events) and what is to be done about it (actions).

`attempt` counts placements from 1; each has its own cluster-wide request id, so that what an abandoned attempt still
sends can be told apart. Pure data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.generation.avoidance import Incarnation
from protocol.errors import MoonserveError
from protocol.ids import RequestId
from protocol.prompt_logprobs import PromptLogprobs
from protocol.request import (
    DecodeReport,
    Endpoint,
    FinishReason,
    Placement,
    PrefillReport,
    SamplingParams,
    Token,
)

OpenSince = Mapping[Incarnation, float]
"""When the connections began on which workers speak now."""


class ReportPhase(StrEnum):
    """What the conductor is told about a placement."""

    FIRST_TOKEN = "first_token"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDue:
    """The request was accepted, or its pause before placing again is over."""

    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    attempt: int
    placement: Placement
    replaced: frozenset[str] = frozenset()  # its instances that have a successor already
    open_since: OpenSince = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceFailed:
    attempt: int
    error: MoonserveError
    may_return: bool = False  # there were workers until a moment ago
    open_since: OpenSince = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitFailed:
    attempt: int
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensArrived:
    attempt: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A worker told what its part took."""

    attempt: int
    report: PrefillReport | DecodeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """A worker gave the request up."""

    attempt: int
    instance_id: str
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLost:
    """The stream from a worker broke; whether it died or only the connection cannot be told."""

    instance_id: str
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """The request must end now: the client left, the deadline passed, the gateway stops."""

    error: MoonserveError


Event = (
    PlaceDue | Placed | PlaceFailed | SubmitFailed | TokensArrived | Reported | WorkerFailed | InstanceLost | Aborted
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Ask the conductor, then Placed or PlaceFailed."""

    attempt: int
    request_id: RequestId
    token_ids: tuple[int, ...]  # the prompt and what has been generated
    max_tokens: int  # still to come
    excluded: frozenset[Incarnation]
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Hand the request to the placement's prefill worker; only failure returns as an event."""

    attempt: int
    request_id: RequestId
    token_ids: tuple[int, ...]
    placement: Placement
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """PlaceDue after `delay_s`."""

    attempt: int
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAt:
    """Tell the workers of an attempt to let go of it."""

    request_id: RequestId
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Tell the conductor what became of a placement."""

    request_id: RequestId
    phase: ReportPhase
    elapsed_s: float = 0.0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefill: PrefillReport | None = None  # of this attempt, where it is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New output of one choice, for the client; `finish_reason` is set on the last one."""

    index: int  # of the choice
    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None = None  # with its first piece, where they are wanted
    is_known: bool = False  # the client has it, from an earlier connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The request ends in this error."""

    error: MoonserveError


Action = Place | Submit | Pause | CancelAt | Report | Piece | Fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One continuation of one prompt."""

    index: int  # in the reply
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    includes_stop: bool = False  # what ended it is part of its text
    num_known: int = 0  # first tokens that the client has, from a stream that broke off


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """All choices of one request and what they share."""

    request_id: str
    arrived_at: float  # monotonic seconds; its last byte
    client_id: str = ""  # its header x-request-id, as the client knows it
    session_id: str = ""  # of the client's conversation; empty = it names none
    choices: tuple[Choice, ...]
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    traceparent: str = ""  # of the client's own trace, as it came
    ttft_slo_s: float = 0.0  # 0 = the conductor's default
    tbt_slo_s: float = 0.0
