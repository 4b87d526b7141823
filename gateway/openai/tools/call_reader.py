"""Reads one call, `{"name": …, "arguments": {…}}` in any order of keys, from text that comes in pieces. Pure.

A call is certain to be one when its name, which must be offered, and the beginning of its arguments have been read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum

_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # within a string
_WORD = re.compile(r"[-+.0-9A-Za-z]*")  # numbers, true, false, null
_WORDS = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_MAX_WORD = 400  # characters of a number: enough for any float, and a bound on what is kept
_MAX_DEPTH = 200


class _ValueAt(Enum):
    """What may come next."""

    VALUE = "a value"
    FIRST_ITEM = "a value or ]"
    FIRST_KEY = "a key or }"
    KEY = "a key"
    COLON = ":"
    AFTER = ", or the end of what is open"
    STRING = "more of a string"
    ESCAPE = "an escape"
    WORD = "more of a number or a name"


class JsonValue:
    """One value. `read` until `is_complete` or `is_broken`."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False
        self._at = _ValueAt.VALUE
        self._open: list[str] = []  # the brackets around, as they close
        self._is_key = False  # of STRING and ESCAPE
        self._num_hex = 0  # digits that a \\u still needs
        self._word = ""

    def read(self, text: str, start: int) -> int:
        """Reads from `start`; returns where it stopped: behind a complete value (a number is complete at the first
        character that is not its own), at the character that breaks it, or at the end of the text."""
        at = start
        while at < len(text) and not (self.is_complete or self.is_broken):
            match self._at:
                case _ValueAt.STRING:
                    at = self._string(text, at)
                case _ValueAt.ESCAPE:
                    at = self._escape(text, at)
                case _ValueAt.WORD:
                    at = self._more_of_word(text, at)
                case _:
                    found = _JSON_SPACE.match(text, at)
                    assert found is not None, "nothing is space, too"
                    at = found.end()
                    if at < len(text):
                        at = self._token(text[at], at)
        return at

    def _token(self, char: str, at: int) -> int:
        """Takes a character between tokens, or leaves one that a word begins with."""
        opens_value = self._at in (_ValueAt.VALUE, _ValueAt.FIRST_ITEM)
        if char == '"' and (opens_value or self._at in (_ValueAt.KEY, _ValueAt.FIRST_KEY)):
            self._is_key = not opens_value
            self._at = _ValueAt.STRING
        elif char in "{[" and opens_value and len(self._open) < _MAX_DEPTH:
            self._open.append("}" if char == "{" else "]")
            self._at = _ValueAt.FIRST_KEY if char == "{" else _ValueAt.FIRST_ITEM
        elif char == ":" and self._at is _ValueAt.COLON:
            self._at = _ValueAt.VALUE
        elif char == "," and self._at is _ValueAt.AFTER:
            self._at = _ValueAt.KEY if self._open[-1] == "}" else _ValueAt.VALUE
        elif self._may_close(char):
            self._open.pop()
            self._end_value()
        elif opens_value and (char.isalnum() or char == "-"):
            self._at, self._word = _ValueAt.WORD, ""
            return at
        else:
            self.is_broken = True
            return at
        return at + 1

    def _may_close(self, char: str) -> bool:
        closing = {_ValueAt.FIRST_KEY: "}", _ValueAt.FIRST_ITEM: "]", _ValueAt.AFTER: "}]"}.get(
            self._at, ""
        )
        return char in closing and bool(self._open) and self._open[-1] == char

    def _end_value(self) -> None:
        self._at = _ValueAt.AFTER
        self.is_complete = not self._open

    def _string(self, text: str, at: int) -> int:
        found = _PLAIN.match(text, at)
        assert found is not None, "nothing is plain, too"
        at = found.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._at = _ValueAt.ESCAPE
        elif text[at] != '"':
            self.is_broken = True
            return at
        elif self._is_key:
            self._at = _ValueAt.COLON
        else:
            self._end_value()
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        char = text[at]
        if self._num_hex:
            self._num_hex -= 1
            self.is_broken = char not in _HEX
        elif char == "u":
            self._num_hex = 4
        else:
            self.is_broken = char not in _ESCAPES
        if self.is_broken:
            return at
        if not self._num_hex:
            self._at = _ValueAt.STRING
        return at + 1

    def _more_of_word(self, text: str, at: int) -> int:
        found = _WORD.match(text, at, at + _MAX_WORD - len(self._word))
        assert found is not None, "nothing is a word, too"
        self._word += found.group()
        end = found.end()
        if end < len(text):
            ends_here = _WORD.fullmatch(text[end]) is None
            if ends_here and _WORDS.fullmatch(self._word):
                self._end_value()
            else:
                self.is_broken = True
        return end


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
