"""Tests of replay and download against real local HTTP servers."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from moonserve.protocol.errors import ConfigError
from moonserve.traces.format import TraceRecord
from moonserve.traces.replay import ReplayConfig, _due_prompts, main, replay
from moonserve.traces.workload.fetch import FetchConfig, fetch, git_object_id
from moonserve.traces.workload.prompts import PromptBuilder

Serve = Callable[[web.Application], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as servers:

        async def start(app: web.Application) -> str:
            server = await servers.enter_async_context(TestServer(app))
            return str(server.make_url("/")).rstrip("/")

        yield start


def endpoint(bodies: list[dict[str, Any]]) -> web.Application:
    """Returns an OpenAI-compatible endpoint that answers every third request with 429."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "vocab_size": 300, "max_model_len": 100, "block_size": 4}]})

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        bodies.append(body)
        if len(bodies) % 3 == 0:
            return web.json_response({"error": {"message": "busy"}}, status=429)
        response = web.StreamResponse()
        await response.prepare(request)
        usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 4}}
        entries = [{"choices": [{"text": "x", "token_ids": [index]}]} for index in range(body["max_tokens"])]
        for entry in [*entries, {"choices": [], "usage": usage}]:
            await response.write(b"data: " + json.dumps(entry).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
    return app


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    records = (
        {"timestamp": 40 * n, "input_length": 1000 + n, "output_length": 24, "hash_ids": [0, n + 1]} for n in range(6)
    )
    return write(tmp_path / "trace.jsonl", *records)


async def test_a_replay_sends_every_request_with_exact_lengths(serve: Serve, trace: Path) -> None:
    bodies: list[dict[str, Any]] = []
    url = await serve(endpoint(bodies))
    report = await replay(ReplayConfig(trace=str(trace), url=url, scale_lengths=1 / 32, scale_outputs=1 / 8))
    assert sorted(len(body["prompt"]) for body in bodies) == sorted(round((1000 + n) / 32) for n in range(6))
    assert {body["max_tokens"] for body in bodies} == {3}
    assert all(body["prompt"][:16] == bodies[0]["prompt"][:16] for body in bodies)
    assert (report["completed"], report["rejected"], report["failed"]) == (4, 2, 0)
    assert report["total_output_tokens"] == 12
    assert report["duration"] >= 0.2
    assert report["ideal_hit_ratio"] > report["hit_ratio"] > 0


async def test_a_record_is_sent_with_its_tenant_and_priority(serve: Serve, tmp_path: Path) -> None:
    """A request has the tenant and priority of its record; if the record has none, neither has the request."""
    plain = {"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [0]}
    path = write(tmp_path / "trace.jsonl", plain, {**plain, "tenant": "alice", "priority": -2})
    bodies: list[dict[str, Any]] = []
    await replay(ReplayConfig(trace=str(path), url=await serve(endpoint(bodies))))
    said = [(body.get("user"), body.get("priority")) for body in bodies]
    assert sorted(said, key=str) == [("alice", -2), (None, None)]


async def test_requests_of_one_instant_are_sent_in_the_order_of_the_trace() -> None:
    """Requests are sent in trace order, since it decides which ones a long prompt delays, and none before it is due."""
    builder = PromptBuilder(300)
    records = [
        TraceRecord(arrived_s=0.1 * (n // 100), input_length=9, output_length=1, hash_ids=(n,), tokens_per_hash=16)
        for n in range(300)
    ]
    began_at = time.monotonic()
    paced = []
    async for index, prompt in _due_prompts(records, builder, began_at):
        assert time.monotonic() >= began_at + records[index].arrived_s
        assert prompt == builder.prompt(records[index])
        paced.append(index)
    assert paced == list(range(300))


async def test_a_trace_that_cannot_fit_is_refused_before_anything_is_sent(serve: Serve, trace: Path) -> None:
    bodies: list[dict[str, Any]] = []
    config = ReplayConfig(trace=str(trace), url=await serve(endpoint(bodies)))
    with pytest.raises(ConfigError, match="--scale-lengths"):
        await replay(config)
    assert not bodies


async def test_a_report_that_cannot_be_written_is_told_below_its_table(
    serve: Serve, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "report.json"
    options = ["--scale-lengths", "0.03125", "--scale-outputs", "0.125", "--output", str(output)]
    url = await serve(endpoint([]))
    assert await asyncio.to_thread(main, [str(trace), "--url", url, *options]) == 2
    said = capsys.readouterr()
    assert "completed 4" in said.out
    assert f"cannot write {output}: " in said.err


def hosting(files: dict[str, bytes], *, damaged: bool = False) -> web.Application:
    """Returns a server of files and of their listing in GitHub's contents format. `damaged`: digests do not match."""

    async def listing(request: web.Request) -> web.Response:
        entries = [
            {
                "name": name,
                "size": len(content),
                "sha": git_object_id(content + b"!" * damaged),
                "download_url": f"{request.url.origin()}/files/{name}",
            }
            for name, content in files.items()
        ]
        return web.json_response(entries)

    async def file(request: web.Request) -> web.Response:
        return web.Response(body=files[request.match_info["name"]])

    app = web.Application()
    app.add_routes([web.get("/listing", listing), web.get("/files/{name}", file)])
    return app


async def test_fetch_downloads_and_verifies_the_traces_only(serve: Serve, tmp_path: Path) -> None:
    files = {"a.jsonl": b"x" * 100_000, "README.md": b"no"}
    url = await serve(hosting(files))
    config = FetchConfig(into=str(tmp_path), listing=f"{url}/listing")
    written_at = set()
    for _ in range(2):
        assert await asyncio.to_thread(fetch, config) == [tmp_path / "a.jsonl"]
        written_at.add((tmp_path / "a.jsonl").stat().st_mtime_ns)
    assert len(written_at) == 1, "the second time nothing is left to do"
    assert {p.name for p in tmp_path.iterdir()} == {"a.jsonl"}
    assert (tmp_path / "a.jsonl").read_bytes() == files["a.jsonl"]


async def test_a_damaged_download_is_refused_and_leaves_nothing(serve: Serve, tmp_path: Path) -> None:
    url = await serve(hosting({"a.jsonl": b"x"}, damaged=True))
    with pytest.raises(ConfigError, match="arrived damaged"):
        await asyncio.to_thread(fetch, FetchConfig(into=str(tmp_path), listing=f"{url}/listing"))
    assert not list(tmp_path.iterdir())


def test_object_ids_are_those_of_git() -> None:
    assert git_object_id(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"
