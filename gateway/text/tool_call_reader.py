"""Incremental reader of one call, `{"name": …, "arguments": {…}}` in any order of keys. Pure.

A call is certain once its name, which must be offered, and the beginning of its arguments have been read.
"""

import json
import re
from collections.abc import Collection
from enum import Enum

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # within a string
_WORD = re.compile(r"[-+.0-9A-Za-z]*")  # numbers, true, false, null
_WORDS = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_MAX_WORD = 400  # characters of a number: enough for any float, and a bound on memory
_MAX_DEPTH = 200
_MAX_HEAD = 4_096  # characters of keys, the name and values other than the arguments


class _At(Enum):
    """Syntax expected next."""

    VALUE = "a value"
    FIRST_ITEM = "a value or ]"
    FIRST_KEY = "a key or }"
    KEY = "a key"
    COLON = ":"
    AFTER = ", or the end of what is open"
    STRING = "more of a string"
    ESCAPE = "an escape"
    WORD = "more of a number or a name"


class _Part(Enum):
    """Part of the call's own object that is being read."""

    KEY = "a key"
    ARGUMENTS = "the arguments"
    OTHER = "the name, or what is neither"


class CallReader:
    """Reader of one call. Call `read` until `is_complete` or `is_broken`."""

    def __init__(self, names: Collection[str], arguments_keys: Collection[str]) -> None:
        """`names`: functions that are offered. `arguments_keys`: keys accepted for the arguments."""
        self._names = names
        self._arguments_keys = arguments_keys
        self.is_complete = False
        self.is_broken = False
        self.name: str | None = None
        self._at = _At.VALUE
        self._open: list[str] = []  # closing brackets of the open objects and arrays
        self._is_key = False  # in STRING and ESCAPE: the string is a key
        self._num_hex = 0  # hexadecimal digits that a \\u still needs
        self._word = ""
        self._part: _Part | None = None
        self._text = ""  # text of the part, unless it is the arguments
        self._key = ""
        self._seen: set[str] = set()
        self._unread = ""  # arguments that `take_arguments` has not returned yet
        self._has_arguments = False
        self._num_head = 0

    @property
    def is_certain(self) -> bool:
        """True once the name and the beginning of the arguments have been read."""
        return self.name is not None and self._has_arguments

    def take_arguments(self) -> str:
        """Returns the arguments read since the last time; empty until the call is certain."""
        if not self.is_certain:
            return ""
        text, self._unread = self._unread, ""
        return text

    def read(self, text: str, start: int) -> int:
        """Reads from `start`. Returns the position where it stopped: after the call, at the breaking character, or at
        the end of the text."""
        at = start
        while at < len(text) and not (self.is_complete or self.is_broken):
            part, begin, end = self._part, at, len(text)
            if part in (_Part.KEY, _Part.OTHER):  # never beyond the limit, regardless of how the text is split
                end = min(end, at + _MAX_HEAD + 1 - self._num_head)
            at = self._step(text, at, end)
            self._keep(part or self._part, text[begin:at])
            if part is not None and self._part is None and not self.is_broken:
                self._end_part(part)
        return at

    def _keep(self, part: _Part | None, text: str) -> None:
        if part is _Part.ARGUMENTS:
            self._unread += text
        elif part is not None:
            self._text += text
            self._num_head += len(text)
            self.is_broken = self.is_broken or self._num_head > _MAX_HEAD

    # The call's own object

    def _begin_value(self, char: str) -> None:
        """Starts a value at any depth."""
        if not self._open:
            self.is_broken = char != "{"
        elif len(self._open) == 1:
            is_arguments = self._key in self._arguments_keys
            self._part, self._text = _Part.ARGUMENTS if is_arguments else _Part.OTHER, ""
            # Arguments must be an object; anything else is not a call.
            self.is_broken = is_arguments and char != "{"
            self._has_arguments = self._has_arguments or (is_arguments and char == "{")

    def _end_value(self) -> None:
        """Ends a value at any depth."""
        self._at = _At.AFTER
        if len(self._open) == 1:
            self._part = None
        elif not self._open:
            self.is_complete, self.is_broken = self.is_certain, not self.is_certain

    def _end_part(self, part: _Part) -> None:
        if part is _Part.KEY:
            self._key = json.loads(self._text)
            kind = "arguments" if self._key in self._arguments_keys else self._key
            self.is_broken = kind in self._seen
            self._seen.add(kind)
        elif part is _Part.OTHER and self._key == "name":
            name = json.loads(self._text)
            self.name = name if isinstance(name, str) and name in self._names else None
            self.is_broken = self.name is None

    # JSON

    def _step(self, text: str, at: int, end: int) -> int:
        """Consumes one token or part of one, up to `end`. Returns the position after it; a breaking character stays."""
        match self._at:
            case _At.STRING:
                return self._string(text, at, end)
            case _At.ESCAPE:
                return self._escape(text[at], at)
            case _At.WORD:
                return self._more_of_word(text, at, end)
            case _:
                behind = _match(_SPACE, text, at, end)
                return behind if behind > at else self._token(text[at], at)

    def _token(self, char: str, at: int) -> int:
        """Consumes a character between tokens, or leaves one that starts a word."""
        opens_value = self._at in (_At.VALUE, _At.FIRST_ITEM)
        is_word = char.isalnum() or char == "-"
        if opens_value and (is_word or char in '"{['):
            self._begin_value(char)
        if char == '"' and (opens_value or self._at in (_At.KEY, _At.FIRST_KEY)):
            self._is_key, self._at = not opens_value, _At.STRING
            if self._is_key and len(self._open) == 1:
                self._part, self._text = _Part.KEY, ""
        elif char in "{[" and opens_value and len(self._open) <= _MAX_DEPTH:
            self._open.append("}" if char == "{" else "]")
            self._at = _At.FIRST_KEY if char == "{" else _At.FIRST_ITEM
        elif char == ":" and self._at is _At.COLON:
            self._at = _At.VALUE
        elif char == "," and self._at is _At.AFTER:
            self._at = _At.KEY if self._open[-1] == "}" else _At.VALUE
        elif self._may_close(char):
            self._open.pop()
            self._end_value()
        elif opens_value and is_word:
            self._at, self._word = _At.WORD, ""
            return at
        else:
            self.is_broken = True
        return at if self.is_broken else at + 1

    def _may_close(self, char: str) -> bool:
        closing = {_At.FIRST_KEY: "}", _At.FIRST_ITEM: "]", _At.AFTER: "}]"}.get(self._at, "")
        return char in closing and bool(self._open) and self._open[-1] == char

    def _string(self, text: str, at: int, end: int) -> int:
        at = _match(_PLAIN, text, at, end)
        if at == end:
            return at
        if text[at] == "\\":
            self._at = _At.ESCAPE
        elif text[at] != '"':
            self.is_broken = True
            return at
        elif self._is_key:
            self._at = _At.COLON
            if len(self._open) == 1:
                self._part = None
        else:
            self._end_value()
        return at + 1

    def _escape(self, char: str, at: int) -> int:
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

    def _more_of_word(self, text: str, at: int, end: int) -> int:
        behind = _match(_WORD, text, at, min(end, at + _MAX_WORD - len(self._word)))
        self._word += text[at:behind]
        if behind < end:
            if _WORD.fullmatch(text[behind]) is None and _WORDS.fullmatch(self._word):
                self._end_value()
            else:
                self.is_broken = True
        return behind


def _match(pattern: re.Pattern[str], text: str, at: int, end: int) -> int:
    """Returns the end of the longest match from `at`, which may be empty."""
    found = pattern.match(text, at, end)
    assert found is not None, "nothing matches, too"
    return found.end()
