"""How fast blocks move, until it was measured. Pure."""

from __future__ import annotations

# Between hosts, until an instance has measured its own: what one TCP stream between two Python processes carries.
DEFAULT_BYTES_PER_S = 1e9
# Within a host, through shared memory: one copy. Half of what a core copies into prefaulted pages.
LOCAL_BYTES_PER_S = 5e9
