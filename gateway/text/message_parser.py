"""Reading of messages while their text arrives: what is reasoning, what is content, what calls a tool. Pure.

**Splitting does not matter**: any way of splitting the text gives the same parts. Text that may begin a tag or a call
is held back.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

SPACE = " \t\n\r"


@dataclass(slots=True)
class CallDelta:
    """New part of one call."""

    name: str | None = None  # name of its function, if the call begins here
    arguments: str = ""  # next part; all parts together are one JSON object, as the model wrote it


@dataclass(slots=True)
class ParsedDelta:
    """Output that has become certain."""

    reasoning: str = ""  # text that precedes the answer
    content: str = ""  # other text that belongs to no call
    calls: dict[int, CallDelta] = field(default_factory=dict)  # by their index in the message


class MessageParser(ABC):
    """Reads one message: `start`, `push` for each text, `finish`; `take_output` at any time."""

    def __init__(self) -> None:
        self._output = ParsedDelta()
        self.num_calls = 0  # number of calls reported and ended

    def start(self, prompt: str) -> None:
        """Takes the text of the prompt, which may already contain the message's beginning."""
        del prompt

    @abstractmethod
    def push(self, text: str) -> None:
        """Reads the next text."""

    @abstractmethod
    def finish(self, *, is_cut: bool) -> None:
        """Ends the message. `is_cut`: it was cut off by the token limit."""

    def take_output(self) -> ParsedDelta:
        """Returns the output that has become certain since the last time."""
        output, self._output = self._output, ParsedDelta()
        return output


class ContentParser(MessageParser):
    """Parser of messages that are only content."""

    def push(self, text: str) -> None:
        self._output.content += text

    def finish(self, *, is_cut: bool) -> None:
        pass


def held_back(text: str, markers: Iterable[str]) -> int:
    """Returns the number of characters at the end of `text` that may begin one of `markers`."""
    return max(
        (n for marker in markers for n in range(1, min(len(text), len(marker) - 1) + 1) if text.endswith(marker[:n])),
        default=0,
    )


def is_object(text: str) -> bool:
    """Returns True if the text is a whole JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
