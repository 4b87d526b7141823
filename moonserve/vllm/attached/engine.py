"""A vLLM server that someone else runs, with the interface of an engine (`serving.service.Engine`), over HTTP.

Closing an iterator closes its connection, at which vLLM aborts the request. A server that is lost fails its requests by
PeerLost, which names this worker, so that they continue elsewhere. Does not know gateways or the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp

from moonserve.protocol.errors import ConfigError, InvalidRequest, NoWorker, PeerLost
from moonserve.protocol.request import GatewayId, PrefillReport, Request, RequestId, SamplingParams, new_id
from moonserve.vllm.attached.completions import completion_body, num_cached_of, prompt_logprobs_of, tokens_of
from moonserve.vllm.attached.server_facts import update_figures
from moonserve.vllm.serving.kv_event_state import KvEventSource
from moonserve.vllm.serving.model_description import EngineFacts
from moonserve.vllm.serving.sampling import transfer_parameters
from moonserve.vllm.serving.service import EngineFigures
from moonserve.vllm.serving.state import Generate, Generated

HEALTH_INTERVAL_S = 1.0
HEALTH_TIMEOUT_S = 5.0
MAX_SILENCES = 3
"""A server whose event loop is busy may answer late; one that refuses connections is lost at once."""
_OVERLOADED, _REFUSED = (408, 429), range(400, 500)


class ServerLost(NoWorker):
    """The server does not answer any more."""


class VllmServer:
    """The HTTP side of one server. `worker`: instance id of the worker that speaks to it, for errors."""

    def __init__(self, session: aiohttp.ClientSession, url: str, api_key: str, worker: str) -> None:
        self.url = url.rstrip("/")
        self.worker = worker
        self._session = session
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def get(self, path: str) -> str:
        """Returns the body of a reply. Raises PeerLost, or ConfigError if the API key is refused."""
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        async with (
            self._lost_as_error(),
            self._session.get(self.url + path, headers=self._headers, timeout=timeout) as reply,
        ):
            text = await reply.text()
        if reply.status in (401, 403):
            raise ConfigError(f"{self.url} refuses the API key: set MOONSERVE_ATTACH_API_KEY")
        if reply.status != 200:
            raise PeerLost(f"{self.url}{path}: status {reply.status}", worker=self.worker)
        return text

    async def complete(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the reply to a completion, or the events of its stream up to `[DONE]`. Raises InvalidRequest if the
        server refuses it, NoWorker if it fails, and PeerLost if the connection breaks before the end."""
        async with (
            self._lost_as_error(),
            self._session.post(f"{self.url}/v1/completions", json=body, headers=self._headers) as reply,
        ):
            if reply.status != 200:
                raise _error_of(reply.status, await reply.text())
            if not body["stream"]:
                yield json.loads(await reply.read())
                return
            async for line in _lines(reply.content):
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        raise PeerLost(f"{self.url} ended an answer early", worker=self.worker)

    @contextlib.asynccontextmanager
    async def _lost_as_error(self) -> AsyncIterator[None]:
        try:
            yield
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            text = f"the vLLM server {self.url} is lost: {str(error) or type(error).__name__}"
            raise PeerLost(text, worker=self.worker) from error


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yields lines of any length: the first event of a stream repeats the prompt."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.strip()


def _error_of(status: int, text: str) -> InvalidRequest | NoWorker:
    try:
        message = str(json.loads(text)["error"]["message"])
    except (KeyError, TypeError, ValueError):
        message = text[:500]
    if status in _REFUSED and status not in _OVERLOADED:
        return InvalidRequest(message)
    return NoWorker(f"vLLM failed with status {status}: {message}")


class AttachedEngine:
    """A server that answers. `model`: its name there."""

    def __init__(self, server: VllmServer, model: str, facts: EngineFacts, kv_events: KvEventSource | None) -> None:
        self.facts = facts
        self.kv_events = kv_events
        self.figures = EngineFigures()
        self.has_connector = True  # as far as is known: `find_connector`
        self._server = server
        self._model = model

    async def generate(self, wanted: Generate, salt: str = "") -> AsyncGenerator[Generated, None]:
        """As `Engine.generate`, but the server schedules by arrival. Raises PeerLost if the server is lost."""
        request, is_prefill = wanted.request, wanted.is_prefill
        transfer = transfer_parameters(request, is_prefill, wanted.kv_transfer_params) if self.has_connector else None
        body = completion_body(request, self._model, is_prefill=is_prefill, salt=salt, transfer=transfer)
        index, began_at = request.first_index, time.monotonic()
        async with contextlib.aclosing(self._server.complete(body)) as parts:
            async for part in parts:
                if "error" in part:
                    raise NoWorker(f"vLLM failed: {part['error'].get('message')}", request=request.request_id)
                for choice in part["choices"]:
                    found = part.get("kv_transfer_params")
                    tokens = tokens_of(request, choice, index, is_prefill=is_prefill)
                    index += len(tokens)
                    if tokens:
                        yield Generated(
                            request_id=request.request_id,
                            tokens=tokens,
                            report=_report(request, part, choice, time.monotonic() - began_at),
                            kv_transfer_params=json.dumps(found) if found else "",
                        )
                    if tokens and tokens[-1].finish_reason is not None:
                        return
        if index == request.first_index or not is_prefill:
            raise PeerLost("vLLM ended an answer early", request=request.request_id, worker=self._server.worker)

    async def find_connector(self) -> None:
        """Learns with a short prompt if the server offers a prompt's KV to decode servers."""
        request = Request(
            request_id=RequestId(new_id("probe")),
            gateway_id=GatewayId(""),
            token_ids=(0, 1),
            num_prompt_tokens=2,
            block_keys=(),
            sampling=SamplingParams(max_tokens=2, temperature=0.0),
        )
        async for generated in self.generate(Generate(request=request, is_prefill=True)):
            self.has_connector = bool(generated.kv_transfer_params)

    async def died(self) -> None:
        """Follows the server's health and figures. Raises ServerLost once it does not answer."""
        num_silences = 0
        while True:
            try:
                await self._server.get("/health")
                update_figures(self.figures, await self._server.get("/metrics"))
                num_silences = 0
            except PeerLost as error:
                num_silences += 1
                if num_silences == MAX_SILENCES or isinstance(error.__cause__, aiohttp.ClientConnectorError):
                    raise ServerLost(error.message) from error
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def reset_prefix_cache(self) -> None:
        """Does nothing: the cache is not only this worker's."""


def _report(request: Request, part: dict[str, Any], choice: dict[str, Any], elapsed_s: float) -> PrefillReport:
    """Returns the report of a prefill. The server does not tell how long it queued, so that counts as computing."""
    return PrefillReport(
        request_id=request.request_id,
        cached_tokens=num_cached_of(part),
        queue_s=0.0,
        load_s=0.0,
        compute_s=elapsed_s,
        prompt_logprobs=prompt_logprobs_of(request, choice),
    )
