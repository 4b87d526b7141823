"""What one HTTP request asks of the cluster, after validation and tokenizing. Frozen, free of I/O."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.request import SamplingParams


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
