"""Damage to the memory of a running store node."""

import re
from collections.abc import Iterable
from pathlib import Path


def flip_bytes(pid: int, offsets: Iterable[int], segment_bytes: int) -> None:
    """Inverts a bit of each of these bytes of a node's segment, which has at least `segment_bytes`, without the node's
    knowledge. Raises LookupError if the process has no such segment."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    for match in re.finditer(r"^([0-9a-f]+)-([0-9a-f]+) rw.*memfd:moonserve:objects", maps, re.MULTILINE):
        start, end = (int(text, 16) for text in match.groups())
        if end - start >= segment_bytes:
            break
    else:
        raise LookupError(f"process {pid} maps no segment of {segment_bytes} bytes")
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for offset in offsets:
            memory.seek(start + offset)
            [byte] = memory.read(1)
            memory.seek(start + offset)
            memory.write(bytes([byte ^ 1]))
