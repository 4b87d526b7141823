"""What a lean server can be called for: the unary methods that a servicer implements, found by its descriptor.

And protocols that a proven connection can be handed over to.
"""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import ServiceDescriptor

PROTO_PACKAGE = "moonserve"


@dataclass(frozen=True, slots=True)
class Method:
    path: str
    """As generated stubs name it: /package.Service/Method."""
    deserialize: Callable[[bytes], Any]
    handler: Callable[[Any, Any], Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class HandOver:
    """Not a call: the connection goes over to somebody who speaks another protocol on it."""

    path: str
    admit: Callable[[], None]
    """Raises a MoonserveError when nobody is there to take it."""
    take: Callable[[socket.socket], None]
    """Gets the socket, non-blocking, and with it all that follows the reply."""


def service_descriptor(name: str) -> ServiceDescriptor:
    """The descriptor of a service whose generated module has been imported."""
    service: ServiceDescriptor = descriptor_pool.Default().FindServiceByName(
        f"{PROTO_PACKAGE}.{name}"
    )
    return service


def unary_methods(service: ServiceDescriptor, servicer: object) -> Iterator[Method]:
    """Leaves out streams, and what the servicer inherits from the generated base class, which implements nothing."""
    for method in service.methods:
        handler = getattr(servicer, method.name)
        if inspect.iscoroutinefunction(handler):
            message_class = message_factory.GetMessageClass(method.input_type)
            path = f"/{service.full_name}/{method.name}"
            yield Method(path, message_class.FromString, handler)
