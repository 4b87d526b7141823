"""Tokens to text, one token at a time: never a part of a character, never a part of a stop string.

Pure. Two ways of decoding with one contract, `TextDecoder`: byte-level tokenizers give a table of each token's bytes
and an incremental UTF-8 decoder does the rest; any other is asked to decode a small sliding window of tokens. Knows
nothing about requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"

# A UTF-8 character has at most 4 bytes, a byte-fallback token has one, and a few more for normalizers that look back.
_MAX_HELD_TOKENS = 16


class TextDecoder(Protocol):
    """Turns the tokens of one sequence into text."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What an incomplete character leaves behind."""
        ...


class ByteDecoder:
    """For byte-level tokenizers: exact and without a call into the tokenizer."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id >= len(self._token_bytes):
            return ""  # the model's vocabulary is padded beyond the tokenizer's
        return self._utf8.decode(self._token_bytes[token_id])

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For every other tokenizer: decodes from the last safe border and emits what is new.

    `_start` is a border where the text was complete, `_read` the end of what has been emitted; the tokens between
    them give the next ones their context (leading spaces, byte runs). Amortised O(1) per token.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._read = 0  # tokens of the window already emitted
        self._emitted = ""  # their text

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        incomplete = text.endswith(REPLACEMENT) or len(text) <= len(self._emitted)
        if incomplete and len(self._window) - self._read < _MAX_HELD_TOKENS:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._decode(self._window)) if self._window else ""

    def _advance(self, text: str) -> str:
        fresh = text[len(self._emitted) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._emitted = self._decode(self._window)
        return fresh


class StopMatcher:
    """Cuts text at the first stop string; holds back what may become one.

    *First* is the one that ends first (the longest, when several end together), so that the result does not depend on
    where token borders fall. One Knuth-Morris-Pratt automaton per stop string: O(1) amortised per character.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        """`includes_stop`: cuts behind the stop string, not before it."""
        self._includes_stop = includes_stop
        self._automata = [_Automaton(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is now certain to belong to the output."""
        if not self._automata or self.stopped:
            return "" if self.stopped else text
        held = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            for automaton in self._automata:
                automaton.step(char)
            for automaton in self._automata:
                if automaton.complete:
                    cut = 0 if self._includes_stop else len(automaton.pattern)
                    return self._stop(held[: position - cut])
        keep = len(held) - max(automaton.matched for automaton in self._automata)
        self._held = held[keep:]
        return held[:keep]

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _stop(self, text: str) -> str:
        self.stopped = True
        self._held = ""
        return text


class _Automaton:
    """How much of one pattern the text ends with."""

    __slots__ = ("_borders", "matched", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._borders = _borders(pattern)

    @property
    def complete(self) -> bool:
        return self.matched == len(self.pattern)

    def step(self, char: str) -> None:
        matched = self.matched
        while matched and (matched == len(self.pattern) or self.pattern[matched] != char):
            matched = self._borders[matched - 1]
        self.matched = matched + (self.pattern[matched] == char)


def _borders(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = borders[length - 1]
        length += pattern[position] == pattern[length]
        borders[position] = length
    return borders


class TextOutput:
    """The text of one choice: decoder and stop strings together."""

    def __init__(
        self,
        decoder: TextDecoder,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        includes_stop: bool = False,
    ) -> None:
        self.includes_stop = includes_stop
        self._decoder = decoder
        self._stops = StopMatcher(stops, includes_stop=includes_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string has been reached; nothing more will come."""
        return self._stops.stopped

    def push(self, token_id: int) -> str:
        """Text that is final with this token. Stop strings count from `min_tokens` on."""
        self._num_tokens += 1
        text = self._decoder.push(token_id)
        if self._num_tokens < self._min_tokens:
            return text
        return self._stops.push(text) if text else ""

    def finish(self) -> str:
        """The rest, when generation ended for another reason than a stop string."""
        if self.stopped:
            return ""
        return self._stops.push(self._decoder.finish()) + self._stops.finish()
