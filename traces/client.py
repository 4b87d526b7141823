"""Streaming client of an OpenAI-compatible endpoint. Records the arrival time of each token."""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import aiohttp

from moonserve.protocol.errors import ConfigError
from moonserve.protocol.latency import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Properties of a model that an endpoint reports in /v1/models."""

    name: str
    vocab_size: int | None
    max_model_len: int | None
    block_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one request."""

    status: int  # HTTP status; 0 = no response
    error: str | None
    timeline: Timeline | None  # None = no token arrived
    prompt_tokens: int = 0
    cached_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    request_id: str = ""  # the endpoint's id of the request; empty if not reported

    @property
    def succeeded(self) -> bool:
        return self.error is None and self.timeline is not None

    @property
    def rejected(self) -> bool:
        """True if the request was rejected for load; it does not count as failed."""
        return self.status == 429


class StreamClient(AbstractAsyncContextManager["StreamClient"]):
    """A session with one endpoint. Use it as an async context manager."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=2**20,
        )

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def model(self, name: str | None) -> ModelInfo:
        """Returns the model called `name`, or the first one if None. Raises ConfigError if there is none."""
        try:
            async with self._session.get(f"{self._url}/v1/models") as response:
                response.raise_for_status()
                entries = (await response.json())["data"]
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            raise ConfigError(f"no OpenAI-compatible endpoint at {self._url}: {error}") from error
        for entry in entries:
            if name in (None, entry["id"]):
                return ModelInfo(
                    name=entry["id"],
                    vocab_size=entry.get("vocab_size"),
                    max_model_len=entry.get("max_model_len"),
                    block_size=entry.get("block_size"),
                )
        raise ConfigError(f"{self._url} does not serve a model named {name!r}")

    async def is_ready(self) -> bool:
        """True if /ready answers 200."""
        try:
            async with self._session.get(f"{self._url}/ready") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def cluster(self) -> dict[str, Any]:
        """Returns the answer of moonserve's /v1/cluster."""
        async with self._session.get(f"{self._url}/v1/cluster") as response:
            response.raise_for_status()
            view: dict[str, Any] = await response.json()
            return view

    async def explain(self, request_id: str) -> dict[str, Any] | None:
        """Returns a request's last placement decision and its outcome (`conductor.placement.decision`); None if it is
        unknown."""
        async with self._session.get(f"{self._url}/v1/requests/{request_id}/explain") as response:
            if response.status != 200:
                return None
            decision: dict[str, Any] = (await response.json())["decisions"][-1]
            return decision

    async def complete(
        self,
        model: str,
        prompt: Sequence[int] | str,
        *,
        max_tokens: int,
        extra: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Streams a greedy completion of exactly `max_tokens` tokens. Endpoint failures are returned, never raised."""
        body = {
            "model": model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **(extra or {}),
        }
        encoded = json.dumps(body).encode()
        arrived_at = time.monotonic()
        try:
            return await self._stream(encoded, arrived_at)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return Outcome(status=0, error=f"{type(error).__name__}: {error}", timeline=None)

    async def _stream(self, body: bytes, arrived_at: float) -> Outcome:
        headers = {"Content-Type": "application/json"}
        url = f"{self._url}/v1/completions"
        async with self._session.post(url, data=body, headers=headers) as response:
            if response.status != 200:
                return Outcome(status=response.status, error=await response.text(), timeline=None)
            reading = _StreamState(arrived_at, response.headers.get("x-request-id", ""))
            async for event in _events(response.content):
                reading.take(event, time.monotonic())
            return reading.outcome()


class _StreamState:
    """State of one response stream."""

    def __init__(self, arrived_at: float, request_id: str) -> None:
        self._arrived_at = arrived_at
        self._request_id = request_id
        self._token_at: list[float] = []
        self._token_ids: list[int] = []
        self._usage: dict[str, Any] = {}
        self._error: str | None = "the stream ended without [DONE]"

    def take(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self._error = None
            return
        entry = json.loads(event)
        if "error" in entry:
            self._error = str(entry["error"].get("message"))
        for choice in entry.get("choices", ()):
            token_ids = choice.get("token_ids")
            # Without token ids, each chunk with text is assumed to hold one token.
            count = len(token_ids) if token_ids is not None else bool(choice.get("text"))
            self._token_ids += token_ids or ()
            self._token_at += [now] * count
        self._usage = entry.get("usage") or self._usage

    def outcome(self) -> Outcome:
        details = self._usage.get("prompt_tokens_details") or {}
        timeline = Timeline(self._arrived_at, tuple(self._token_at)) if self._token_at else None
        return Outcome(
            status=200,
            error=self._error or (None if timeline else "no token came"),
            timeline=timeline,
            prompt_tokens=self._usage.get("prompt_tokens", 0),
            cached_tokens=details.get("cached_tokens") or 0,
            token_ids=tuple(self._token_ids),
            request_id=self._request_id,
        )


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yields the data of each server-sent event."""
    async for line in content:
        if line.startswith(b"data:"):
            yield line[5:].strip()
