"""Data of one request: what it asks of the cluster, events that happen to it, and actions that follow. Pure data.

`attempt` counts placements from 1. Each attempt has its own cluster-wide request id, so that late messages of an
abandoned attempt can be told apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moonserve.gateway.cluster.avoided_instances import Incarnation
from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.request import (
    NO_HINTS,
    CacheHints,
    DecodeReport,
    Endpoint,
    FinishReason,
    Placement,
    PrefillReport,
    PromptLogprobs,
    RequestId,
    RequestPhase,
    SamplingParams,
    Token,
)

OpenSince = Mapping[Incarnation, float]
"""Opening time of the current connection to each worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDue:
    """The request was accepted, or the pause before its next placement is over."""

    attempt: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    attempt: int
    placement: Placement
    replaced: frozenset[str] = frozenset()  # instances of the placement that already have a successor
    open_since: OpenSince = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceFailed:
    attempt: int
    error: MoonserveError
    may_return: bool = False  # workers were there until a moment ago
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
    """A worker reported the durations of its part."""

    attempt: int
    report: PrefillReport | DecodeReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """A worker gave up the request."""

    attempt: int
    instance_id: str
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLost:
    """The stream from a worker broke. The worker may be dead, or only the connection."""

    instance_id: str
    error: MoonserveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """The request must end now: the client left, the deadline passed or the gateway stops."""

    error: MoonserveError


Event = (
    PlaceDue | Placed | PlaceFailed | SubmitFailed | TokensArrived | Reported | WorkerFailed | InstanceLost | Aborted
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Request a placement from the conductor; the result is Placed or PlaceFailed."""

    attempt: int
    request_id: RequestId
    token_ids: tuple[int, ...]  # the prompt and the tokens generated so far
    max_tokens: int  # tokens still to generate
    excluded: frozenset[Incarnation]
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Submit the request to the placement's prefill worker; only a failure returns as an event."""

    attempt: int
    request_id: RequestId
    token_ids: tuple[int, ...]
    placement: Placement
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Deliver PlaceDue after `delay_s`."""

    attempt: int
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAttempt:
    """Cancel an attempt at its workers."""

    request_id: RequestId
    endpoints: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Report the outcome of a placement to the conductor."""

    request_id: RequestId
    phase: RequestPhase
    elapsed_s: float = 0.0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_draft_tokens: int = 0  # of these, guessed and computed by the decode worker, and right
    num_accepted_tokens: int = 0
    prefill: PrefillReport | None = None  # of this attempt, if known


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New output of one choice for the client; `finish_reason` is set on the last piece."""

    index: int  # position of the choice
    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None = None  # with the first piece, if requested
    is_known: bool = False  # the client already has it, from an earlier connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The request ends with this error."""

    error: MoonserveError


Action = Place | Submit | Pause | CancelAttempt | Report | Piece | Fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One continuation of one prompt."""

    index: int  # position in the reply
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stops: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    includes_stop: bool = False  # the text includes the stop string or token that ended it
    num_known: int = 0  # first tokens that the client already has, from a stream that broke off


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """All choices of one request and the options that they share."""

    request_id: str
    arrived_at: float  # monotonic seconds; arrival of the last byte
    model: str = ""  # as the client names it
    client_id: str = ""  # header x-request-id, the client's own id of the request
    session_id: str = ""  # id of the client's conversation; empty if it names none
    has_tools: bool = False
    cache_hints: CacheHints = NO_HINTS
    expected_return: str = ""  # time and source of the expected return in the hints
    choices: tuple[Choice, ...]
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    traceparent: str = ""  # of the client's own trace, unchanged
    ttft_slo_s: float = 0.0  # 0 = the conductor's default
    tbt_slo_s: float = 0.0

    @property
    def session(self) -> str:
        """Name of the session among those of all tenants; empty = none."""
        return f"{self.tenant}\0{self.session_id}" if self.session_id else ""
