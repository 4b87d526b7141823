"""Numbers of bytes, as people read them in what commands print."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(num_bytes: float) -> str:
    """`3.2 GiB`."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    return f"{num_bytes:.1f} {_UNITS[unit]}" if unit else f"{num_bytes:.0f} B"


def rate(bytes_per_s: float) -> str:
    """`12.34 GB/s`."""
    return f"{bytes_per_s / 1e9:.2f} GB/s"
