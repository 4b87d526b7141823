"""A preempted sequence returns from a real store with the same KV, and a store that is down delays no request."""

from dataclasses import replace
from pathlib import Path

import pytest

from moonserve.decode_worker.decisions.offloading import OffloadCosts
from moonserve.deploy.launcher.ports import free_port
from moonserve.kvstore.client.blocks import BlockStores
from moonserve.kvstore.config import StoreConfig
from moonserve.kvstore.node.process import serve as serve_store
from moonserve.protocol.process.machine import host_identity
from moonserve.protocol.rpc.grpc_transport import Channels
from moonserve.transfer import TransferEngine
from moonserve.transfer.config import TransferTimeout
from tests.decode_worker.driver import CHEAP_STORE
from tests.decode_worker.world import until_counted, world
from tests.patience import PATIENCE_S
from tests.services import serving
from tests.worker.parts import BLOCK_SIZE, TOKEN, endpoint_of, layout_of

NUM_BLOCKS = 10  # too few for three sequences


def costs_of(path: Path) -> OffloadCosts:
    return replace(CHEAP_STORE, block_bytes=layout_of(path).block_bytes, host=host_identity())


@pytest.mark.parametrize("device", ["cpu", "cpu-staged"])
async def test_preempted_sequence_is_read_from_the_store_with_the_same_tokens(
    model_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonserve.decode_worker.store_io.STORE_TIMEOUTS", TransferTimeout(base_s=PATIENCE_S))
    costs = costs_of(model_path)
    config = StoreConfig(instance_id="store-0", cluster_token=TOKEN, dram=4 * 2**20)
    async with (
        Channels(TOKEN) as channels,
        serving(serve_store, config) as facts,
        world(model_path, num_blocks=NUM_BLOCKS, keeping=costs, device=device) as w,
    ):
        with TransferEngine(cluster_token=TOKEN) as transfer:
            client = BlockStores(channels, transfer)
            w.service.home_found(await client.locate(facts["rpc"], timeout_s=PATIENCE_S))
            await client.close()
        await until_counted(w, "fetched_blocks")
        counters = w.service.state.counters
        assert counters.kept_blocks >= counters.fetched_blocks
        assert counters.keep_failures == 0
        # Only the last block of each sequence, which is not full, is computed again.
        assert counters.recomputed_tokens <= BLOCK_SIZE * counters.num_preemptions


async def test_a_store_that_cannot_be_reached_costs_a_computation(model_path: Path) -> None:
    async with world(model_path, num_blocks=NUM_BLOCKS, keeping=costs_of(model_path)) as w:
        w.service.home_found(endpoint_of("store-0", f"127.0.0.1:{free_port()}"))
        await until_counted(w, "keep_failures")
        # Blocks that were not put may still be in the pool: all blocks, if the preemption was at a block's end.
        await until_counted(w, "recomputed_tokens")
