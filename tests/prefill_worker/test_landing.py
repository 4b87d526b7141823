"""Which bytes go where: the writer against the plain formula of `protocol.layout`."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engine.batch import Slice
from prefill_worker import landing as landing_module
from prefill_worker.actions import SlicePlan
from prefill_worker.events import Landing
from prefill_worker.landing import StepWriter, block_runs, token_runs
from protocol.checksum import checksum
from protocol.ids import LeaseId, RequestId
from protocol.layout import KvLayout
from protocol.request import SamplingParams
from transfer import Batch, ScatterTransfer, TransferEngine, TransferOptions
from worker.memory import KvMemory

LAYOUT = KvLayout(num_layers=2, block_size=4, num_kv_heads=1, head_dim=2, dtype="float32")
OWN_BLOCKS, TARGET_BLOCKS = 10, 16


def landing(block_ids: Sequence[int]) -> Landing:
    return Landing(
        lease_id=LeaseId("l"),
        block_ids=tuple(block_ids),
        num_cached_blocks=0,
        transfer_address="somewhere",
        segment_id=1,
        window_id=3,
        num_blocks=TARGET_BLOCKS,
        ttl_s=30.0,
    )


def plan_of(table: Sequence[int], target: Sequence[int], start: int, end: int, complete: Sequence[int]) -> SlicePlan:
    return SlicePlan(
        slice=Slice(
            request_id=RequestId("r"),
            token_ids=range(end),
            start=start,
            end=end,
            block_table=table,
            sampling=SamplingParams(max_tokens=1),
            num_prompt_tokens=end,
            samples=True,
        ),
        landing=landing(target),
        send_from=start,
        complete=tuple(complete),
    )


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
    expected = {
        table[token // size] * LAYOUT.piece_bytes + token % size * token_bytes + byte: target[token // size]
        * LAYOUT.piece_bytes
        + token % size * token_bytes
        + byte
        for token in range(start, end)
        for byte in range(token_bytes)
    }
    assert moved == expected


@pytest.mark.parametrize(
    ("min_batch_bytes", "batches"),
    [(1, [1, 2, 2]), (10**6, [0, 0, 1])],
    ids=["large layers leave one by one", "small layers leave together"],
)
def test_layers_send_k_and_v_and_the_checksums_are_those_of_the_blocks(
    monkeypatch: pytest.MonkeyPatch, min_batch_bytes: int, batches: list[int]
) -> None:
    monkeypatch.setattr(landing_module, "MIN_BATCH_BYTES", min_batch_bytes)
    table, target = [7, 2, 3], [4, 9, 10]
    with TransferEngine(cluster_token="secret", options=TransferOptions(transports=("tcp",))) as transfer:
        segment = transfer.allocate(LAYOUT.pool_bytes(OWN_BLOCKS))
        segment.buffer[:] = bytes(i % 251 for i in range(segment.nbytes))
        memory = KvMemory(segment, LAYOUT, OWN_BLOCKS)
        submitted: list[list[int]] = []
        counts: list[int] = []
        num_batches = 0

        def submit(write: ScatterTransfer) -> Batch:
            nonlocal num_batches
            num_batches += 1
            submitted.extend(write.rows.tolist())
            return Batch(0, 0, lambda: None)

        writer = StepWriter(memory, [plan_of(table, target, 6, 11, [1, 2])], submit)
        for layer in range(LAYOUT.num_layers):
            writer.on_layer(layer)
            counts.append(num_batches)
        writer.finish()
        assert [*counts, num_batches] == batches
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
