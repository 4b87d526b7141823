"""Grammars that constrain a model's output, compiled over the vocabulary of one model.

A grammar is text in llguidance's dialect of Lark, which includes JSON schemas (`start: %json {…}`) and regular
expressions. The gateway compiles grammars to reject invalid ones, workers to learn which tokens may follow. Both do it
here, so that workers can follow whatever the gateway accepts. This module knows neither requests nor logits.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from moonserve.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_CHARS = 256 * 1024
"""A grammar is sent with its request to both workers."""

_MAX_COMPILED = 128
_MAX_MESSAGE_CHARS = 400  # characters of an error message; the library's messages quote the grammar


class GrammarCache:
    """Thread-safe cache of compiled grammars. The vocabulary is read, and each grammar compiled, on first use."""

    def __init__(self, folder: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`folder` is the model's folder with its tokenizer; `vocab_size` is the (maybe padded) size of the logits."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # least recently used first

    def new_matcher(self, grammar: str) -> "LLMatcher":
        """Returns a new matcher in its initial state. Raises InvalidRequest if the grammar is invalid or matches
        nothing, or if the model has no end-of-sequence token or no readable tokenizer."""
        compiled = self._find(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            self._keep(grammar, compiled)
        return compiled.deep_copy()

    def is_compiled(self, grammar: str) -> bool:
        """Returns true if the grammar is in the cache of successfully compiled grammars."""
        return self._find(grammar) is not None

    def _find(self, grammar: str) -> "LLMatcher | None":
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
            return compiled

    def _keep(self, grammar: str, compiled: "LLMatcher") -> None:
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)

    def _compile(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        if len(grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(f"a grammar of {len(grammar)} characters is longer than {MAX_GRAMMAR_CHARS}")
        with self._reading:
            vocabulary = self._vocabulary
        # The library's default limits bound the cost of a request. They count work, not seconds.
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(vocabulary, grammar, limits=limits, log_level=0)
        if matcher.is_error():
            raise InvalidRequest(_shortened(matcher.get_error()))
        return matcher

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        if not self._eos_token_ids:
            raise InvalidRequest(
                "this model cannot follow a grammar: it defines no end-of-sequence token, which must end the answer"
            )
        try:
            return LLTokenizer(
                _tokenizer_json(self._folder),
                n_vocab=self._vocab_size,
                eos_token=list(self._eos_token_ids),
            )
        except Exception as error:  # the libraries raise errors of several unrelated classes for a bad file
            raise InvalidRequest(
                "this model cannot follow a grammar: the tokenizer in its folder cannot be read "
                f"({_shortened(str(error))}); put its tokenizer.json there, or send the request without a grammar"
            ) from error


def _tokenizer_json(folder: Path) -> str:
    """Returns the path of tokenizer.json, or its text, converted from another kind of tokenizer in the folder."""
    path = folder / "tokenizer.json"
    if path.exists():
        return str(path)
    from transformers import AutoTokenizer  # slow to import, and most folders do not need it

    backend = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    serialize: Callable[[], str] = backend.to_str
    return serialize()


def _shortened(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]}…"
