"""Reads one call, `{"name": …, "arguments": {…}}` in any order of keys, from text that comes in pieces. Pure.

A call is certain to be one when its name, which must be offered, and the beginning of its arguments have been read.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum

from gateway.tools.json_value import JsonValue

_SPACE = " \t\n\r"
_MAX_HEAD = 4_096  # characters of keys, of the name and of what is neither name nor arguments


class _At(Enum):
    """Within the call's own object."""

    OPENING = "{"
    FIRST_KEY = "its first key"
    KEY = "a key"
    COLON = ":"
    VALUE = "a value"
    AFTER = ", or }"


class CallReader:
    """One call. `read` until `is_complete` or `is_broken`."""

    def __init__(self, names: Collection[str], arguments_keys: Collection[str]) -> None:
        """`names` of the functions that are offered; `arguments_keys`: under which arguments may be."""
        self._names = names
        self._arguments_keys = arguments_keys
        self.is_complete = False
        self.is_broken = False
        self.name: str | None = None
        self._at = _At.OPENING
        self._value: JsonValue | None = None  # a key or a value that is being read
        self._text = ""  # of it, unless it is the arguments
        self._key = ""
        self._seen: set[str] = set()
        self._unread = ""  # arguments that have not been taken
        self._has_arguments = False
        self._num_head = 0

    @property
    def is_certain(self) -> bool:
        """Name and beginning of the arguments have been read."""
        return self.name is not None and self._has_arguments

    def take_arguments(self) -> str:
        """What has been read of them since the last time, once the call is certain."""
        if not self.is_certain:
            return ""
        text, self._unread = self._unread, ""
        return text

    def read(self, text: str, start: int) -> int:
        """Reads from `start`; returns where it stopped: behind the call, at what breaks it, or at the text's end."""
        at = start
        while at < len(text) and not (self.is_complete or self.is_broken):
            at = self._inside(text, at) if self._value is not None else self._between(text, at)
        return at

    def _between(self, text: str, at: int) -> int:
        char = text[at]
        if char in _SPACE:
            return at + 1
        if self._at is _At.OPENING and char == "{":
            self._at = _At.FIRST_KEY
        elif self._at in (_At.FIRST_KEY, _At.KEY) and char == '"':
            self._begin()
            return at
        elif self._at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif self._at is _At.VALUE:
            self._begin()
            self._has_arguments = self._has_arguments or self._is_arguments
            # Arguments are an object; a model that writes anything else does not call.
            self.is_broken = self._is_arguments and char != "{"
            return at
        elif self._at is _At.AFTER and char == ",":
            self._at = _At.KEY
        elif self._at is _At.AFTER and char == "}":
            self.is_complete = self.is_certain
            self.is_broken = not self.is_certain
        else:
            self.is_broken = True
        return at if self.is_broken else at + 1

    @property
    def _is_arguments(self) -> bool:
        return self._at is _At.VALUE and self._key in self._arguments_keys

    def _begin(self) -> None:
        self._value, self._text = JsonValue(), ""

    def _inside(self, text: str, at: int) -> int:
        value = self._value
        assert value is not None, "something is being read"
        if self._is_arguments:
            end = value.read(text, at)
            self._unread += text[at:end]
        else:  # never beyond the limit, wherever the pieces end
            end = value.read(text[: at + _MAX_HEAD + 1 - self._num_head], at)
            self._text += text[at:end]
            self._num_head += end - at
        if value.is_broken or self._num_head > _MAX_HEAD:
            self.is_broken = True
        elif value.is_complete:
            self._ended()
        return end

    def _ended(self) -> None:
        self._value = None
        if self._at is not _At.VALUE:
            self._end_key(json.loads(self._text))
            return
        if self._key == "name":
            name = json.loads(self._text)
            if isinstance(name, str) and name in self._names:
                self.name = name
            self.is_broken = self.name is None
        self._at = _At.AFTER

    def _end_key(self, key: str) -> None:
        kind = "arguments" if key in self._arguments_keys else key
        self.is_broken = kind in self._seen
        self._seen.add(kind)
        self._key, self._at = key, _At.COLON
