"""Blocks through a real store node, and from one worker to another, in place and staged."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moonserve.transfer import TransferEngine
from moonserve.vllm.kv.cache_groups import CacheGroup, Page
from moonserve.vllm.kv.chained_keys import ChainedKeys
from moonserve.vllm.kv.kv_memory import SHARED_BYTES, HostMemory, KvMemory, StagedMemory, use_huge_pages
from moonserve.vllm.kv.settings import ConnectorSettings
from moonserve.vllm.kv.step_plan import GroupBlocks, Load, Offer, Remote, Save, StepPlan, StepReport
from moonserve.vllm.kv.worker import ConnectorWorker
from tests.kvstore.node.nodes import TOKEN, Node, running_node
from tests.patience import PATIENCE_S, until

NUM_BLOCKS = 32
# Two layers of one group lie one after the other; the other group's layer overlays the first.
GROUPS = [
    CacheGroup(16, (Page(0, 4096, 4096), Page(NUM_BLOCKS * 4096, 4096, 4000))),
    CacheGroup(16, (Page(0, 4096, 2048),), window=20),
]
NBYTES = 2 * NUM_BLOCKS * 4096


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node("--dram", str(64 * 2**20)) as node:
        yield node


def shared_memory(engine: TransferEngine, memory: torch.Tensor) -> KvMemory:
    """Lends memory that is large enough to be replaced by shared memory."""
    return HostMemory(engine, memory)


LENDERS = [HostMemory, StagedMemory, shared_memory]


@pytest.fixture(params=LENDERS)
def lent_by(request: pytest.FixtureRequest) -> Callable[..., KvMemory]:
    return request.param  # type: ignore[no-any-return]


class Server:
    """A worker with its KV memory."""

    def __init__(
        self, lent_by: Callable[..., KvMemory], join: str = "", *, namespace: str = "n", lease_s: float = 60.0
    ) -> None:
        settings = ConnectorSettings(cluster_token=TOKEN, join=join, timeout_s=PATIENCE_S, lease_s=lease_s)
        device = "cuda" if lent_by is StagedMemory and torch.cuda.is_available() else "cpu"
        nbytes = SHARED_BYTES if lent_by is shared_memory else NBYTES
        self.memory = torch.zeros(nbytes, dtype=torch.int8, device=device)
        self.worker = ConnectorWorker(settings, GROUPS, namespace, 0, hands_off=True)
        self.worker.register(self.memory, lent_by)
        self.memory[:NBYTES].random_(-128, 128)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.close()

    def block(self, group: int, block_id: int) -> list[torch.Tensor]:
        pages = GROUPS[group].pages
        return [self.memory[p.offset + block_id * p.stride :][: p.nbytes] for p in pages]

    def load(self, load: Load) -> bool:
        """Runs one load and tells whether all blocks arrived."""
        self.worker.start_loads(StepPlan(loads=[load]))
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            ended, failed = self.worker.take_loaded()
            if ended:
                assert ended == {load.request_id}
                return not failed
            time.sleep(0.005)
        raise AssertionError("the load has not ended")

    def report(self) -> StepReport:
        end = time.monotonic() + PATIENCE_S
        while (report := self.worker.take_report()) is None and time.monotonic() < end:
            time.sleep(0.005)
        assert report is not None
        return report


def blocks(*pairs: dict[int, int]) -> list[GroupBlocks]:
    """Returns the groups' blocks, each given as place: block id."""
    return [GroupBlocks(list(each), list(each.values())) for each in pairs]


def keys(seed: int) -> list[list[bytes]]:
    chain = ChainedKeys(bytes(16), 16)  # type: ignore[arg-type]
    chain.extend(range(seed, seed + 64), None)
    return [chain.keys, chain.keys]  # type: ignore[list-item]


def equal(here: Server, there: Server, group: int, block_ids: dict[int, int]) -> bool:
    return all(
        torch.equal(x, y)
        for mine, other in block_ids.items()
        for x, y in zip(here.block(group, mine), there.block(group, other), strict=True)
    )


def test_memory_moves_into_huge_pages_with_its_content() -> None:
    allowed = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not allowed.exists() or "[never]" in allowed.read_text():
        pytest.skip("this kernel gives no huge pages")
    memory = torch.randint(-128, 128, (8 << 20,), dtype=torch.int8)
    content = memory.clone()
    use_huge_pages(memory.data_ptr(), memory.numel())
    assert torch.equal(memory, content)
    [mapping] = [
        part
        for part in re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
        for begin, end in [(int(each, 16) for each in part.split(" ", 1)[0].split("-"))]
        if begin <= memory.data_ptr() + (4 << 20) < end
    ]
    assert "VmFlags" in mapping
    assert " hg" in mapping, "no huge pages were asked for"


def test_large_memory_is_replaced_by_shared_memory() -> None:
    with Server(shared_memory) as server:
        first = server.memory.data_ptr() // 4096 * 4096
        [mapping] = [
            line for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(f"{first:x}-")
        ]
        assert "memfd:moonserve" in mapping
        content = server.memory.clone()
    assert torch.equal(server.memory, content), "it outlives the transfer engine"
    del server  # the allocator gets its pages back, with its own data in the first one
    assert not torch.zeros(SHARED_BYTES, dtype=torch.int8).any()


def test_what_one_server_stores_another_one_loads(node: Node, lent_by: Callable[..., KvMemory]) -> None:
    join, chains = f"node://{node.rpc_address}", keys(1000 * LENDERS.index(lent_by))
    with Server(lent_by, join) as writer, Server(lent_by, join) as reader:
        writer.worker.step_computed(
            StepPlan(saves=[Save(7, "a", blocks({0: 3, 1: 5, 2: 9}, {2: 11}), chains)])  # type: ignore[arg-type]
        )
        assert writer.report().unpinned == {7: 1}
        assert reader.load(Load("b", blocks({0: 20, 1: 21, 2: 22}, {2: 23}), chains))  # type: ignore[arg-type]
        assert equal(writer, reader, 0, {3: 20, 5: 21, 9: 22})
        assert equal(writer, reader, 1, {11: 23})
        assert not reader.load(Load("c", blocks({3: 1}, {}), chains))  # type: ignore[arg-type]
        assert reader.report().failed_loads == {"c"}
        assert writer.worker.take_counts()["tokens/stored"] == 48
        counts = reader.worker.take_counts()
        assert (counts["tokens/loaded"], counts["failed_blocks/missing"]) == (48, 1)


def test_a_prompt_goes_from_server_to_server_and_its_blocks_are_free_again(lent_by: Callable[..., KvMemory]) -> None:
    with Server(lent_by) as prefill, Server(lent_by) as decode, Server(lent_by, namespace="other") as stranger:
        remote = Remote("p", [prefill.worker.address])
        offer = Offer(1, "p", blocks({0: 1, 1: 2}, {1: 3}), 32)
        prefill.worker.step_computed(StepPlan(offers=[offer]))
        there = blocks({0: 8, 1: 9}, {1: 10})
        assert decode.load(Load("d", there, [[], []], remote))
        assert equal(prefill, decode, 0, {1: 8, 2: 9})
        assert equal(prefill, decode, 1, {3: 10})
        assert prefill.report().unpinned == {1: 1}
        assert not decode.load(Load("again", there, [[], []], remote)), "it was released"
        assert decode.worker.take_counts()["failed_blocks/expired"] == 3
        prefill.worker.step_computed(StepPlan(offers=[Offer(2, "q", offer.groups, 32)]))
        assert not stranger.load(Load("s", there, [[], []], Remote("q", remote.addresses)))
        assert stranger.worker.take_counts()["failed_blocks/refused"] == 3


def test_a_byte_that_changes_on_the_way_is_noticed(lent_by: Callable[..., KvMemory]) -> None:
    with Server(lent_by) as prefill, Server(lent_by) as decode:
        prefill.worker.step_computed(StepPlan(offers=[Offer(1, "p", blocks({0: 1, 1: 2}, {}), 32)]))
        held = prefill.worker._server
        assert held is not None
        until(lambda: len(held._held))  # until its checksums are known
        [prompt] = [each.content for each in held._held._held.values()]
        segment = prefill.worker._engine._state.segments.find(prompt.location.groups[0].segment_id)
        offset = int.from_bytes(prompt.location.groups[0].offsets[:8], "little")
        segment.buffer[offset] ^= 1
        assert not decode.load(Load("d", blocks({0: 8, 1: 9}, {}), [[], []], Remote("p", [prefill.worker.address])))
        counts = decode.worker.take_counts()
        assert (counts["failed_blocks/checksum"], counts["tokens/fetched"]) == (1, 16)


def test_what_nobody_fetches_is_given_up(lent_by: Callable[..., KvMemory]) -> None:
    with Server(lent_by, lease_s=0.2) as prefill:
        prefill.worker.step_computed(StepPlan(offers=[Offer(1, "p", blocks({0: 1}, {}), 16)]))
        assert prefill.report().unpinned == {1: 1}
        assert prefill.worker.take_counts()["expired_handoffs/lease"] == 1
        prefill.worker.step_computed(StepPlan(offers=[Offer(2, "q", blocks({0: 1}, {}), 16)], withdrawn=["q"]))
        assert prefill.report().unpinned == {2: 1}


def test_loads_from_servers_that_are_gone_fail_soon(lent_by: Callable[..., KvMemory]) -> None:
    with Server(lent_by) as decode:
        begin = time.monotonic()
        gone = Remote("p", ["lean://127.0.0.1:1"])
        assert not decode.load(Load("d", blocks({0: 1}, {}), [[], []], gone))
        assert decode.worker.take_counts()["failed_blocks/unreachable"] == 1
        assert time.monotonic() - begin < PATIENCE_S
