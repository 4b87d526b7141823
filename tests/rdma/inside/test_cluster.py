"""A whole cluster over verbs answers one request with the right tokens. KV can travel only over RDMA.

Its parts are those of `moonserve serve`, in one process: here each further interpreter would need a minute for imports.
test_transport_contract.py covers two processes over verbs. For the same reason the host computes the expected answer
with transformers (tests/rdma/test_guest.py).
"""

import asyncio
import json
import time
import urllib.error
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from moonserve.conductor.config import ConductorConfig
from moonserve.conductor.service import serve as serve_conductor
from moonserve.decode_worker.config import DecodeConfig
from moonserve.decode_worker.worker import serve as serve_decode
from moonserve.gateway.config import GatewayConfig
from moonserve.gateway.server import serve as serve_gateway
from moonserve.kvstore.config import StoreConfig
from moonserve.kvstore.node.process import serve as serve_store
from moonserve.models import demo_model_path
from moonserve.prefill_worker.config import PrefillConfig
from moonserve.prefill_worker.worker import serve as serve_prefill
from tests.patience import PATIENCE_S, answered
from tests.rdma.expected import NUM_TOKENS, PROMPT, Expected
from tests.services import serving

pytestmark = pytest.mark.timeout(840)

START_TIMEOUT_S = 720.0  # on emulated processors, next to other tests
RESULTS = Path("/run/job")
TRANSPORTS = ("rdma",)
MIB = 1 << 20
BLOCK_SIZE = 16


def ask(url: str) -> dict[str, Any]:
    wish = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = json.dumps({"prompt": PROMPT, **wish}).encode()
    question = urllib.request.Request(f"{url}/v1/completions", body)
    question.add_header("Content-Type", "application/json")
    while True:
        try:
            with urllib.request.urlopen(question, timeout=START_TIMEOUT_S) as reply:
                answer: dict[str, Any] = json.load(reply)
                return answer
        except urllib.error.HTTPError as error:
            if error.code != 503:  # on emulated processors a worker may miss heartbeats for a while
                raise
            time.sleep(1.0)


def shown(url: str) -> dict[str, dict[str, Any]]:
    """Returns the instances by id."""
    with urllib.request.urlopen(f"{url}/v1/cluster", timeout=PATIENCE_S) as reply:
        return {each["instance_id"]: each for each in json.load(reply)["instances"]}


async def test_a_request_transfers_its_kv_over_rdma(tmp_path: Path) -> None:
    """KV goes from the prefill worker to the decode worker, and into the store."""
    async with AsyncExitStack() as stack:

        async def start(serve: Any, config: Any) -> dict[str, str]:
            return await stack.enter_async_context(serving(serve, config, START_TIMEOUT_S))

        conductor = await start(serve_conductor, ConductorConfig(cluster_token="t"))
        common = {"cluster_token": "t", "conductor": conductor["rpc"]}
        kv = {"transports": TRANSPORTS, **common}
        # Small, with torch kernels: compiling and measuring take minutes on emulated processors.
        small = {"kv_cache_memory": 64 * MIB, "max_num_batched_tokens": 32, "max_num_seqs": 4}
        model = {"model": str(demo_model_path()), "block_size": BLOCK_SIZE, "kernels": "torch"}
        worker = {**kv, **model, **small, "cache_dir": str(tmp_path)}
        await start(serve_store, StoreConfig(instance_id="store-0", dram=64 * MIB, **kv))
        await start(serve_prefill, PrefillConfig(instance_id="prefill-0", home_store="store-0", **worker))
        await start(serve_decode, DecodeConfig(instance_id="decode-0", **worker))
        gateway = GatewayConfig(model=str(demo_model_path()), port=0, **common)
        url = (await start(serve_gateway, gateway))["http"]
        await answered(lambda: asyncio.to_thread(shown, url), lambda instances: len(instances) == 3, START_TIMEOUT_S)
        answer = await asyncio.to_thread(ask, url)
        [choice] = answer["choices"]
        assert Expected(choice["prompt_token_ids"], choice["token_ids"]) == Expected.read(RESULTS)
        least = len(choice["prompt_token_ids"]) // BLOCK_SIZE  # the blocks of the answer follow those of the prompt
        await answered(
            lambda: asyncio.to_thread(shown, url),
            lambda instances: instances["store-0"]["indexed_blocks"] >= least,
            START_TIMEOUT_S,
        )
