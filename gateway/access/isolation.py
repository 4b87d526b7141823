"""Which requests may share cached blocks: those of one tenant that give the same `cache_salt`.

The root of a chain of block keys mixes in what is said here, so that nothing that goes by keys (device caches, stores,
disks, the conductor's index, events between them) can take one tenant's block for another's. Whoever could name the
same salt could ask whether a prompt is cached, and by and by what it is: so a client's own salt is mixed in, never
taken as it is.
"""

from __future__ import annotations

import hashlib

_DIGEST_BYTES = 32


def salt_of(tenant: str | None, cache_salt: str | None) -> str:
    """`tenant`: whose key it was; None or "" = nobody's in particular. "" when neither says anything: who shares with
    all. Different pairs give different salts."""
    if not tenant and not cache_salt:
        return ""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"moonserve-salt")
    for part in (tenant or "", cache_salt or ""):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()
