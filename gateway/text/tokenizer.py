"""A model folder's tokenizer: converts text to tokens and creates decoders; holds the chat template.

Reads `tokenizer.json` with the `tokenizers` library; `transformers` converts the files of a folder that has none.
Encoding releases the interpreter's lock, so long texts may be encoded in a thread. This module does not know requests.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from moonserve.gateway.text.chat_template import ChatTemplate
from moonserve.gateway.text.detokenizer import ByteDecoder, TextDecoder, WindowDecoder
from moonserve.protocol.errors import ConfigError, InvalidRequest

_NAMED_SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


class Tokenizer:
    """Tokenizer and chat template of one model."""

    def __init__(
        self,
        inner: FastTokenizer,
        template: ChatTemplate | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._template = template
        self.eos_token_ids = eos_token_ids
        self.size = max(inner.get_vocab().values(), default=-1) + 1  # one more than the greatest token id
        added = inner.get_added_tokens_decoder()
        self._added_ids = {token.content: id for id, token in added.items()}
        self._special_ids = frozenset(id for id, token in added.items() if token.special)
        decoder = json.loads(inner.to_str()).get("decoder") or {}
        self._bytes = _byte_table(inner, self.size) if decoder.get("type") == "ByteLevel" else None
        self._bytes_without_special = self._bytes and [
            b"" if token_id in self._special_ids else spelled for token_id, spelled in enumerate(self._bytes)
        ]

    def is_special(self, text: str) -> bool:
        """Returns True if a special token is spelled like the text."""
        return self._added_ids.get(text) in self._special_ids

    def added_token_id(self, text: str) -> int | None:
        """Returns the id of the added token that is spelled like the text, special or not; None if there is none."""
        return self._added_ids.get(text)

    @property
    def template_source(self) -> str | None:
        """Text of the chat template; the one for tools if there are two."""
        return self._template.source if self._template else None

    @property
    def template(self) -> ChatTemplate:
        """Template that renders a conversation as the prompt that the model was trained on. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        return self._template

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: bounds from below how many tokens a text becomes."""
        return max(1, *map(len, self._inner.get_vocab()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of a whole sequence."""
        return self._inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns one token's bytes; with a tokenizer that is not byte-level, the bytes of its decoded text."""
        if self._bytes is not None:
            return self._bytes[token_id] if token_id < len(self._bytes) else b""
        return self.decode([token_id]).encode()

    def token_name(self, token_id: int) -> str:
        """Returns one token as text for people, with replacement characters for parts of characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_width(self, token_id: int, *, skip_special_tokens: bool = True) -> int:
        """Returns the number of characters that begin in this token; a character of several tokens counts once."""
        if skip_special_tokens and token_id in self._special_ids:
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self.token_bytes(token_id))

    def decoder(self, *, skip_special_tokens: bool = True) -> TextDecoder:
        """Returns a new incremental decoder."""
        if self._bytes is not None and self._bytes_without_special is not None:
            return ByteDecoder(self._bytes_without_special if skip_special_tokens else self._bytes)
        return WindowDecoder(lambda ids: self._inner.decode(ids, skip_special_tokens=skip_special_tokens))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Loads the tokenizer of a model folder. Raises ConfigError that says what is missing."""
    if not folder.is_dir():
        raise ConfigError(f"--model {folder}: no such folder")
    config = _read_json(folder / "tokenizer_config.json")
    source, with_tools = _template_sources(folder, config)
    special = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
    template = ChatTemplate(source, special, with_tools) if source else None
    return Tokenizer(_tokens_of(folder), template, _eos_token_ids(folder))


def _tokens_of(folder: Path) -> FastTokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        return _converted(folder)
    try:
        return FastTokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for every bad file
        raise ConfigError(f"cannot read {path}: {error}") from error


def _converted(folder: Path) -> FastTokenizer:
    from transformers import AutoTokenizer  # slow to import, and most folders do not need it

    try:
        found: FastTokenizer = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        raise ConfigError(f"cannot read a tokenizer in {folder}: {error}") from error
    return found


def _template_sources(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Returns the chat template and, if there is one, the template for conversations with tools. `chat_template.jinja`
    takes precedence over `chat_template.json`, and that over the entry in tokenizer_config.json."""
    standalone = folder / "chat_template.jinja"
    if standalone.exists():
        return standalone.read_text(encoding="utf-8"), None
    template = _read_json(folder / "chat_template.json").get("chat_template")
    template = template or config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default"), named.get("tool_use")
    return template if isinstance(template, str) else None, None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the named special tokens; an entry is a string or a dict with `content`."""
    found: dict[str, str] = {}
    for name in _NAMED_SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _eos_token_ids(folder: Path) -> frozenset[int]:
    """Returns the ids from generation_config.json, else from config.json; each has one id or a list."""
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(folder / name).get("eos_token_id")
        if isinstance(eos, int):
            return frozenset({eos})
        if isinstance(eos, list):
            return frozenset(token_id for token_id in eos if isinstance(token_id, int))
    return frozenset()


def load_vocab_size(folder: Path) -> int | None:
    """Returns the model's vocabulary size, which may exceed the tokenizer's; None if not configured."""
    size = _read_json(folder / "config.json").get("vocab_size")
    return size if isinstance(size, int) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content


def _byte_table(inner: FastTokenizer, size: int) -> list[bytes]:
    alphabet = _byte_alphabet()
    return [_spell(inner.id_to_token(token_id) or "", alphabet) for token_id in range(size)]


def _spell(token: str, alphabet: Mapping[str, int]) -> bytes:
    """Returns a token's bytes. A token with other characters (an added token) is itself, as in `tokenizers`."""
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's printable stand-ins for bytes: printable Latin-1 stays, other bytes are moved beyond U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(moved)}
