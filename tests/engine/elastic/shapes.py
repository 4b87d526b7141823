"""Small layouts and pages for these tests, and how much memory of a range is resident."""

from __future__ import annotations

from pathlib import Path

from engine.elastic.pages import Paging
from protocol.layout import KvLayout

PAGE = 4096  # the kernel's

# 2 layers, pieces of 2 KiB: a page of two pieces of each slab is 4 of the kernel's and holds 2 blocks.
LAYOUT = KvLayout(num_layers=2, block_size=16, num_kv_heads=2, head_dim=16, dtype="float32")


def paging(num_pages: int, blocks_per_page: int = 2) -> Paging:
    """Pages of that many blocks; where they lie does not matter."""
    return Paging(num_pages=num_pages, num_slabs=1, blocks_per_page=blocks_per_page, span_bytes=PAGE)


def resident_bytes(address: int, nbytes: int) -> int:
    """Bytes of the range that are resident, as the kernel tells: the sum over the mappings in it.
    Raises ValueError for one that lies in it only partly, of which
    nobody can say what belongs to whom."""
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
