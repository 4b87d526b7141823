"""Events and actions of workers of both roles. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import MoonserveError
from protocol.ids import GatewayId, RequestId
from protocol.request import Endpoint, Placement, Request


class Event:
    """What can happen to a worker: input of its `state.handle`."""

    __slots__ = ()


class Action:
    """What a worker does next: output of its `state.handle`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted(Event):
    """A gateway brought a request that the conductor placed here."""

    request: Request
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled(Event):
    """The client went away. The request may be unknown yet: the cancellation can overtake it."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLost(Event):
    """Nobody is left to hear the tokens of this gateway's requests."""

    gateway_id: GatewayId


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFound(Event):
    """The home store can be reached (again); a new epoch is an empty store."""

    store: Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChanged(Event):
    """There may be memory for more blocks, or only for fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """The instant that the state's `wake_at` named may have come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail(Action):
    """Tell the gateway that the request ended without a result here. Not answered."""

    gateway_id: GatewayId
    request_id: RequestId
    error: MoonserveError
