"""What lean channels lack of a `grpc.Channel`, so that stubs of services that also have streams can be made."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


class UnaryOnly:
    """Streams are refused when they are called."""

    def unary_stream(
        self, path: str, *_of_grpc: object, **_more_of_grpc: object
    ) -> Callable[..., NoReturn]:
        def refuse(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{path} is a stream; call it over gRPC")

        return refuse

    stream_unary = stream_stream = unary_stream
