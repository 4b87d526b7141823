"""Recognizes one JSON value (RFC 8259) in text that comes in pieces: where it ends, or where it breaks. Pure.

Libraries parse what is complete, or parse anew what has grown; here each character is looked at once, and what has been
read so far is known to be the beginning of a value.
"""

from __future__ import annotations

import re
from enum import Enum

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # within a string
_WORD = re.compile(r"[-+.0-9A-Za-z]*")  # numbers, true, false, null
_WORDS = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_MAX_WORD = 400  # characters of a number: enough for any float, and a bound on what is kept
_MAX_DEPTH = 200


class _At(Enum):
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
        self._at = _At.VALUE
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
                case _At.STRING:
                    at = self._string(text, at)
                case _At.ESCAPE:
                    at = self._escape(text, at)
                case _At.WORD:
                    at = self._more_of_word(text, at)
                case _:
                    found = _SPACE.match(text, at)
                    assert found is not None, "nothing is space, too"
                    at = found.end()
                    if at < len(text):
                        at = self._token(text[at], at)
        return at

    def _token(self, char: str, at: int) -> int:
        """Takes a character between tokens, or leaves one that a word begins with."""
        opens_value = self._at in (_At.VALUE, _At.FIRST_ITEM)
        if char == '"' and (opens_value or self._at in (_At.KEY, _At.FIRST_KEY)):
            self._is_key = not opens_value
            self._at = _At.STRING
        elif char in "{[" and opens_value and len(self._open) < _MAX_DEPTH:
            self._open.append("}" if char == "{" else "]")
            self._at = _At.FIRST_KEY if char == "{" else _At.FIRST_ITEM
        elif char == ":" and self._at is _At.COLON:
            self._at = _At.VALUE
        elif char == "," and self._at is _At.AFTER:
            self._at = _At.KEY if self._open[-1] == "}" else _At.VALUE
        elif self._may_close(char):
            self._open.pop()
            self._end_value()
        elif opens_value and (char.isalnum() or char == "-"):
            self._at, self._word = _At.WORD, ""
            return at
        else:
            self.is_broken = True
            return at
        return at + 1

    def _may_close(self, char: str) -> bool:
        closing = {_At.FIRST_KEY: "}", _At.FIRST_ITEM: "]", _At.AFTER: "}]"}.get(self._at, "")
        return char in closing and bool(self._open) and self._open[-1] == char

    def _end_value(self) -> None:
        self._at = _At.AFTER
        self.is_complete = not self._open

    def _string(self, text: str, at: int) -> int:
        found = _PLAIN.match(text, at)
        assert found is not None, "nothing is plain, too"
        at = found.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._at = _At.ESCAPE
        elif text[at] != '"':
            self.is_broken = True
            return at
        elif self._is_key:
            self._at = _At.COLON
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
            self._at = _At.STRING
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
