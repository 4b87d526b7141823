"""Events and actions of workers of both roles. Pure data."""

from dataclasses import dataclass

from moonserve.protocol.errors import MoonserveError
from moonserve.protocol.request import Endpoint, GatewayId, Placement, Request, RequestId


class Event:
    """Input of a worker's `state.handle`."""

    __slots__ = ()


class Action:
    """Output of a worker's `state.handle`, performed by its service."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PerRequest:
    """An event or action about one request."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted(Event):
    """A gateway submitted a request that the conductor placed here."""

    request: Request
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled(PerRequest, Event):
    """A request was cancelled. It may not be known yet, since the cancellation can overtake it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLost(Event):
    """A gateway is gone; its requests have no receiver any more."""

    gateway_id: GatewayId


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFound(Event):
    """The home store can be reached (again). A new epoch means an empty store."""

    store: Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChanged(Event):
    """The KV memory limit changed: there may be memory for more blocks, or only for fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """The time given by the state's `wake_at` may have come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail(PerRequest, Action):
    """Notify the gateway that the request failed here. No event follows."""

    gateway_id: GatewayId
    error: MoonserveError
