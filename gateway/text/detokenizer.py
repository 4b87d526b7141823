"""Incremental detokenization and stop strings. Emits neither parts of a character nor parts of a stop string.

Pure. Two implementations share the contract `TextDecoder`. Byte-level tokenizers provide a table of each token's bytes,
which an incremental UTF-8 decoder reads. Any other tokenizer decodes a small sliding window of tokens. This module does
not know requests.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"

# A UTF-8 character has at most 4 bytes and a byte-fallback token has one; the rest is for normalizers that look back.
_MAX_HELD_TOKENS = 16


class TextDecoder(Protocol):
    """Decodes the tokens of one sequence into text."""

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """Returns the text left over from an incomplete character."""
        ...


class ByteDecoder:
    """Decodes byte-level tokens exactly, without a call into the tokenizer."""

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
    """Decodes tokens of any other tokenizer: decodes a sliding window of them and emits the new text.

    The first `_read` tokens of the window are already emitted as `_emitted`; they give the next tokens their context
    (leading spaces, byte runs). Amortized O(1) per token.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._read = 0  # number of tokens of the window already emitted
        self._emitted = ""  # text of the emitted tokens

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
    """Cuts text at the first stop string and holds back text that may become one.

    The first stop string is the one that ends first (the longest if several end together), so the result does not
    depend on token borders. One Knuth-Morris-Pratt automaton per stop string: amortized O(1) per character.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        """`includes_stop`: cut after the stop string instead of before it."""
        self._includes_stop = includes_stop
        self._automata = [_Automaton(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Returns the text that is now certain to belong to the output."""
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
        """Returns held-back text that did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _stop(self, text: str) -> str:
        self.stopped = True
        self._held = ""
        return text


class _Automaton:
    """Tracks how many characters of one pattern the text ends with."""

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
    """Returns, for each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[position] != pattern[length]:
            length = borders[length - 1]
        length += pattern[position] == pattern[length]
        borders[position] = length
    return borders


class TextOutput:
    """Text of one choice: a decoder followed by a stop matcher."""

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
        """True if a stop string has been reached; no more text follows."""
        return self._stops.stopped

    def push(self, token_id: int) -> str:
        """Returns the text that is final with this token. Stop strings are matched from token `min_tokens` on."""
        self._num_tokens += 1
        text = self._decoder.push(token_id)
        if self._num_tokens < self._min_tokens:
            return text
        return self._stops.push(text) if text else ""

    def finish(self) -> str:
        """Returns the remaining text after generation ended for another reason than a stop string."""
        if self.stopped:
            return ""
        return self._stops.push(self._decoder.finish()) + self._stops.finish()
