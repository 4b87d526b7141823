"""Small layouts and pages for these tests, and the resident memory of an address range."""

from pathlib import Path

from moonserve.engine.kv_cache.elastic_pages import Paging
from moonserve.protocol.kv_blocks import KvLayout

PAGE = 4096  # bytes of a kernel page

# 2 layers, pieces of 2 KiB: a page has two pieces of each slab, spans 4 kernel pages and holds 2 blocks.
LAYOUT = KvLayout(num_layers=2, block_size=16, num_kv_heads=2, head_dim=16, dtype="float32")


def paging(num_pages: int, blocks_per_page: int = 2) -> Paging:
    """Builds pages of that many blocks. Their place in memory does not matter."""
    return Paging(num_pages=num_pages, num_slabs=1, blocks_per_page=blocks_per_page, span_bytes=PAGE)


def resident_bytes(address: int, nbytes: int) -> int:
    """Returns the resident bytes of the range: the sum over its mappings in /proc/self/smaps. Raises ValueError if a
    mapping lies only partly in the range, since its memory cannot be attributed."""
    total = 0
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if not first.endswith(":"):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            overlaps = begin < address + nbytes and end > address
            is_inside = address <= begin and end <= address + nbytes
            if overlaps and not is_inside:
                raise ValueError(f"{line} is only partly in the range")
        elif is_inside and first == "Rss:":
            total += int(line.split()[1]) * 1024
    return total
