"""Small layouts and pages for these tests, and the resident memory of an address range."""

from typing import Any

import psutil

from moonserve.engine.kv_cache.block_pool import BlockPool
from moonserve.engine.kv_cache.elastic_pages import Paging
from moonserve.protocol.kv_blocks import KvLayout

PAGE = 4096  # bytes of a kernel page

# 2 layers, pieces of 2 KiB: a page has two pieces of each slab, spans 4 kernel pages and holds 2 blocks.
LAYOUT = KvLayout(num_layers=2, block_size=16, num_kv_heads=2, head_dim=16, dtype="float32")


def paging(num_pages: int, blocks_per_page: int = 2) -> Paging:
    """Builds pages of that many blocks. Their place in memory does not matter."""
    return Paging(num_pages=num_pages, num_slabs=1, blocks_per_page=blocks_per_page, span_bytes=PAGE)


def quiet_pool(num_blocks: int, **options: Any) -> BlockPool:
    """Returns a pool whose changes nobody is told."""
    return BlockPool(num_blocks, **{"on_added": lambda *_: None, "on_removed": lambda _: None, **options})


def resident_bytes(address: int, nbytes: int) -> int:
    """Returns the resident bytes of the range. Fails if a mapping, whose bytes are one number, is only partly in it."""
    total = 0
    for mapping in psutil.Process().memory_maps(grouped=False):
        begin, end = (int(bound, 16) for bound in mapping.addr.split("-"))
        if begin < address + nbytes and end > address:
            assert address <= begin < end <= address + nbytes, f"{mapping} is only partly in the range"
            total += mapping.rss
    return total
