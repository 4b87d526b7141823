"""Blocks that are copied between a pool and host memory arrive where the layout says, in order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moonserve.engine.cuda.block_copier import BlockCopier
from moonserve.engine.kv_cache.tensors import KvTensors, allocate_memory
from moonserve.protocol.kv_blocks import KvLayout
from tests.engine.cuda.conftest import DEVICE

LAYOUT = KvLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")
NUM_BLOCKS = 9


def random_pool(device: torch.device, seed: int = 0) -> KvTensors:
    pool = KvTensors(LAYOUT, NUM_BLOCKS, None, device)
    generator = torch.Generator().manual_seed(seed)
    for piece in (*pool.keys, *pool.values):
        piece.copy_(torch.randn(piece.shape, generator=generator))
    return pool


def block_bytes(memory: memoryview, layer: int, block: int) -> list[bytes]:
    offsets = [LAYOUT.pool_offset(NUM_BLOCKS, 2 * layer + place, block) for place in (0, 1)]
    return [bytes(memory[offset : offset + LAYOUT.piece_bytes]) for offset in offsets]


def raw(piece: torch.Tensor) -> bytes:
    return piece.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def test_stored_blocks_are_at_the_offsets_of_the_layout_when_their_callback_runs(device: torch.device) -> None:
    pool = random_pool(device)
    memory = allocate_memory(LAYOUT.pool_bytes(NUM_BLOCKS))
    staging = BlockCopier(pool, KvTensors(LAYOUT, NUM_BLOCKS, memory, device))
    found: list[list[bytes]] = []
    blocks = [7, 0, 3, 4, 8]
    for layer in range(LAYOUT.num_layers):
        staging.store(layer, blocks, lambda layer=layer: found.append(block_bytes(memory, layer, 3)))
    assert found == []
    staging.flush(wait=True)
    assert found == [[raw(pool.keys[layer][3]), raw(pool.values[layer][3])] for layer in range(LAYOUT.num_layers)]
    for layer in range(LAYOUT.num_layers):
        for block in range(NUM_BLOCKS):
            pieces = (pool.keys[layer][block], pool.values[layer][block])
            zeros = [bytes(LAYOUT.piece_bytes)] * 2
            expected = [raw(piece) for piece in pieces] if block in blocks else zeros
            assert block_bytes(memory, layer, block) == expected


@pytest.mark.parametrize(("dtype", "row"), [(torch.bfloat16, 4096), (torch.float32, 2500), (torch.bfloat16, 7)])
def test_the_kernel_copies_the_named_blocks_only(dtype: torch.dtype, row: int, device: torch.device) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (690 MB): pip install 'moonserve[gpu]'")
    from moonserve.engine.cuda.copy_kernel import copy_blocks

    source = (torch.randn(6, row).to(device, dtype), torch.randn(6, row).to(device, dtype))
    target = (torch.zeros_like(source[0]), torch.zeros_like(source[1]))
    copy_blocks(source, target, torch.tensor([5, 0, 3], device=device))
    for piece, place in zip(source, target, strict=True):
        assert torch.equal(place[[0, 3, 5]], piece[[0, 3, 5]])
        assert not place[[1, 2, 4]].any()


@given(
    moves=st.lists(
        st.tuples(
            st.booleans(),
            st.integers(0, LAYOUT.num_layers - 1),
            st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=6, unique=True),
        ),
        max_size=12,
    ),
)
def test_stores_and_loads_in_any_order(moves: list[tuple[bool, int, list[int]]]) -> None:
    """Any order of stores and loads equals plain copies, if each is settled before the next."""
    pool, twin = random_pool(DEVICE), random_pool(DEVICE)
    host, twin_host = (random_pool(torch.device("cpu"), seed=1) for _ in range(2))
    staging = BlockCopier(pool, KvTensors(LAYOUT, NUM_BLOCKS, host.memory, DEVICE))
    stores = 0
    reported: list[int] = []
    for outward, layer, blocks in moves:
        source, target = (twin, twin_host) if outward else (twin_host, twin)
        for piece, place in ((source.keys[layer], target.keys[layer]), (source.values[layer], target.values[layer])):
            place[blocks] = piece[blocks].to(place.device)
        if outward:
            staging.store(layer, blocks, lambda number=stores: reported.append(number))
            stores += 1
            staging.flush(wait=True)
        else:
            staging.load(layer, blocks)()
    assert reported == list(range(stores))
    for one, other in ((pool, twin), (host, twin_host)):
        for piece, expected in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
            assert torch.equal(piece, expected)
