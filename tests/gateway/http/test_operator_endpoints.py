"""Health, readiness, metrics, the dashboard, and the gateway process itself."""

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import pytest

from moonserve.__main__ import main
from moonserve.gateway.generation.request_timing import PHASES
from moonserve.gateway.http import operator_endpoints
from moonserve.protocol.errors import PeerLost
from tests.gateway.conftest import CHAT_PATH, MODEL, TEXT, TEXT_PATH, clients_of, get, post, running_gateway
from tests.gateway.scripted_cluster import Run, ScriptedCluster, failing

ASSETS = Path(operator_endpoints.__file__).with_name("assets")


async def test_metrics_follow_requests(http: aiohttp.ClientSession, cluster: ScriptedCluster) -> None:
    cluster.cached_tokens = 1
    usage = (await post(http, TEXT_PATH, TEXT))["usage"]
    text = await get(http, "/metrics")

    def value(name: str, more: str = "") -> float:
        found = re.search(rf'^{name}{{engine="[^"]+"{more},model_name="demo"}} (\S+)', text, re.M)
        assert found, name
        return float(found[1])

    assert value("vllm:prompt_tokens_total") == usage["prompt_tokens"]
    assert value("vllm:generation_tokens_total") == 6
    assert value("vllm:time_to_first_token_seconds_count") == value("vllm:e2e_request_latency_seconds_count") == 1
    assert value("vllm:inter_token_latency_seconds_count") == 5
    assert value("vllm:prefix_cache_hits_total") == value("vllm:prompt_tokens_cached_total") == 1
    assert value("vllm:external_prefix_cache_queries_total") == usage["prompt_tokens"] - 1
    assert value("vllm:request_params_max_tokens_sum") == value("vllm:request_max_num_generation_tokens_sum") == 6
    assert value("vllm:iteration_tokens_total_sum") == 6
    for name in ("params_n", "inference_time_seconds", "time_per_output_token_seconds"):
        assert value(f"vllm:request_{name}_count") == 1
    assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0
    assert value("vllm:request_success_total", ',finished_reason="length"') == 1


async def test_operator_endpoints_reply(http: aiohttp.ClientSession) -> None:
    view = json.loads(await get(http, "/v1/cluster"))
    assert view["ready"] is True
    names = [i["instance_id"] for i in view["instances"]]
    assert names == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert set(view["instances"][0]) >= {"role", "rpc_address", "load", "num_blocks"}
    for path, asked in (("/", "v1/chat/completions"), ("/dashboard", "assets/dashboard.js")):
        page = await get(http, path)
        assert asked in page
        assert not re.search(r'(src|href)="(?!assets/|data:,|\.|dashboard)', page), "nothing from elsewhere"
    assert json.loads(await get(http, "/version"))["version"]
    assert json.loads(await get(http, "/health"))["status"] == "ok"


async def test_assets_need_no_key_are_cached_and_load_nothing_from_elsewhere(cluster: ScriptedCluster) -> None:
    async with clients_of(cluster, api_key=("one",)) as http:
        for file in ASSETS.iterdir():
            text = re.sub(r"/\*! https://github\S+|http://www.w3.org/2000/svg", "", file.read_text())
            assert not re.search(r"@import|https?://|url\((?!#)", text)
            async with http.get(f"/assets/{file.name}") as reply:
                assert ("immutable" in reply.headers["cache-control"]) == ("uplot" in file.name)
                known = {"If-None-Match": reply.headers["etag"]}
            async with http.get(f"/assets/{file.name}", headers=known) as reply:
                assert reply.status == 304
        await get(http, "/assets/..%2Froutes.py", 404)
        await get(http, "/v1/history", 401)


async def test_explain_has_the_times_that_this_gateway_measured(http: aiohttp.ClientSession) -> None:
    request_id = (await post(http, TEXT_PATH, TEXT | {"n": 2}))["id"].removeprefix("cmpl-")
    timings = json.loads(await get(http, f"/v1/requests/{request_id}/explain"))["timings"]
    assert sorted(timings) == [request_id, f"{request_id}.1"]
    for timing in timings.values():
        phases = [timing[f"{phase}_s"] for phase in PHASES]
        assert sum(phases) + timing["unaccounted_s"] == pytest.approx(timing["e2e_s"], abs=1e-4)
        arrivals = timing["arrivals_s"]
        assert (arrivals, arrivals[0]) == (sorted(arrivals), pytest.approx(timing["ttft_s"], abs=1e-3))


@pytest.mark.parametrize(
    ("path", "prompt", "prefix"),
    [
        (TEXT_PATH, {"prompt": "hello"}, "cmpl-"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "hi"}]}, "chatcmpl-"),
    ],
)
async def test_explain_finds_a_request_by_any_of_its_ids(
    http: aiohttp.ClientSession, path: str, prompt: dict[str, Any], prefix: str
) -> None:
    for headers in ({"X-Request-Id": "abc"}, {"X-Request-Id": "cmpl-abc"}, {}):
        async with http.post(path, json=prompt | {"max_tokens": 2}, headers=headers) as reply:
            request_id = (await reply.json())["id"]
            named = reply.headers["x-request-id"]
            assert headers.get("X-Request-Id", "req-") in named
        assert request_id.startswith(prefix)
        for accepted in (request_id, request_id.removeprefix(prefix), named):
            reply = json.loads(await get(http, f"/v1/requests/{accepted}/explain"))
            assert reply["request_id"] == request_id.removeprefix(prefix)
            assert [d["because"] for d in reply["decisions"]] == ["scripted"]


async def test_explain_returns_all_choices_and_attempts_of_the_latest_request_with_an_id(
    http: aiohttp.ClientSession, cluster: ScriptedCluster
) -> None:
    named = {"X-Request-Id": "abc"}
    first_id = (await post(http, TEXT_PATH, TEXT, **named))["id"].removeprefix("cmpl-")
    cluster.scripts = [failing(PeerLost("gone"))]
    request_id = (await post(http, TEXT_PATH, TEXT | {"n": 2}, **named))["id"].removeprefix("cmpl-")
    assert request_id != first_id
    explained = json.loads(await get(http, "/v1/requests/abc/explain"))
    assert explained["request_id"] == request_id
    ids = sorted(decision["request_id"] for decision in explained["decisions"])
    again = f"{request_id}~2"
    assert ids in (
        sorted([request_id, again, f"{request_id}.1"]),
        sorted([request_id, f"{request_id}.1", f"{request_id}.1~2"]),
    )
    error = json.loads(await get(http, "/v1/requests/unknown/explain", 404))["error"]
    assert (error["code"], error["type"]) == ("not_found", "invalid_request_error")
    assert "the last 4096 requests" in error["message"]


async def test_gateway_without_workers_or_conductor_is_alive_but_not_ready(cluster: ScriptedCluster) -> None:
    cluster.dead |= {"decode-0", "decode-1"}
    for _ in range(2):
        async with clients_of(cluster) as http:
            await get(http, "/health")
            await get(http, "/ready", 503)
            async with http.post(TEXT_PATH, json=TEXT) as reply:
                assert (reply.status, reply.headers["retry-after"]) == (503, "1")
                assert (await reply.json())["error"]["code"] == "no_worker"
        await cluster.server.stop(0)


async def test_stop_lets_requests_finish_then_fails_the_rest(cluster: ScriptedCluster) -> None:
    finishing = asyncio.Event()

    async def finishes(run: Run) -> None:
        run.prefill_done()
        await finishing.wait()
        run.decoded(*(run.token(index) for index in range(1, 6)))

    cluster.scripts = [finishes, AsyncMock()]  # the second one sends nothing
    async with aiohttp.ClientSession() as http:
        async with running_gateway(cluster, drain_s=0.5) as url:
            asking = [asyncio.ensure_future(http.post(f"{url}/v1/completions", json=TEXT)) for _ in range(2)]
            await cluster.until(lambda: len(cluster.reports) == 1 and len(cluster.submissions) == 2)
            asyncio.get_running_loop().call_later(0.05, finishing.set)
        replies = await asyncio.gather(*asking)
        assert sorted(reply.status for reply in replies) == [200, 503]
        for reply in replies:
            reply.close()


@pytest.mark.usefixtures("untouched")  # the gateway's main function changes them once it has read its flags
@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--model", "x", "--prot", "1"],
        ["--model", "x"],
        ["--model", str(MODEL), "--port", "taken"],
        ["--model", str(MODEL), "--port", "70000"],
    ],
)
def test_invalid_flags_and_a_port_in_use_print_one_line_and_exit_with_2(
    flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = [port if flag == "taken" else flag for flag in flags]
        assert main(["gateway", *flags, "--conductor", "127.0.0.1:1"]) == 2
    [line] = capfd.readouterr().err.strip().splitlines()
    assert port not in flags or (port in line and "--port" in line)
