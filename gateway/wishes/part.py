"""The base of everything that clients send: frozen, strict, with unknown fields kept for whoever looks at them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """No number is made from a string, and none is infinite or no number."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=()
    )
