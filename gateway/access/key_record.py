"""One API key as it is stored: its digest, whose it is, and what it may do. Pure.

Rule: the key itself is nowhere but with its owner. What is kept is plain SHA-256 of it, since keys that we make are 256
random bits: nobody can search for them, so neither salt nor a slow hash would add anything (NIST SP 800-63B, 5.1.2.2
asks for these where secrets are memorised, with less than 112 bits), and either would cost every request.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.errors import InvalidRequest

PREFIX = "msk-"
_KEY_BYTES = 32
MIN_KEY_CHARS = 32
"""Of a key that somebody else made: 128 bits in hexadecimal. Plain SHA-256 does not protect what can be guessed."""
_ID_CHARS = 12
_DIGEST = re.compile("[0-9a-f]{64}")
MAX_NAME_CHARS = 256
MAX_COUNT = 2**53  # exact as a double, in which Redis' scripts count


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """What a key may ask for; None = as much as it likes, or what the gateway says for all."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    streams: int | None = None  # under way at once, streamed or not

    def or_else(self, other: KeyLimits) -> KeyLimits:
        """These, and where nothing is said, those."""
        own = dataclasses.asdict(self)
        return dataclasses.replace(other, **{name: value for name, value in own.items() if value is not None})

    @property
    def is_unlimited(self) -> bool:
        return self == KeyLimits()


_LIMITS = tuple(field.name for field in dataclasses.fields(KeyLimits))


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key that counts. Raises InvalidRequest for what no key can be."""

    digest: str  # SHA-256 of the key, hexadecimal
    tenant: str = ""  # "" = nobody in particular
    priority: int | None = None  # the most urgent that its requests may have; None = as they say
    limits: KeyLimits = KeyLimits()
    note: str = ""  # for people
    created: str = ""  # date, for people

    def __post_init__(self) -> None:
        if not isinstance(self.digest, str) or not _DIGEST.fullmatch(self.digest):
            raise InvalidRequest("digest: must be 64 hexadecimal digits, SHA-256 of the key")
        for name in ("tenant", "note", "created"):
            _check_text(name, getattr(self, name))
        if self.priority is not None:
            _check_number("priority", self.priority, -(2**31), 2**31 - 1)
        for name in _LIMITS:
            if (value := getattr(self.limits, name)) is not None:
                _check_number(name, value, 1, MAX_COUNT)

    @property
    def key_id(self) -> str:
        """Names the key where it must not be told: in lists, logs and the registry."""
        return self.digest[:_ID_CHARS]

    def to_json(self) -> dict[str, Any]:
        """Without what says nothing."""
        record = dataclasses.asdict(self)
        record |= record.pop("limits")
        return {name: value for name, value in record.items() if value not in (None, "")}


def from_json(record: object) -> ApiKey:
    """Raises InvalidRequest that names the field; it never quotes more of the record than that."""
    if not isinstance(record, Mapping):
        raise InvalidRequest("a key is a JSON object")
    known = {field.name for field in dataclasses.fields(ApiKey)} - {"limits"}
    if unknown := sorted(map(str, record.keys() - known - set(_LIMITS))):
        raise InvalidRequest(f"unknown field {unknown[0]:.50}")
    if "digest" not in record:
        raise InvalidRequest("digest is missing; `moonserve keys hash` makes it from a key")
    limits = KeyLimits(**{name: record[name] for name in _LIMITS if name in record})
    return ApiKey(limits=limits, **{name: record[name] for name in known & record.keys()})


def new_key() -> str:
    """256 random bits, as a client presents them."""
    return PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: bytes) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(key).hexdigest()


def check_strength(key: str) -> None:
    """Raises InvalidRequest for keys of somebody else's making that could be guessed, or not be sent."""
    if len(key) < MIN_KEY_CHARS:
        raise InvalidRequest(
            f"a key of {len(key)} characters can be guessed from its hash; have at least {MIN_KEY_CHARS}, at random, "
            "or let `moonserve keys add` make one"
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise InvalidRequest("a key travels in a header: printable ASCII characters without spaces only")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS or not value.isprintable():
        raise InvalidRequest(f"{name}: must be at most {MAX_NAME_CHARS} printable characters")


def _check_number(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InvalidRequest(f"{name}: must be a whole number from {least} to {most}")
