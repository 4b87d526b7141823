"""Prompts that a prefill server holds for decode servers, each under a lease that its reader renews. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from moonserve.protocol.errors import StaleLease

T = TypeVar("T")

_MAX_ENDED = 4096


@dataclass(slots=True)
class _Held(Generic[T]):
    content: T
    expires_at: float


class HeldPrompts(Generic[T]):
    """What is held, by request id. `now` never decreases."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._held: dict[str, _Held[T]] = {}
        self._ended: dict[str, None] = {}
        """The last requests that are held no more, oldest first."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str, content: T, now: float) -> bool:
        """Holds the content for one term. Returns False if it was ended before it came."""
        if request_id in self._ended:
            return False
        self._held[request_id] = _Held(content, now + self._ttl_s)
        return True

    def renewed(self, request_id: str, now: float) -> T | None:
        """Returns what is held, for another term; None if the prompt is not computed yet.

        Raises StaleLease if it is held no more.
        """
        held = self._held.get(request_id)
        if held is not None:
            held.expires_at = now + self._ttl_s
            return held.content
        if request_id in self._ended:
            raise StaleLease("the prefill server has given this request's KV up", lease_id=request_id)
        return None

    def end(self, request_ids: Iterable[str]) -> list[T]:
        """Ends what is held for these requests, and returns it. Others will not be held any more either."""
        ended = [held.content for each in request_ids if (held := self._held.pop(each, None)) is not None]
        self._ended.update(dict.fromkeys(request_ids))
        while len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        return ended

    def overdue(self, now: float) -> list[str]:
        """Returns the requests whose lease has run out."""
        return [name for name, held in self._held.items() if held.expires_at <= now]
