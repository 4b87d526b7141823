"""Stored record of one API key: its digest, its tenant, and what it permits. Pure.

Rule: only the owner has the key itself. The record holds its plain SHA-256 digest. Keys made here are 256 random bits,
which nobody can search for, so a salt or a slow hash would add nothing but cost for every request (NIST SP 800-63B,
5.1.2.2 requires these for memorized secrets with less than 112 bits).
"""

import dataclasses
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonserve.protocol.errors import InvalidRequest

PREFIX = "msk-"
_KEY_BYTES = 32
MIN_KEY_CHARS = 32
"""Minimum length of a key made elsewhere: 128 bits in hexadecimal. Plain SHA-256 does not protect guessable keys."""
_ID_CHARS = 12
_DIGEST = re.compile("[0-9a-f]{64}")
MAX_NAME_CHARS = 256
MAX_COUNT = 2**53  # exact as a double, the number type of Redis' scripts


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """Limits of one key. None means unlimited, or the gateway's limit for all keys."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    streams: int | None = None  # requests in flight at once, streamed or not

    def or_else(self, other: "KeyLimits") -> "KeyLimits":
        """Returns these limits, with values of `other` where none is set."""
        own = dataclasses.asdict(self)
        return dataclasses.replace(other, **{name: value for name, value in own.items() if value is not None})

    @property
    def is_unlimited(self) -> bool:
        return self == KeyLimits()


_LIMITS = tuple(field.name for field in dataclasses.fields(KeyLimits))


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A valid key. Raises InvalidRequest if a field is invalid."""

    digest: str  # SHA-256 of the key, hexadecimal
    tenant: str = ""  # "" = no tenant
    priority: int | None = None  # the most urgent priority of its requests; None = as they request
    limits: KeyLimits = KeyLimits()
    note: str = ""  # for people to read
    created: str = ""  # date, for people to read

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
        """Identifies the key in lists, logs and the registry without revealing it."""
        return self.digest[:_ID_CHARS]

    def to_json(self) -> dict[str, Any]:
        """Returns the record without empty fields."""
        record = dataclasses.asdict(self)
        record |= record.pop("limits")
        return {name: value for name, value in record.items() if value not in (None, "")}


def from_json(record: object) -> ApiKey:
    """Parses a record. Raises InvalidRequest that names the field and quotes nothing else of the record."""
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
    """Returns a new key of 256 random bits in the form that clients present."""
    return PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: bytes) -> str:
    """Returns the key's SHA-256 digest in hexadecimal."""
    return hashlib.sha256(key).hexdigest()


def check_strength(key: str) -> None:
    """Raises InvalidRequest if a key made elsewhere could be guessed or cannot be sent."""
    if len(key) < MIN_KEY_CHARS:
        raise InvalidRequest(
            f"a key of {len(key)} characters can be guessed from its hash; use at least {MIN_KEY_CHARS} random "
            "characters, or let `moonserve keys add` make one"
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise InvalidRequest(
            "a key must consist of printable ASCII characters without spaces, because it is sent in a header"
        )


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS or not value.isprintable():
        raise InvalidRequest(f"{name}: must be at most {MAX_NAME_CHARS} printable characters")


def _check_number(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InvalidRequest(f"{name}: must be a whole number from {least} to {most}")
