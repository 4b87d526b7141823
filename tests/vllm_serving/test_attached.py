"""Workers beside a vLLM server that is asked over HTTP: its tokens, what is refused, and its loss."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from moonserve.conductor.config import ConductorConfig
from moonserve.conductor.service import serve as serve_conductor
from moonserve.protocol.errors import ConfigError, InvalidRequest, MoonserveError, NoWorker, PeerLost
from moonserve.protocol.pb import conductor_pb2, conductor_pb2_grpc
from moonserve.protocol.process.lifecycle import Lifecycle
from moonserve.protocol.request import Request
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.vllm.attached import engine as attached
from moonserve.vllm.attached.completions import REFUSED
from moonserve.vllm.attached.engine import AttachedEngine, ServerLost, VllmServer
from moonserve.vllm.attached.server_facts import facts_of, model_config, update_figures
from moonserve.vllm.attached.worker import AttachedConfig, serve_prefill
from moonserve.vllm.serving.service import EngineFigures
from moonserve.vllm.serving.state import Generate, Generated
from tests.patience import PATIENCE_S, answered
from tests.prefill_worker.builders import make_request
from tests.services import serving
from tests.vllm_serving.fake_server import METRICS, MODEL_CONFIG, FakeServer

_PROMPT = tuple(range(20))
_CARD = {"max_model_len": 200}


@pytest.fixture(name="fake")
async def fixture_fake(tmp_path: Path) -> AsyncIterator[FakeServer]:
    async with FakeServer(tmp_path).running() as server:
        yield server


@asynccontextmanager
async def _engine(fake: FakeServer) -> AsyncIterator[AttachedEngine]:
    async with aiohttp.ClientSession() as session:
        facts = facts_of(_CARD, METRICS, str(fake.folder), model_config(str(fake.folder)), 16)
        yield AttachedEngine(VllmServer(session, fake.url, "", "prefill-0"), "m", facts, None)


async def _generated(fake: FakeServer, request: Request, salt: str = "", **options: Any) -> list[Generated]:
    async with _engine(fake) as engine:
        return [each async for each in engine.generate(Generate(request=request, **options), salt)]


def _tokens(parts: list[Generated]) -> list[int]:
    return [token.token_id for part in parts for token in part.tokens]


async def test_a_decode_server_streams_the_rest_of_an_answer_with_the_prefill_servers_parameters(
    fake: FakeServer,
) -> None:
    request = make_request("r", (*_PROMPT, 20), num_emitted=1)
    parts = await _generated(fake, request, salt="s", kv_transfer_params='{"from": "prefill"}')
    assert _tokens(parts) == [21, 22, 23, 24, 25, 26, 27]
    assert [token.index for part in parts for token in part.tokens] == list(range(1, 8))
    assert parts[-1].tokens[-1].finish_reason == "length"
    [body] = fake.bodies
    assert body["kv_transfer_params"] == {"from": "prefill"}
    assert (body["prompt"], body["max_tokens"], body["cache_salt"]) == ([*_PROMPT, 20], 7, "s")
    assert (body["temperature"], body["ignore_eos"], body["repetition_penalty"]) == (0.0, True, 1.0)


async def test_a_prefill_server_gives_one_token_and_the_parameters_for_the_decode_server(fake: FakeServer) -> None:
    [part] = await _generated(fake, make_request("r", _PROMPT), is_prefill=True)
    assert [(token.token_id, token.finish_reason) for token in part.tokens] == [(20, None)]
    assert (part.kv_transfer_params, part.report.cached_tokens) == ('{"from": "prefill"}', 8)
    assert fake.bodies[0]["kv_transfer_params"]["do_remote_decode"]


async def test_a_server_without_the_connector_is_noticed_and_gets_no_parameters(fake: FakeServer) -> None:
    fake.has_connector = False
    async with _engine(fake) as engine:
        await engine.find_connector()
        [part] = [each async for each in engine.generate(Generate(request=make_request("r", _PROMPT), is_prefill=True))]
    assert part.kv_transfer_params == ""
    assert "kv_transfer_params" not in fake.bodies[-1]


async def test_log_probabilities_come_with_tokens_and_prompt(fake: FakeServer) -> None:
    request = make_request("r", _PROMPT)
    scored = replace(request, sampling=replace(request.sampling, num_logprobs=1, num_prompt_logprobs=1))
    [part] = await _generated(fake, scored, is_prefill=True)
    assert part.tokens[0].logprobs is not None
    assert (part.tokens[0].logprobs.sampled, part.tokens[0].logprobs.top) == (-0.5, ((20, -0.5),))
    found = part.report.prompt_logprobs
    assert found is not None
    assert (len(found), found.ranks[0], found.top_ids[0, 0], found.top_logprobs[0, 0]) == (19, 2, 7, -1.0)


@pytest.mark.parametrize("name", REFUSED)
async def test_a_parameter_that_looks_at_the_whole_answer_is_refused_by_name(fake: FakeServer, name: str) -> None:
    values = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "grammar": 'start: "a"', "bad_words": ((1,),)}
    request = make_request("r", _PROMPT)
    with pytest.raises(InvalidRequest, match=name):
        await _generated(fake, replace(request, sampling=replace(request.sampling, **{name: values[name]})))
    assert fake.bodies == []


@pytest.mark.parametrize(("status", "error"), [(400, InvalidRequest), (503, NoWorker)])
async def test_a_refusal_is_told_apart_from_a_failure(
    fake: FakeServer, status: int, error: type[MoonserveError]
) -> None:
    fake.status = status
    with pytest.raises(error, match="no"):
        await _generated(fake, make_request("r", _PROMPT))


async def test_an_answer_that_ends_early_or_a_server_that_is_gone_is_a_loss_that_names_the_worker(
    fake: FakeServer, tmp_path: Path
) -> None:
    fake.ends_early = True
    gone = FakeServer(tmp_path)
    for server in (fake, gone):
        with pytest.raises(PeerLost) as lost:
            await _generated(server, make_request("r", _PROMPT))
        assert lost.value.ids["worker"] == "prefill-0"
    async with _engine(gone) as engine:
        with pytest.raises(ServerLost):
            await engine.died()


async def test_closing_the_iterator_closes_the_connection(fake: FakeServer) -> None:
    fake.gate.clear()
    async with _engine(fake) as engine:
        async with aclosing(engine.generate(Generate(request=make_request("r", _PROMPT)))) as parts:
            await anext(parts)
        await asyncio.wait_for(fake.closed.wait(), PATIENCE_S)


def test_facts_and_figures_are_those_of_the_servers_metrics(tmp_path: Path) -> None:
    figures, facts = EngineFigures(), facts_of(_CARD, METRICS, str(tmp_path), MODEL_CONFIG, 16)
    update_figures(figures, METRICS)
    assert (figures.kv_usage, figures.num_hit_tokens, figures.num_loaded_tokens) == (0.25, 8, 4)
    assert (facts.num_blocks, facts.block_size, facts.layout.head_dim, facts.vocab_size) == (100, 4, 32, 1000)


def test_a_server_without_figures_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disable-log-stats"):
        facts_of(_CARD, "", str(tmp_path), {}, 16)
    with pytest.raises(ConfigError, match="--model"):
        model_config(str(tmp_path))


async def test_a_worker_leaves_while_its_server_is_silent_and_joins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached, "HEALTH_INTERVAL_S", 0.05)
    fake, lifecycle = FakeServer(tmp_path), Lifecycle(None)
    secret = {"cluster_token": "secret", "host": "127.0.0.1"}
    conductor = serving(serve_conductor, ConductorConfig(instance_id="conductor", **secret))
    async with conductor as facts, Channels("secret") as channels:
        stub = conductor_pb2_grpc.ConductorStub(channels.to(facts["rpc"]))

        async def members() -> list[str]:
            view = await channels.call(stub.GetCluster, conductor_pb2.GetClusterRequest(), timeout_s=PATIENCE_S)
            return [each.endpoint.instance_id for each in view.instances]

        config = AttachedConfig(instance_id="prefill-0", attach=fake.url, conductor=facts["rpc"], **secret)
        worker = asyncio.create_task(serve_prefill(config, lifecycle))
        try:
            for _ in range(2):
                async with fake.running():
                    assert await answered(members) == ["prefill-0"]
                await answered(members, lambda found: not found)
        finally:
            lifecycle.stop()
            await asyncio.wait_for(worker, PATIENCE_S)
