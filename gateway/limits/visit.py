"""One request's way through its key's limits: known by its key, looked at, admitted, settled.

The front door opens a visit before anything is read and leaves it when all is sent, whatever happened; the endpoints
ask for admission once they know how many tokens are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.errors import ApiError
from gateway.keys.record import KeyLimits
from gateway.limits.headers import headers_of, refusal
from gateway.limits.limiter import Limiter


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose a request is, as far as its key says. Without keys it is nobody's."""

    key_id: str = ""
    tenant: str | None = None  # None: keys do not say who asks
    priority: int | None = None  # the most urgent that it may have
    limits: KeyLimits = field(default_factory=KeyLimits)

    def priority_of(self, asked: int | None) -> int:
        """Lower is more urgent; a key's is a bound, and what it has when the request says nothing."""
        if self.priority is None:
            return asked or 0
        return self.priority if asked is None else max(asked, self.priority)


class Visit:
    """`request_id`: unique in the cluster."""

    def __init__(self, identity: Identity, request_id: str, limiter: Limiter) -> None:
        self.identity = identity
        self.headers: dict[str, str] = {}  # of the reply
        self._request_id = request_id
        self._limiter = limiter
        self._used: Callable[[], int] | None = None  # once admitted

    def look(self) -> None:
        """Raises ApiError (429) where a limit is reached already. Charges nothing."""
        if not self.identity.limits.is_unlimited:
            verdict = self._limiter.look(self.identity.key_id, self.identity.limits)
            if verdict.refused_by is not None:
                raise refusal(verdict)

    async def admit(self, prompt_tokens: int, output_tokens: int, used: Callable[[], int]) -> None:
        """Charges the request with what it is expected to take; `used` says at the end what it took.

        Raises ApiError: 429 when a limit is reached, 400 for a prompt that no waiting makes short enough.
        """
        limits = self.identity.limits
        if limits.is_unlimited:
            return
        if limits.tokens_per_minute is not None and prompt_tokens > limits.tokens_per_minute:
            raise ApiError(
                400,
                f"the prompt has {prompt_tokens} tokens, more than the {limits.tokens_per_minute} per minute that this "
                "key may use",
                code="tokens_per_minute_exceeded",
            )
        verdict = await self._limiter.admit(
            self.identity.key_id, self._request_id, limits, prompt_tokens + output_tokens
        )
        if verdict.refused_by is not None:
            raise refusal(verdict)
        self._used = used
        self.headers |= headers_of(verdict)

    def leave(self) -> None:
        """Settles what was admitted. Once."""
        if self._used is None:
            return
        used, self._used = self._used, None
        self._limiter.settle(self.identity.key_id, self._request_id, self.identity.limits, used())
