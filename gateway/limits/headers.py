"""What a client is told of its limits, under OpenAI's names (platform.openai.com/docs/guides/rate-limits)."""

from __future__ import annotations

import math

from gateway.errors import ApiError
from gateway.limits.state import Balance, Verdict

_WORDS = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "streams": "requests under way at once",
}


def headers_of(verdict: Verdict) -> dict[str, str]:
    """`x-ratelimit-*`, lower case; nothing of limits that there are not."""
    found: dict[str, str] = {}
    for name, balance in (("requests", verdict.requests), ("tokens", verdict.tokens)):
        if balance is not None:
            found |= _of(name, balance)
    return found


def _of(name: str, balance: Balance) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{name}": str(balance.limit),
        f"x-ratelimit-remaining-{name}": str(balance.remaining),
        f"x-ratelimit-reset-{name}": duration(balance.reset_s),
    }


def duration(seconds: float) -> str:
    """As OpenAI writes it: `17ms`, `1.5s`, `6m0s`, rounded up."""
    ms = math.ceil(seconds * 1000 - 1e-6)
    if ms < 1000:
        return f"{ms}ms"
    minutes, ms = divmod(ms, 60_000)
    shown = f"{ms / 1000:g}s"
    return f"{minutes}m{shown}" if minutes else shown


def refusal(verdict: Verdict) -> ApiError:
    """429 for a verdict that refuses."""
    assert verdict.refused_by is not None
    retry_after_s = max(1, math.ceil(verdict.retry_after_s - 1e-6))
    return ApiError(
        429,
        f"this key has reached its limit of {_WORDS[verdict.refused_by]}; try again in {retry_after_s} s",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": str(retry_after_s), **headers_of(verdict)},
    )
