"""Two vLLM workers' services over real sockets, with an engine that continues a prompt by counting."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moonserve.protocol.errors import Cancelled, Incompatible, InvalidRequest, NoWorker
from moonserve.protocol.kv_blocks import block_keys, root_key
from moonserve.protocol.pb import worker_pb2, worker_pb2_grpc
from moonserve.protocol.request import Endpoint, PrefillReport, Request, Role, Token, finish_reason
from moonserve.protocol.rpc.grpc_transport import Channels, RpcServer
from moonserve.protocol.rpc.wire import to_message
from moonserve.vllm.serving.service import EngineFigures, HandoffServicer, VllmService, salt_of
from moonserve.vllm.serving.state import Generate, Generated
from moonserve.worker.service import PrefillServicer, WorkerServicer
from tests.patience import PATIENCE_S, came_true
from tests.prefill_worker.builders import make_request
from tests.worker.parts import TOKEN, Ears, endpoint_of, listening, status_of, submit

_FINGERPRINT = "test"
_SIZE = 4
_PROMPT = tuple(range(20))
_EXPECTED = [20, 21, 22, 23, 24, 25, 26, 27]


@dataclass
class CountingEngine:
    """An engine whose next token is the last one plus one. Waits before each token while `gate` is clear."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[Request, bool, str]] = field(default_factory=list)
    num_aborted: int = 0

    def __post_init__(self) -> None:
        self.gate.set()
        self.figures = EngineFigures(kv_usage=0.25)
        self.facts = SimpleNamespace(num_blocks=100, block_size=_SIZE)

    async def generate(self, wanted: Generate, salt: str) -> AsyncGenerator[Generated, None]:
        request, is_prefill = wanted.request, wanted.is_prefill
        self.asked.append((request, is_prefill, wanted.kv_transfer_params))
        report = PrefillReport(request_id=request.request_id, cached_tokens=8, queue_s=0.0, load_s=0.0, compute_s=0.1)
        token_id, index = request.token_ids[-1], request.first_index
        try:
            while True:
                await self.gate.wait()
                token_id += 1
                reason = finish_reason(request.sampling, index, token_id)
                token = Token(request_id=request.request_id, index=index, token_id=token_id, finish_reason=reason)
                params = '{"from": "prefill"}' if is_prefill else ""
                yield Generated(
                    request_id=request.request_id, tokens=(token,), report=report, kv_transfer_params=params
                )
                index += 1
                if reason is not None or is_prefill:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.num_aborted += 1
            raise


@dataclass
class Pair:
    """A prefill and a decode worker, and what a gateway hears of them."""

    engines: dict[Role, CountingEngine]
    services: dict[Role, VllmService]
    servers: dict[Role, RpcServer]
    endpoints: dict[Role, Endpoint]
    channels: Channels
    ears: Ears

    async def submit(self, request: Request) -> None:
        await submit(self.channels, request, self.endpoints[Role.PREFILL], self.endpoints[Role.DECODE])

    async def hand_off(self, request: Request, fingerprint: str = _FINGERPRINT) -> None:
        stub = worker_pb2_grpc.EngineHandoffStub(self.channels.to(self.endpoints[Role.DECODE].rpc_address))
        message = worker_pb2.HandOffRequest(
            request=to_message(worker_pb2.SubmitRequest, request), fingerprint=fingerprint
        )
        await self.channels.call(stub.HandOff, message, timeout_s=PATIENCE_S)

    async def cancel(self, name: str) -> None:
        for endpoint in self.endpoints.values():
            stub = worker_pb2_grpc.WorkerStub(self.channels.to(endpoint.rpc_address))
            await self.channels.call(stub.Cancel, worker_pb2.CancelRequest(request_id=name), timeout_s=PATIENCE_S)

    async def tokens(self, name: str, num_tokens: int) -> dict[int, int]:
        """Returns a request's tokens by index. They come on two streams, so the last one may come before another."""
        await self.ears.until(lambda: name in self.ears.finished and len(self.ears.tokens[name]) == num_tokens)
        return self.ears.tokens[name]

    async def until_idle(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            for service in self.services.values():
                await service.drained()
                service.state.validate()


@asynccontextmanager
async def running_pair() -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        channels = await stack.enter_async_context(Channels(TOKEN))
        pair = Pair({}, {}, {}, {}, channels, Ears())
        for role in (Role.PREFILL, Role.DECODE):
            engine = pair.engines[role] = CountingEngine()
            service = pair.services[role] = VllmService(cast(Any, engine), role, channels, _FINGERPRINT)
            stack.push_async_callback(service.stop)
            server = pair.servers[role] = RpcServer(TOKEN)
            servicer = WorkerServicer(service)
            if role is Role.PREFILL:
                servicer = PrefillServicer(service, block_size=_SIZE, vocab_size=1000)
            worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc)
            worker_pb2_grpc.add_EngineHandoffServicer_to_server(HandoffServicer(service), server.grpc)
            address = await stack.enter_async_context(server.serving("127.0.0.1", 0, 0.0))
            pair.endpoints[role] = endpoint_of(f"{role.value}-0", address)
            await stack.enter_async_context(listening(pair.ears, channels, pair.endpoints[role]))
        yield pair
        await pair.until_idle()
        await asyncio.sleep(0)  # for the callbacks of tasks that have just ended
        for service in pair.services.values():
            assert not service._under_way, "an operation is remembered for ever"


def _handed(request: Request) -> Request:
    return replace(request, token_ids=(*request.token_ids, 20))


async def test_a_request_goes_from_one_engine_to_the_other_with_its_kv_parameters() -> None:
    async with running_pair() as pair:
        await pair.submit(make_request("r", _PROMPT))
        assert await pair.tokens("r", 8) == dict(enumerate(_EXPECTED))
        await pair.until_idle()
        [(_, is_prefill, _)] = pair.engines[Role.PREFILL].asked
        [(handed, _, params)] = pair.engines[Role.DECODE].asked
        assert is_prefill
        assert (handed.token_ids, handed.first_index, params) == ((*_PROMPT, 20), 1, '{"from": "prefill"}')
        assert pair.ears.reports["r"].cached_tokens == 8
        status = await status_of(pair.channels, pair.endpoints[Role.DECODE])
        assert (status.load.held_blocks, status.load.free_blocks, status.num_blocks) == (25, 75, 100)


async def test_an_answer_of_one_token_stays_on_the_prefill_worker() -> None:
    async with running_pair() as pair:
        await pair.submit(make_request("r", _PROMPT, max_tokens=1))
        assert await pair.ears.all_tokens("r") == [20]
        await pair.until_idle()
        assert pair.engines[Role.DECODE].asked == []


async def test_a_request_that_continues_after_a_loss_keeps_its_indexes() -> None:
    async with running_pair() as pair:
        await pair.submit(make_request("r", (*_PROMPT, 20, 21, 22), num_emitted=3))
        assert await pair.tokens("r", 5) == {index: 20 + index for index in range(3, 8)}


async def test_a_repeated_handoff_generates_once() -> None:
    async with running_pair() as pair:
        request = _handed(make_request("r", _PROMPT))
        await pair.hand_off(request)
        await pair.hand_off(request)
        assert await pair.ears.all_tokens("r") == _EXPECTED[1:]
        await pair.until_idle()
        await pair.hand_off(request)
        assert len(pair.engines[Role.DECODE].asked) == 1


async def test_a_handoff_is_refused_for_other_weights_or_form_and_after_a_cancellation_or_while_draining() -> None:
    async with running_pair() as pair:
        request = _handed(make_request("r", _PROMPT))
        with pytest.raises(Incompatible):
            await pair.hand_off(request, fingerprint="other")
        with pytest.raises(InvalidRequest):
            await pair.hand_off(make_request("r", _PROMPT))
        await pair.cancel("r")
        with pytest.raises(Cancelled):
            await pair.hand_off(request)
        pair.services[Role.DECODE].drain(True)
        with pytest.raises(NoWorker):
            await pair.hand_off(_handed(make_request("s", _PROMPT)))
        assert pair.engines[Role.DECODE].asked == []


async def test_the_loss_of_the_decode_worker_reaches_the_gateway_behind_the_first_token() -> None:
    async with running_pair() as pair:
        await pair.servers[Role.DECODE].stop(0.0)
        await pair.submit(make_request("r", _PROMPT))
        failure = await pair.ears.failure("r")
        assert failure.code == "peer_lost"
        assert failure.ids["decode"] == "decode-0"
        assert await pair.ears.first_token("r") == 20
        await pair.until_idle()


async def test_a_cancellation_aborts_the_engine_that_generates() -> None:
    async with running_pair() as pair:
        for role in (Role.PREFILL, Role.DECODE):
            pair.engines[role].gate.clear()
            await pair.submit(make_request(f"r{role}", _PROMPT))
            await came_true(lambda: pair.engines[role].asked)  # noqa: B023 - called at once
            await pair.cancel(f"r{role}")
            await pair.until_idle()
            pair.engines[role].gate.set()
            assert pair.engines[role].num_aborted == 1


def test_requests_have_a_salt_in_common_exactly_if_their_keys_have() -> None:
    root = root_key(_FINGERPRINT)
    plain = make_request("r", _PROMPT)
    assert salt_of(plain, root, _SIZE) == ""
    assert salt_of(make_request("r", _PROMPT[:3]), root, _SIZE) == ""
    salted = [
        replace(plain, block_keys=tuple(block_keys(root_key(_FINGERPRINT, salt), _PROMPT, _SIZE)))
        for salt in ("a", "a", "b")
    ]
    salts = [salt_of(each, root, _SIZE) for each in salted]
    assert salts[0] == salts[1] != salts[2]
    assert all(salts)
