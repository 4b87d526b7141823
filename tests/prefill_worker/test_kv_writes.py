"""Byte ranges, checksums and deadlines of a prefill worker's writes, and peers whose writes are withdrawn."""

from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from moonserve.prefill_worker.decisions.events import SlicePlan
from moonserve.prefill_worker.kv_writes import KvSender, StepWriter, block_runs, token_runs
from moonserve.protocol.errors import InvalidRequest
from moonserve.protocol.kv_blocks import KvLayout, checksum
from moonserve.transfer import Batch, Op, RemoteSegment, ScatterTransfer, TransferEngine, TransferOptions
from moonserve.transfer.config import TransferTimeout
from moonserve.transfer.memory import scatter
from moonserve.worker.process import KvMemory
from tests.engine.steps import make_slice
from tests.prefill_worker.builders import LANDING, endpoint

LAYOUT = KvLayout(num_layers=2, block_size=4, num_kv_heads=1, head_dim=2, dtype="float32")
OWN_BLOCKS, TARGET_BLOCKS = 10, 16


def test_neighbours_on_both_sides_become_one_range() -> None:
    size = LAYOUT.piece_bytes
    assert block_runs([(1, 5), (2, 6), (3, 8)], LAYOUT).tolist() == [
        [5 * size, size, 2 * size],
        [8 * size, 3 * size, size],
    ]


@given(
    table=st.permutations(range(6)),
    target=st.permutations(range(6)),
    bounds=st.tuples(st.integers(0, 24), st.integers(0, 24)).filter(lambda b: b[0] != b[1]),
)
def test_a_chunk_writes_exactly_its_own_tokens(table: list[int], target: list[int], bounds: tuple[int, int]) -> None:
    start, end = sorted(bounds)
    moved: dict[int, int] = {}
    for there, own, length in token_runs(table, target, start, end, LAYOUT).tolist():
        assert length > 0
        moved.update(zip(range(own, own + length), range(there, there + length), strict=True))
    size, token_bytes = LAYOUT.block_size, LAYOUT.token_bytes
    expected: dict[int, int] = {}
    for token in range(start, end):
        offset = token % size * token_bytes
        own, there = (blocks[token // size] * LAYOUT.piece_bytes + offset for blocks in (table, target))
        expected.update(zip(range(own, own + token_bytes), range(there, there + token_bytes), strict=True))
    assert moved == expected


@pytest.mark.parametrize(
    ("min_batch_bytes", "batches"),
    [(1, [1, 2, 2]), (10**6, [0, 0, 1])],
    ids=["large layers leave one by one", "small layers leave together"],
)
def test_layers_send_k_and_v_and_the_checksums_are_those_of_the_blocks(
    monkeypatch: pytest.MonkeyPatch, min_batch_bytes: int, batches: list[int]
) -> None:
    monkeypatch.setattr("moonserve.prefill_worker.kv_writes.MIN_BATCH_BYTES", min_batch_bytes)
    table = [7, 2, 3]
    with TransferEngine(cluster_token="secret", options=TransferOptions(transports=("tcp",))) as transfer:
        segment = transfer.allocate(LAYOUT.pool_bytes(OWN_BLOCKS))
        segment.buffer[:] = bytes(i % 251 for i in range(segment.nbytes))
        memory = KvMemory(segment, LAYOUT, OWN_BLOCKS)
        writes: list[list[list[int]]] = []
        counts: list[int] = []

        def submit(write: ScatterTransfer) -> Batch:
            writes.append(write.rows.tolist())
            return Batch(0, 0, lambda: None)

        piece = make_slice(range(11), 6, 11, table, request_id="r")
        landing = replace(LANDING, block_ids=(4, 9, 10), num_blocks=TARGET_BLOCKS)
        plan = SlicePlan(slice=piece, landing=landing, send_from=6, complete=(1, 2))
        writer = StepWriter(memory, [plan], submit)
        for layer in range(LAYOUT.num_layers):
            writer.on_layer(layer)
            counts.append(len(writes))
        writer.finish()
        assert [*counts, len(writes)] == batches
        submitted = [row for rows in writes for row in rows]
        sent_bytes = sum(length for _, _, length in submitted)
        assert sent_bytes == 5 * 2 * LAYOUT.num_layers * LAYOUT.token_bytes
        there, own, _ = submitted[0]
        offset = 2 * LAYOUT.token_bytes  # token 6 is the third of its block
        assert own == LAYOUT.pool_offset(OWN_BLOCKS, 0, 2) + offset
        assert there == LAYOUT.pool_offset(TARGET_BLOCKS, 0, 9) + offset
        _, own, _ = submitted[-1]
        assert own == LAYOUT.pool_offset(OWN_BLOCKS, 3, 2) + offset

        def block_checksum(block: int, num_tokens: int) -> int:
            length = num_tokens * LAYOUT.token_bytes
            return checksum(
                segment.buffer[start : start + length] for start in memory.spots_of([block]).offsets[0].tolist()
            )

        [sums] = writer.checksums()
        assert sums == ((1, block_checksum(2, 4)), (2, block_checksum(3, 3)))


@dataclass
class FakeEngine:
    """Transfer engine whose batches end when the test settles them."""

    deadlines_s: list[float] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    is_closed: bool = False

    def submit(self, transfers: list[ScatterTransfer], *, deadline_s: float) -> Batch:
        if self.is_closed:
            raise InvalidRequest("closed")
        self.deadlines_s.append(deadline_s)
        self.batches.append(Batch(len(transfers), 1, lambda: None))
        return self.batches[-1]

    def forget(self, address: str) -> None:
        self.forgotten.append(address)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def sender(engine: FakeEngine) -> KvSender:
    transfer: Any = engine
    return KvSender(transfer, TransferTimeout(base_s=1.0, slowest_bytes_s=100.0))


def write(address: str, nbytes: int) -> ScatterTransfer:
    local: Any = None
    return ScatterTransfer(Op.WRITE, local, RemoteSegment(address, 1), scatter.rows((0, 0, nbytes)), 1)


def test_earlier_writes_to_a_peer_extend_the_deadline(engine: FakeEngine, sender: KvSender) -> None:
    sender.submit(write("a", 100))
    sender.submit(write("a", 300))
    sender.submit(write("b", 200))
    engine.batches[0].settle_part({})
    sender.submit(write("a", 50))
    assert engine.deadlines_s == [2.0, 5.0, 3.0, 4.5]


def test_failed_write_does_not_delay_the_next(engine: FakeEngine, sender: KvSender) -> None:
    engine.is_closed = True
    with pytest.raises(InvalidRequest):
        sender.submit(write("a", 1000))
    engine.is_closed = False
    sender.submit(write("a", 100))
    assert engine.deadlines_s == [2.0]


def test_a_later_incarnation_means_that_the_earlier_one_is_dead(engine: FakeEngine, sender: KvSender) -> None:
    for epoch in (1, 1, 2, 1):
        sender.note_peer(endpoint("decode-0", epoch=epoch))
    sender.note_peer(endpoint("decode-1", epoch=9))
    assert engine.forgotten == ["decode-0@1"]


def test_number_of_known_peers_is_bounded(
    engine: FakeEngine, sender: KvSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonserve.prefill_worker.kv_writes.MAX_KNOWN_PEERS", 2)
    for name in ("a", "b", "c"):
        sender.note_peer(endpoint(name))
    for name in ("a", "c"):
        sender.note_peer(endpoint(name, epoch=2))
    assert engine.forgotten == ["c@1"]
