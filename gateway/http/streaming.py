"""HTTP replies that wait for the cluster: a stream or a whole body. Both watch the client's connection.

Lean ASGI: a chunk goes directly to the server's `send`, which waits while the client's buffers are full. If a client
leaves or stops reading, its request in the cluster is ended. Nothing is sent before the first output, so that every
failure up to then has its own status.
"""

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moonserve.gateway.errors import ApiError, reply_for
from moonserve.gateway.generation.events import Piece
from moonserve.gateway.generation.output_queue import Answer, join_pieces
from moonserve.gateway.http.connection import Connection
from moonserve.gateway.http.stream_resumption import EventIds
from moonserve.gateway.openai.prompts import Prompt
from moonserve.gateway.openai.reply_format import ReplyFormat
from moonserve.protocol.errors import Cancelled, MoonserveError
from moonserve.protocol.process.logs import request_extra

log = logging.getLogger(__name__)


class ClusterReply(Response, ABC):
    """A reply whose content comes from a running answer."""

    def __init__(self, answer: Answer, slow_client_s: float) -> None:
        super().__init__()
        self._answer = answer
        self._slow_client_s = slow_client_s
        self._connection: Connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive), name="client watcher")
        self._connection = Connection.of(scope)
        try:
            await self._deliver(send)
        except TimeoutError:
            whose = request_extra(scope["state"]["cluster_id"])
            log.info("the client did not read for %.0f s", self._slow_client_s, extra=whose)
            self._connection.abort()
        finally:
            watcher.cancel()
            # Does nothing if all choices are finished; otherwise no client is left to read the rest.
            self._answer.cancel(Cancelled("the client disconnected"))

    async def _watch(self, receive: Receive) -> None:
        """Ends the request in the cluster as soon as the client has left."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._answer.cancel(Cancelled("the client disconnected"))

    @abstractmethod
    async def _deliver(self, send: Send) -> None:
        """Sends the whole reply. Raises TimeoutError if the client does not read."""

    async def _send_error(self, send: Send, error: MoonserveError) -> None:
        reply = _error_for_client(error)
        await self._start(send, reply.status, b"application/json", reply.headers)
        await self._send(send, reply.body(), more=False)

    async def _start(self, send: Send, status: int, content_type: bytes, headers: Mapping[str, str]) -> None:
        raw = [(b"content-type", content_type)]
        raw += [(name.encode(), value.encode()) for name, value in headers.items()]
        placement = self._answer.placement
        if placement is not None:
            raw.append((b"x-prefill-instance-id", placement.prefill.instance_id.encode()))
            raw.append((b"x-decode-instance-id", placement.decode.instance_id.encode()))
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        """Sends a part of the body. Raises TimeoutError if the client takes nothing for too long."""
        message = {"type": "http.response.body", "body": body, "more_body": more}
        if not self._connection.may_wait():  # nearly always; a timeout costs 5 % of a chunk's time
            await send(message)
            if self._connection.may_wait():
                async with asyncio.timeout(self._slow_client_s):
                    await self._connection.drained()
            return
        async with asyncio.timeout(self._slow_client_s):
            await send(message)
            await self._connection.drained()


class WholeReply(ClusterReply):
    """One JSON body, sent once all output is complete."""

    def __init__(
        self,
        answer: Answer,
        slow_client_s: float,
        render: Callable[[list[Piece]], dict[str, Any]],
    ) -> None:
        """`render` receives one piece per choice."""
        super().__init__(answer, slow_client_s)
        self._render = render

    async def _deliver(self, send: Send) -> None:
        pieces: list[Piece] = []
        try:
            while not self._answer.is_complete:
                pieces += await self._answer.take()
        except MoonserveError as error:
            await self._send_error(send, error)
            return
        whole = self._render(sorted(join_pieces(pieces), key=lambda piece: piece.index))
        body = json.dumps(whole, separators=(",", ":")).encode()
        await self._start(send, 200, b"application/json", {"content-length": str(len(body))})
        await self._send(send, body, more=False)


class StreamReply(ClusterReply):
    """Server-sent events, with one write per wake-up."""

    def __init__(
        self,
        answer: Answer,
        slow_client_s: float,
        reply_format: ReplyFormat,
        trailing_chunks: Callable[[], str],
        event_ids: EventIds | None = None,
        *,
        is_resumed: bool = False,
    ) -> None:
        """`trailing_chunks` returns the chunks after all output. `is_resumed`: the client has the first chunks."""
        super().__init__(answer, slow_client_s)
        self._reply_format = reply_format
        self._trailing_chunks = trailing_chunks
        self._event_ids = event_ids
        self._is_resumed = is_resumed

    async def _deliver(self, send: Send) -> None:
        try:
            pieces = await self._answer.take()
        except MoonserveError as error:
            await self._send_error(send, error)
            return
        await self._start(send, 200, b"text/event-stream; charset=utf-8", {"cache-control": "no-cache"})
        try:
            await self._stream(send, pieces)
        except MoonserveError as error:
            self._connection.close_after_reply()
            await self._send(send, self._reply_format.failure(_error_for_client(error)), more=False)

    async def _stream(self, send: Send, pieces: list[Piece]) -> None:
        text = "" if self._is_resumed else self._reply_format.first()
        while True:
            text += "".join(map(self._event, pieces))
            if self._answer.is_complete:
                break
            if text:
                await self._send(send, text.encode(), more=True)
            text = ""
            pieces = await self._answer.take(self._write_directly)
        text += self._trailing_chunks()
        await self._send(send, text.encode() + self._reply_format.ending(), more=False)

    def _event(self, piece: Piece) -> str:
        """Returns the piece's event. Known pieces are formatted too, because chunks depend on earlier ones."""
        chunk = self._reply_format.piece(piece)
        event_id = self._event_ids.of(piece) if self._event_ids is not None else ""
        return event_id + chunk if chunk and not piece.is_known else ""

    def _write_directly(self, piece: Piece) -> bool:
        """Writes an event directly if the client keeps up; waking the reply's task took 30 % of a chunk's time."""
        if not self._connection.takes_chunks():
            return False
        if text := self._event(piece):
            self._connection.write_chunk(text.encode())
        return True


def _error_for_client(error: MoonserveError) -> ApiError:
    """Returns the error for the client. Drops the traceback, whose frames hold the request, which holds the error."""
    error.__traceback__ = None
    return reply_for(error)


def usage_of(answer: Answer, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Returns the reply's token counts. A prompt counts once, even if several choices continue it."""
    states = [generation.state for generation in answer.generations]
    per_prompt = len(states) // len(prompts)
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    completion_tokens = sum(len(state.generated) for state in states)
    cached = sum(state.cached_tokens for state in states[::per_prompt])
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
