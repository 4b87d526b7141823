"""Which generation an event belongs to: by the request id of its current attempt."""

from __future__ import annotations

from typing import Generic, TypeVar

from protocol.ids import RequestId

G = TypeVar("G")


class Routes(Generic[G]):
    """Live generations by the id under which workers know them now."""

    def __init__(self) -> None:
        self._routes: dict[str, G] = {}

    def __len__(self) -> int:
        return len(self._routes)

    def add(self, request_id: RequestId, generation: G) -> None:
        self._routes[request_id] = generation

    def remove(self, request_id: RequestId) -> None:
        self._routes.pop(request_id, None)

    def find(self, request_id: str) -> G | None:
        """None for requests that ended and attempts that were abandoned."""
        return self._routes.get(request_id)

    def all(self) -> list[G]:
        return list(self._routes.values())
