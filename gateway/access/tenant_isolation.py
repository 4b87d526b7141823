"""Whose a request is: its key's identity and tenant, and the salt that isolates cached blocks. Pure.

Rule: requests share blocks only within one tenant and one `cache_salt`. The salt goes into the root of a chain of block
keys. So nothing that works by keys (device caches, stores, disks, the conductor's index, events between them) can
mistake one tenant's block for another's. A client that could choose the salt itself could probe whether a prompt is
cached, and gradually its content; therefore a client's salt is mixed in and never used directly.
"""

import hashlib
from dataclasses import dataclass, field

from moonserve.gateway.access.api_key import KeyLimits

_DIGEST_BYTES = 32
_MAX_TENANT = 256  # characters; the conductor keeps it with each decision, so a longer name is replaced by a digest
_TENANT_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of a request according to its key; empty if the gateway has no keys."""

    key_id: str = ""
    tenant: str | None = None  # None: keys do not name tenants
    priority: int | None = None  # the most urgent that it may have
    limits: KeyLimits = field(default_factory=KeyLimits)

    def priority_of(self, asked: int | None) -> int:
        """Returns the request's priority; lower is more urgent. The key's priority is both bound and default."""
        if self.priority is None:
            return asked or 0
        return self.priority if asked is None else max(asked, self.priority)


def tenant_of(identity: Identity, user: str | None) -> str:
    """Returns the tenant of the key; if keys name no tenants, the `user` that the client names."""
    if identity.tenant is not None:
        return identity.tenant
    named = user or ""
    if len(named) <= _MAX_TENANT:
        return named
    return hashlib.blake2b(named.encode(), digest_size=_TENANT_DIGEST_BYTES).hexdigest()


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
