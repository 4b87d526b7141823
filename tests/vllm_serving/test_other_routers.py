"""What routers of other projects use: the conductor's `Place`, hints, and events of what the connector has stored."""

import asyncio
import contextlib
import io
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from moonserve.conductor.config import ConductorConfig
from moonserve.conductor.service import serve
from moonserve.protocol.kv_blocks import BlockKey, root_key
from moonserve.protocol.pb import common_pb2, conductor_pb2, conductor_pb2_grpc
from moonserve.protocol.request import NO_HINTS, CacheHints
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.vllm.kv.cache_groups import CacheGroup, Page
from moonserve.vllm.kv.chained_keys import ChainedKeys, StoredKeys
from moonserve.vllm.kv.scheduler import ConnectorScheduler
from moonserve.vllm.kv.settings import ConnectorSettings
from moonserve.vllm.kv.step_plan import Save, StepReport
from tests.conductor.test_service import TOKEN, registration
from tests.docs.fences import ROOT, fences_of
from tests.patience import PATIENCE_S
from tests.services import serving

_SIZE = 4


async def test_the_documented_router_gets_a_placement() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    [code] = [fence.text for fence in fences_of(page) if fence.language == "python" and "PlaceRequest" in fence.text]
    config = ConductorConfig(instance_id="conductor", cluster_token=TOKEN, host="127.0.0.1")
    async with serving(serve, config) as facts, Channels(TOKEN) as channels:
        stub = conductor_pb2_grpc.ConductorStub(channels.to(facts["rpc"]))
        for name, role in (("p0", common_pb2.ROLE_PREFILL), ("d0", common_pb2.ROLE_DECODE)):
            await channels.call(stub.Register, registration(name, role), timeout_s=PATIENCE_S)
        code = code.replace("10.0.0.1:7100", facts["rpc"])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            await asyncio.to_thread(exec, compile(code, "vllm.md", "exec"), {})
        assert printed.getvalue().startswith("p0 d0 ")
        found = await channels.call(stub.Explain, conductor_pb2.ExplainRequest(request_id="r-1"), timeout_s=PATIENCE_S)
        assert found.found


def _scheduler(num_ranks: int, extras: Any = None) -> ConnectorScheduler:
    made = ConnectorScheduler(
        ConnectorSettings(cluster_token=TOKEN), [CacheGroup(_SIZE, (Page(0, 64, 64),))], "n", num_ranks,
        lambda _: extras, saves=True, loads=True, publishes=True,
    )  # fmt: skip
    made._store = cast(Any, SimpleNamespace(close=lambda: None))
    pool = SimpleNamespace(blocks=[None] * 100, num_gpu_blocks=100, touch=lambda _: None, free_blocks=lambda _: None)
    made.bind(SimpleNamespace(block_pool=pool, get_block_ids=lambda _: (list(range(1, 50)),)))
    return made


def _request(token_ids: list[int], hints: Any = None) -> Any:
    return SimpleNamespace(
        request_id="r", all_token_ids=token_ids, num_tokens=len(token_ids), num_prompt_tokens=len(token_ids),
        kv_transfer_params=None if hints is None else {"cache_hints": hints},
    )  # fmt: skip


def _plan_saves(scheduler: ConnectorScheduler, token_ids: list[int], num_computed: int = 0) -> list[int]:
    """Plans a step that computes all tokens of a request. Returns the pins of its saves."""
    return [save.pin_id for save in _saves(scheduler, token_ids, num_computed)]


def _saves(scheduler: ConnectorScheduler, token_ids: list[int], num_computed: int = 0) -> list[Save]:
    if "r" not in scheduler._tracked:
        scheduler.add(_request(token_ids))
    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=len(token_ids), num_scheduled_tokens={"r": len(token_ids) - num_computed},
        scheduled_new_reqs=[SimpleNamespace(req_id="r", num_computed_tokens=num_computed)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
    )  # fmt: skip
    return scheduler.plan_step(scheduled).saves


def _keys(token_ids: list[int]) -> list[BlockKey]:
    """Returns the keys of the first rank's objects."""
    chain = ChainedKeys(root_key("n"), _SIZE)
    chain.extend(token_ids, None)
    return [block.key for block in StoredKeys("n", 0, 0).blocks(chain.keys, range(len(chain.keys)))]


def test_a_block_is_reported_as_stored_once_every_rank_has_saved_it() -> None:
    tokens = list(range(14))
    with contextlib.closing(_scheduler(2)) as scheduler:
        [pin] = _plan_saves(scheduler, tokens)
        scheduler.reported(StepReport(Counter({pin: 1})))
        assert scheduler.take_stored() == []
        scheduler.reported(StepReport(Counter({pin: 1})))
        [stored] = scheduler.take_stored()
        assert (stored.keys, stored.parent, stored.token_ids) == (_keys(tokens), None, tokens[:12])
        assert (stored.block_size, stored.group, scheduler.take_stored()) == (_SIZE, 0, [])


def test_later_blocks_are_reported_behind_their_parent_and_unsaved_ones_not_at_all() -> None:
    tokens = list(range(14))
    with contextlib.closing(_scheduler(2)) as scheduler:
        [first] = _plan_saves(scheduler, tokens)
        longer = [*tokens, 14, 15]
        scheduler._tracked["r"].request.all_token_ids = longer
        scheduler._tracked["r"].request.num_tokens = len(longer)
        [second] = _plan_saves(scheduler, longer, num_computed=14)
        scheduler.reported(StepReport(Counter({first: 1}), failed_saves={first}))
        scheduler.reported(StepReport(Counter({first: 1, second: 2})))
        [stored] = scheduler.take_stored()
        assert (stored.keys, stored.parent, stored.token_ids) == (_keys(longer)[3:], _keys(tokens)[2], longer[12:])


def test_blocks_whose_keys_depend_on_more_than_tokens_are_not_reported() -> None:
    with contextlib.closing(_scheduler(1, lambda first, last: b"salt")) as scheduler:
        [pin] = _plan_saves(scheduler, list(range(14)))
        scheduler.reported(StepReport(Counter({pin: 1})))
        assert scheduler.take_stored() == []


def test_the_expected_return_comes_once_with_the_blocks_that_complete_the_prompt() -> None:
    hints = CacheHints(return_within_s=9.0, ttl_s=60.0)
    request = _request(list(range(14)), {"return_within_s": 9.0, "ttl_s": 60.0})
    with contextlib.closing(_scheduler(1)) as scheduler:
        scheduler.add(request)
        found = [_saves(scheduler, request.all_token_ids[:end], first) for first, end in ((0, 8), (8, 12), (12, 14))]
        request.all_token_ids, request.num_tokens = list(range(16)), 16
        found.append(_saves(scheduler, request.all_token_ids, 14))
    rest = hints.without_return()
    assert [[save.hints for save in saves] for saves in found] == [[rest], [hints], [], [rest]]


def test_what_is_not_to_be_stored_leaves_vllms_cache_but_for_what_was_there() -> None:
    evicted: list[set[int]] = []
    request = _request(list(range(14)), {"store": False})
    with contextlib.closing(_scheduler(1)) as scheduler:
        scheduler._manager.evict_blocks = evicted.append
        scheduler.add(request)
        scheduler._tracked["r"].num_computed = 8
        assert _saves(scheduler, request.all_token_ids, 8) == []
        scheduler.finished(request)
    assert evicted == [{3, 4}]


def test_hints_that_are_none_are_ignored() -> None:
    for wrong in ("soon", {"return_within_s": "soon"}, {"return_within_s": -1.0}, {"returns": 1.0}):
        with contextlib.closing(_scheduler(1)) as scheduler:
            scheduler.add(_request(list(range(14)), wrong))
            assert [save.hints for save in _saves(scheduler, list(range(14)))] == [NO_HINTS]
