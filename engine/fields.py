"""Typed, checked access to an untrusted JSON object. Every error names the file and the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from protocol.errors import ConfigError

T = TypeVar("T")


class Fields:
    """Fields of one JSON object. null counts as absent. Raises ConfigError for a wrong type or range."""

    def __init__(self, content: dict[str, Any], *, source: str) -> None:
        self._content = content
        self._source = source

    def error(self, complaint: str) -> ConfigError:
        return ConfigError(f"{self._source}: {complaint}")

    def has(self, name: str) -> bool:
        """True if the field is present, even as null, for fields where null and absent differ."""
        return name in self._content

    @property
    def is_empty(self) -> bool:
        return not self._content

    def objects(self) -> list[str]:
        """Returns the names of fields that are objects."""
        return [name for name, value in self._content.items() if isinstance(value, dict)]

    def _get(self, name: str, what: str, fits: Callable[[Any], bool]) -> Any:
        value = self._content.get(name)
        if value is not None and not fits(value):
            raise self.error(f"{name} must be {what}, not {value!r}")
        return value

    def _required(self, name: str, value: T | None, default: T | None) -> T:
        found = default if value is None else value
        if found is None:
            raise self.error(f"{name} is missing")
        return found

    def optional_count(self, name: str, *, minimum: int = 1) -> int | None:
        value: int | None = self._get(name, "an integer", _is_integer)
        if value is not None and value < minimum:
            raise self.error(f"{name} must be at least {minimum}, not {value}")
        return value

    def count(self, name: str, *, default: int | None = None, minimum: int = 1) -> int:
        return self._required(name, self.optional_count(name, minimum=minimum), default)

    def optional_number(self, name: str) -> float | None:
        value = self._get(name, "a number", lambda each: _is_integer(each) or type(each) is float)
        return None if value is None else float(value)

    def number(self, name: str, *, default: float | None = None) -> float:
        return self._required(name, self.optional_number(name), default)

    def flag(self, name: str, *, default: bool) -> bool:
        value: bool | None = self._get(name, "true or false", lambda each: isinstance(each, bool))
        return self._required(name, value, default)

    def text(self, name: str, *, default: str) -> str:
        value: str | None = self._get(name, "a string", lambda each: isinstance(each, str))
        return self._required(name, value, default)

    def strings(self, name: str) -> tuple[str, ...] | None:
        value = self._get(name, "a list of strings", lambda each: _is_list_of(each, str))
        return None if value is None else tuple(value)

    def token_ids(self, name: str) -> list[int]:
        """Returns a field that holds one id or a list of ids; empty if it is absent."""
        what = "a token id or a list of them"
        value = self._get(name, what, lambda each: _is_integer(each) or _is_list_of(each, int))
        return [] if value is None else value if isinstance(value, list) else [value]

    def nested(self, name: str) -> Fields | None:
        """Returns the fields of a nested object, or None if it is absent."""
        value = self._get(name, "an object", lambda each: isinstance(each, dict))
        return None if value is None else Fields(value, source=f"{self._source}: {name}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)
