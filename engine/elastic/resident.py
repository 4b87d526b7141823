"""How much of an address range is resident, as the kernel tells (/proc/self/smaps). Linux only; for tests and
measurements: it walks page tables and takes milliseconds per GiB."""

from __future__ import annotations

from pathlib import Path


def resident_bytes(address: int, nbytes: int) -> int:
    """Sum over the mappings that lie in the range. Raises ValueError for one that lies in it only partly, of which
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
