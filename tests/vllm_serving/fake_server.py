"""A server with the part of vLLM's HTTP interface that attached workers use. It continues a prompt by counting."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from moonserve.deploy.launcher.ports import free_port

MODEL_CONFIG = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "vocab_size": 1000,
    "dtype": "float32",
}
METRICS = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="4",cache_dtype="auto",engine="0",num_gpu_blocks="101"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 8.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 4.0
vllm:num_preemptions_total{engine="0",model_name="m"} 1.0
"""


@dataclass
class FakeServer:
    """`folder`: gets the model's config.json. Waits before each token but an answer's first while `gate` is clear."""

    folder: Path
    port: int = field(default_factory=free_port)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)  # a client has left during an answer
    status: int = 200  # of answers
    ends_early: bool = False
    has_connector: bool = True

    def __post_init__(self) -> None:
        self.gate.set()
        (self.folder / "config.json").write_text(json.dumps(MODEL_CONFIG))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FakeServer]:
        app = web.Application()
        app.add_routes([web.get("/{name:.*}", self._tell), web.post("/v1/completions", self._complete)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _tell(self, request: web.Request) -> web.Response:
        models = {"data": [{"id": "m", "root": str(self.folder), "max_model_len": 200}]}
        return web.Response(text={"/health": "", "/metrics": METRICS, "/v1/models": json.dumps(models)}[request.path])

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        if not body["stream"]:
            reply = {"choices": [_choice(body, 0)], "usage": {"prompt_tokens_details": {"cached_tokens": 8}}}
            if self.has_connector:
                reply["kv_transfer_params"] = {"from": "prefill"}
            return web.json_response(reply)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for index in range(body["max_tokens"]):
                await response.write(f"data: {json.dumps({'choices': [_choice(body, index)]})}\n\n".encode())
                if self.ends_early:
                    return response
                await self.gate.wait()
            await response.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.closed.set()
            raise
        return response


def _choice(body: dict[str, Any], index: int) -> dict[str, Any]:
    token_id = (body["prompt"][-1] + 1 + index) % MODEL_CONFIG["vocab_size"]
    ended = "length" if index + 1 == body["max_tokens"] else None
    choice: dict[str, Any] = {"token_ids": [token_id], "text": "", "finish_reason": ended}
    if "logprobs" in body:
        top = {f"token_id:{token_id}": -0.5, "token_id:7": -1.5}
        choice["logprobs"] = {"token_logprobs": [-0.5], "top_logprobs": [top]}
    if "prompt_logprobs" in body:
        entries = [
            {str(each): {"logprob": -2.0, "rank": 2}, "7": {"logprob": -1.0, "rank": 1}} for each in body["prompt"]
        ]
        choice["prompt_logprobs"] = [None, *entries[1:]]
    return choice
