"""Salt that isolates cached blocks: requests share blocks only within one tenant and one `cache_salt`.

The salt goes into the root of a chain of block keys. So nothing that works by keys (device caches, stores, disks, the
conductor's index, events between them) can mistake one tenant's block for another's. A client that could choose the
salt itself could probe whether a prompt is cached, and gradually its content; therefore a client's salt is mixed in and
never used directly.
"""

from __future__ import annotations

import hashlib

_DIGEST_BYTES = 32


def salt_of(tenant: str | None, cache_salt: str | None) -> str:
    """Returns the salt of a tenant and its `cache_salt`. `tenant`: owner of the key; None or "" = no tenant. Different
    pairs give different salts. If both are empty the salt is "", which all such requests share."""
    if not tenant and not cache_salt:
        return ""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"moonserve-salt")
    for part in (tenant or "", cache_salt or ""):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()
