"""From an HTTP request and its checked body to what the cluster is asked: whose it is, and what its headers wish."""

from __future__ import annotations

import hashlib
import math

from starlette.requests import Request

from gateway.admission import visit_of
from gateway.errors import ApiError
from gateway.limits.visit import Identity
from gateway.wishes.isolation import salt_of
from gateway.wishes.schema import SamplingBody
from gateway.wishes.wish import Choice, Wish

_MAX_TENANT = 256  # characters; the conductor keeps it with each decision, so longer names are known by a digest
_TENANT_DIGEST_BYTES = 16
_MAX_SESSION_ID = 256  # characters; the conductor hashes it


def wish_of(request: Request, body: SamplingBody, choices: tuple[Choice, ...]) -> Wish:
    """Raises ApiError for headers that say nothing."""
    identity = visit_of(request).identity
    return Wish(
        request_id=request.state.cluster_id,
        client_id=request.state.request_id,
        arrived_at=request.state.arrived_at,
        session_id=_session_id(request),
        choices=choices,
        priority=identity.priority_of(body.priority),
        tenant=_tenant(identity, body),
        cache_salt=salt_of(identity.tenant, body.cache_salt),
        traceparent=request.headers.get("traceparent", ""),
        ttft_slo_s=_milliseconds(request, "x-slo-ttft-ms"),
        tbt_slo_s=_milliseconds(request, "x-slo-tbt-ms"),
    )


def _tenant(identity: Identity, body: SamplingBody) -> str:
    """Whose key it is; where keys do not say, whom the client names."""
    if identity.tenant is not None:
        return identity.tenant
    named = body.user or ""
    if len(named) <= _MAX_TENANT:
        return named
    return hashlib.blake2b(named.encode(), digest_size=_TENANT_DIGEST_BYTES).hexdigest()


def _session_id(request: Request) -> str:
    given = request.headers.get("x-session-id", "")
    if len(given) > _MAX_SESSION_ID:
        raise ApiError(
            400,
            f"x-session-id is longer than {_MAX_SESSION_ID} characters",
            param="x-session-id",
            code="invalid_value",
        )
    return given


def _milliseconds(request: Request, header: str) -> float:
    """A header in milliseconds as seconds; 0 when it is absent."""
    given = request.headers.get(header)
    if given is None:
        return 0.0
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not (0.0 < value < 1e9):
        raise ApiError(400, f"{header} must be a positive number", param=header)
    return value / 1000.0
