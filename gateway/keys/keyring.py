"""The keys that count now, and which of them was presented. Immutable; a reload makes another.

Finding takes the same time whatever was presented: the table is asked for the digest of what came, which nobody can
steer towards a stored one, and what it gives is compared in constant time.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator

from gateway.keys.record import ApiKey, digest_of

_NOBODY = "0" * 64


class Keyring:
    """By digest; of two records of one key the later counts."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._by_digest = {key.digest: key for key in keys}

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._by_digest.values())

    def find(self, presented: bytes) -> ApiKey | None:
        """The key's record; None when it is none of ours."""
        digest = digest_of(presented)
        found = self._by_digest.get(digest)
        known = _NOBODY if found is None else found.digest
        return found if hmac.compare_digest(digest, known) else None
