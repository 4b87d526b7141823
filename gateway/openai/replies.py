"""Replies that wait for the cluster: a stream or a whole body, each with an eye on the client; and whole bodies' JSON.

Lean ASGI: nothing stands between a chunk and the server's `send`, which waits while the client's buffers are full. A
client that leaves or stops reading ends its request in the cluster. Nothing is sent before the first output, so that
every failure up to then has its own status.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.generation.answer import Answer
from gateway.generation.events import Piece
from gateway.http.connection import Connection
from gateway.http.errors import ApiError, reply_for
from gateway.openai.chunks import Chunks, Heading, Wants
from gateway.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)
from gateway.openai.prompts import Prompt
from gateway.openai.resuming import EventIds
from gateway.openai.schema import SamplingBody
from gateway.text.tokenizer import Tokenizer
from protocol.errors import Cancelled, MoonserveError
from protocol.logs import of
from protocol.request import Token

log = logging.getLogger(__name__)


class ClusterReply(Response, ABC):
    """A reply whose content comes from an answer under way."""

    def __init__(self, answer: Answer, slow_client_s: float) -> None:
        super().__init__()
        self._answer = answer
        self._slow_client_s = slow_client_s
        self._connection = Connection(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive), name="client watcher")
        self._connection = Connection.of(scope)
        try:
            await self._deliver(send)
        except TimeoutError:
            whose = of(scope["state"]["cluster_id"])
            log.info("the client did not read for %.0f s", self._slow_client_s, extra=whose)
            self._connection.abort()
        finally:
            watcher.cancel()
            # Nothing happens when all is finished; else nobody is left to read the rest.
            self._answer.cancel(Cancelled("the client went away"))

    async def _watch(self, receive: Receive) -> None:
        """Ends the request in the cluster as soon as the client has left."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._answer.cancel(Cancelled("the client went away"))

    @abstractmethod
    async def _deliver(self, send: Send) -> None:
        """Sends the whole reply. Raises TimeoutError when the client does not read."""

    async def _send_error(self, send: Send, error: MoonserveError) -> None:
        reply = _told(error)
        await self._start(send, reply.status, b"application/json", reply.headers)
        await self._send(send, reply.body(), more=False)

    async def _start(
        self, send: Send, status: int, content_type: bytes, headers: Mapping[str, str]
    ) -> None:
        raw = [(b"content-type", content_type)]
        raw += [(name.encode(), value.encode()) for name, value in headers.items()]
        placement = self._answer.placement
        if placement is not None:
            raw.append((b"x-prefill-instance-id", placement.prefill.instance_id.encode()))
            raw.append((b"x-decode-instance-id", placement.decode.instance_id.encode()))
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        """Raises TimeoutError when the client takes nothing for too long."""
        message = {"type": "http.response.body", "body": body, "more_body": more}
        if not self._connection.may_wait():  # nearly always; a timeout is 5 % of a chunk's time
            await send(message)
            if self._connection.may_wait():
                async with asyncio.timeout(self._slow_client_s):
                    await self._connection.drained()
            return
        async with asyncio.timeout(self._slow_client_s):
            await send(message)
            await self._connection.drained()


class WholeReply(ClusterReply):
    """One JSON body, once everything is there."""

    def __init__(
        self,
        answer: Answer,
        slow_client_s: float,
        render: Callable[[list[list[Piece]]], bytes],
    ) -> None:
        """`render` gets the pieces of each choice."""
        super().__init__(answer, slow_client_s)
        self._render = render

    async def _deliver(self, send: Send) -> None:
        collected: list[list[Piece]] = [[] for _ in self._answer.generations]
        try:
            while not self._answer.is_complete:
                for piece in await self._answer.take():
                    collected[piece.index].append(piece)
        except MoonserveError as error:
            await self._send_error(send, error)
            return
        body = self._render(collected)
        length = {"content-length": str(len(body))}
        await self._start(send, 200, b"application/json", length)
        await self._send(send, body, more=False)


class StreamReply(ClusterReply):
    """Server-sent events, one write per wake-up."""

    def __init__(
        self,
        answer: Answer,
        slow_client_s: float,
        chunks: Chunks,
        usage: Callable[[], dict[str, Any]] | None,
        timing: Callable[[], str] | None = None,
        event_ids: EventIds | None = None,
        *,
        is_resumed: bool = False,
    ) -> None:
        """`usage` and `timing`, a chunk, are asked at the end, when the client wants to know. `is_resumed`: the client
        has what comes before any output."""
        super().__init__(answer, slow_client_s)
        self._chunks = chunks
        self._usage = usage
        self._timing = timing
        self._event_ids = event_ids
        self._is_resumed = is_resumed

    async def _deliver(self, send: Send) -> None:
        try:
            pieces = await self._answer.take()
        except MoonserveError as error:
            await self._send_error(send, error)
            return
        await self._start(
            send, 200, b"text/event-stream; charset=utf-8", {"cache-control": "no-cache"}
        )
        try:
            await self._stream(send, pieces)
        except MoonserveError as error:
            self._connection.close_after_reply()
            await self._send(send, self._chunks.failure(_told(error)), more=False)

    async def _stream(self, send: Send, pieces: list[Piece]) -> None:
        text = "" if self._is_resumed else self._chunks.first()
        while True:
            text += "".join(map(self._event, pieces))
            if self._answer.is_complete:
                break
            if text:
                await self._send(send, text.encode(), more=True)
            text = ""
            pieces = await self._answer.take(self._write_now)
        if self._timing is not None:
            text += self._timing()
        if self._usage is not None:
            text += self._chunks.usage(self._usage())
        await self._send(send, text.encode() + self._chunks.ending(), more=False)

    def _event(self, piece: Piece) -> str:
        """Also made of what the client has: chunks depend on those before."""
        chunk = self._chunks.piece(piece)
        event_id = self._event_ids.of(piece) if self._event_ids is not None else ""
        return event_id + chunk if chunk and not piece.is_known else ""

    def _write_now(self, piece: Piece) -> bool:
        """Where the client keeps up; waking the reply's task took 30 % of a chunk's time."""
        if not self._connection.takes_chunks():
            return False
        if text := self._event(piece):
            self._connection.write_chunk(text.encode())
        return True


def _told(error: MoonserveError) -> ApiError:
    """What the client gets to know. The frames that the error came through hold the request, which holds the error."""
    error.__traceback__ = None
    return reply_for(error)


# What whole bodies say

MessageOf = Callable[[Sequence[Piece]], tuple[dict[str, Any], str | None]]
"""A choice's message, and why it ended, from its pieces."""


def render_chat(
    heading: Heading,
    wants: Wants,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    choices: Sequence[Sequence[Piece]],
    usage: dict[str, Any],
    message_of: MessageOf | None = None,
) -> bytes:
    """A `chat.completion`; `choices` are the pieces of each. `message_of`: None = their text is the message."""
    rendered = []
    for index, pieces in enumerate(choices):
        tokens = _tokens(pieces)
        message, finish_reason = (message_of or _text_message)(pieces)
        rendered.append(
            {
                "index": index,
                "message": message,
                "logprobs": {"content": chat_logprobs(tokens, tokenizer)}
                if wants.logprobs
                else None,
                "finish_reason": finish_reason,
                **_token_ids(wants, tokens),
            }
        )
    prompt = _prompt(wants, tokenizer, prompt_token_ids, choices[0])
    return _body("chat.completion", heading, rendered, usage, prompt)


def render_completion(
    heading: Heading,
    wants: Wants,
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[Sequence[int]],
    echoes: Sequence[str],
    choices: Sequence[Sequence[Piece]],
    usage: dict[str, Any],
) -> bytes:
    """A `text_completion`; one entry of the sequences per choice."""
    rendered = []
    for index, pieces in enumerate(choices):
        tokens = _tokens(pieces)
        logprobs = None
        if wants.logprobs:
            logprobs, _ = completion_logprobs(
                tokens,
                tokenizer,
                len(echoes[index]),
                skip_special_tokens=wants.skip_special_tokens,
            )
            found, num_top = pieces[0].prompt_logprobs, wants.echoed_logprobs
            if found is not None and num_top is not None:
                ids = prompt_token_ids[index]
                logprobs = joined(
                    echoed_logprobs(ids, echoes[index], found, num_top, tokenizer), logprobs
                )
        prompt = _prompt(wants, tokenizer, prompt_token_ids[index], pieces)
        rendered.append(
            {
                "index": index,
                "text": echoes[index] + _text(pieces),
                "logprobs": logprobs,
                "finish_reason": pieces[-1].finish_reason,
                **prompt,
                **_token_ids(wants, tokens),
            }
        )
    return _body("text_completion", heading, rendered, usage, {})


def _body(
    kind: str,
    heading: Heading,
    choices: list[dict[str, Any]],
    usage: dict[str, Any],
    extra: dict[str, Any],
) -> bytes:
    body = {
        "id": heading.id,
        "object": kind,
        "created": heading.created,
        "model": heading.model,
        "choices": choices,
        "usage": usage,
        **extra,
    }
    return json.dumps(body, separators=(",", ":")).encode()


def _prompt(
    wants: Wants, tokenizer: Tokenizer, token_ids: Sequence[int], pieces: Sequence[Piece]
) -> dict[str, Any]:
    """What the client wants to see of a prompt; `pieces`: of a choice of it."""
    told: dict[str, Any] = {"prompt_token_ids": token_ids} if wants.token_ids else {}
    if wants.prompt_logprobs is not None:
        told["prompt_logprobs"] = prompt_logprobs(
            token_ids, pieces[0].prompt_logprobs, wants.prompt_logprobs, tokenizer
        )
    return told


def _text_message(pieces: Sequence[Piece]) -> tuple[dict[str, Any], str | None]:
    message = {"role": "assistant", "content": _text(pieces), "refusal": None}
    return message, pieces[-1].finish_reason


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _tokens(pieces: Sequence[Piece]) -> list[Token]:
    return [token for piece in pieces for token in piece.tokens]


def _token_ids(wants: Wants, tokens: Sequence[Token]) -> dict[str, Any]:
    return {"token_ids": [token.token_id for token in tokens]} if wants.token_ids else {}


def with_timing(body: SamplingBody, reply: bytes, answer: Answer) -> bytes:
    """A reply's JSON object with `x_timing`, where the client wants that."""
    if not body.x_timing:
        return reply
    return reply[:-1] + b',"x_timing":' + json.dumps(answer.timing()).encode() + b"}"


def usage_of(answer: Answer, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """A prompt counts once, however many choices continue it."""
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
