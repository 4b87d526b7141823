"""Typed access to a JSON object whose author we do not trust: every complaint names the file and the field."""

from __future__ import annotations

from typing import Any

from protocol.errors import ConfigError


class Fields:
    """The fields of one JSON object. null counts as absent. Raises ConfigError for a wrong type or range."""

    def __init__(self, content: dict[str, Any], *, source: str) -> None:
        self._content = content
        self._source = source

    def error(self, complaint: str) -> ConfigError:
        return ConfigError(f"{self._source}: {complaint}")

    def has(self, name: str) -> bool:
        """Whether it is there, if only as null: where that is another thing than to be absent."""
        return name in self._content

    @property
    def is_empty(self) -> bool:
        return not self._content

    def objects(self) -> list[str]:
        """Names of those that are objects themselves."""
        return [name for name, value in self._content.items() if isinstance(value, dict)]

    def optional_count(self, name: str, *, minimum: int = 1) -> int | None:
        value = self._content.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{name} must be an integer, not {value!r}")
        if value < minimum:
            raise self.error(f"{name} must be at least {minimum}, not {value}")
        return value

    def count(self, name: str, *, default: int | None = None, minimum: int = 1) -> int:
        value = self.optional_count(name, minimum=minimum)
        if value is not None:
            return value
        if default is None:
            raise self.error(f"{name} is missing")
        return default

    def optional_number(self, name: str) -> float | None:
        value = self._content.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{name} must be a number, not {value!r}")
        return float(value)

    def number(self, name: str, *, default: float | None = None) -> float:
        value = self.optional_number(name)
        if value is not None:
            return value
        if default is None:
            raise self.error(f"{name} is missing")
        return default

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, not {value!r}")
        return value

    def text(self, name: str, *, default: str) -> str:
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(f"{name} must be a string, not {value!r}")
        return value

    def strings(self, name: str) -> tuple[str, ...] | None:
        value = self._content.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"{name} must be a list of strings, not {value!r}")
        return tuple(value)

    def token_ids(self, name: str) -> list[int]:
        """One id or a list of them; absent = empty."""
        value = self._content.get(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self.error(f"{name} must be a token id or a list of them, not {value!r}")
        return list(items)

    def nested(self, name: str) -> Fields | None:
        """The fields of an object within this one."""
        value = self._content.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{name} must be an object, not {value!r}")
        return Fields(value, source=f"{self._source}: {name}")
