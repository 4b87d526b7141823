"""How families of models write calls, and which one a chat template teaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.tools import hermes
from gateway.tools.hermes import HermesParser
from gateway.tools.llama3_json import PYTHON_TAG, Llama3JsonParser
from gateway.tools.parser import ToolParser


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
        opening=hermes.OPENING,
        closing=hermes.CLOSING,
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
    if hermes.OPENING in template:
        return FORMATS["hermes"]
    if PYTHON_TAG in template or ('"name"' in template and '"parameters"' in template):
        return FORMATS["llama3_json"]
    return None
