"""How families of models write calls, and which one a chat template teaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.openai.tools.parser import SPACE, ToolParser, held

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Text between calls is content."""

    _closes = False  # behind a call, whose closing tag has not come

    def _look(self, *, is_final: bool) -> bool:
        if self._closes:
            return self._skip_closing(is_final=is_final)
        before, marker, after = self._rest.partition(OPENING)
        if marker:
            said = before.rstrip(SPACE)
            self._say(said)
            self._rest = after
            self._begin_call(before[len(said) :] + marker)
            return True
        said = before
        if not is_final:
            said = before[: len(before) - held(before, OPENING)].rstrip(SPACE)
        self._say(said)
        self._rest = before[len(said) :]
        return False

    def _skip_closing(self, *, is_final: bool) -> bool:
        """The tag, with white space before it; a model that forgets it has ended its call all the same."""
        text = self._rest.lstrip(SPACE)
        if text.startswith(CLOSING):
            self._closes, self._rest = False, text[len(CLOSING) :]
        elif is_final or not CLOSING.startswith(text):
            self._closes = False
        return not self._closes

    def _call_ended(self) -> None:
        self._closes = True

    def _call_broke(self) -> None:
        pass


PYTHON_TAG = "<|python_tag|>"
_BETWEEN = SPACE + ";"


class Llama3JsonParser(ToolParser):
    """What follows something that is no call is content to the end."""

    _is_plain = False

    def _look(self, *, is_final: bool) -> bool:
        if self._is_plain:
            self._say(self._rest)
            self._rest = ""
            return False
        text = self._rest.lstrip(_BETWEEN if self.num_calls else SPACE)
        lead = self._rest[: len(self._rest) - len(text)]
        tagged = text.startswith(PYTHON_TAG)
        body = text.removeprefix(PYTHON_TAG).lstrip(SPACE)
        if body.startswith("{"):
            self._rest = body
            self._begin_call(lead + text[: len(text) - len(body)])
            return True
        if is_final and not text and self.num_calls:
            self._rest = ""  # white space behind the last call
        elif is_final or (body if tagged else not PYTHON_TAG.startswith(text)):
            self._is_plain = True
        return self._is_plain

    def _call_ended(self) -> None:
        pass

    def _call_broke(self) -> None:
        self._is_plain = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way of writing calls, as a model does that was trained to it."""

    parser: type[ToolParser]
    arguments_key: str
    between: str  # two calls
    opening: str = ""  # tag before a call; may be a token of its own
    closing: str = ""

    @property
    def padding(self) -> str:
        """Between tags and call."""
        return "\n" if self.opening else ""


FORMATS: Mapping[str, Format] = {
    "hermes": Format(
        parser=HermesParser,
        arguments_key="arguments",
        between="\n",
        opening=OPENING,
        closing=CLOSING,
    ),
    "llama3_json": Format(parser=Llama3JsonParser, arguments_key="parameters", between="; "),
}

# Formats that have the tags of Hermes around something else than JSON.
_OTHERS = ("<function=", "<arg_key>")


def format_of(name: str, template: str | None) -> Format | None:
    """What --tool-call-parser means for a model with this chat template; None = calls are not read."""
    return detect(template) if name == "auto" else FORMATS.get(name)


def detect(template: str | None) -> Format | None:
    """The format that a chat template's text shows the model; None where it shows none that is known."""
    if template is None or any(mark in template for mark in _OTHERS):
        return None
    if OPENING in template:
        return FORMATS["hermes"]
    if PYTHON_TAG in template or ('"name"' in template and '"parameters"' in template):
        return FORMATS["llama3_json"]
    return None
